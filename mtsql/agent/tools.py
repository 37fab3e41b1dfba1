"""The tools that an agent can call. A further tool is one more entry of TOOLS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtsql.agent.memory import recall
from mtsql.agent.trajectory import ActionType

if TYPE_CHECKING:
    from mtsql.agent.env import Episode

EXEC_SQL = "exec_sql"
MEMORY_RETRIEVE = "memory_retrieve"


@dataclass(frozen=True)
class Tool:
    """A tool with one text argument, `code`.

    `schema` is its JSON schema for the chat template. `answer(episode, argument, turns_left)` is the text
    that it returns. `action` is the action of MTSQL-R1's section 3.1 that a call is, `verdict` the one that
    judges what came back. The argument of a tool with either is a candidate SQL.
    """

    schema: dict
    answer: Callable[[Episode, str, int], str]
    action: ActionType | None = None
    verdict: ActionType | None = None


def tool_schema(name: str, description: str, argument: str) -> dict:
    """The JSON schema of a tool whose argument is described by `argument`."""
    code = {"type": "object", "properties": {"code": {"type": "string", "description": argument}}}
    parameters = code | {"required": ["code"]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _execute(episode: Episode, sql: str, turns_left: int) -> str:
    check_memory = MEMORY_RETRIEVE in episode.tools and bool(episode.example.history)
    return episode.recipe.observe_execution(
        episode.example.question, sql, episode.execute(sql), check_memory, turns_left
    )


def _retrieve(episode: Episode, sql: str, turns_left: int) -> str:
    result = episode.execute(sql) if EXEC_SQL in episode.tools else None
    memory = recall(episode.example, episode.schema, episode.executor)
    return episode.recipe.observe_memory(episode.example.question, sql, result, memory)


# The descriptions are those of MTSQL-R1, appendix B.0.1.
TOOLS = {
    EXEC_SQL: Tool(
        tool_schema(
            EXEC_SQL,
            "A tool for executing sql and return the query results",
            "The current generated SQL that will be executed",
        ),
        _execute,
        ActionType.EXECUTE,
        ActionType.E_VERIFY,
    ),
    MEMORY_RETRIEVE: Tool(
        tool_schema(
            MEMORY_RETRIEVE,
            "A tool for retrieving the historical questions and ground-truth SQL in this dialogue",
            "The current generated SQL that needs to be verified coherence with the given historical memory",
        ),
        _retrieve,
        verdict=ActionType.M_VERIFY,
    ),
}
TOOL_SETS = {  # by --tools; Table 4 of MTSQL-R1 switches its two off
    "both": tuple(TOOLS),
    "no_execution": tuple(name for name in TOOLS if name != EXEC_SQL),
    "no_memory": tuple(name for name in TOOLS if name != MEMORY_RETRIEVE),
    "none": (),
}


def make_tools(choice: str) -> dict[str, Tool]:
    """The tools of one of TOOL_SETS, by name."""
    return {name: TOOLS[name] for name in TOOL_SETS[choice]}
