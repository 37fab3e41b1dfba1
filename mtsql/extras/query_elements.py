"""What the clauses of a query hold, for comparing two queries: elements taken apart, tables, join keys."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from sqlglot import exp

from mtsql.data.names import folded
from mtsql.sql.tree import clause_items, first_select, join_condition, sources, swap

ELEMENTS = ("select", "inner", "conditions", "group", "order")  # inner: what sub-queries select
CLAUSES = (*ELEMENTS, "or", "limit", "operators", "from", "tables", "joins", "sides")
OR = exp.var("or")
NUMBER = re.compile(r"\d+(\.\d+)?")


class Element(NamedTuple):
    """An expression of a clause, taken apart."""

    text: str  # each column as _, each sub-query as "query"
    frame: str  # each aggregate as _ too
    columns: tuple[str, ...]
    aggregates: tuple[str, ...]
    nested: bool  # whether it holds a sub-query


Reading: TypeAlias = dict[str, Counter]  # clause -> what it holds: elements, texts, or pairs of columns


def read_clauses(tree: exp.Query, same: dict[str, str]) -> Reading:
    """What the clauses of a canonical tree hold, sub-queries included.

    An item counts as often as in the one query that holds it most. `same` maps columns to the ones that
    they are taken for.
    """
    found: Reading = {clause: Counter() for clause in CLAUSES}
    first = first_select(tree)
    names = {folded(cte.alias) for cte in tree.find_all(exp.CTE)}
    for query in tree.find_all(exp.Query):
        for clause, items in _clauses(query).items():
            if clause == "select" and query is not first:
                if query.find_ancestor(exp.From, exp.Join, exp.CTE) is not None:
                    continue  # what a sub-query in FROM selects stands where its names are used
                clause = "inner"
            if clause in ELEMENTS:
                items = [_element(item, same) for item in items]
            found[clause] |= Counter(item for item in items if clause != "tables" or item not in names)
    return found


def _clauses(query: exp.Query) -> dict[str, list]:
    """The clauses of one query, its sub-queries left aside."""
    held: dict[str, list] = {clause: [] for clause in CLAUSES}
    if isinstance(query, exp.SetOperation):
        held["operators"] = [query.key if query.args.get("distinct") else f"{query.key} all"]
    elif isinstance(query, exp.Subquery):
        held["from"] = ["query"] * isinstance(query.parent, exp.From | exp.Join)
    else:
        _read_select(query, held)
    held["order"] = [_ordinal(item, query) for item in clause_items(query, "order")]
    cut = [query.args[name].sql("sqlite").strip() for name in ("limit", "offset") if query.args.get(name)]
    held["limit"] = [" ".join(cut)] if cut else []
    return held


def _read_select(select: exp.Select, held: dict[str, list]) -> None:
    """Adds the clauses that only SELECT has; comparing columns of two tables is joining, even in WHERE."""
    joins = select.args.get("joins") or []
    held["select"] = select.expressions
    held["tables"] = [source.name for source in sources(select) if isinstance(source, exp.Table)]
    held["sides"] = [join.side for join in joins if join.side]
    held["group"] = [_ordinal(item, select) for item in clause_items(select, "group")]
    places = [condition for join in joins for condition in join_condition(join)]
    places += clause_items(select, "where") + clause_items(select, "having")
    for condition in (part for place in places for part in _split(place)):
        pair = _compared_columns(condition)
        if condition is OR:
            held["or"].append("or")
        elif not pair or table_of(pair[0]) == table_of(pair[1]):
            held["conditions"].append(condition)
        elif isinstance(condition, exp.EQ):
            held["joins"].append(pair)
        else:
            held["sides"].append(f"{pair} {condition.key}")


def _compared_columns(condition: exp.Expression) -> tuple[str, ...]:
    """The two columns that a condition compares, sorted; none if it compares anything else."""
    sides = [condition.left.unnest(), condition.right.unnest()] if isinstance(condition, exp.Binary) else []
    columns = sorted(_column(side) for side in sides if isinstance(side, exp.Column))
    return tuple(columns) if len(columns) == 2 else ()


def _split(condition: exp.Expression) -> list[exp.Expression]:
    """What AND and OR connect, with OR itself for each; BETWEEN as two conditions, IN (a, b) as a OR b."""
    condition = condition.unnest()
    if isinstance(condition, exp.And | exp.Or):
        connector = [OR] if isinstance(condition, exp.Or) else []
        return _split(condition.left) + connector + _split(condition.right)
    if isinstance(condition, exp.Between):
        low, high = condition.args["low"], condition.args["high"]
        return [_comparison(exp.GTE, condition, low), _comparison(exp.LTE, condition, high)]
    if isinstance(condition, exp.In) and condition.expressions:
        equal = [_comparison(exp.EQ, condition, value) for value in condition.expressions]
        return equal + [OR] * (len(equal) - 1)
    return [condition]


def _comparison(operator: type[exp.Binary], condition: exp.Expression, value: exp.Expression) -> exp.Binary:
    return operator(this=condition.this.copy(), expression=value.copy())


def _ordinal(item: exp.Expression, query: exp.Query) -> exp.Expression:
    """ORDER BY 2 and GROUP BY 2 mean the second item that is selected."""
    place = item.this if isinstance(item, exp.Ordered) else item
    if isinstance(place, exp.Literal) and place.name in map(str, range(1, len(query.selects) + 1)):
        meant = query.selects[int(place.name) - 1].copy()
        return exp.Ordered(this=meant, desc=item.args.get("desc")) if place is not item else meant
    return item


def _element(node: exp.Expression, same: dict[str, str]) -> Element:
    root = exp.Paren(this=node.copy())  # so that the node itself can be replaced
    if isinstance(node, exp.Ordered):
        root.this.set("nulls_first", None)
        root.this.set("desc", bool(node.args.get("desc")))
    nested = False
    while (query := root.find(exp.Query)) is not None:
        swap(query, exp.var("query"))
        nested = True
    for count in root.find_all(exp.Count):
        count.set("this", exp.Star())
    for value in root.find_all(exp.Literal):
        value.set("is_string", value.is_string and not NUMBER.fullmatch(value.name))
    columns = []
    for column in list(root.find_all(exp.Column, bfs=False)):
        columns.append(same.get(_column(column), _column(column)))
        swap(column, exp.var("_"))
    if isinstance(root.this, exp.Star):
        columns.append("*")
        root.set("this", exp.var("_"))
    aggregates = list(root.find_all(exp.AggFunc))
    names, text = tuple(aggregate.key for aggregate in aggregates), root.sql(dialect="sqlite")
    for aggregate in aggregates:
        swap(aggregate, exp.var("_"))
    return Element(text, root.sql(dialect="sqlite"), tuple(columns), names, nested)


def column_classes(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Each column of the pairs -> the first of all columns that are equal to it through them."""
    first: dict[str, str] = {}
    for pair in pairs:
        roots = {first.get(column, column) for column in pair}
        for column in {*first, *pair}:
            if first.get(column, column) in roots:
                first[column] = min(roots)
    return first


def with_outputs(tree: exp.Query) -> dict[str, str]:
    """Name in use -> column, of every plain column that a query of WITH selects."""
    items = ((folded(cte.alias), item) for cte in tree.find_all(exp.CTE) for item in cte.this.selects)
    return {f"{name}.{item.name}": _column(item) for name, item in items if isinstance(item, exp.Column)}


def _column(column: exp.Column) -> str:
    if isinstance(column.this, exp.Star):
        return ".*"  # of which table is lost with its alias
    return folded(f"{column.table}.{column.name}")


def table_of(column: str) -> str:
    """The table of a column as elements name it."""
    return column.partition(".")[0]
