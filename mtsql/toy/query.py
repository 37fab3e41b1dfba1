"""A small query form, its SQL, and the mistakes a careless writer of it would make.

The scripted agent imitates these mistakes; each is of a kind that a tool can reveal: the database
(a misnamed column, a value in a form that is not stored) or the memory (a constraint of an earlier
question lost or left unchanged, a look-alike column of another table).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtsql.toy.database import Column, Database, Table

AGGREGATES = {"avg": "average", "max": "highest", "min": "lowest", "sum": "total"}
COUNT = ("count", None)


@dataclass(frozen=True)
class Condition:
    """`column op value`; `value` is a number, a word as people write it, or a Query."""

    column: Column
    op: str
    value: int | str | Query


@dataclass(frozen=True)
class Query:
    """One SELECT. `select` and `order` hold (aggregate or "", column or None for *), `order` ASC or DESC too.

    `least` stands for HAVING count(*) >= it. `combined` is INTERSECT, EXCEPT or UNION with another query.
    """

    table: str
    select: tuple[tuple[str, Column | None], ...]
    where: tuple[Condition, ...] = ()
    group: Column | None = None
    least: int | None = None
    order: tuple[str, Column | None, str] | None = None
    limit: int | None = None
    combined: tuple[str, Query] | None = None
    joined: str | None = None  # a child table that is counted, though none of its columns is named

    def tables(self) -> list[str]:
        """Every table that the FROM clause needs for the columns named, the main table first."""
        columns = [c for _, c in self.select] + [c.column for c in self.where] + [self.group]
        columns += [self.order[1]] if self.order else []
        return list(dict.fromkeys([self.table, *(c.table for c in columns if c), self.joined or self.table]))

    @property
    def is_plain(self) -> bool:
        """A list, count or aggregate under conditions, and nothing more."""
        return not (self.group or self.order or self.combined or self.joined)

    @property
    def is_plain_list(self) -> bool:
        """Columns under conditions, and nothing more."""
        return self.is_plain and not self.select[0][0]

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
    return Query(table.name, tuple(("", column) for column in columns))


def _value(condition: Condition, database: Database) -> str:
    """The right side of a condition in SQL."""
    if isinstance(condition.value, Query):
        return f"({render(condition.value, database)})"
    if isinstance(condition.value, int):
        return str(condition.value)
    return f"'{condition.column.stored(condition.value)}'"


def _link(database: Database, one: str, other: str) -> tuple[Table, Table] | None:
    """Two tables as (child, parent) if one points to the other."""
    first, second = database[one], database[other]
    if first.parent is second:
        return first, second
    return (second, first) if second.parent is first else None


def _joins(database: Database, tables: list[str]) -> dict[str, tuple[Table, Table] | None]:
    """FROM clause: the main table, then each further one with its link (child, parent) to one before it.

    A grandparent brings its own table between them.
    """
    joins: dict[str, tuple[Table, Table] | None] = {tables[0]: None}
    while waiting := [table for table in tables if table not in joins]:
        above = [database[there].parent.name for there in joins if database[there].parent]
        new = [table for table in (*waiting, *above) if table not in joins]
        links = ((table, _link(database, table, there)) for table in new for there in joins)
        table, link = next((table, link) for table, link in links if link)
        joins[table] = link
    return joins


def render(query: Query, database: Database) -> str:
    """SQL of a query: plain names over one table, aliases t1, t2, ... over several."""
    joins = _joins(database, query.tables())
    alias = {table: f"t{i}" for i, table in enumerate(joins, 1)}

    def expression(aggregate: str, column: Column | None) -> str:
        name = "*" if column is None else column.name
        if column is not None and len(joins) > 1:
            name = f"{alias[column.table]}.{name}"
        return f"{aggregate}({name})" if aggregate else name

    sql = "SELECT " + ", ".join(expression(a, c) for a, c in query.select)
    sql += f" FROM {query.table}" + (f" AS {alias[query.table]}" if len(joins) > 1 else "")
    for table, link in joins.items():
        if link:
            child, parent = link
            sql += f" JOIN {table} AS {alias[table]}"
            sql += f" ON {alias[child.name]}.{child.link} = {alias[parent.name]}.{parent.key}"
    if query.where:
        conditions = (f"{expression('', c.column)} {c.op} {_value(c, database)}" for c in query.where)
        sql += " WHERE " + " AND ".join(conditions)
    if query.group:
        sql += f" GROUP BY {expression('', query.group)}"
    if query.least:
        sql += f" HAVING count(*) >= {query.least}"
    if query.order:
        sql += f" ORDER BY {expression(*query.order[:2])} {query.order[2]}"
    if query.limit:
        sql += f" LIMIT {query.limit}"
    if query.combined:
        sql += f" {query.combined[0]} {render(query.combined[1], database)}"
    return sql


def _replace_column(query: Query, old: Column, new: Column) -> Query:
    """The query with one column taken for another everywhere, but for nested queries."""

    def swap(part: object) -> object:
        if isinstance(part, Condition):
            return replace(part, column=swap(part.column))
        return tuple(map(swap, part)) if isinstance(part, tuple) else new if part == old else part

    return replace(
        query, **{name: swap(getattr(query, name)) for name in ("select", "where", "group", "order")}
    )


def mistakes(query: Query, previous: Query | None, database: Database) -> list[tuple[str, str]]:
    """(kind, SQL) of wrong versions of `query`, which followed `previous` (None for a first question).

    Kinds: lost_constraint, stale_value, value_form, look_alike, misnamed_column.
    """
    found: list[tuple[str, Query]] = []
    earlier = previous.where if previous else ()
    for lost in (c for c in query.where if c in earlier):
        found.append(("lost_constraint", replace(query, where=tuple(c for c in query.where if c != lost))))
    for now in query.where:
        for old in earlier:
            same = (old.column, old.op) == (now.column, now.op)
            if same and old.value != now.value and isinstance(old.value, str):
                found.append(("stale_value", query.changed(now, old)))
    for now in (c for c in query.where if isinstance(c.value, str)):
        for style in ("title", "lower") if now.column.form == "proper" else ("lower", "title"):
            if style != now.column.style:
                stored = replace(now, column=replace(now.column, style=style))
                found.append(("value_form", query.changed(now, stored)))
    for column in dict.fromkeys([c for _, c in query.select if c] + [c.column for c in query.where]):
        for table in database.values():
            twin = next((c for c in table.columns if c.name == column.name), None)
            if twin and column.form != "label" and _link(database, column.table, twin.table):
                found.append(("look_alike", _replace_column(query, column, twin)))
        own = {c.name for c in database[column.table].columns}
        for wrong in (n for n in column.other_names if n not in own):
            found.append(("misnamed_column", _replace_column(query, column, replace(column, name=wrong))))
    rendered = dict.fromkeys((kind, render(wrong, database)) for kind, wrong in found)
    return [(kind, sql) for kind, sql in rendered if sql != render(query, database)]
