"""SQL text to the Spider structure, as the official evaluation reads it."""

from __future__ import annotations

from typing import Literal, TypeAlias

from mtsql.sql.grammar import parse_official
from mtsql.sql.structure import SqlParseError, SqlSchema, cached
from mtsql.sql.tree import MAX_CHARACTERS, TOO_LONG

Mode: TypeAlias = Literal["official", "authors"]


@cached
def parse_sql(sql: str, schema: SqlSchema, mode: Mode = "official") -> dict:
    """The Spider structure of `sql`; it may be a cached one, so callers must not change it.

    Keys: select, from, where, groupBy, having, orderBy, limit, intersect, union, except. A column
    is "__table.column__", "*" is "__all__". "official" refuses what the official parser
    (taoyds/test-suite-sql-eval, process_sql.py) refuses; "authors" does too, but keeps the number after
    LIMIT, as the authors of MTSQL-R1 do. Raises SqlParseError for what cannot be read.
    """
    if len(sql) > MAX_CHARACTERS:
        raise SqlParseError(TOO_LONG)
    try:
        return parse_official(sql, schema, keep_limit=mode == "authors")
    except RecursionError:
        raise SqlParseError("nested too deeply") from None


def official_prediction(sql: str) -> str:
    """A prediction as the official evaluation rewrites it first: "value" becomes "1" everywhere."""
    return sql.replace("value", "1")
