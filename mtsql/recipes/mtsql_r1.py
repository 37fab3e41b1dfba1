"""MTSQL-R1, the recipe: what it asks, reads and shows, and Equation 1; rewards are in mtsql_r1_rewards.py.

Two wordings of the same prompts: `paper`, and `compact` for the tiny model, for which the paper's are ten
times too long. Both show the earlier questions with their SQL; the compact tool responses do not repeat the
question and the SQL that stand right before them, and the compact memory is the earlier SQL with its results,
without the paper's parsed elements and checklist. Section 3.1 also speaks of a violation set that the
environment computes for M-VERIFY; the tool of appendix B has none, and neither has ours.

The paper's "maximum interaction between agent and tools" of 4 are answered tool calls, and the message after
them has to be the answer. The authors' code ends the episode at the fourth message, so that no query that was
corrected after a failed M-VERIFY can be executed, checked again and committed, as Equation 1 asks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from mtsql.agent.env import ModelMessage, Recipe
from mtsql.agent.memory import MemoryEntry
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE, Tool
from mtsql.agent.trajectory import ActionType, Status
from mtsql.data.datasets import Example
from mtsql.data.schema import Schema
from mtsql.recipes import mtsql_r1_prompts as texts
from mtsql.recipes.mtsql_r1_rewards import make_reward
from mtsql.recipes.prompt_options import PromptOptions, compact_result, read_call, render
from mtsql.sql.execute import ExecutionResult

__all__ = ["MtsqlR1", "make_recipe", "make_reward", "next_action"]

ACTION = re.compile("<tool_call>|<answer_sql>")


def next_action(
    previous: ActionType | None, passed: bool | None, tools: Collection[str], has_history: bool
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
    """MTSQL-R1's prompts, tags and observations; with `options.compact` in short."""

    options: PromptOptions = PromptOptions()  # noqa: RUF009 (frozen)
    right_by_em: ClassVar[bool] = True
    verifies: ClassVar[bool] = True
    next_action = staticmethod(next_action)

    def prompt(
        self, example: Example, schema: Schema, tools: Mapping[str, Tool]
    ) -> tuple[list[dict], list[dict] | None]:
        """System and user message, and the tool schemas for the chat template."""
        if self.options.compact:
            named = f"tools: {' '.join(tools) or 'none'}"
            return self.options.compact_prompt(example, schema, named), None
        dialogue = {"history": example.history, "question": example.question, "knowledge": example.knowledge}
        return [
            {"role": "system", "content": render("mtsql_r1_system", tools=tools)},
            {"role": "user", "content": render("mtsql_r1_user", tools=tools, schema=schema, **dialogue)},
        ], [tool.schema for tool in tools.values()] or None

    def parse(self, text: str) -> ModelMessage:
        """Verdicts, and a tool call or an answer; thinking is not read, nor a verdict behind the action.

        Of several verdicts the last counts, of several calls the first; a call counts before an answer.
        """
        text = text.rpartition("</think>")[2]
        if "<think>" in text:
            return ModelMessage(problem=Status.NO_ACTION)  # the thinking never ended
        before = ACTION.split(text)[0]
        found = {tool: pattern.findall(before) for tool, pattern in texts.VERDICT.items()}
        verdicts = {tool: said[-1] == "pass" for tool, said in found.items() if said}
        call = read_call(text, "code")
        if call is not None:
            return replace(call, verdicts=verdicts)
        answers = texts.answers(text)
        if not answers or not answers[-1].strip():
            return ModelMessage(verdicts, problem=Status.NO_ACTION)
        return ModelMessage(verdicts, answer=answers[-1].strip())

    def call(self, sql: str) -> str:
        """The message that runs a query."""
        return texts.tool_call(EXEC_SQL, sql)

    def answer(self, sql: str) -> str:
        """The message that ends the episode."""
        return texts.final_answer(sql)

    def observe_execution(
        self, question: str, sql: str, result: ExecutionResult, check_memory: bool, messages_left: int
    ) -> str:
        """What `exec_sql` returns."""
        limit = self.options.result_characters
        if self.options.compact:
            return compact_result(result, limit)
        said = {"question": question, "sql": sql, "result": texts.result_text(result, limit), "limit": limit}
        return render("mtsql_r1_exec_sql", check_memory=check_memory, **said)

    def observe_memory(
        self, question: str, sql: str, result: ExecutionResult | None, memory: tuple[MemoryEntry, ...]
    ) -> str:
        """What `memory_retrieve` returns."""
        limit = self.options.result_characters
        if self.options.compact:
            seen = [(entry.sql or "?", compact_result(entry.result, limit // 2)) for entry in memory]
            return "\n".join(f"{i}. {sql} -> {rows}" for i, (sql, rows) in enumerate(seen, 1)) or "empty"
        return texts.memory_text(question, sql, result, memory, limit)


make_recipe = MtsqlR1
