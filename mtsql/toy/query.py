"""A small query form, its SQL, and the mistakes a careless writer of it would make.

The scripted agent imitates these mistakes; each is of a kind that a tool can reveal: the database
(a misnamed column, a value in a form that is not stored) or the memory (a constraint of an earlier
question lost or left unchanged, a look-alike column of another table).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from mtsql.toy.database import Column, Database, Table

AGGREGATES = {"avg": "average", "max": "highest", "min": "lowest", "sum": "total"}
COUNT = ("count", None)


@dataclass(frozen=True)
class Condition:
    """`column op value`; `value` is a number, a word as people write it, or a Query."""

    column: Column
    op: str
    value: int | str | Query

    def sql(self) -> str:
        """The operator and the right side in SQL."""
        if isinstance(self.value, Query):
            return f"{self.op} ({render(self.value)})"
        if isinstance(self.value, int):
            return f"{self.op} {self.value}"
        return f"{self.op} '{self.column.stored(self.value)}'"


@dataclass(frozen=True)
class Query:
    """One SELECT. `select` and `order` hold (aggregate or "", column or None for *), `order` ASC or DESC too.

    `least` stands for HAVING count(*) >= it. `combined` is INTERSECT, EXCEPT or UNION with another query.
    """

    table: Table
    select: tuple[tuple[str, Column | None], ...]
    where: tuple[Condition, ...] = ()
    group: Column | None = None
    least: int | None = None
    order: tuple[str, Column | None, str] | None = None
    limit: int | None = None
    combined: tuple[str, Query] | None = None
    joined: Table | None = None  # a child table that is counted, though none of its columns is named

    @property
    def columns(self) -> list[Column]:
        """The columns that SELECT and WHERE name, each once."""
        named = [c for _, c in self.select if c] + [c.column for c in self.where]
        return list(dict.fromkeys(named))

    @property
    def is_list(self) -> bool:
        """Columns of single entities: no aggregates, groups or set operation."""
        return not (self.select[0][0] or self.group or self.combined)

    @property
    def is_plain(self) -> bool:
        """A list, count or aggregate under conditions, and nothing more."""
        return not (self.group or self.order or self.combined)

    @property
    def shown(self) -> Column:
        """The first column that it selects."""
        return self.select[0][1]

    @property
    def aggregate(self) -> str:
        """The name of the aggregate that it selects."""
        return f"{AGGREGATES[self.select[0][0]]} {self.shown.phrase}"

    @property
    def extreme(self) -> str:
        """The word for what its order puts first."""
        _, column, direction = self.order
        extremes = ("latest", "earliest") if column.form == "year" else ("highest", "lowest")
        return extremes[direction == "ASC"]

    def showing(self, column: Column) -> Query:
        """The query with this column alone selected."""
        return replace(self, select=(("", column),))

    def under(self, condition: Condition) -> Query:
        """The query with one more condition."""
        return replace(self, where=(*self.where, condition))

    def changed(self, old: Condition, new: Condition) -> Query:
        """The query with one condition in place of another."""
        return replace(self, where=tuple(new if c == old else c for c in self.where))


def listing_of(table: Table, *columns: Column) -> Query:
    """The query for columns of a table, or of its parent beside them."""
    return Query(table, tuple(("", column) for column in columns))


def _linked(one: Table, other: Table) -> bool:
    return one.parent is other or other.parent is one


def _from(query: Query) -> list[Table]:
    """The tables that a query needs, its own first, and then each linked to one before it.

    A grandparent brings its own table between them.
    """
    ordered = [query.order[1]] if query.order else []
    named = [c.table for c in (*query.columns, query.group, *ordered) if c] + [query.joined or query.table]
    tables = [query.table]
    while waiting := [table for table in named if table not in tables]:
        above = [table.parent for table in tables if table.parent]
        new = [table for table in waiting + above if table not in tables]
        tables.append(next(table for table in new if any(_linked(table, there) for there in tables)))
    return tables


def render(query: Query) -> str:
    """SQL of a query: plain names over one table, aliases t1, t2, ... over several."""
    tables = _from(query)
    alias = {table: f"t{i}" for i, table in enumerate(tables, 1)}

    def name(column: Column) -> str:
        return f"{alias[column.table]}.{column.name}" if len(tables) > 1 else column.name

    def expression(aggregate: str, column: Column | None) -> str:
        inner = name(column) if column else "*"
        return f"{aggregate}({inner})" if aggregate else inner

    sql = "SELECT " + ", ".join(expression(a, c) for a, c in query.select) + f" FROM {query.table.name}"
    if len(tables) > 1:
        sql += f" AS {alias[query.table]}"
    for i, table in enumerate(tables[1:], 1):
        there = next(t for t in tables[:i] if _linked(t, table))
        child, parent = (there, table) if there.parent is table else (table, there)
        sql += f" JOIN {table.name} AS {alias[table]} ON {name(child.link)} = {name(parent.key)}"
    if query.where:
        sql += " WHERE " + " AND ".join(f"{name(c.column)} {c.sql()}" for c in query.where)
    if query.group:
        sql += f" GROUP BY {name(query.group)}"
    if query.least:
        sql += f" HAVING count(*) >= {query.least}"
    if query.order:
        sql += f" ORDER BY {expression(*query.order[:2])} {query.order[2]}"
    if query.limit:
        sql += f" LIMIT {query.limit}"
    if query.combined:
        sql += f" {query.combined[0]} {render(query.combined[1])}"
    return sql


def _replace_column(query: Query, old: Column, new: Column) -> Query:
    """The query with one column taken for another everywhere, but for nested queries."""

    def swap(column: Column | None) -> Column | None:
        return new if column is old else column

    return replace(
        query,
        select=tuple((aggregate, swap(column)) for aggregate, column in query.select),
        where=tuple(replace(c, column=swap(c.column)) for c in query.where),
        group=swap(query.group),
        order=query.order and (query.order[0], swap(query.order[1]), query.order[2]),
    )


def mistakes(query: Query, previous: Query | None, database: Database) -> list[dict[str, str]]:
    """Wrong versions of `query`, {kind, query}; it followed `previous` (None for a first question).

    Kinds: lost_constraint, stale_value, value_form, look_alike, misnamed_column.
    """
    earlier = previous.where if previous else ()
    found: list[tuple[str, Query]] = []
    for lost in (c for c in query.where if c in earlier):
        found.append(("lost_constraint", replace(query, where=tuple(c for c in query.where if c != lost))))
    for now, old in product(query.where, earlier):
        same = now.column is old.column and now.op == old.op
        if same and now.value != old.value and isinstance(old.value, str):
            found.append(("stale_value", query.changed(now, old)))
    for now in (c for c in query.where if isinstance(c.value, str)):
        for style in ("title", "lower") if now.column.form == "proper" else ("lower", "title"):
            if style != now.column.style:
                stored = replace(now, column=replace(now.column, style=style))
                found.append(("value_form", query.changed(now, stored)))
    for column in query.columns:
        for table in database:
            twin = next((c for c in table.columns if c.name == column.name), None)
            if twin and column.form != "label" and _linked(column.table, table):
                found.append(("look_alike", _replace_column(query, column, twin)))
        own = {c.name for c in column.table.columns}
        for wrong in (n for n in column.names if n not in own):
            found.append(("misnamed_column", _replace_column(query, column, replace(column, name=wrong))))
    rendered = dict.fromkeys((kind, render(wrong)) for kind, wrong in found)
    return [{"kind": kind, "query": sql} for kind, sql in rendered if sql != render(query)]
