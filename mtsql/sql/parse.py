"""SQL text to the Spider structure, strictly as the official evaluation reads it or leniently."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, TypeAlias

from mtsql.sql.grammar import official_structure
from mtsql.sql.lenient import lenient_structure
from mtsql.sql.structure import SqlParseError, SqlSchema, foreign_key_map

__all__ = ["SqlParseError", "SqlSchema", "foreign_key_map", "official_prediction", "parse_sql"]

Mode: TypeAlias = Literal["official", "lenient", "authors"]


@lru_cache(maxsize=50_000)
def parse_sql(sql: str, schema: SqlSchema, mode: Mode = "official") -> dict:
    """The Spider structure of `sql`; cached, so callers must not change it.

    Keys: select, from, where, groupBy, having, orderBy, limit, intersect, union, except. A column
    is "__table.column__", "*" is "__all__". "official" refuses what the official grammar refuses
    (section 2 of the notes); "authors" does too, but keeps the number after LIMIT, as the authors of
    MTSQL-R1 do; "lenient" reads whatever sqlglot reads as a query in SQLite's dialect.
    Raises SqlParseError for what cannot be read.
    """
    if mode == "lenient":
        return lenient_structure(sql, schema)
    return official_structure(sql, schema, keep_limit=mode == "authors")


def official_prediction(sql: str) -> str:
    """A prediction as the official tool rewrites it first (section 1): "value" becomes "1"."""
    return sql.replace("value", "1")
