"""The environment: the tools, the limits, and every way for an episode to end.

An `Episode` is one question being answered. It is token in, token out: it takes the ids that the model
sampled and gives the ids to append; nothing that was sampled is ever encoded again.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

from mtsql.agent.memory import MemoryEntry, recall
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.trajectory import Action, ActionType, Observation, Segment, Status, Stop, Trajectory
from mtsql.data.datasets import Example
from mtsql.data.schema import Schema
from mtsql.sql.execute import ExecutionResult, Executor

EXEC_SQL = "exec_sql"
MEMORY_RETRIEVE = "memory_retrieve"
UNAVAILABLE = "unavailable"  # the tool of an observation that says that there is no such tool
NO_TOOL = "none"  # of one that answers a message without an action
TOOL_SETS = {
    "both": (EXEC_SQL, MEMORY_RETRIEVE),
    "no_execution": (MEMORY_RETRIEVE,),
    "no_memory": (EXEC_SQL,),
    "none": (),
}


@dataclass(frozen=True)
class Limits:
    """What an episode may use. Token limits count ids; a response counts observations too."""

    max_interactions: int = 4
    max_prompt_tokens: int = 4000
    max_response_tokens: int = 8000
    max_turn_tokens: int = 4000
    max_tool_tokens: int = 2000
    max_sequence_tokens: int = 40_960


@dataclass(frozen=True)
class ModelMessage:
    """What a recipe read in one model message.

    Verdicts are None where the tag is missing. `tool` and `sql` belong to the tool call; `problem` is
    why the message holds no usable action. `well_formed` says whether it keeps the recipe's format,
    beyond what is needed to read it.
    """

    exec_verdict: bool | None = None
    memory_verdict: bool | None = None
    tool: str | None = None
    sql: str | None = None
    answer: str | None = None
    problem: Status | None = None
    well_formed: bool = True


class Recipe(Protocol):
    """What one paper decides about the agent: its prompts, its tags, its observations, its protocol."""

    observation_role: str  # of the message that holds an observation, for the chat template: tool, user
    stop_strings: tuple[str, ...]  # that end a model message beside the end of turn
    verifies: bool  # whether a message after a tool call is to hold a verdict on what it returned

    @abstractmethod
    def prompt(
        self, example: Example, schema: Schema, tools: tuple[str, ...]
    ) -> tuple[list[dict], list[dict] | None]:
        """Chat messages and, for the chat template, tool schemas."""

    @abstractmethod
    def call(self, sql: str) -> str:
        """A model message that runs a query, without thoughts."""

    @abstractmethod
    def answer(self, sql: str) -> str:
        """A model message that ends the episode, without thoughts."""

    @abstractmethod
    def read(self, text: str) -> ModelMessage:
        """The verdicts and the action in one model message."""

    @abstractmethod
    def next_action(
        self, previous: ActionType | None, passed: bool | None, tools: tuple[str, ...], has_history: bool
    ) -> ActionType | None:
        """The action that the protocol calls for after `previous`; None where any is fine."""

    @abstractmethod
    def observe_execution(
        self, question: str, sql: str, result: ExecutionResult, history: int, turns_left: int
    ) -> str:
        """The text that `exec_sql` returns; `history` is the number of earlier questions."""

    def observe_memory(
        self,
        question: str,
        sql: str,
        result: ExecutionResult | None,
        memory: tuple[MemoryEntry, ...],
    ) -> str:
        """The text that `memory_retrieve` returns; `result` is None without the execution tool.

        Not for a recipe whose `read` knows no such call.
        """
        raise NotImplementedError

    @abstractmethod
    def observe_problem(self, problem: Status, turns_left: int) -> str | None:
        """The answer to a message without a usable action; None if that ends the episode."""


def outcome_of(result: ExecutionResult) -> str:
    """ "ok", "null" (no row, or nothing but NULLs) or "error": the rows of the E-verify table."""
    if not result.ok:
        return "error"
    return "ok" if any(v is not None for row in result.rows for v in row) else "null"


class Episode:
    """One question being answered: state s_k of section 3.1 and its transitions."""

    def __init__(
        self,
        example: Example,
        schema: Schema,
        recipe: Recipe,
        tokens: ChatTokens,
        executor: Executor,
        limits: Limits,
        tools: tuple[str, ...],
        seed: int,
        prompt_ids: list[int],
    ) -> None:
        self.example = example
        self.schema = schema
        self.recipe = recipe
        self.tokens = tokens
        self.executor = executor
        self.limits = limits
        self.tools = tools
        self.trajectory = Trajectory(example.id, seed, [Segment.given("prompt", prompt_ids)])
        self.candidate: str | None = None
        self.result: ExecutionResult | None = None
        self.pending_tool: str | None = None
        if len(prompt_ids) > limits.max_prompt_tokens or self.remaining_tokens() < 1:
            self.trajectory.status = Status.OUT_OF_TOKENS

    def remaining_tokens(self) -> int:
        """Tokens that the response may still take, by its own limit and that of the sequence."""
        response = self.trajectory.response_length
        whole = self.trajectory.prompt_length + response
        return min(self.limits.max_response_tokens - response, self.limits.max_sequence_tokens - whole)

    def step(self, ids: list[int], logprobs: list[float], stop: Stop) -> list[int] | None:
        """Take one sampled message; return the ids to append, or None when the episode is over.

        A message cut by a limit ends the episode: what it holds is not read. After a stop string the
        end of turn is appended, with loss mask 0.
        """
        trajectory = self.trajectory
        trajectory.segments.append(Segment.sampled(ids, logprobs))
        trajectory.interactions += 1
        if stop is Stop.LIMIT:
            return self._end(Status.OUT_OF_TOKENS)
        message = self.recipe.read(self.tokens.decode(ids))
        self._record(message)
        turns_left = self.limits.max_interactions - trajectory.interactions
        reply = None if message.problem is None else self.recipe.observe_problem(message.problem, turns_left)
        if message.problem is not None and (reply is None or turns_left == 0):
            return self._end(message.problem)
        if message.answer is not None:
            trajectory.answer_sql = message.answer
            return self._end(Status.ANSWERED)
        if turns_left == 0:
            return self._end(Status.OUT_OF_INTERACTIONS)
        text = self._observe(message, turns_left) if reply is None else self._no_action(reply)
        suffix = self.tokens.observation_suffix(text, stop is Stop.END_OF_TURN, self.recipe.observation_role)
        if len(suffix) >= self.remaining_tokens():
            return self._end(Status.OUT_OF_TOKENS)
        trajectory.segments.append(Segment.given("environment", suffix))
        return suffix

    def _end(self, status: Status) -> None:
        self.trajectory.status = status

    def _act(self, kind: ActionType, sql: str | None, passed: bool | None = None) -> None:
        actions = self.trajectory.actions
        previous = actions[-1] if actions else None
        expected = self.recipe.next_action(
            previous.type if previous else None,
            previous.passed if previous else None,
            self.tools,
            bool(self.example.history),
        )
        self.trajectory.off_protocol += expected is not None and kind is not expected
        actions.append(Action(kind, self.trajectory.interactions - 1, sql, passed))

    def _record(self, message: ModelMessage) -> None:
        """Append the actions of one message: verdict on what was seen, then the next move."""
        self.trajectory.off_protocol += not message.well_formed
        seen = self.pending_tool if self.recipe.verifies else None
        if seen == EXEC_SQL:
            self._act(ActionType.E_VERIFY, self.candidate, message.exec_verdict)
        elif seen == MEMORY_RETRIEVE:
            self._act(ActionType.M_VERIFY, self.candidate, message.memory_verdict)
        self.pending_tool = message.tool if message.tool in self.tools else None
        if message.problem is not None:
            return
        sql = message.answer or message.sql
        if sql != self.candidate:
            first = self.candidate is None
            self._act(ActionType.PROPOSE if first else ActionType.SELF_CORRECT, sql)
            self.candidate = sql
            self.result = None
        if message.answer is not None:
            self._act(ActionType.FINALIZE, sql)
        elif self.pending_tool == EXEC_SQL:
            self._act(ActionType.EXECUTE, sql)

    def _no_action(self, text: str) -> str:
        """Answer a message without an action; the model may try again."""
        self.trajectory.observations.append(Observation(NO_TOOL, "", "error", text))
        return text

    def _observe(self, message: ModelMessage, turns_left: int) -> str:
        question, sql = self.example.question, message.sql
        if message.tool not in self.tools:
            self.trajectory.off_protocol += 1
            missing = self.recipe.observe_problem(Status.NO_ACTION, turns_left)
            text = self._cut(missing or f"{message.tool} is not available")
            self.trajectory.observations.append(Observation(UNAVAILABLE, sql, "error", text))
            return text
        if EXEC_SQL in self.tools:
            self.result = self.executor.execute(self.schema.path, sql)
        if message.tool == EXEC_SQL:
            history = len(self.example.history)
            text = self.recipe.observe_execution(question, sql, self.result, history, turns_left)
        else:
            memory = recall(self.example, self.schema, self.executor)
            text = self.recipe.observe_memory(question, sql, self.result, memory)
        text = self._cut(text)
        outcome = outcome_of(self.result) if self.result else "ok"
        self.trajectory.observations.append(Observation(message.tool, sql, outcome, text))
        return text

    def _cut(self, text: str) -> str:
        """The text within the limit on tool tokens: its middle is left out, and that is marked."""
        limit = self.limits.max_tool_tokens
        if self.tokens.count(text) <= limit:
            return text
        low, high = 0, len(text)
        while low < high:
            half = (low + high + 1) // 2
            low, high = (half, high) if self.tokens.count(_shorten(text, half)) <= limit else (low, half - 1)
        return _shorten(text, low)


def _shorten(text: str, kept: int) -> str:
    return text[: kept - kept // 2] + " ... " + text[len(text) - kept // 2 :]


@dataclass(frozen=True)
class Environment:
    """What all episodes of a run share."""

    schemas: dict[str, Schema]
    recipe: Recipe
    tokens: ChatTokens
    executor: Executor
    limits: Limits
    tools: tuple[str, ...]

    def episodes(self, example: Example, seeds: list[int]) -> list[Episode]:
        """One episode a seed, all from the same prompt ids (a GRPO group)."""
        schema = self.schemas[example.db_id]
        messages, tool_schemas = self.recipe.prompt(example, schema, self.tools)
        ids = self.tokens.prompt_ids(messages, tool_schemas)
        return [
            Episode(
                example,
                schema,
                self.recipe,
                self.tokens,
                self.executor,
                self.limits,
                self.tools,
                s,
                ids,
            )
            for s in seeds
        ]
