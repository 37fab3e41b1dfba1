"""Runs SQL from a model without risk, and compares results as the official evaluation does.

Design invariant 10: read-only, with a time and a row limit that really stop the statement. The
comparison is section 6 of the notes on the official evaluation, which has neither safeguard.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from mtsql.sql.compare import results_equal
from mtsql.sql.text import join_operators, without_distinct

__all__ = ["ExecutionResult", "Executor", "execution_match", "results_equal"]

ALLOWED_ACTIONS = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)
ALLOWED_PRAGMAS = frozenset(
    "table_info table_xinfo table_list index_list index_info index_xinfo foreign_key_list".split()
)
DENIED_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer"})
PROGRESS_STEPS = 1_000  # virtual-machine instructions between two looks at the clock
MAX_CELL_BYTES = 1_000_000
MAX_RESULT_BYTES = 50_000_000
MAX_CACHED_ROWS = 500_000  # in all results of the cache together
MAX_GOLD_ROWS = 1_000_000
CONNECTIONS_PER_THREAD = 16


@dataclass(frozen=True)
class ExecutionResult:
    """What came of one statement: "rows", "empty", "error", "timeout" or "refused" (unsafe)."""

    status: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple, ...] = ()
    truncated: bool = False
    message: str = ""

    @property
    def ok(self) -> bool:
        """True if the statement ran to its end or to the row limit."""
        return self.status in ("rows", "empty")


class _Connection:
    """One read-only connection of one thread: the guards, and what they saw last."""

    def __init__(self, path: str) -> None:
        self.deadline = 0.0
        self.timed_out = False
        self.refused = False
        uri = Path(path).absolute().as_uri() + "?mode=ro"
        self.sqlite = sqlite3.connect(uri, uri=True, isolation_level=None)
        self.sqlite.text_factory = lambda raw: raw.decode(errors="ignore")
        self.sqlite.execute("PRAGMA query_only = ON")
        self.sqlite.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
        self.sqlite.set_progress_handler(self._out_of_time, PROGRESS_STEPS)
        self.sqlite.set_authorizer(self._authorize)

    def _out_of_time(self) -> bool:
        self.timed_out = time.monotonic() > self.deadline
        return self.timed_out

    def _authorize(self, action: int, name: str | None, detail: str | None, *_: object) -> int:
        allowed = action in ALLOWED_ACTIONS or (
            action == sqlite3.SQLITE_PRAGMA and (name or "").lower() in ALLOWED_PRAGMAS
        )
        if action == sqlite3.SQLITE_FUNCTION and (detail or "").lower() in DENIED_FUNCTIONS:
            allowed = False
        self.refused |= not allowed
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    def run(self, sql: str, seconds: float, max_rows: int) -> ExecutionResult:
        self.timed_out = self.refused = False
        self.deadline = time.monotonic() + seconds
        cursor = self.sqlite.cursor()
        try:
            cursor.execute(sql)
            if cursor.description is None:
                return ExecutionResult("error", message="the query holds no statement")
            columns = tuple(column[0] for column in cursor.description)
            rows, truncated = self._fetch(cursor, max_rows)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            return self._failure(str(error), seconds)
        finally:
            cursor.close()
        return ExecutionResult("rows" if rows else "empty", columns, rows, truncated)

    def _fetch(self, cursor: sqlite3.Cursor, max_rows: int) -> tuple[tuple[tuple, ...], bool]:
        rows: list[tuple] = []
        size = 0
        for row in cursor:
            size += sum(len(cell) for cell in row if isinstance(cell, str | bytes))
            if len(rows) == max_rows or size > MAX_RESULT_BYTES:
                return tuple(rows), True
            rows.append(row)
        return tuple(rows), False

    def _failure(self, message: str, seconds: float) -> ExecutionResult:
        if self.timed_out:
            return ExecutionResult("timeout", message=f"stopped after {seconds:g} seconds")
        if self.refused or message == "You can only execute one statement at a time.":
            return ExecutionResult("refused", message=message)
        return ExecutionResult("error", message=message)


class Executor:
    """Runs one statement at a time per thread; results are cached while the file is unchanged.

    A built-in function that runs long inside one instruction is stopped only after it; the limit of
    1 MB a cell keeps that short.
    """

    def __init__(
        self, timeout_seconds: float = 5.0, max_rows: int = 10_000, cache_size: int = 50_000
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.max_rows = max_rows
        self.cache_size = cache_size
        self._cache: OrderedDict[tuple, ExecutionResult] = OrderedDict()
        self._cached_rows = 0
        self._lock = threading.Lock()
        self._local = threading.local()

    def execute(self, db_path: str | Path, sql: str) -> ExecutionResult:
        """The result of `sql`; errors of the statement are results, not exceptions.

        Raises FileNotFoundError if there is no such database.
        """
        return self._execute(db_path, sql, self.max_rows)

    def gold_rows(self, db_path: str | Path, sql: str) -> tuple[tuple, ...]:
        """All rows of a gold query, beyond the row limit.

        Raises ValueError naming the query if it fails, FileNotFoundError as `execute`.
        """
        result = self._execute(db_path, sql, MAX_GOLD_ROWS)
        if not result.ok or result.truncated:
            reason = result.message or f"more than {MAX_GOLD_ROWS} rows"
            raise ValueError(f"the gold query failed ({reason}): {sql}")
        return result.rows

    def predicted_rows(self, db_path: str | Path, sql: str, wanted: int) -> tuple[tuple, ...] | None:
        """All rows of a predicted query, or None if it fails or has more than `wanted` rows."""
        result = self._execute(db_path, sql, wanted)
        return result.rows if result.ok and not result.truncated else None

    def _execute(self, db_path: str | Path, sql: str, max_rows: int) -> ExecutionResult:
        path = os.fspath(db_path)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"The database file {path} does not exist.")
        stat = os.stat(path)
        version = (path, stat.st_mtime_ns, stat.st_size)
        key = (*version, sql)
        with self._lock:
            result = self._cache.get(key)
            if result is not None:
                self._cache.move_to_end(key)
        if result is None or (result.truncated and len(result.rows) < max_rows):
            result = self._connection(version).run(sql, self.timeout_seconds, max_rows)
            self._remember(key, result)
        if len(result.rows) > max_rows:  # it was run with a higher limit
            result = replace(result, rows=result.rows[:max_rows], truncated=True)
        return result

    def _remember(self, key: tuple, result: ExecutionResult) -> None:
        with self._lock:
            if key in self._cache:
                self._cached_rows -= len(self._cache.pop(key).rows)
            self._cache[key] = result
            self._cached_rows += len(result.rows)
            while len(self._cache) > self.cache_size or self._cached_rows > MAX_CACHED_ROWS:
                self._cached_rows -= len(self._cache.popitem(last=False)[1].rows)

    def _connection(self, version: tuple[str, int, int]) -> _Connection:
        if not hasattr(self._local, "connections"):
            self._local.connections = OrderedDict()
        connections = self._local.connections
        if version not in connections:
            connections[version] = _Connection(version[0])
            if len(connections) > CONNECTIONS_PER_THREAD:
                connections.popitem(last=False)[1].sqlite.close()
        connections.move_to_end(version)
        return connections[version]


CURRENT_YEAR = re.compile(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)", re.IGNORECASE)


@lru_cache(maxsize=100_000)
def _normalised(sql: str, keep_distinct: bool) -> str:
    """`sql` as the official evaluation runs it.

    Repairs split operators and the year function; unless `keep_distinct`, drops every DISTINCT and
    everything after the first statement.
    """
    sql = CURRENT_YEAR.sub("2020", join_operators(sql))
    return sql if keep_distinct else without_distinct(sql)


def execution_match(
    executor: Executor,
    db_path: str | Path,
    gold_sql: str,
    pred_sql: str | None,
    keep_distinct: bool = False,
) -> bool:
    """Execution match (EX), section 6 of the notes on the official evaluation; R_EX in training.

    Unlike there, a timeout or an empty prediction is wrong, even if the gold result is empty.
    Raises ValueError if the gold query fails, FileNotFoundError if the database is missing.
    """
    gold = _normalised(gold_sql, keep_distinct)
    gold_rows = executor.gold_rows(db_path, gold)
    if pred_sql is None or not pred_sql.strip():
        return False
    pred_rows = executor.predicted_rows(db_path, _normalised(pred_sql, keep_distinct), len(gold_rows))
    if pred_rows is None:
        return False
    return results_equal(gold_rows, pred_rows, "order by" in gold.lower())
