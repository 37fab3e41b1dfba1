"""MTSQL-R1, the recipe: what it asks, reads and shows, and Equation 1; rewards are in mtsql_r1_rewards.py.

Two wordings of the same prompts: `paper`, and `compact` for the tiny model, for which the paper's are ten
times too long. Both show the earlier questions with their SQL; the compact tool responses do not repeat the
question and the SQL that stand right before them, and the compact memory is the earlier SQL with its results,
without the paper's parsed elements and checklist. Section 3.1 also speaks of a violation set that the
environment computes for M-VERIFY; the tool of appendix B has none, and neither has ours.

The paper's "maximum interaction between agent and tools" of 4 are answered tool calls, and the message after
them has to be the answer. Appendix B.0.1 sets max_turns to 4: in the authors' code the episode ends at the
fourth message, so that no query that was corrected after a failed M-VERIFY can be executed, checked again and
committed, as Equation 1 asks.

The prompts (prompts/mtsql_r1_*.jinja) are as the paper prints them (appendix B.0.1 and D). They follow the tools
that there are: the paper shows both tools, and appendix D.1's baseline without any (D.2's has other words). Where
its listings differ from each other, or we from them:

- Line breaks and the request to call 'exec_sql' again after a failed M-VERIFY are B.0.1's; D says "you can call".
  Quotes are straight throughout, as in D.
- Turns are shown as in D.1; D.2 writes "User: " before the quoted question.
- The instructions are the message of the system, the rest that of the user; D prints them as one text.
- Without earlier questions the schema comes first and 'exec_sql' asks for the answer, as in the authors' code.
  With --history questions the earlier turns have no SQL. External knowledge (BIRD) is our addition.
- The results of earlier turns are cut to a quarter of the characters of a result, 50 of 200, as D says of them;
  D.2 shows all 17 rows of one. A result is cut with its first words, as in D.2, where 200 characters hold both.
- "Ground-Truth SQL" and "correct SQL" stand there with --history predicted too: the agent is not told otherwise.
- D.1 shows two results as [[0,]] and [[4,]], which in Python, as elsewhere in D, are [(0,)] and [(4,)]; of the
  parsed elements those of FROM end in a bracket, not in a brace; one full stop of the first task is missing.
- An earlier SQL that the official grammar cannot read has no elements.
- What the paper does not show: an error as a result, the prompt without 'exec_sql', responses without the other tool.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from mtsql.agent.env import ModelMessage, Prompt, Recipe
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE, MemoryEntry, Tool
from mtsql.agent.trajectory import Action, ActionType, Status
from mtsql.data.datasets import Example
from mtsql.data.schema import Schema
from mtsql.recipes.mtsql_r1_rewards import make_reward
from mtsql.recipes.prompt_options import PromptOptions, compact_result, read_call, render, write_call
from mtsql.sql.execute import ExecutionResult

__all__ = ["MtsqlR1", "make_recipe", "make_reward", "next_action"]

ACTION = re.compile("<tool_call>|<answer_sql>")
VERDICT = {
    EXEC_SQL: re.compile(r"<exec_verify>\s*(pass|no_pass)\s*</exec_verify>"),
    MEMORY_RETRIEVE: re.compile(r"<memory_verify>\s*(pass|no_pass)\s*</memory_verify>"),
}


def next_action(last: Action | None, tools: Collection[str], history: bool) -> ActionType:
    """Equation 1: the type of a_{k+1} from the type of a_k, the `last`, and the verdict on y_k.

    A tool that is switched off drops out of the cycle, as in Table 4; without earlier questions there
    is nothing to check against, so that a passed E-VERIFY leads to FINALIZE. A missing verdict
    (None) is not a pass. Raises ValueError after FINALIZE, which ends the episode.
    """
    can_check_memory = MEMORY_RETRIEVE in tools and history
    if last is None:
        return ActionType.PROPOSE
    previous = last.type
    if previous in (ActionType.PROPOSE, ActionType.SELF_CORRECT):
        if EXEC_SQL in tools:
            return ActionType.EXECUTE
        return ActionType.M_VERIFY if can_check_memory else ActionType.FINALIZE
    if previous is ActionType.EXECUTE:
        return ActionType.E_VERIFY
    if previous in (ActionType.E_VERIFY, ActionType.M_VERIFY):
        if not last.passed:
            return ActionType.SELF_CORRECT
        if previous is ActionType.E_VERIFY and can_check_memory:
            return ActionType.M_VERIFY
        return ActionType.FINALIZE
    raise ValueError("FINALIZE ends the episode: no action follows it")


def enclosed(text: str, opening: str, closing: str) -> list[tuple[str, int]]:
    """What stands between a match of `opening` and the next `closing`, and where that ends.

    It is what re.finditer finds of "opening(.*?)closing", which takes square time where an end is missing.
    """
    found, at, opens = [], 0, re.compile(opening)
    while (start := opens.search(text, at)) and (end := text.find(closing, start.end())) >= 0:
        at = end + len(closing)
        found.append((text[start.end() : end], at))
    return found


def answers(text: str) -> list[str]:
    """The SQL of all answers in a text."""
    return [sql for sql, _ in enclosed(text, "<answer_sql>", "</answer_sql>")]


def tool_call(tool: str, sql: str) -> str:
    """A call of one of the two tools."""
    return write_call(tool, "code", sql)


def verdict(tool: str, passed: bool) -> str:
    """The verdict on what `tool` returned."""
    tag = "exec_verify" if tool == EXEC_SQL else "memory_verify"
    return f"<{tag}>{'pass' if passed else 'no_pass'}</{tag}>"


def final_answer(sql: str) -> str:
    """The answer that ends an episode."""
    return f"<answer_sql>{sql}</answer_sql>"


def result_text(result: ExecutionResult, limit: int) -> str:
    """Rows as the paper shows them, or the error, within `limit` characters."""
    introduced = "The sql results example is: " * result.ok
    return f"{introduced}{_rows_text(result, limit)}"[:limit]


def _rows_text(result: ExecutionResult, limit: int) -> str:
    shown = [tuple(row) for row in result.rows[:limit]]  # each has four characters at least
    return (str(shown) if result.ok else f"Error: {result.message}")[:limit]


def _flat_elements(elements: dict) -> dict:
    """FROM first and SELECT as a list of its columns, without aggregates: so the paper prints them."""
    _, selected = elements["select"]
    units = [unit for _, (_, left, right) in selected for unit in (left, right) if unit is not None]
    return {"from": elements["from"], "select": [column for _, column, _ in units]} | {
        name: value for name, value in elements.items() if name not in ("from", "select")
    }


@dataclass(frozen=True)
class MtsqlR1(Recipe):
    """MTSQL-R1's prompts, tags and observations; with `options.compact` in short."""

    options: PromptOptions = PromptOptions()  # noqa: RUF009 (frozen)
    right_by_em: ClassVar[bool] = True
    verifies: ClassVar[bool] = True
    next_action = staticmethod(next_action)

    def prompt(self, example: Example, schema: Schema, tools: Mapping[str, Tool]) -> Prompt:
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

        The last verdict, the first call and the last answer count; a call outranks an answer.
        """
        text = text.rpartition("</think>")[2]
        if "<think>" in text:
            return ModelMessage(problem=Status.NO_ACTION)  # the thinking never ended
        before = ACTION.split(text)[0]
        found = {tool: pattern.findall(before) for tool, pattern in VERDICT.items()}
        verdicts = {tool: said[-1] == "pass" for tool, said in found.items() if said}
        call = read_call(text, "code")
        if call is not None:
            return replace(call, verdicts=verdicts)
        given = answers(text)
        if not given or not given[-1].strip():
            return ModelMessage(verdicts, problem=Status.NO_ACTION)
        return ModelMessage(verdicts, answer=given[-1].strip())

    def call(self, sql: str) -> str:
        """The message that runs a query."""
        return tool_call(EXEC_SQL, sql)

    def answer(self, sql: str) -> str:
        """The message that ends the episode."""
        return final_answer(sql)

    def observe_execution(
        self, question: str, sql: str, result: ExecutionResult, check_memory: bool, messages_left: int
    ) -> str:
        """What `exec_sql` returns."""
        limit = self.options.result_characters
        if self.options.compact:
            return compact_result(result, limit)
        said = {"question": question, "sql": sql, "result": result_text(result, limit), "limit": limit}
        return render("mtsql_r1_exec_sql", check_memory=check_memory, **said)

    def observe_memory(
        self, question: str, sql: str, result: ExecutionResult | None, memory: tuple[MemoryEntry, ...]
    ) -> str:
        """What `memory_retrieve` returns: every earlier turn, and the checklist."""
        limit = self.options.result_characters
        if self.options.compact:
            seen = [(entry.sql or "?", compact_result(entry.result, limit // 2)) for entry in memory]
            return "\n".join(f"{i}. {sql} -> {rows}" for i, (sql, rows) in enumerate(seen, 1)) or "empty"
        turns = []
        for entry in memory:
            elements = entry.elements and _flat_elements(entry.elements)
            seen = entry.result and _rows_text(entry.result, limit // 4)
            turns.append(vars(entry) | {"elements": elements, "result": seen})
        said = {"question": question, "sql": sql, "result": result and result_text(result, limit)}
        return render("mtsql_r1_memory_retrieve", turns=turns, limit=limit // 4, **said)


make_recipe = MtsqlR1
