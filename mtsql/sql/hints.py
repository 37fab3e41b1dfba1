"""What a database could have said beside "no such column": where it is, as PostgreSQL's hints do."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sqlglot import exp

from mtsql.data.names import folded, written
from mtsql.data.schema import Schema
from mtsql.sql.structure import SqlParseError
from mtsql.sql.tree import query_tree

# A name may hold a line break; a dot that stops at one would take square time, too.
NO_TABLE = re.compile(r"no such table: (?P<name>.+)", re.DOTALL)
AMBIGUOUS = re.compile(r"ambiguous column name: (?:.*\.)?(?P<name>.+)", re.DOTALL)
NO_COLUMN = re.compile(
    r'no such column: (?:(?P<table>[^."]+)\.)?"?(?P<name>[^"]+)"?(?: - should .*)?', re.DOTALL
)


def error_hint(message: str, sql: str, schema: Schema) -> str:
    """The names that there are instead of one that SQLite's `message` misses; "" for other errors.

    Instead of a table: all tables. Instead of a column: the tables that have it, then the columns of the
    table before its dot, or of all that the query reads. For an ambiguous column: the tables that have it.
    """
    if NO_TABLE.fullmatch(message):
        return f"tables: {_listed(table.name for table in schema.tables)}"
    found = NO_COLUMN.fullmatch(message) or AMBIGUOUS.fullmatch(message)
    if found is None:
        return ""
    name = folded(found["name"])
    having = [t.name for t in schema.tables if name in (folded(column) for column, _ in t.columns)]
    hints = [f"{written(found['name'])} is in {_listed(having)}"] if having else []
    if found.re is NO_COLUMN:
        read = _tables_by_alias(sql)
        asked = found["table"] and {read.get(folded(found["table"]), folded(found["table"]))}
        wanted = asked or set(read.values())
        tables = (t for t in schema.tables if folded(t.name) in wanted)
        hints += [f"{written(t.name)} has {_listed(name for name, _ in t.columns)}" for t in tables]
    return "; ".join(hints)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(written, names))


def _tables_by_alias(sql: str) -> dict[str, str]:
    """The tables that a query reads, by the names that it gives them, `folded`; none if unreadable."""
    try:
        tables = query_tree(sql).find_all(exp.Table)
    except SqlParseError:
        return {}
    return {folded(table.alias_or_name): folded(table.name) for table in tables}
