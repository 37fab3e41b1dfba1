"""MTSQL-R1, the recipe: what it asks, reads and shows (appendix B.0.1 and D), and Equation 1.

Its texts are in mtsql_r1_prompts.py, its rewards in mtsql_r1_rewards.py. Two wordings of the same prompts:
`paper`, and `compact` for the tiny model, for which the paper's are ten times too long. The compact prompt
names the earlier questions and leaves their SQL to the memory tool; its tool responses do not repeat the
question and the SQL that stand right before them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mtsql.agent.env import EXEC_SQL, MEMORY_RETRIEVE, TOOL_SETS, ModelMessage, Recipe
from mtsql.agent.memory import MemoryEntry
from mtsql.agent.trajectory import ActionType, Status
from mtsql.data.datasets import Example
from mtsql.data.schema import Schema
from mtsql.recipes.mtsql_r1_prompts import (
    ANSWER,
    EXEC_TASKS,
    EXEC_THEN_ANSWER,
    EXEC_THEN_MEMORY,
    MEMORY_TASKS,
    SYSTEM,
    VERDICT,
    final_answer,
    result_text,
    tool_call,
    tool_schemas,
)
from mtsql.recipes.mtsql_r1_rewards import make_reward
from mtsql.recipes.tool_calls import read_call
from mtsql.recipes.wording import Wording, compact_result, truncated
from mtsql.sql.execute import ExecutionResult

__all__ = ["SETTINGS", "make_recipe", "make_reward"]

SETTINGS = {"max_interactions": 4}  # every other option's default is this paper's already


def make_recipe(wording: Wording) -> MtsqlR1:
    """The recipe in a wording."""
    return MtsqlR1(wording)


def next_action(
    previous: ActionType | None, passed: bool | None, tools: tuple[str, ...], has_history: bool
) -> ActionType:
    """Equation 1: the type of a_{k+1} from the type of a_k and the verdict on y_k.

    A tool that is switched off drops out of the cycle, as in Table 4; without earlier questions there
    is nothing to check against, so that a passed E-VERIFY leads to FINALIZE. A missing verdict
    (`passed` None) is not a pass. Raises ValueError after FINALIZE, which ends the episode.
    """
    can_check_memory = MEMORY_RETRIEVE in tools and has_history
    if previous is None:
        return ActionType.PROPOSE
    if previous in (ActionType.PROPOSE, ActionType.SELF_CORRECT):
        if EXEC_SQL in tools:
            return ActionType.EXECUTE
        return ActionType.M_VERIFY if can_check_memory else ActionType.FINALIZE
    if previous is ActionType.EXECUTE:
        return ActionType.E_VERIFY
    if previous in (ActionType.E_VERIFY, ActionType.M_VERIFY):
        if not passed:
            return ActionType.SELF_CORRECT
        if previous is ActionType.E_VERIFY and can_check_memory:
            return ActionType.M_VERIFY
        return ActionType.FINALIZE
    raise ValueError("FINALIZE ends the episode: no action follows it")


@dataclass(frozen=True)
class MtsqlR1(Recipe):
    """The recipe in a wording."""

    wording: Wording = Wording()  # noqa: RUF009 (frozen)
    observation_role: ClassVar[str] = "tool"
    stop_strings: ClassVar[tuple[str, ...]] = ()
    verifies: ClassVar[bool] = True
    next_action = staticmethod(next_action)

    def prompt(
        self, example: Example, schema: Schema, tools: tuple[str, ...]
    ) -> tuple[list[dict], list[dict] | None]:
        """System and user message, and the tool schemas for the chat template."""
        if self.wording.compact:
            # The schema comes first: prompts over one database share it as a prefix.
            lines = [self.wording.schema_text(schema)]
            lines += [f"{i}. {turn.question}" for i, turn in enumerate(example.history, 1)]
            lines += [example.knowledge] if example.knowledge else []
            lines += [f"now: {example.question}", "tools: " + (" ".join(tools) or "none")]
            return [_message("user", "\n".join(lines))], None
        name = next(name for name, choice in TOOL_SETS.items() if choice == tools)
        return [
            _message("system", SYSTEM[name]),
            _message("user", self._paper_question(example, schema, tools)),
        ], tool_schemas(tools)

    def _paper_question(self, example: Example, schema: Schema, tools: tuple[str, ...]) -> str:
        lines = []
        schema_text = f"Database schema:\n{self.wording.schema_text(schema)}\n"
        if example.history:
            lines.append("Here are previous question and corresponding correct SQL in this dialogue:")
            if example.history[0].sql is None:
                lines[0] = "Here are the previous questions in this dialogue:"
            for i, turn in enumerate(example.history, 1):
                lines.append(f'## Turn {i} ##\n"{schema_text if i == 1 else ""}Question: {turn.question}"')
                if turn.sql is not None:
                    lines.append(f'Corresponding Correct SQL: "{turn.sql}"')
            lines.append("")
        else:
            lines.append(schema_text)
        if example.knowledge:
            lines.append(f"External Knowledge: {example.knowledge}")
        lines.append("Now please translate the following question to SQL step by step")
        note = "Note please call 'exec_sql' tool at least once" if EXEC_SQL in tools else ""
        lines.append(
            f"Question: {example.question} (Note you only need to translate the question to SQL instead "
            "answer the question. Once you feel you are ready for the final SQL, directly return the SQL "
            f"inside <answer_sql> and </answer_sql> at the end of your response. {note})"
        )
        return "\n".join(lines)

    def read(self, text: str) -> ModelMessage:
        """Verdicts, and a tool call or an answer; thinking is not read.

        Of several calls the first counts; a call beside an answer counts before it.
        """
        if "<think>" in text.rpartition("</think>")[2]:
            return ModelMessage(problem=Status.NO_ACTION)  # the thinking never ended
        text = text.rpartition("</think>")[2]
        verdicts = {
            tool: (found[-1] == "pass") if (found := pattern.findall(text)) else None
            for tool, pattern in VERDICT.items()
        }
        seen = {"exec_verdict": verdicts[EXEC_SQL], "memory_verdict": verdicts[MEMORY_RETRIEVE]}
        call = read_call(text, "code")
        if call is not None:
            return replace(call, **seen)
        answers = ANSWER.findall(text)
        if not answers or not answers[-1].strip():
            return ModelMessage(**seen, problem=Status.NO_ACTION)
        return ModelMessage(**seen, answer=answers[-1].strip())

    def call(self, sql: str) -> str:
        """The message that runs a query."""
        return tool_call(EXEC_SQL, sql)

    def answer(self, sql: str) -> str:
        """The message that ends the episode."""
        return final_answer(sql)

    def observe_execution(
        self, question: str, sql: str, result: ExecutionResult, history: int, turns_left: int
    ) -> str:
        """What `exec_sql` returns: a recap and the next tasks (appendix B.0.1)."""
        if self.wording.compact:
            return compact_result(result, self.wording.result_characters)
        shown = truncated(result_text(result), self.wording.result_characters)
        recap = (
            f"Recap:\n- Current question: {question}\n- Generated SQL: {sql}\n"
            f"- SQL execution results (truncated to {self.wording.result_characters} characters): {shown}\n"
        )
        return recap + EXEC_TASKS + (EXEC_THEN_MEMORY if history else EXEC_THEN_ANSWER)

    def observe_memory(
        self,
        question: str,
        sql: str,
        result: ExecutionResult | None,
        memory: tuple[MemoryEntry, ...],
    ) -> str:
        """What `memory_retrieve` returns: every earlier turn, and the checklist (appendix B.0.1)."""
        if self.wording.compact:
            lines = [
                f"{i}. {entry.sql or '?'} -> {compact_result(entry.result, self.wording.result_characters // 2)}"
                for i, entry in enumerate(memory, 1)
            ]
            return "\n".join(lines) or "empty"
        lines = [
            "You are a coherence verifier for Multi-turn Text2SQL.",
            f"Current Question: {question}",
            f"Proposed SQL: {sql}",
            "The execution results of the proposed SQL: "
            + truncated(result_text(result), self.wording.result_characters),
            "Memory (historical information in order):",
        ]
        for i, entry in enumerate(memory):
            lines.append(f"== Turn {i} ==\nQuestion: {entry.question}")
            if entry.sql is not None:
                lines.append(f"SQL: {entry.sql}")
                lines.append(f"Parsed Elements for each term: {entry.elements}")
                shown = truncated(result_text(entry.result), self.wording.result_characters)
                lines.append(
                    f"SQL Results (truncated to {self.wording.result_characters} characters): {shown}"
                )
        recheck = ", and then please call 'exec_sql' tool again via <tool_call> to check the corrected SQL"
        return "\n".join(lines) + "\n" + MEMORY_TASKS.format(recheck=recheck if result else "")

    def observe_problem(self, problem: Status, turns_left: int) -> None:
        """A message without a usable action ends the episode."""


def _message(role: str, content: str) -> dict:
    return {"role": role, "content": content}
