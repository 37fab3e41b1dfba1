"""Verdicts on one predicted SQL: execution match, exact match, hardness, and clause F1 (MTSQL-R1, 3.3.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from sqlglot import exp

from mtsql.data.datasets import Example
from mtsql.data.schema import Schema, folded
from mtsql.errors import UserError
from mtsql.sql.execute import Executor, execution_match
from mtsql.sql.grammar import MAX_KEPT, SqlParseError, SqlSchema, foreign_key_map
from mtsql.sql.match import exact_set_match, hardness
from mtsql.sql.text import as_executed
from mtsql.sql.tree import canonical_tree, clause_items, join_condition, sources, unreadable_if_it_fails

CLAUSES = ("SELECT", "WHERE", "JOIN", "GROUP", "ORDER")
FURTHER_METRICS = {
    "ex_keep_distinct": "EX, DISTINCT kept",
    "ex_bird": "EX of BIRD (set of rows)",
    "em_string": "EM, strict string",
}


class Scorer:
    """Scores predictions over the databases of one dataset."""

    def __init__(self, schemas: dict[str, Schema], executor: Executor, kind: str = "official") -> None:
        """Reads the databases' files; raises FileNotFoundError if one is missing, UserError if it is none.

        The `kind` of EX is "official", "keep_distinct" or "bird": see `execution_match`.
        """
        self.executor, self.kind = executor, kind
        self.paths = {db: schema.path for db, schema in schemas.items()}
        self.schemas = {db: SqlSchema.from_database(schema.path) for db, schema in schemas.items()}
        self.foreign_keys = {db: foreign_key_map(schema.entry) for db, schema in schemas.items()}

    def ex(self, db_id: str, gold: str, predicted: str | None) -> bool:
        """Execution match of the scorer's kind: R_EX of MTSQL-R1, section 3.3.2, the official one.

        Raises ValueError if the gold query fails.
        """
        return execution_match(self.executor, self.paths[db_id], gold, predicted, self.kind)

    def em(self, db_id: str, gold: str, predicted: str | None, keep_limit: bool = False) -> bool:
        """Exact set match: the official EM; with `keep_limit` the numbers after nested LIMITs count.

        False for a gold SQL that the official grammar cannot read, as are most of BIRD's.
        """
        try:
            return exact_set_match(gold, predicted, self.schemas[db_id], self.foreign_keys[db_id], keep_limit)
        except SqlParseError:
            return False

    def further_ex(self, suite: Sequence[Path], gold: str, predicted: str | None) -> dict[str, int]:
        """Those of FURTHER_METRICS that run the queries, 0 or 1; every database of the suite must agree.

        A gold query that does not run makes them 0.
        """

        def agree(kind: str) -> bool:
            try:
                return all(execution_match(self.executor, path, gold, predicted, kind) for path in suite)
            except ValueError:
                return False

        return {f"ex_{kind}": int(agree(kind)) for kind in ("keep_distinct", "bird")}

    def runs(self, db_id: str, predicted: str | None) -> bool:
        """Whether it executes without an error, repaired as EX repairs it."""
        path = self.paths[db_id]
        return predicted is not None and self.executor.execute(path, as_executed(predicted, True)).ok

    def readable(self, db_id: str, predicted: str | None) -> bool:
        """Whether the official grammar reads it."""
        return predicted is not None and self.hardness(db_id, predicted) != "unread"

    def gold_problem(self, db_id: str, gold: str) -> str | None:
        """Why a gold SQL cannot be scored against (it does not run), or None."""
        try:
            self.ex(db_id, gold, gold)
        except ValueError as error:
            return str(error)
        return None

    def clause_f1(self, db_id: str, gold: str, predicted: str) -> float:
        """Mean F1 over SELECT, WHERE, JOIN, GROUP, ORDER (MTSQL-R1, section 3.3.2).

        EX stands in where the gold SQL cannot be read, so that a right proposal is not taught as wrong.
        """
        try:
            return clause_f1(gold, predicted, self.schemas[db_id])
        except SqlParseError:
            return float(self.ex(db_id, gold, predicted))

    def hardness(self, db_id: str, sql: str) -> str:
        """easy, medium, hard or extra; "unread" for SQL that the official grammar cannot read."""
        try:
            return hardness(sql, self.schemas[db_id])
        except SqlParseError:
            return "unread"


def scorable(asked: Sequence[Example], scorer: Scorer) -> list[Example]:
    """The questions whose gold SQL runs. Raises UserError if none is left."""
    kept = [e for e in asked if scorer.gold_problem(e.db_id, e.gold_sql) is None]
    if not kept:
        raise UserError("no question has a gold SQL that runs")
    return kept


def print_left_out(asked: Sequence[Example], kept: Sequence[Example], why: str) -> None:
    """Say how many of each source's questions were left out, and why; nothing if none was."""
    every, left = Counter(e.source for e in asked), Counter(e.source for e in kept)
    for source, count in every.items():
        if count > left[source]:
            of = f" of {source}" if len(every) > 1 else ""
            print(f"left out {count - left[source]} of {count} questions{of}: {why}")


def clause_f1(gold_sql: str, pred_sql: str, schema: SqlSchema) -> float:
    """Mean over SELECT, WHERE, JOIN, GROUP, ORDER of the F1 of their elements.

    A clause that both queries lack does not count. Elements are compared with aliases
    resolved and with their values. JOIN holds the tables and the join conditions, GROUP also the
    HAVING conditions, ORDER also LIMIT and OFFSET; the parts of a set operation are marked with its
    operator, those of a common table expression with WITH.
    0.0 if the prediction cannot be read. Raises SqlParseError if the gold query cannot.
    """
    gold = _elements(gold_sql, schema)
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

    query = query.unnest()
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
        found += [f"using {folded(column.name)}" for column in join.args.get("using") or []]
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
