"""The long-term dialogue memory M_{t-1} (MTSQL-R1, section 3.1): what earlier turns established."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from mtsql.data.datasets import Example
from mtsql.data.schema import Schema
from mtsql.sql.execute import ExecutionResult, Executor, as_executed
from mtsql.sql.grammar import SqlParseError, SqlSchema, parse_sql


@dataclass(frozen=True)
class MemoryEntry:
    """An earlier question with its SQL, the SQL's parsed elements and its result.

    The last three are None with history "questions", or where the policy gave no answer.
    """

    question: str
    sql: str | None = None
    elements: dict | None = None
    result: ExecutionResult | None = None


def recall(example: Example, schema: Schema, executor: Executor) -> tuple[MemoryEntry, ...]:
    """The memory that `memory_retrieve` reads, in the order of the turns; EX's repairs are made in it too."""
    entries = []
    for turn in example.history:
        if turn.sql is None:
            entries.append(MemoryEntry(turn.question))
            continue
        result = executor.execute(schema.path, as_executed(turn.sql, keep_distinct=True))
        entries.append(MemoryEntry(turn.question, turn.sql, _elements(turn.sql, schema), result))
    return tuple(entries)


def _elements(sql: str, schema: Schema) -> dict | None:
    """By the official grammar with the numbers after LIMIT, as in the paper's memory."""
    with suppress(SqlParseError):
        return parse_sql(sql, SqlSchema.from_database(schema.path), keep_limit=True)
    return None
