"""The environment: episodes, limits, every way to end; and `Recipe`, what a paper decides. Tools: tools.py.

An `Episode` is one question being answered. It is token in, token out: it takes the ids that the model
sampled and gives the ids to append; nothing that was sampled is ever encoded again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

from mtsql.agent.tokens import ChatTokens, shared_length
from mtsql.agent.tools import MemoryEntry, Tool
from mtsql.agent.trajectory import Action, ActionType, Observation, Segment, Status, Stop, Trajectory
from mtsql.data.datasets import Example
from mtsql.data.schema import Schema
from mtsql.sql.execute import ExecutionResult, Executor, error_hint
from mtsql.sql.text import in_normal_form, same_query

UNAVAILABLE = "unavailable"  # the tool of an observation that says that there is no such tool
NO_TOOL = "none"  # of one that answers a message without an action
AT_A_CUT = 16  # tokens that a cut inside a word may add, at most
Prompt: TypeAlias = tuple[list[dict], list[dict] | None]  # messages; tool schemas for the chat template
Answered: TypeAlias = list[tuple[Example, Trajectory]]


@dataclass(frozen=True)
class Limits:
    """What an episode may use: messages that get a reply (`max_interactions`), and tokens.

    Token limits count ids; a response counts observations too.
    """

    max_interactions: int = 4
    max_prompt_tokens: int = 4000
    max_response_tokens: int = 8000
    max_turn_tokens: int = 4000
    max_tool_tokens: int = 2000


@dataclass(frozen=True)
class ModelMessage:
    """What a recipe read in one model message.

    `verdicts` has those that it holds, pass or not, by the tool whose answer they judge. `tool` and `sql`
    belong to the tool call; `problem` is why the message holds no usable action. `well_formed` says whether
    it keeps the recipe's format, beyond what is needed to read it.
    """

    verdicts: Mapping[str, bool] = field(default_factory=dict)
    tool: str | None = None
    sql: str | None = None
    answer: str | None = None
    problem: Status | None = None
    well_formed: bool = True


class Recipe(ABC):
    """What one paper decides about the agent: its prompts, its tags, its observations, its protocol."""

    observation_role: ClassVar[str] = "tool"  # of the message that holds an observation: tool, user
    stop_strings: ClassVar[tuple[str, ...]] = ()  # that end a model message beside the end of turn
    right_by_em: ClassVar[bool] = False  # whether an answer is right by EX and EM, or by EX alone
    verifies: ClassVar[bool] = False  # whether a message after a tool call is to hold a verdict on it

    @abstractmethod
    def prompt(self, example: Example, schema: Schema, tools: Mapping[str, Tool]) -> Prompt:
        """Chat messages and, for the chat template, tool schemas."""

    @abstractmethod
    def call(self, sql: str) -> str:
        """A model message that runs a query, without thoughts."""

    @abstractmethod
    def answer(self, sql: str) -> str:
        """A model message that ends the episode, without thoughts."""

    @abstractmethod
    def parse(self, text: str) -> ModelMessage:
        """The verdicts and the action in one model message."""

    def next_action(self, last: Action | None, tools: Collection[str], history: bool) -> ActionType | None:
        """The action that the protocol calls for after the `last`; None where any is fine."""
        return None

    @abstractmethod
    def observe_execution(
        self, question: str, sql: str, result: ExecutionResult, check_memory: bool, messages_left: int
    ) -> str:
        """The text that `exec_sql` returns; `check_memory`: there is a memory tool and something in it."""

    def observe_memory(
        self, question: str, sql: str, result: ExecutionResult | None, memory: tuple[MemoryEntry, ...]
    ) -> str:
        """The text that `memory_retrieve` returns; `result` is None without the execution tool.

        Not for a recipe whose `parse` knows no such call.
        """
        raise NotImplementedError

    def observe_problem(self, problem: Status, messages_left: int) -> str | None:
        """The answer to a message without a usable action; None if that ends the episode."""
        return None


def outcome_of(result: ExecutionResult) -> str:
    """ "ok", "null" (no row, or nothing but NULLs) or "error": the rows of the E-verify table."""
    if not result.ok:
        return "error"
    return "ok" if any(v is not None for row in result.rows for v in row) else "null"


class Episode:
    """One question being answered: state s_k of section 3.1 and its transitions.

    `told` hears of the trajectory after each message: to show it, or to keep what has ended.
    """

    def __init__(self, environment: Environment, example: Example, seed: int, prompt_ids: list[int]) -> None:
        self.example = example
        self.schema = environment.schemas[example.db_id]
        self.recipe = environment.recipe
        self.tokens = environment.tokens
        self.executor = environment.executor
        self.error_hints = environment.error_hints
        self.limits = environment.limits
        self.tools = environment.tools
        prompt = Segment.given("prompt", prompt_ids)
        self.trajectory = Trajectory(example.id, seed, [prompt], tools=tuple(environment.tools))
        self.candidate: str | None = None
        self.result: ExecutionResult | None = None  # of the last query that ran
        self.told: Callable[[Trajectory], None] = lambda trajectory: None
        if len(prompt_ids) > self.limits.max_prompt_tokens:
            self.trajectory.status = Status.OUT_OF_TOKENS

    def remaining_tokens(self) -> int:
        """Tokens that the response may still take."""
        return self.limits.max_response_tokens - self.trajectory.response_length

    def execute(self, sql: str) -> ExecutionResult:
        """Run a query on the question's database; an error may have a hint behind it."""
        self.result = self.executor.execute(self.schema.path, sql)
        hint = error_hint(self.result.message, sql, self.schema) if self.error_hints else ""
        if hint:
            self.result = replace(self.result, message=f"{self.result.message}; {hint}")
        return self.result

    def step(
        self, ids: list[int], logprobs: list[float], stop: Stop, loss_mask: Sequence[int] | None = None
    ) -> list[int] | None:
        """Take one sampled message; return the ids to append, or None when the episode is over.

        A message cut by a limit ends the episode: what it holds is not read. After a stop string the
        end of turn is appended, with loss mask 0. `loss_mask`, one bit a token, is for a message that is not
        to be learned throughout.
        """
        self.trajectory.segments.append(Segment.sampled(ids, logprobs, loss_mask))
        suffix = self._reply(stop)
        self.told(self.trajectory)
        return suffix

    def give_up(self) -> None:
        """End the episode: its next message does not come, as from a server that refuses."""
        self._end(Status.NO_ACTION)
        self.told(self.trajectory)

    def _reply(self, stop: Stop) -> list[int] | None:
        """What follows the last message."""
        trajectory = self.trajectory
        before, ids = (segment.ids for segment in trajectory.segments[-2:])
        messages_left = self.limits.max_interactions - trajectory.interactions  # after this one
        if stop is Stop.LIMIT:
            return self._end(Status.OUT_OF_TOKENS)
        message = self.recipe.parse(self.tokens.with_opening(self.tokens.decode(ids), before))
        self._record(message)
        problem = message.problem
        reply = None if problem is None else self.recipe.observe_problem(problem, messages_left)
        if problem is not None and (reply is None or messages_left < 1):
            return self._end(problem)
        if message.answer is not None:
            trajectory.answer_sql = message.answer
            return self._end(Status.ANSWERED)
        if messages_left < 1:
            return self._end(Status.OUT_OF_INTERACTIONS)
        seen = self._observe(message, reply, messages_left)
        ended = stop is Stop.END_OF_TURN
        suffix = self.tokens.observation_suffix(seen.text, ended, self.recipe.observation_role)
        if len(suffix) >= self.remaining_tokens():
            return self._end(Status.OUT_OF_TOKENS)
        trajectory.observations.append(seen)
        trajectory.segments.append(Segment.given("environment", suffix))
        return suffix

    def _end(self, status: Status) -> None:
        self.trajectory.status = status

    def _act(self, kind: ActionType, passed: bool | None = None) -> None:
        actions, history = self.trajectory.actions, bool(self.example.history)
        expected = self.recipe.next_action(actions[-1] if actions else None, self.tools, history)
        self.trajectory.off_protocol += expected is not None and kind is not expected
        actions.append(Action(kind, self.trajectory.messages - 1, self.candidate, passed))

    def _record(self, message: ModelMessage) -> None:
        """Append the actions of one message: verdict on what was seen, then the next move."""
        seen = self.trajectory.observations
        judged, tool = self.tools.get(seen[-1].tool) if seen else None, self.tools.get(message.tool)
        unavailable = message.tool is not None and tool is None
        self.trajectory.off_protocol += (not message.well_formed) + unavailable
        if judged is not None and judged.verdict is not None and self.recipe.verifies:
            self._act(judged.verdict, message.verdicts.get(judged.name))
        sql = message.answer or message.sql
        if sql is None or (tool is not None and tool.action is None and tool.verdict is None):
            return
        first = self.candidate is None
        changed = first or not same_query(sql, self.candidate)
        self.candidate = sql
        if changed:
            self._act(ActionType.PROPOSE if first else ActionType.SELF_CORRECT)
        if message.answer is not None:
            self._act(ActionType.FINALIZE)
        elif tool is not None and tool.action is not None:
            self._act(tool.action)

    def _observe(self, message: ModelMessage, reply: str | None, messages_left: int) -> Observation:
        """What the tool answers, or `reply` to a message without an action."""
        if reply is not None:
            return Observation(NO_TOOL, "", "error", reply)
        if message.tool not in self.tools:
            missing = self.recipe.observe_problem(Status.NO_ACTION, messages_left)
            text = self._cut(missing or f"{message.tool} is not available")
            return Observation(UNAVAILABLE, message.sql, "error", text)
        tool = self.tools[message.tool]
        text = self._cut(tool.answer(self, message.sql, messages_left))
        outcome = outcome_of(self.result) if tool.action is ActionType.EXECUTE else "ok"
        return Observation(message.tool, message.sql, outcome, text)

    def _cut(self, text: str) -> str:
        """The text within the limit on tool tokens: its middle is left out, and that is marked."""
        kept, shown = len(text), text  # characters
        while kept and self.tokens.count(shown) > self.limits.max_tool_tokens:
            kept = kept * 9 // 10
            shown = text[: kept - kept // 2] + " ... " + text[len(text) - kept // 2 :]
        return shown


@dataclass(frozen=True)
class Environment:
    """What all episodes of a run share; `tools` by name.

    With `error_hints` an error of SQLite names what there is instead (`mtsql.sql.execute`).
    """

    schemas: dict[str, Schema]
    recipe: Recipe
    tokens: ChatTokens
    executor: Executor
    limits: Limits
    tools: Mapping[str, Tool]
    error_hints: bool = False

    def episodes(
        self, example: Example, seeds: list[int], shown: tuple[Example, Schema] | None = None
    ) -> list[Episode]:
        """One episode a seed, all from the same prompt ids (a GRPO group).

        Earlier SQL is in its normal form. `shown` are another question and schema, for the prompt alone.
        """
        schema = self.schemas[example.db_id]
        example = in_normal_form(example, schema)
        ids = self.tokens.prompt_ids(*self.recipe.prompt(*(shown or (example, schema)), self.tools))
        return [Episode(self, example, seed, ids) for seed in seeds]

    def fits(self, examples: Sequence[Example]) -> list[bool]:
        """Whether the prompt of each question is within its limit.

        Few need encoding: a prompt has at most the tokens of the last one encoded, AT_A_CUT more, and one for
        each byte after they differ.
        """
        texts = []
        for example in examples:
            schema = self.schemas[example.db_id]
            chat = self.recipe.prompt(in_normal_form(example, schema), schema, self.tools)
            texts.append(self.tokens.prompt_text(*chat))
        fits, limit = [True] * len(examples), self.limits.max_prompt_tokens
        encoded, length = "", 0
        for place in sorted(range(len(texts)), key=lambda i: texts[i]):
            text = texts[place]
            further = text[shared_length(encoded, text) :]
            if length + len(further.encode(errors="surrogatepass")) + AT_A_CUT > limit:
                encoded, length = text, self.tokens.count(text)
                fits[place] = length <= limit
        return fits
