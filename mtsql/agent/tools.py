"""The tools that an agent can call, and the dialogue's memory that one of them reads (MTSQL-R1, 3.1).

A further tool is one more `Tool` in TOOLS.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtsql.agent.trajectory import ActionType
from mtsql.data.datasets import Example
from mtsql.data.schema import Schema
from mtsql.sql.execute import ExecutionResult, Executor
from mtsql.sql.grammar import SqlParseError, SqlSchema, parse_sql
from mtsql.sql.text import as_executed

if TYPE_CHECKING:
    from mtsql.agent.env import Episode

EXEC_SQL = "exec_sql"
MEMORY_RETRIEVE = "memory_retrieve"


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
    """The memory that `memory_retrieve` reads, by turns; its SQL runs with the repairs of EX."""
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


@dataclass(frozen=True)
class Tool:
    """A tool with one text argument, `code`; `description` and `argument` say to the model what they are.

    `answer(episode, code, messages_left)` is the text that it returns. `action` is the action of MTSQL-R1's
    section 3.1 that a call is, `verdict` the one that judges what came back; with either, `code` is a
    candidate SQL.
    """

    name: str
    description: str
    argument: str
    answer: Callable[[Episode, str, int], str]
    action: ActionType | None = None
    verdict: ActionType | None = None

    @property
    def schema(self) -> dict:
        """The JSON schema for the chat template."""
        code = {"type": "string", "description": self.argument}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def _execute(episode: Episode, sql: str, messages_left: int) -> str:
    check_memory = MEMORY_RETRIEVE in episode.tools and bool(episode.example.history)
    return episode.recipe.observe_execution(
        episode.example.question, sql, episode.execute(sql), check_memory, messages_left
    )


def _retrieve(episode: Episode, sql: str, messages_left: int) -> str:
    result = episode.execute(sql) if EXEC_SQL in episode.tools else None
    memory = recall(episode.example, episode.schema, episode.executor)
    return episode.recipe.observe_memory(episode.example.question, sql, result, memory)


# The descriptions are those of MTSQL-R1, appendix B.0.1.
TOOLS = (
    Tool(
        EXEC_SQL,
        "A tool for executing sql and return the query results",
        "The current generated SQL that will be executed",
        _execute,
        ActionType.EXECUTE,
        ActionType.E_VERIFY,
    ),
    Tool(
        MEMORY_RETRIEVE,
        "A tool for retrieving the historical questions and ground-truth SQL in this dialogue",
        "The current generated SQL that needs to be verified coherence with the given historical memory",
        _retrieve,
        verdict=ActionType.M_VERIFY,
    ),
)
TOOL_SETS = ("both", "no_execution", "no_memory", "none")  # --tools, which switches off what Table 4 does


def make_tools(choice: str) -> dict[str, Tool]:
    """The tools of one of TOOL_SETS, by name."""
    left_out = {"no_execution": EXEC_SQL, "no_memory": MEMORY_RETRIEVE}.get(choice)
    return {tool.name: tool for tool in TOOLS if tool.name != left_out and choice != "none"}
