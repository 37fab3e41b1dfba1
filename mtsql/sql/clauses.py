"""Clause F1, the dense reward of MTSQL-R1, as the paper defines it (section 3.3.2)."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from sqlglot import exp

from mtsql.sql.structure import MAX_KEPT, SqlParseError, SqlSchema
from mtsql.sql.tree import canonical_tree, clause_items, join_condition, sources, unreadable_if_it_fails

CLAUSES = ("SELECT", "WHERE", "JOIN", "GROUP", "ORDER")


def clause_f1(gold_sql: str, pred_sql: str | None, schema: SqlSchema) -> float:
    """Mean over SELECT, WHERE, JOIN, GROUP, ORDER of the F1 of their elements.

    Only clauses that are not empty on both sides count. Elements are compared with aliases
    resolved and with their values. JOIN holds the tables and the join conditions, GROUP also the
    HAVING conditions, ORDER also LIMIT and OFFSET; the parts of a set operation are marked with its
    operator, those of a common table expression with WITH.
    0.0 if the prediction cannot be read. Raises SqlParseError if the gold query cannot.
    """
    gold = _elements(gold_sql, schema)
    if pred_sql is None:
        return 0.0
    try:
        pred = _elements(pred_sql, schema)
    except SqlParseError:
        return 0.0
    scores = [_f1(gold[clause], pred[clause]) for clause in CLAUSES if gold[clause] or pred[clause]]
    return sum(scores) / len(scores)


def _f1(gold: Counter, pred: Counter) -> float:
    return 2 * (gold & pred).total() / (gold.total() + pred.total())


@lru_cache(maxsize=MAX_KEPT)
def _elements(sql: str, schema: SqlSchema) -> dict[str, Counter]:
    found: dict[str, Counter] = {clause: Counter() for clause in CLAUSES}
    with unreadable_if_it_fails():
        _collect(canonical_tree(sql, schema), "", found)
    return found


def _collect(query: exp.Expression, mark: str, found: dict[str, Counter]) -> None:
    """Adds the elements of `query`, each preceded by `mark`."""

    def add(clause: str, texts: list[str]) -> None:
        found[clause].update(mark + text for text in texts)

    if isinstance(query, exp.Subquery):
        _collect(query.this, mark, found)
        return
    if isinstance(query, exp.SetOperation):
        operator = query.key + ("" if query.args.get("distinct") else " all")
        _collect(query.left, mark, found)
        _collect(query.right, f"{mark}{operator}: ", found)
    elif isinstance(query, exp.Select):
        add("SELECT", [_text(item) for item in query.expressions])
        add("SELECT", ["distinct"] if query.args.get("distinct") else [])
        add("JOIN", _joined(query))
        add("WHERE", _conditions(clause_items(query, "where")))
        add("GROUP", [_text(item) for item in clause_items(query, "group")])
        add("GROUP", _conditions(clause_items(query, "having")))
    else:
        raise SqlParseError(f"cannot read {query.key}")
    for item in clause_items(query, "order"):
        add("ORDER", [f"{_text(item.this)} {'desc' if item.args.get('desc') else 'asc'}"])
    for cut in ("limit", "offset"):
        if query.args.get(cut):
            add("ORDER", [f"{cut} {_text(query.args[cut].expression)}"])
    for table in query.ctes:
        _collect(table.this, f"{mark}with: ", found)


def _joined(select: exp.Select) -> list[str]:
    found = [_text(source) for source in sources(select)]
    for join in select.args.get("joins") or []:
        if join.side:
            found.append(f"{join.side.lower()} {_text(join.this)}")
        found += _conditions(join_condition(join))
        found += [f"using {_text(column)}" for column in join.args.get("using") or []]
    return found


def _conditions(places: list[exp.Expression]) -> list[str]:
    """The conditions that AND and OR connect, and one more element for each OR."""
    found = []
    for condition in map(_unbracketed, places):
        if isinstance(condition, exp.And | exp.Or):
            found += ["or"] * isinstance(condition, exp.Or)
            found += _conditions([condition.left, condition.right])
        else:
            found.append(_text(condition))
    return found


def _unbracketed(node: exp.Expression) -> exp.Expression:
    """The node inside brackets. A sub-query keeps its own, unlike with sqlglot's `unnest`."""
    while isinstance(node, exp.Paren):
        node = node.this
    return node


def _text(node: exp.Expression) -> str:
    """One spelling: the sides of = and != are sorted, brackets around a whole node dropped."""
    node = _unbracketed(node)
    if isinstance(node, exp.EQ | exp.NEQ):
        return f" {node.key} ".join(sorted((_text(node.left), _text(node.right))))
    return node.sql(dialect="sqlite")
