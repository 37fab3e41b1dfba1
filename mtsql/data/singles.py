"""Datasets of single questions: the fields of Spider, its variants, BIRD and SynSQL-2.5M.

Spider-Realistic and Spider-DK have Spider's fields. Spider's own `sql`, the parsed query, is not read.
Sources: taoyds/spider, ygan/Spider-Syn, ygan/Spider-DK, bird-bench/mini_dev, RUCKBReasoning/OmniSQL.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mtsql.errors import UserError


class Single(NamedTuple):
    """One question as its file has it; `difficulty` is the dataset's own word."""

    question: str
    sql: str
    db_id: str
    knowledge: str
    difficulty: str


class Fields(NamedTuple):
    """What a format calls its fields; knowledge and difficulty may be absent ("" without a name)."""

    format: str
    question: str
    sql: str
    knowledge: str = ""
    difficulty: str = ""


# By the field that only this format has. Spider's files have a `sql` too, so `query` stands before it.
FORMATS = {
    "SpiderSynQuestion": Fields("Spider-Syn", "SpiderSynQuestion", "query"),
    "SQL": Fields("BIRD", "question", "SQL", "evidence", "difficulty"),
    "query": Fields("Spider", "question", "query"),
    "sql": Fields("SynSQL", "question", "sql", "external_knowledge", "sql_complexity"),
}


def read_single(data: Path, number: int, item: object) -> Single:
    """Item `number` (from 0) of the file `data`; its format is told by its fields.

    Raises UserError with the file, the item and the field that is missing or no text.
    """
    where = f"{data}, item {number}"
    if not isinstance(item, dict):
        raise UserError(f"{where} should be an object with named fields, not {type(item).__name__}")
    fields = next((fields for key, fields in FORMATS.items() if key in item), None)
    if fields is None:
        known = ", ".join(f"{key} ({fields.format})" for key, fields in FORMATS.items())
        raise UserError(
            f"{where} has none of the fields interaction (SParC, CoSQL), {known}; "
            f"its fields are {', '.join(map(str, item)) or 'none'}"
        )

    def text(field: str) -> str:
        if field not in item:
            raise UserError(f"{where} looks like {fields.format} but lacks the field {field}")
        if not isinstance(item[field], str):
            raise UserError(f"{where}: the field {field} should be text, not {type(item[field]).__name__}")
        return item[field]

    def optional(field: str) -> str:
        return text(field).strip() if item.get(field) is not None else ""

    return Single(
        text(fields.question),
        text(fields.sql),
        text("db_id"),
        optional(fields.knowledge),
        optional(fields.difficulty),
    )
