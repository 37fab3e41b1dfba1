"""Lenient reading of SQL through sqlglot: a syntax tree with aliases resolved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import sqlglot
from sqlglot import exp
from sqlglot.dialects.sqlite import SQLite
from sqlglot.tokens import Token, TokenType

from mtsql.data.names import KEYWORDS, RESERVED, folded
from mtsql.sql.structure import MAX_CHARACTERS, TOO_LONG, SqlParseError, SqlSchema
from mtsql.sql.text import first_statement, join_operators

MAX_COPIED_NODES = 10_000
MAX_JOINED = 64  # by SQLite
MAX_STEPS = 5_000  # of sqlglot from token to token, many times what a gold query takes
ASKS_FOR_OPERAND = frozenset(  # what stands before a name rather than a keyword
    """select distinct , ( . by where and or on having case when then else between from join
    + - * / % || = == != <> < > <= >= << >> & |""".split()
)
NO_KEYWORDS = SQLite.Parser.TYPE_TOKENS - {TokenType.INTERVAL}
NO_KEYWORDS |= {TokenType.VAR, TokenType.TRUE, TokenType.FALSE}


def canonical_tree(sql: str, schema: SqlSchema) -> exp.Query:
    """The first statement of `sql` with every alias replaced by what it stands for.

    Columns carry their real table, identifiers are as `folded` has them, a quoted word that is no column is
    a string, as in SQLite. A name that the schema does not explain stays as it is.
    Raises SqlParseError if sqlglot cannot read it or it is no query.
    """
    tree = query_tree(sql)
    with unreadable_if_it_fails():
        for scope in reversed(_Scopes(schema).read(tree)):  # inner queries first
            scope.replace_names()
        _strip_aliases(tree)
    return tree


def query_tree(sql: str) -> exp.Query:
    """The first statement of `sql` as it is written; SqlParseError if sqlglot cannot read it as a query."""
    if len(sql) > MAX_CHARACTERS:
        raise SqlParseError(TOO_LONG)
    text = "".join(first_statement(join_operators(sql)))
    with unreadable_if_it_fails():
        tokens = sqlglot.tokenize(text, read="sqlite")
        _mark_names(tokens, text)
        tree = _BoundedParser(dialect=SQLite()).parse(tokens, text)[0]
        if not isinstance(tree, exp.Query):
            raise SqlParseError("not a query")
        for name in tree.find_all(exp.Identifier):
            if name.quoted and text[name.meta.get("start", 0)] != '"':
                name.set("quoted", False)  # it can be no text
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


def _mark_names(tokens: Sequence[Token], text: str) -> None:
    """Makes names of the words that are keywords to sqlglot, but none in SQLite or none in their place."""
    before = ""
    for token, after in pairwise((*tokens, None)):
        word = text[token.start : token.end + 1].lower()
        special = (
            token.token_type not in NO_KEYWORDS or word.upper() in SQLite.Parser.NO_PAREN_FUNCTION_PARSERS
        )
        if special and word.isidentifier():
            called = after is not None and after.token_type == TokenType.L_PAREN
            misplaced = word in KEYWORDS and word not in RESERVED and before in ASKS_FOR_OPERAND
            if not called and (misplaced or word not in KEYWORDS):
                token.token_type = TokenType.IDENTIFIER
        before = word.rpartition(" ")[2]  # of ORDER BY, BY


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


def unbracketed(node: exp.Expression) -> exp.Expression:
    """The node inside brackets. A sub-query keeps its own, unlike with sqlglot's `unnest`."""
    while isinstance(node, exp.Paren):
        node = node.this
    return node


def swap(node: exp.Expression, new: exp.Expression) -> None:
    """`node.replace(new)`, which takes time for every node of the list that this one stands in."""
    parent, key, index = node.parent, node.arg_key, node.index
    if index is None:
        parent.args[key] = new
    else:
        parent.args[key][index] = new
    new.parent, new.arg_key, new.index = parent, key, index


class _Name(NamedTuple):
    """A column as it is written, and where."""

    column: exp.Column
    item: int  # the id of the condition, or the item of a clause, that holds it
    ordering: bool


Meanings: TypeAlias = Mapping[str, exp.Expression | tuple[str, str]]  # or a column and its table


@dataclass
class _Scope:
    """One SELECT: the names in it, and the names that its tables and sub-queries bring in."""

    select: exp.Select
    outer: _Scope | None
    named: Mapping[str, exp.CTE]  # the queries of WITH that it sees
    all: _Scopes
    names: list[_Name] = field(default_factory=list)
    sure: set[int] = field(default_factory=set)  # the items that hold a name

    @cached_property
    def aliases(self) -> dict[str, exp.Expression]:
        """The selected items that have an alias, the first one with each."""
        return {folded(item.alias): item for item in reversed(self.select.expressions) if item.alias}

    @cached_property
    def tables(self) -> dict[str, str]:
        """Name in use -> table; a function that gives rows has none."""
        found = [source for source in sources(self.select) if isinstance(source, exp.Table) and source.name]
        return {folded(source.alias_or_name): folded(source.name) for source in found}

    @cached_property
    def sources(self) -> dict[str, Meanings]:
        """Name in use of each table and sub-query -> its columns -> what each stands for."""
        found: dict[str, Meanings] = {}
        for index, source in enumerate(sources(self.select)):
            if isinstance(source, exp.Table) and source.name:
                table = folded(source.name)
                columns = self.all.schema.tables.get(table, ())
                if table in self.named:
                    columns = self._named_columns(self.named[table])
                found[folded(source.alias_or_name)] = {column: (column, table) for column in columns}
            elif isinstance(source, exp.Subquery):
                found[folded(source.alias) or f"#{index}"] = self._outputs_of(source)
        return found

    @cached_property
    def visible(self) -> Meanings:
        """What columns stand for without the name of their table; the first table that has one counts."""
        return {name: m for columns in reversed(self.sources.values()) for name, m in columns.items()}

    def _named_columns(self, cte: exp.CTE) -> list[str]:
        given = cte.args["alias"].columns
        return [folded(name.name) for name in given] if given else list(self._outputs_of(cte.this))

    def _outputs_of(self, query: exp.Expression) -> Meanings:
        scope = self.all.by_select.get(id(first_select(query)))
        return scope.outputs if scope is not None else {}

    @cached_property
    def outputs(self) -> Meanings:
        """Each name that is selected -> what it stands for, * taken apart."""
        found: dict[str, exp.Expression | tuple[str, str]] = {}
        self.__dict__["outputs"] = found  # a recursive query reads its own
        for item in self.select.expressions:
            if not item.is_star:
                found.setdefault(folded(item.alias_or_name), item.unalias())
                continue
            for name, columns in self.sources.items():
                if folded(getattr(item, "table", "")) in ("", name):
                    self.all.count(len(columns))
                    found |= {**columns, **found}
        return found

    def replace_names(self) -> None:
        """Replaces every name by what it stands for."""
        unknown = [name for name in self.names if not self.resolve(name)]
        outputs = [name for name in unknown if self.output(name.column) is not None]
        meant = {id(name) for name in outputs}
        for name in unknown:
            if id(name) not in meant:
                swap(name.column, self.guess(name))
        for name in outputs:
            swap(name.column, self.all.copy(self.output(name.column).this))

    def output(self, column: exp.Column) -> exp.Expression | None:
        """The selected item that has the name of a column as its alias."""
        return None if column.table else self.aliases.get(folded(column.name))

    def resolve(self, name: _Name) -> bool:
        """Replaces a column by its meaning in the nearest scope that knows it, if one does.

        In ORDER BY a name of the output comes first.
        """
        scope: _Scope | None = self
        if name.ordering and self.output(name.column) is not None:
            return False
        while scope is not None:
            meaning = scope._meaning(folded(name.column.table), folded(name.column.name))
            if meaning is not None:
                swap(name.column, self.all.copy(meaning))
                self.sure.add(name.item)
                return True
            scope = scope.outer
        return False

    def _meaning(self, table: str, column: str) -> exp.Expression | tuple[str, str] | None:
        meaning = (self.sources.get(table, {}) if table else self.visible).get(column)
        return (column, self.tables[table]) if meaning is None and table in self.tables else meaning

    def guess(self, name: _Name) -> exp.Expression:
        """What a name stands for that nothing explains: a column of the only table.

        In double quotes it is a text, if the rest of its condition or item holds a name.
        """
        column = name.column
        if column.this.quoted and not column.table and name.item in self.sure:
            return exp.Literal.string(column.name)
        self.sure.add(name.item)
        table = folded(column.table)
        if not table and len(sources(self.select)) == 1:
            table = next(iter(self.tables.values()), "")
        return exp.column(folded(column.name), table or None)


# Below these begins another condition or item.
HOLDERS = (
    exp.Query, exp.Group, exp.Order, exp.Where, exp.Having, exp.Join, exp.Connector, exp.Not, exp.Alias
)  # fmt: skip


class _Scopes:
    """The scopes of all SELECTs, and how much was copied: a query is refused if that grows level by level."""

    def __init__(self, schema: SqlSchema) -> None:
        self.schema, self.copied = schema, 0
        self.by_select: dict[int, _Scope] = {}  # by the id of their SELECT

    def read(self, tree: exp.Query) -> list[_Scope]:
        """The scopes, outer ones first.

        Raises SqlParseError for a SELECT of nothing, and for more tables than SQLite joins.
        """
        waiting: list[tuple] = [(tree, tree, None, {}, False)]
        while waiting:
            node, item, scope, named, ordering = waiting.pop()
            if isinstance(node, exp.Query) and node.ctes:
                named = named | {folded(cte.alias): cte for cte in node.ctes}
            if isinstance(node, exp.Select):
                if not node.expressions:
                    raise SqlParseError("SELECT of nothing")
                if len(sources(node)) > MAX_JOINED:
                    raise SqlParseError(f"it joins more than {MAX_JOINED} tables")
                scope, ordering = _Scope(node, scope, named, self), False
                self.by_select[id(node)] = scope
            elif isinstance(node, exp.With) and isinstance(node.parent, exp.Select):
                scope = scope.outer
            elif isinstance(node, exp.Order):
                ordering = True
                if isinstance(node.parent, exp.SetOperation):
                    scope = self.by_select.get(id(first_select(node.parent)), scope)
            elif isinstance(node, exp.Column) and isinstance(node.this, exp.Identifier) and scope is not None:
                scope.names.append(_Name(node, id(item), ordering))
                if not node.this.quoted or node.table:
                    scope.sure.add(id(item))
            below = isinstance(node, HOLDERS)
            waiting += [
                (child, child if below else item, scope, named, ordering)
                for child in node.iter_expressions(reverse=True)
            ]
        return list(self.by_select.values())

    def count(self, nodes: int) -> None:
        """Adds to what was copied."""
        self.copied += nodes
        if self.copied > MAX_COPIED_NODES:
            raise SqlParseError("its names stand for too much")

    def copy(self, meaning: exp.Expression | tuple[str, str]) -> exp.Expression:
        """A copy of what a name stands for."""
        if isinstance(meaning, tuple):
            return exp.column(*meaning)
        self.count(sum(1 for _ in meaning.walk()))
        return meaning.copy()


def first_select(query: exp.Expression) -> exp.Expression:
    """The first SELECT of a query, which names what the query puts out."""
    while isinstance(query, exp.SetOperation | exp.Subquery):
        query = query.this
    return query


def _strip_aliases(tree: exp.Query) -> None:
    for node in list(tree.find_all(exp.Alias)):
        swap(node, node.this)
    for node in list(tree.find_all(exp.Table)):
        if node.name:
            swap(node, exp.table_(folded(node.name)))
    for node in tree.find_all(exp.Subquery, exp.Table):
        node.set("alias", None)
