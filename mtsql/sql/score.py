"""Verdicts on one predicted SQL: execution match, exact match, clause F1, hardness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mtsql.data.datasets import Example
from mtsql.data.schema import Schema
from mtsql.errors import UserError
from mtsql.sql.clauses import clause_f1
from mtsql.sql.execute import Executor, as_executed, execution_match, set_match
from mtsql.sql.grammar import parse_sql
from mtsql.sql.match import exact_set_match, hardness
from mtsql.sql.structure import SqlParseError, SqlSchema, foreign_key_map

FURTHER_METRICS = {
    "ex_keep_distinct": "EX, DISTINCT kept",
    "ex_bird": "EX of BIRD (set of rows)",
    "em_string": "EM, strict string",
}


class Scorer:
    """Scores predictions over the databases of one dataset."""

    def __init__(self, schemas: dict[str, Schema], executor: Executor, kind: str = "official") -> None:
        """Reads the databases' files; raises UserError if one is missing or no database.

        The `kind` of EX is "official", "keep_distinct" (likewise, DISTINCT counts) or "bird" (`set_match`).
        """
        self.executor, self.kind = executor, kind
        self.paths = {db: schema.path for db, schema in schemas.items()}
        self.schemas = {db: SqlSchema.from_database(schema.path) for db, schema in schemas.items()}
        self.foreign_keys = {db: foreign_key_map(schema.entry) for db, schema in schemas.items()}

    def ex(self, db_id: str, gold: str, predicted: str | None) -> bool:
        """Execution match of the scorer's kind: R_EX of MTSQL-R1, section 3.3.2, the official one.

        Raises ValueError if the gold query fails.
        """
        executor, path = self.executor, self.paths[db_id]
        if self.kind == "bird":
            executor.gold_rows(path, gold)
            return set_match(executor, path, gold, predicted)
        return execution_match(executor, path, gold, predicted, self.kind == "keep_distinct")

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
        executor = self.executor
        try:
            kept = all(execution_match(executor, path, gold, predicted, keep_distinct=True) for path in suite)
        except ValueError:
            kept = False
        as_sets = all(set_match(executor, path, gold, predicted) for path in suite)
        return {"ex_keep_distinct": int(kept), "ex_bird": int(as_sets)}

    def runs(self, db_id: str, predicted: str | None) -> bool:
        """Whether it executes without an error, repaired as EX repairs it."""
        if predicted is None:
            return False
        return self.executor.execute(self.paths[db_id], as_executed(predicted, keep_distinct=True)).ok

    def readable(self, db_id: str, predicted: str | None) -> bool:
        """Whether the official grammar reads it."""
        try:
            return predicted is not None and bool(parse_sql(predicted, self.schemas[db_id]))
        except SqlParseError:
            return False

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

    def hardness(self, db_id: str, gold: str) -> str:
        """easy, medium, hard or extra, by the gold SQL; "unread" if the official grammar cannot read it."""
        try:
            return hardness(gold, self.schemas[db_id])
        except SqlParseError:
            return "unread"


def scorable(asked: Sequence[Example], scorer: Scorer) -> list[Example]:
    """The questions whose gold SQL runs; how many do not is printed, by source. UserError if none is left."""
    kept = [e for e in asked if scorer.gold_problem(e.db_id, e.gold_sql) is None]
    print_left_out(asked, kept, "their gold SQL does not run")
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
