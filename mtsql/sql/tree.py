"""Lenient reading of SQL through sqlglot: a syntax tree with aliases resolved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import sqlglot
from sqlglot import exp
from sqlglot.dialects.sqlite import SQLite

from mtsql.data.schema import folded
from mtsql.sql.grammar import MAX_CHARACTERS, TOO_LONG, SqlParseError, SqlSchema
from mtsql.sql.text import ROW_IDS, first_statement, is_blank, join_operators

MAX_COPIED_NODES = 10_000
MAX_STEPS = 5_000  # of sqlglot from token to token, many times what a gold query takes

Meanings: TypeAlias = Mapping[str, exp.Expression]  # a column's name -> what it stands for
Named: TypeAlias = Mapping[str, list[str]]  # the queries of WITH that can be read, with their columns


def canonical_tree(sql: str, schema: SqlSchema) -> exp.Query:
    """The first statement of `sql` with every alias replaced by what it stands for, but names of WITH.

    Columns carry their real table, identifiers are as `folded` has them, a word in double quotes that is no
    column is a text, as in SQLite. Another name that the schema does not explain stays as it is.
    Raises SqlParseError if sqlglot cannot read it or it is no query.
    """
    tree = query_tree(sql)
    with unreadable_if_it_fails():
        _Names(schema).resolve(tree, None, {})
        _strip_aliases(tree)
    return tree


def query_tree(sql: str) -> exp.Query:
    """The first statement of `sql` without comments; SqlParseError if sqlglot cannot read it as a query."""
    if len(sql) > MAX_CHARACTERS:
        raise SqlParseError(TOO_LONG)
    text = "".join(" " if is_blank(piece) else piece for piece in first_statement(join_operators(sql)))
    with unreadable_if_it_fails():
        tree = _BoundedParser(dialect=SQLite()).parse(sqlglot.tokenize(text, read="sqlite"), text)[0]
        if not isinstance(tree, exp.Query):
            raise SqlParseError("not a query")
    return tree


class _BoundedParser(SQLite.Parser):
    """sqlglot's parser, which tries one reading after another, exponentially many of what is nested.

    Here its steps have an end. Between two of them it only tries what a token may begin.
    """

    steps = 0

    def _advance(self, times: int = 1) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise SqlParseError("sqlglot takes too long to read it")
        super()._advance(times)


@contextmanager
def unreadable_if_it_fails() -> Iterator[None]:
    """Raises SqlParseError for whatever fails inside: of garbage sqlglot makes trees that lack parts."""
    try:
        yield
    except SqlParseError:
        raise
    except RecursionError:
        raise SqlParseError("nested too deeply") from None
    except Exception as error:
        raise SqlParseError(str(error).split("\n")[0]) from None


def sources(select: exp.Select) -> list[exp.Expression]:
    """The tables and sub-queries of FROM, in order."""
    first = select.args.get("from_")
    joined = [join.this for join in select.args.get("joins") or []]
    return ([first.this] if first else []) + joined


def join_condition(join: exp.Join) -> list[exp.Expression]:
    """The condition after ON, if there is one; sqlglot writes a missing one as TRUE."""
    condition = join.args.get("on")
    return [] if condition is None or isinstance(condition, exp.Boolean) else [condition]


def clause_items(query: exp.Query, clause: str) -> list[exp.Expression]:
    """The items of GROUP BY or ORDER BY, the one condition of WHERE or HAVING; none without the clause."""
    node = query.args.get(clause)
    if node is None:
        return []
    return node.expressions if clause in ("group", "order") else [node.this]


def first_select(query: exp.Expression) -> exp.Expression:
    """The first SELECT of a query, which names what the query puts out."""
    while isinstance(query, exp.SetOperation | exp.Subquery):
        query = query.this
    return query


class _Scope:
    """One SELECT: what the names mean that its FROM brings in, and those of its own items."""

    def __init__(self, select: exp.Select, outer: _Scope | None) -> None:
        """Raises SqlParseError for a SELECT of nothing."""
        if not select.expressions:
            raise SqlParseError("SELECT of nothing")
        self.outer, self.items = outer, select.expressions
        self.item_names = [folded(item.alias_or_name) for item in self.items]
        self.aliases = {folded(item.alias): item for item in reversed(self.items) if item.alias}
        self.tables: dict[str, str] = {}  # name in use -> table
        self.sources: dict[str, Meanings] = {}  # name in use of a table or sub-query -> its columns
        self.opaque = False  # whether FROM has columns that nobody knows, as of a function that gives rows

    def alias(self, column: exp.Column) -> exp.Expression | None:
        """The selected item that has the name of a column as its alias."""
        return None if column.table else self.aliases.get(folded(column.name))

    def meaning(self, table: str, column: str) -> exp.Expression | None:
        """What a column stands for here or in the nearest scope around that knows it."""
        for name, columns in self.sources.items():
            if table in ("", name) and column in columns:
                return columns[column]
        if table in self.tables:
            return exp.column(column, self.tables[table])
        return self.outer.meaning(table, column) if self.outer else None

    def guess(self, column: exp.Column) -> exp.Expression:
        """What a name stands for that nothing explains: a text in double quotes, or a column."""
        if column.this.quoted and not column.table and not self.opaque:
            return exp.Literal.string(column.name)
        table = folded(column.table)
        if not table and len(self.sources) == 1:
            table = next(iter(self.tables.values()), "")
        return exp.column(folded(column.name), table or None)

    def outputs(self) -> Meanings:
        """Each name that is selected -> what it stands for, * taken apart."""
        found: dict[str, exp.Expression] = {}
        for item_name, item in zip(self.item_names, self.items, strict=True):
            if not item.is_star:
                found.setdefault(item_name, item.unalias())
                continue
            for name, columns in self.sources.items():
                if folded(getattr(item, "table", "")) in ("", name):
                    for column, meaning in columns.items():
                        found.setdefault(column, meaning)
        return found


class _Names:
    """Resolves the names of a tree, and refuses a query whose names stand for more at every level."""

    def __init__(self, schema: SqlSchema) -> None:
        self.schema, self.copied = schema, 0
        self.scopes: dict[int, _Scope] = {}  # by the id of their query

    def resolve(self, query: exp.Query, outer: _Scope | None, named: Named) -> _Scope:
        """Replaces every name in a query by what it stands for; the scope of its first SELECT."""
        if id(query) in self.scopes:
            return self.scopes[id(query)]
        for cte in query.ctes:
            given = [folded(name.name) for name in cte.args["alias"].columns]
            named = {**named, folded(cte.alias): given}
            scope = self.resolve(cte.this, outer, named)
            named[folded(cte.alias)] = given or list(scope.outputs())
        columns, inner = [], []
        for node in query.walk(prune=lambda node: node is not query and _selects(node)):
            if node is not query and _selects(node):
                inner.append(node)
            elif isinstance(node, exp.Column):
                columns.append(node)
        if isinstance(query, exp.Select):
            scope = _Scope(query, outer)
            self.read_sources(query, scope, named)
        else:
            for part in inner:
                self.resolve(part, outer, named)
            scope = self.scopes[id(first_select(query))]
        self.scopes[id(query)] = scope
        for part in inner:
            self.resolve(part, scope, named)
        self.replace(columns, scope)
        return scope

    def read_sources(self, select: exp.Select, scope: _Scope, named: Named) -> None:
        """Gives a scope the tables and sub-queries of its FROM."""
        for index, source in enumerate(sources(select)):
            if isinstance(source, exp.Table) and source.name:  # a function that gives rows has none
                name, table = folded(source.alias_or_name), folded(source.name)
                known = named[table] if table in named else (*self.schema.tables.get(table, ()), *ROW_IDS)
                scope.opaque |= table not in {**named, **self.schema.tables}  # SQLite's own, as sqlite_master
                scope.tables[name] = table
                scope.sources[name] = {column: exp.column(column, table) for column in known}
            elif _selects(source):
                inner = self.resolve(source, scope.outer, named)
                scope.sources[folded(source.alias) or f"#{index}"] = inner.outputs()
            else:
                scope.opaque = True

    def replace(self, columns: list[exp.Column], scope: _Scope) -> None:
        """Replaces columns; an alias of the SELECT comes first in ORDER BY, and last elsewhere."""
        of_items = []
        for column in columns:
            if column.is_star:
                table = scope.tables.get(folded(column.table), folded(column.table))
                column.replace(exp.Star() if len(scope.sources) == 1 else exp.column(exp.Star(), table))
                continue
            meaning = scope.meaning(folded(column.table), folded(column.name))
            ordering = isinstance(column.find_ancestor(exp.Order, exp.Query), exp.Order)
            if scope.alias(column) and (ordering or meaning is None):
                of_items.append(column)
            else:
                column.replace(scope.guess(column) if meaning is None else self.copy(meaning))
        for column in of_items:  # by now the items hold no names themselves
            column.replace(self.copy(scope.alias(column).this))

    def copy(self, meaning: exp.Expression) -> exp.Expression:
        if not isinstance(meaning, exp.Column):
            self.copied += sum(1 for _ in meaning.walk())
        if self.copied > MAX_COPIED_NODES:
            raise SqlParseError("its names stand for too much")
        return meaning.copy()


def _selects(node: exp.Expression) -> bool:
    """Whether a node is a query; tables that are joined in brackets are a sub-query to sqlglot too."""
    return isinstance(first_select(node), exp.Select)


def _strip_aliases(tree: exp.Query) -> None:
    for node in list(tree.find_all(exp.Alias)):
        node.replace(node.this)
    for node in list(tree.find_all(exp.Table)):
        if node.name:
            node.replace(exp.table_(folded(node.name)))
    for node in tree.find_all(exp.Subquery, exp.Table):
        node.set("alias", None)
