"""How a recipe puts a question: what all recipes can be asked to change in their prompts."""

from __future__ import annotations

from dataclasses import dataclass

from mtsql.data.datasets import Example
from mtsql.data.names import written
from mtsql.data.schema import Schema, one_line
from mtsql.sql.execute import ExecutionResult


@dataclass(frozen=True)
class PromptOptions:
    """`compact` for the tiny model, else the paper's; `result_characters` is MTSQL-R1's cut of results.

    `schema` is "full" or "names" (table names only); `turns` the model messages of an episode, its answer
    included; `native_thinking` drops the instructions to think for a model that thinks by itself.
    """

    compact: bool = False
    result_characters: int = 200
    schema: str = "full"
    turns: int = 5
    native_thinking: bool = False

    def schema_text(self, schema: Schema) -> str:
        """The database as the prompt shows it."""
        if self.schema == "names":
            return ", ".join(written(table.name) for table in schema.tables)
        return schema.text(self.compact)

    def history_text(self, example: Example) -> str:
        """The earlier questions of the dialogue, with their SQL where it is known; "" without any."""
        lines = []
        for number, turn in enumerate(example.history, 1):
            lines.append(f"{number}. {turn.question}")
            if turn.sql is not None:
                lines.append(turn.sql if self.compact else f"   SQL: {turn.sql}")
        heading = "" if self.compact or not lines else "Earlier questions of this dialogue:\n"
        return heading + "\n".join(lines)

    def compact_prompt(self, example: Example, schema: Schema, last_line: str) -> list[dict]:
        """The compact wording's prompt, one message of the user.

        The schema comes first, so that prompts over one database share it as a prefix.
        """
        lines = [self.schema_text(schema), self.history_text(example), example.knowledge]
        text = "\n".join(filter(None, [*lines, f"now: {example.question}", last_line]))
        return [{"role": "user", "content": text}]


def compact_result(result: ExecutionResult | None, limit: int) -> str:
    """Rows in the compact wording, cut to `limit` characters, or the error, to four times as many."""
    if result is None:
        return "?"
    if not result.ok:
        return f"error: {result.message}"[: 4 * limit]
    cells = ["|".join("null" if v is None else one_line(str(v)) for v in row) for row in result.rows]
    text = " ; ".join(cells) or "empty"
    return text if len(text) <= limit else text[:limit] + " ..."


def truncated(text: str, limit: int) -> str:
    """The first `limit` characters of a text, and dots if there are more."""
    return text if len(text) <= limit else text[:limit] + "..."
