"""Runs SQL from a model without risk, and compares results as the official evaluation does.

What makes it safe is in mtsql/data/sandbox.py; here are the results that threads share, and the verdicts of
the official evaluation (taoyds/test-suite-sql-eval, exec_eval.py), which has no safeguard.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mtsql.data.sandbox import BUSY, ENDED, LOCKED, ExecutionResult, FileVersion, file_version, run_sql
from mtsql.data.sql_worker import MAX_SQL_BYTES, NOT_OPEN, OUT_OF_MEMORY
from mtsql.sql.compare import results_equal
from mtsql.sql.text import join_operators, without_distinct

MAX_RESULT_BYTES = 16_000_000  # one result, as Python objects,
MAX_SCORED_BYTES = 64_000_000  # or one that is compared with another
MAX_CACHED_RESULTS = 50_000
MAX_CACHED_BYTES = 64_000_000
MAX_GOLD_BYTES = 256_000_000  # of gold results, which are kept: a slow one may fail when the machine is busy
MAX_GOLD_ROWS = 1_000_000
OF_THE_MOMENT = (OUT_OF_MEMORY, ENDED, LOCKED, NOT_OPEN, BUSY)  # how a failure begins that may pass


class Executor:
    """Runs statements, one at a time in a thread; results are cached while the file is unchanged.

    A file counts as changed if its inode, its size or its time of modification or change is another, or those
    of its write-ahead log.
    """

    def __init__(self, timeout_seconds: float = 5.0, max_rows: int = 10_000) -> None:
        self.timeout_seconds = timeout_seconds
        self.max_rows = max_rows
        self._cache: OrderedDict[tuple[FileVersion, str], ExecutionResult] = OrderedDict()
        self._cached_bytes = 0
        self._gold: dict[tuple[FileVersion, str], tuple[tuple, ...]] = {}
        self._gold_bytes = 0
        self._lock = threading.Lock()

    def execute(self, db_path: str | Path, *statements: str) -> ExecutionResult:
        """The result of the first of `statements` that runs, else of the first.

        Their errors are results, not exceptions. Raises FileNotFoundError if there is no such database.
        """
        return self._first(db_path, statements, self.max_rows, MAX_RESULT_BYTES)

    def gold_rows(self, db_path: str | Path, sql: str) -> tuple[tuple, ...]:
        """All rows of a gold query, beyond the row limit.

        Raises ValueError naming the query if it fails, FileNotFoundError as `execute`.
        """
        key = (file_version(db_path), sql)
        with self._lock:
            rows = self._gold.get(key)
        if rows is not None:
            return rows
        result = self._execute(db_path, sql, MAX_GOLD_ROWS, MAX_SCORED_BYTES)
        if not result.ok or result.truncated:
            reason = result.message or f"more than {MAX_GOLD_ROWS} rows or {MAX_SCORED_BYTES} bytes"
            raise ValueError(f"the gold query failed ({reason}): {sql}")
        with self._lock:
            if key not in self._gold and self._gold_bytes + result.bytes <= MAX_GOLD_BYTES:
                self._gold[key] = result.rows
                self._gold_bytes += result.bytes
        return result.rows

    def predicted_rows(self, db_path: str | Path, wanted: int, *statements: str) -> tuple[tuple, ...] | None:
        """All rows of the first of `statements` that runs; None if none does or it has more than `wanted`."""
        result = self._first(db_path, statements, wanted, MAX_SCORED_BYTES)
        return result.rows if result.ok and not result.truncated else None

    def _first(self, db_path: str | Path, statements: Sequence[str], *limits: int) -> ExecutionResult:
        first, *others = statements
        result = self._execute(db_path, first, *limits)
        if result.ok or not others:
            return result
        other = self._first(db_path, others, *limits)
        return other if other.ok else result

    def _execute(self, db_path: str | Path, sql: str, max_rows: int, max_bytes: int) -> ExecutionResult:
        version = file_version(db_path)
        key = (version, sql)
        with self._lock:
            result = self._cache.get(key)
            if result is not None:
                self._cache.move_to_end(key)
        too_few = result is not None and result.truncated and len(result.rows) < max_rows
        if result is None or (too_few and result.bytes <= max_bytes):
            result = run_sql(version, sql, self.timeout_seconds, max_rows, max_bytes)
            self._remember(key, result)
        if len(result.rows) > max_rows:  # it was run with a higher limit
            result = replace(result, rows=result.rows[:max_rows], truncated=True)
        return result

    def _remember(self, key: tuple[FileVersion, str], result: ExecutionResult) -> None:
        """Into the cache, unless the failure may have been of the moment."""
        if result.message.startswith(OF_THE_MOMENT):
            return
        with self._lock:
            if key in self._cache:
                self._forget(key)
            self._cache[key] = result
            self._cached_bytes += result.bytes + sys.getsizeof(key[-1])
            while len(self._cache) > MAX_CACHED_RESULTS or self._cached_bytes > MAX_CACHED_BYTES:
                self._forget(next(iter(self._cache)))

    def _forget(self, key: tuple[FileVersion, str]) -> None:
        self._cached_bytes -= self._cache.pop(key).bytes + sys.getsizeof(key[-1])


CURRENT_YEAR = re.compile(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", re.IGNORECASE)  # as the official one


def as_executed(sql: str, keep_distinct: bool) -> str:
    """`sql` as the official evaluation runs it.

    Repairs split operators, and the year function even in quotes, as officially; unless `keep_distinct`,
    drops every DISTINCT and everything after the first statement. What is too long to be run stays as it is.
    """
    if len(sql) > MAX_SQL_BYTES:
        return sql
    sql = CURRENT_YEAR.sub("2020", join_operators(sql))
    return sql if keep_distinct else without_distinct(sql)


def as_scored(sql: str, keep_distinct: bool) -> tuple[str, ...]:
    """What EX runs, and what it runs where that fails: the statement with its DISTINCT."""
    executed = as_executed(sql, keep_distinct)
    return (
        (executed, as_executed(sql, True)) if "distinct" in sql.lower() and not keep_distinct else (executed,)
    )


def execution_match(
    executor: Executor,
    db_path: str | Path,
    gold_sql: str,
    pred_sql: str | None,
    keep_distinct: bool = False,
) -> bool:
    """Execution match (EX) as the official evaluation defines it; R_EX in training.

    Unlike there, a timeout or an empty prediction is wrong, even if the gold result is empty. A query that
    fails without its DISTINCT, or is past a limit, runs with it; where the gold query does, both do.
    Raises ValueError if the gold query fails, FileNotFoundError if the database is missing.
    """
    gold = as_executed(gold_sql, keep_distinct)
    try:
        gold_rows = executor.gold_rows(db_path, gold)
    except ValueError:
        if len(as_scored(gold_sql, keep_distinct)) == 1:
            raise
        return execution_match(executor, db_path, gold_sql, pred_sql, keep_distinct=True)
    if pred_sql is None or not pred_sql.strip():
        return False
    pred_rows = executor.predicted_rows(db_path, len(gold_rows), *as_scored(pred_sql, keep_distinct))
    if pred_rows is None:
        return False
    return results_equal(gold_rows, pred_rows, "order by" in gold.lower())


def set_match(executor: Executor, db_path: str | Path, gold_sql: str, pred_sql: str | None) -> bool:
    """BIRD's EX (bird-bench/mini_dev, evaluation_ex.py): equal sets of rows, columns in the same order.

    Both queries run as they are written. Wrong if either fails, as in BIRD's evaluation.
    Raises FileNotFoundError if the database is missing.
    """
    if pred_sql is None or not pred_sql.strip():
        return False
    try:
        gold_rows = executor.gold_rows(db_path, gold_sql)
    except ValueError:
        return False
    pred_rows = executor.predicted_rows(db_path, MAX_GOLD_ROWS, pred_sql)
    return pred_rows is not None and set(gold_rows) == set(pred_rows)
