"""MTSQL-R1: its tags, and what fills its prompts (prompts/mtsql_r1_*.jinja), as the paper prints them
(appendix B.0.1 and D).

They follow the tools that there are: the paper shows both tools, and appendix D.1's baseline without any (D.2's
has other words). Where its listings differ from each other, or we from them:

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
from collections.abc import Sequence

from mtsql.agent.memory import MemoryEntry
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.recipes.prompt_options import render, write_call
from mtsql.sql.execute import ExecutionResult

VERDICT = {
    EXEC_SQL: re.compile(r"<exec_verify>\s*(pass|no_pass)\s*</exec_verify>"),
    MEMORY_RETRIEVE: re.compile(r"<memory_verify>\s*(pass|no_pass)\s*</memory_verify>"),
}


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


def memory_text(
    question: str, sql: str, result: ExecutionResult | None, memory: Sequence[MemoryEntry], limit: int
) -> str:
    """What `memory_retrieve` returns: every earlier turn, and the checklist."""
    turns = [
        {
            "question": entry.question,
            "sql": entry.sql,
            "elements": entry.elements and _flat_elements(entry.elements),
            "result": entry.result and _rows_text(entry.result)[: limit // 4],
        }
        for entry in memory
    ]
    shown = None if result is None else result_text(result, limit)
    return render(
        "mtsql_r1_memory_retrieve", question=question, sql=sql, result=shown, turns=turns, limit=limit // 4
    )


def result_text(result: ExecutionResult, limit: int) -> str:
    """Rows as the paper shows them, or the error, within `limit` characters."""
    introduced = "The sql results example is: " * result.ok
    return f"{introduced}{_rows_text(result)}"[:limit]


def _rows_text(result: ExecutionResult) -> str:
    return str([tuple(row) for row in result.rows]) if result.ok else f"Error: {result.message}"


def _flat_elements(elements: dict) -> dict:
    """FROM first and SELECT as a list of its columns, without aggregates: so the paper prints them."""
    _, selected = elements["select"]
    units = [unit for _, (_, left, right) in selected for unit in (left, right) if unit is not None]
    return {"from": elements["from"], "select": [column for _, column, _ in units]} | {
        name: value for name, value in elements.items() if name not in ("from", "select")
    }
