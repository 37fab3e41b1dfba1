"""What recipes share: how a question is put, how a result is shown, how a tool call is read.

The papers' prompts are the Jinja templates of prompts/, as chat templates are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mtsql.agent.env import ModelMessage
from mtsql.agent.trajectory import Status
from mtsql.data.datasets import Example
from mtsql.data.schema import Schema, one_line
from mtsql.sql.execute import ExecutionResult

TEMPLATES = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, auto_reload=False)
TEMPLATES.loader = FileSystemLoader(Path(__file__).parent / "prompts")


@dataclass(frozen=True)
class PromptOptions:
    """`compact` is our wording for the tiny model, else the paper's; `result_characters` is the cut of results.

    With `native_thinking` the model thinks by itself: prompts do not ask for thoughts between tags.
    """

    compact: bool = False
    result_characters: int = 200
    native_thinking: bool = False

    def history_text(self, example: Example) -> str:
        """The earlier questions of the dialogue, with their SQL where it is known; "" without any."""
        lines = []
        for number, turn in enumerate(example.history, 1):
            lines.append(f"{number}. {turn.question}")
            if turn.sql is not None:
                lines.append(turn.sql if self.compact else f"   SQL: {turn.sql}")
        heading = "" if self.compact or not lines else "Earlier questions of this dialogue:\n"
        return heading + "\n".join(lines)

    def paper_prompt(self, template: str, example: Example, schema: Schema, tool: bool) -> list[dict]:
        """The paper's prompt, one message of the user; `tool`: there is one that executes SQL."""
        text = render(
            template,
            tool=tool,
            thoughts=not self.native_thinking,
            schema=schema,
            db_id=example.db_id,
            history=self.history_text(example),
            knowledge=example.knowledge,
            question=example.question,
        )
        return [{"role": "user", "content": text}]

    def compact_prompt(self, example: Example, schema: Schema, last_line: str) -> list[dict]:
        """The compact wording's prompt, one message of the user.

        The schema comes first, so that prompts over one database share it as a prefix.
        """
        lines = [schema.text(compact=True), self.history_text(example), example.knowledge]
        text = "\n".join(filter(None, [*lines, f"now: {example.question}", last_line]))
        return [{"role": "user", "content": text}]


def render(template: str, **values: Any) -> str:
    """A template of prompts/ with its values, which are put in as they are."""
    return TEMPLATES.get_template(f"{template}.jinja").render(values).rstrip("\n")


def compact_result(result: ExecutionResult | None, limit: int) -> str:
    """Rows in the compact wording, cut to `limit` characters, or the error, to four times as many."""
    if result is None:
        return "?"
    if not result.ok:
        return f"error: {result.message}"[: 4 * limit]
    rows = result.rows[: limit + 1]  # each adds three characters at least
    cells = ["|".join("null" if v is None else one_line(str(v)) for v in row) for row in rows]
    return cut(" ; ".join(cells) or "empty", limit, " ...")


def cut(text: str, limit: int, dots: str = "...") -> str:
    """The first `limit` characters of a text, and dots if there are more."""
    return text if len(text) <= limit else text[:limit] + dots


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows as a table; its first column stands to the left, the others to the right."""
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join("  ".join([name.ljust(first), *map(str.rjust, row, widths)]) for name, *row in rows)


def write_call(tool: str, argument: str, sql: str) -> str:
    """A call in Qwen3's format."""
    call = json.dumps({"name": tool, "arguments": {argument: sql}}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def read_call(text: str, argument: str) -> ModelMessage | None:
    """The first tool call in `text`: its name as `tool`, its string `argument` as `sql`; None without any.

    The problem is MALFORMED_CALL if the call has no end or is not JSON, or if its name or argument is
    missing or no text. Other arguments are not read.
    """
    _, opened, rest = text.partition("<tool_call>")
    if not opened:
        return None
    call, closed, _ = rest.partition("</tool_call>")
    try:
        content = json.loads(call) if closed else None
        tool, sql = content["name"], content["arguments"][argument]
        if isinstance(tool, str) and isinstance(sql, str) and sql.strip():
            (tool + sql).encode()  # half a surrogate pair is JSON but no text
            return ModelMessage(tool=tool, sql=sql.strip())
    except (KeyError, TypeError, ValueError, RecursionError):
        pass  # JSON errors are ValueErrors, and so is a number of too many digits
    return ModelMessage(problem=Status.MALFORMED_CALL)
