"""Lenient reading of SQL through sqlglot: a syntax tree with aliases resolved."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import sqlglot
from sqlglot import exp
from sqlglot.dialects.sqlite import SQLite
from sqlglot.tokens import Token, TokenType

from mtsql.sql.structure import SqlParseError, SqlSchema
from mtsql.sql.text import first_statement, join_operators

MAX_CHARACTERS = 100_000
MAX_COPIED_NODES = 10_000
MAX_OPEN_JOINS = 12  # JOIN without ON; each doubles the time that sqlglot takes
MAX_READ_AGAIN = 10_000  # tokens inside date(, char( and other names of types, each of which doubles it too
QUERY = re.compile(r"[\s(]*(select|with)\b", re.IGNORECASE)


def canonical_tree(sql: str, schema: SqlSchema) -> exp.Query:
    """The first statement of `sql` with every alias replaced by what it stands for.

    Columns carry their real table, identifiers are lower case, a quoted word that is no column is
    a string, as in SQLite. A name that the schema does not explain stays as it is.
    Raises SqlParseError if sqlglot cannot read it or it is no query.
    """
    tree = query_tree(sql)
    if tree.find(exp.Fetch):
        raise SqlParseError("FETCH is not SQLite's")
    with unreadable_if_it_fails():
        _resolve_names(tree, schema)
    return tree


def query_tree(sql: str) -> exp.Query:
    """The first statement of `sql` as it is written; SqlParseError if sqlglot cannot read it as a query."""
    if len(sql) > MAX_CHARACTERS:
        raise SqlParseError(f"longer than {MAX_CHARACTERS} characters")
    text = "".join(first_statement(join_operators(sql)))
    if not QUERY.match(text):
        raise SqlParseError("not a query")
    with unreadable_if_it_fails():
        tokens = sqlglot.tokenize(text, read="sqlite")
        _refuse_what_takes_forever(tokens)
        tree = SQLite().parser().parse(tokens, text)[0]
    if not isinstance(tree, exp.Query):
        raise SqlParseError("not a query")
    return tree


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


def _refuse_what_takes_forever(tokens: list[Token]) -> None:
    """Raises SqlParseError for what sqlglot, trying one reading after another, takes exponential time for."""
    open_joins = open_types = read_again = 0
    brackets: list[bool] = []  # whether each that is open follows the name of a type
    before = None
    for kind in (token.token_type for token in tokens):
        open_joins += kind == TokenType.JOIN
        open_joins -= open_joins > 0 and kind in (TokenType.ON, TokenType.USING)
        if kind == TokenType.L_PAREN:
            brackets.append(before in SQLite.Parser.TYPE_TOKENS)
            open_types += brackets[-1]
        elif kind == TokenType.R_PAREN and brackets:
            open_types -= brackets.pop()
        read_again += 2**open_types - 1
        if open_joins > MAX_OPEN_JOINS:
            raise SqlParseError("too many joins without ON")
        if read_again > MAX_READ_AGAIN:
            raise SqlParseError("too much inside functions that are also types")
        before = kind


def _resolve_names(tree: exp.Query, schema: SqlSchema) -> None:
    selects = list(tree.find_all(exp.Select, bfs=False))
    if not all(select.expressions for select in selects):
        raise SqlParseError("SELECT of nothing")
    copies = _Copies()
    scopes = {id(select): _Scope(select, schema, copies) for select in selects}
    for select in reversed(selects):  # inner queries first
        scopes[id(select)].add_derived()
        unknown = [column for column in _own_columns(select) if not _resolve(column, scopes)]
        for column in unknown:
            output = None if column.table else _output(select, column.name.lower())
            if output is not None:
                column.replace(copies.of(output))
            elif column.this.quoted and not column.table:
                column.replace(exp.Literal.string(column.name))
            else:
                column.replace(exp.column(column.name.lower(), column.table.lower() or None))
    _strip_aliases(tree)


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


def unbracketed(node: exp.Expression) -> exp.Expression:
    """The node inside brackets. A sub-query keeps its own, unlike with sqlglot's `unnest`."""
    while isinstance(node, exp.Paren):
        node = node.this
    return node


class _Copies:
    """Copies of what names stand for. A query is refused if they grow too large, level by level."""

    def __init__(self) -> None:
        self.nodes = 0

    def of(self, node: exp.Expression) -> exp.Expression:
        self.nodes += sum(1 for _ in node.walk())
        if self.nodes > MAX_COPIED_NODES:
            raise SqlParseError("its names stand for too much")
        return node.copy()


class _Scope:
    """The names that one SELECT brings in."""

    def __init__(self, select: exp.Select, schema: SqlSchema, copies: _Copies) -> None:
        self.select = select
        self.schema = schema
        self.copies = copies
        tables = [source for source in sources(select) if isinstance(source, exp.Table)]
        self.tables = {t.alias_or_name.lower(): t.name.lower() for t in tables}  # name in use -> table
        self.derived: dict[str, dict[str, exp.Expression]] = {}  # sub-query -> output -> meaning

    def add_derived(self) -> None:
        """Takes in the outputs of the sub-queries in FROM, resolved by now."""
        for index, source in enumerate(sources(self.select)):
            if isinstance(source, exp.Subquery) and isinstance(source.this, exp.Query):
                outputs = {item.alias_or_name.lower(): item.unalias() for item in source.this.selects}
                self.derived[source.alias.lower() or f"#{index}"] = outputs

    def meaning(self, table: str, column: str) -> exp.Expression | None:
        """What `table.column` (or `column` alone) stands for here."""
        if table and table not in self.derived:
            return exp.column(column, self.tables[table]) if table in self.tables else None
        for name in () if table else self.tables.values():
            if column in self.schema.tables.get(name, ()):
                return exp.column(column, name)
        for name, outputs in self.derived.items():
            if column in outputs and table in ("", name):
                return self.copies.of(outputs[column])
        return None


def _own_columns(select: exp.Select) -> list[exp.Column]:
    """The columns of this SELECT itself, and the columns that order its set operation."""
    found = [c for c in select.find_all(exp.Column) if c.parent_select is select]
    part: exp.Expression = select
    while isinstance(part.parent, exp.SetOperation) and part.parent.left is part:
        part = part.parent
        if part.args.get("order"):
            found += part.args["order"].find_all(exp.Column)
    return [column for column in found if isinstance(column.this, exp.Identifier)]


def _resolve(column: exp.Column, scopes: dict[int, _Scope]) -> bool:
    """Replaces a column by its meaning in the nearest scope that knows it, if one does.

    In ORDER BY a name of the output comes first.
    """
    table, name = column.table.lower(), column.name.lower()
    select = _select_of(column)
    ordering = isinstance(column.find_ancestor(exp.Order, exp.Select), exp.Order)
    if ordering and not table and select and _output(select, name):
        return False
    while select is not None:
        found = scopes[id(select)].meaning(table, name)
        if found is not None:
            column.replace(found)
            return True
        select = _select_of(select)
    return False


def _select_of(node: exp.Expression) -> exp.Select | None:
    """The SELECT around a node; of a set operation, the first."""
    select = node.parent_select
    while isinstance(select, exp.SetOperation):
        select = select.left
    return select if isinstance(select, exp.Select) and select is not node else None


def _output(select: exp.Select, name: str) -> exp.Expression | None:
    named = (item.this for item in select.expressions if item.alias.lower() == name)
    return next(named, None)


def _strip_aliases(tree: exp.Query) -> None:
    for node in list(tree.find_all(exp.Alias)):
        node.replace(node.this)
    for node in list(tree.find_all(exp.Table)):
        node.replace(exp.table_(node.name.lower()))
    for node in tree.find_all(exp.Subquery):
        node.set("alias", None)
