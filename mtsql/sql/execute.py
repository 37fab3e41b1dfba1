"""Runs SQL from a model without risk, and compares results as the official evaluation does.

Design invariant 10: read-only (URI mode, authorizer and query_only), with limits on time, rows, memory
and the size of a cell that really stop the statement. The comparison is section 6 of the notes on the
official evaluation, which has no such safeguard.

A watchdog thread interrupts a statement that is past its time, which SQLite obeys between the rounds of a
loop (a progress handler would do the same, but takes Python's lock again and again: beside a busy thread
a query that takes 13 ms then took 4 s); while it prepares a statement, the authorizer looks at the clock at
every name. What runs in between is kept short by the limits on cells, patterns, function calls and the
statement's length; what grows in between is stopped by the heap limit.
"""

from __future__ import annotations

import os
import re
import sqlite3
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from mtsql.sql.compare import results_equal
from mtsql.sql.text import join_operators, without_distinct

__all__ = ["ExecutionResult", "Executor", "as_executed", "execution_match", "results_equal", "set_match"]

ALLOWED_ACTIONS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE})
ALLOWED_PRAGMAS = frozenset(
    "table_info table_xinfo table_list index_list index_info index_xinfo foreign_key_list".split()
)
DENIED_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer"})
PREPARED_TABLES = (  # table-valued functions; their first use looks like a CREATE to the authorizer
    *(f"pragma_{name}" for name in sorted(ALLOWED_PRAGMAS)),
    "json_each",
    "json_tree",
)
LONG_FORMAT = re.compile(r"%[^%a-zA-Z]*(\*|\d{5})")
DENIED_TABLES = frozenset({"sqlite_dbpage", "dbstat"})  # raw pages of the file
WATCH_SECONDS = 0.02  # between two looks at the clock
MAX_SQL_BYTES = 100_000
MAX_CELL_BYTES = 150_000
MAX_PATTERN_BYTES = 250  # of LIKE and GLOB
MAX_FUNCTION_CALLS = 50  # written in one statement
MAX_HEAP_BYTES = 80_000_000  # SQLite's own memory, in the whole process
MAX_RESULT_BYTES = 16_000_000  # one result, as Python objects,
MAX_SCORED_BYTES = 64_000_000  # or one that is compared with another
MAX_CACHED_BYTES = 64_000_000
MAX_GOLD_ROWS = 1_000_000
MAX_IDLE_CONNECTIONS = 32
PAGE_CACHE_KIB = 500  # of one connection
OUT_OF_MEMORY = "the query needs more memory than it may have"


@dataclass(frozen=True)
class ExecutionResult:
    """What came of one statement: "rows", "empty", "error", "timeout" or "refused" (unsafe)."""

    status: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple, ...] = ()
    truncated: bool = False
    message: str = ""
    bytes: int = 0  # of memory that the rows take

    @property
    def ok(self) -> bool:
        """True if the statement ran to its end or to the row limit."""
        return self.status in ("rows", "empty")


class _Connection:
    """A read-only connection, for one thread at a time: the guards, and what they saw last."""

    def __init__(self, path: str) -> None:
        self.deadline = 0.0
        self.timed_out = False
        self.refused = False
        self.functions = 0
        uri = Path(path).absolute().as_uri() + "?mode=ro"
        self.sqlite = sqlite3.connect(
            uri, uri=True, isolation_level=None, cached_statements=0, check_same_thread=False
        )
        self.sqlite.text_factory = lambda raw: raw.decode(errors="ignore")
        self.sqlite.execute("PRAGMA query_only = ON")
        self.sqlite.execute(f"PRAGMA hard_heap_limit = {MAX_HEAP_BYTES}")
        self.sqlite.execute(f"PRAGMA cache_size = -{PAGE_CACHE_KIB}")
        self.sqlite.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
        self.sqlite.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, MAX_SQL_BYTES)
        self.sqlite.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, MAX_PATTERN_BYTES)
        self.sqlite.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        for name in PREPARED_TABLES:
            self.sqlite.execute(f"SELECT 1 FROM {name}").fetchone()
        self.formatter = sqlite3.connect(":memory:", check_same_thread=False, cached_statements=0)
        self.formatter.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
        for name in ("printf", "format"):
            # Not a method: SQLite would hold this connection alive where no garbage collector looks.
            self.sqlite.create_function(name, -1, partial(_printf, self.formatter), deterministic=True)
        self.sqlite.set_authorizer(self._authorize)

    def close(self) -> None:
        self.sqlite.close()
        self.formatter.close()

    def _authorize(self, action: int, name: str | None, detail: str | None, *_: object) -> int:
        if time.monotonic() > self.deadline:
            self.timed_out = True
            return sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_FUNCTION:
            self.functions += 1
            allowed = self.functions <= MAX_FUNCTION_CALLS and (detail or "").lower() not in DENIED_FUNCTIONS
        elif action == sqlite3.SQLITE_READ:
            allowed = (name or "").lower() not in DENIED_TABLES
        elif action == sqlite3.SQLITE_PRAGMA:
            allowed = (name or "").lower() in ALLOWED_PRAGMAS
        else:
            allowed = action in ALLOWED_ACTIONS
        self.refused |= not allowed
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    def run(self, sql: str, seconds: float, max_rows: int, max_bytes: int) -> ExecutionResult:
        self.timed_out = self.refused = False
        self.functions = 0
        cursor = self.sqlite.cursor()
        try:
            cursor.execute(sql)
            if cursor.description is None:
                return ExecutionResult("error", message="the query holds no statement")
            columns = tuple(column[0] for column in cursor.description)
            rows, truncated, size = self._fetch(cursor, max_rows, max_bytes)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            return self._failure(str(error), seconds)
        except MemoryError:
            return ExecutionResult("error", message=OUT_OF_MEMORY)
        finally:
            cursor.close()
        return ExecutionResult("rows" if rows else "empty", columns, rows, truncated, bytes=size)

    def _fetch(
        self, cursor: sqlite3.Cursor, max_rows: int, max_bytes: int
    ) -> tuple[tuple[tuple, ...], bool, int]:
        rows: list[tuple] = []
        size = 0
        for row in cursor:
            size += sys.getsizeof(row) + sum(map(sys.getsizeof, row))
            if len(rows) == max_rows or size > max_bytes:
                return tuple(rows), True, size
            rows.append(row)
        return tuple(rows), False, size

    def _failure(self, message: str, seconds: float) -> ExecutionResult:
        if self.timed_out:
            return ExecutionResult("timeout", message=f"stopped after {seconds:g} seconds")
        if self.refused or message == "You can only execute one statement at a time.":
            return ExecutionResult("refused", message=message)
        return ExecutionResult("error", message=message)


def _printf(formatter: sqlite3.Connection, *arguments: object) -> str | None:
    """SQLite's own printf, which would write a width of a billion character by character."""
    if arguments and LONG_FORMAT.search(str(arguments[0])):
        raise ValueError("the width is too large")
    places = ", ".join("?" * len(arguments))
    return formatter.execute(f"SELECT printf({places})", arguments).fetchone()[0]


class _Watchdog:
    """Interrupts statements that are past their time, from a thread that lives while any run."""

    def __init__(self) -> None:
        self._running: set[_Connection] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, connection: _Connection) -> Iterator[None]:
        with self._lock:
            self._running.add(connection)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="sql watchdog", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(connection)

    def _watch(self) -> None:
        idle = 0.0
        while True:
            time.sleep(WATCH_SECONDS)
            with self._lock:
                idle = 0.0 if self._running else idle + WATCH_SECONDS
                if idle > 1:
                    self._thread = None
                    return
                for connection in self._running:
                    if time.monotonic() > connection.deadline:
                        connection.timed_out = True
                        connection.sqlite.interrupt()


class Executor:
    """Runs statements, one at a time in a thread; results are cached while the file is unchanged.

    A file counts as changed if its inode, its size or its time of modification or change is another.
    """

    def __init__(
        self,
        timeout_seconds: float = 5.0,
        max_rows: int = 10_000,
        cache_size: int = 50_000,
        threads: int = 4,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.max_rows = max_rows
        self.cache_size = cache_size
        self._cache: OrderedDict[tuple, ExecutionResult] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()
        self._memory_lock = threading.Lock()
        self._idle: list[tuple[tuple, _Connection]] = []  # the one used last is last
        self._watchdog = _Watchdog()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="sql")

    def execute(self, db_path: str | Path, sql: str) -> ExecutionResult:
        """The result of `sql`; errors of the statement are results, not exceptions.

        Raises FileNotFoundError if there is no such database.
        """
        return self._execute(db_path, sql, self.max_rows, MAX_RESULT_BYTES)

    def execute_many(self, requests: Iterable[tuple[str | Path, str]]) -> list[ExecutionResult]:
        """`execute` of every (database, SQL), several at once, in the order of the requests."""
        return list(self._pool.map(lambda request: self.execute(*request), requests))

    def gold_rows(self, db_path: str | Path, sql: str) -> tuple[tuple, ...]:
        """All rows of a gold query, beyond the row limit.

        Raises ValueError naming the query if it fails, FileNotFoundError as `execute`.
        """
        result = self._execute(db_path, sql, MAX_GOLD_ROWS, MAX_SCORED_BYTES)
        if not result.ok or result.truncated:
            reason = result.message or f"more than {MAX_GOLD_ROWS} rows"
            raise ValueError(f"the gold query failed ({reason}): {sql}")
        return result.rows

    def predicted_rows(self, db_path: str | Path, sql: str, wanted: int) -> tuple[tuple, ...] | None:
        """All rows of a predicted query, or None if it fails or has more than `wanted` rows."""
        result = self._execute(db_path, sql, wanted, MAX_SCORED_BYTES)
        return result.rows if result.ok and not result.truncated else None

    def _execute(self, db_path: str | Path, sql: str, max_rows: int, max_bytes: int) -> ExecutionResult:
        path = os.fspath(db_path)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"The database file {path} does not exist.")
        stat = os.stat(path)
        version = (path, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        key = (*version, sql)
        with self._lock:
            result = self._cache.get(key)
            if result is not None:
                self._cache.move_to_end(key)
        too_few = result is not None and result.truncated and len(result.rows) < max_rows
        if result is None or (too_few and result.bytes <= max_bytes):
            result = self._run(version, sql, max_rows, max_bytes)
            if result.message == OUT_OF_MEMORY:  # perhaps another thread's doing: once more, one at a time
                with self._memory_lock:
                    result = self._run(version, sql, max_rows, max_bytes)
            self._remember(key, result)
        if len(result.rows) > max_rows:  # it was run with a higher limit
            result = replace(result, rows=result.rows[:max_rows], truncated=True)
        return result

    def _run(
        self, version: tuple[str, int, int, int, int], sql: str, max_rows: int, max_bytes: int
    ) -> ExecutionResult:
        if len(sql) > MAX_SQL_BYTES:
            return ExecutionResult("error", message=f"the query is longer than {MAX_SQL_BYTES} characters")
        try:
            connection = self._borrow(version)
        except (sqlite3.Error, MemoryError) as error:
            return ExecutionResult("error", message=f"the database does not open: {error}")
        connection.deadline = time.monotonic() + self.timeout_seconds
        try:
            with self._watchdog.watching(connection):
                return connection.run(sql, self.timeout_seconds, max_rows, max_bytes)
        finally:
            self._give_back(version, connection)

    def _remember(self, key: tuple, result: ExecutionResult) -> None:
        """Into the cache, unless the failure may have been of the moment."""
        if result.message == OUT_OF_MEMORY or result.message.startswith("the database does not open"):
            return
        with self._lock:
            if key in self._cache:
                self._forget(key)
            self._cache[key] = result
            self._cached_bytes += result.bytes + 2 * len(key[-1])
            while len(self._cache) > self.cache_size or self._cached_bytes > MAX_CACHED_BYTES:
                self._forget(next(iter(self._cache)))

    def _forget(self, key: tuple) -> None:
        self._cached_bytes -= self._cache.pop(key).bytes + 2 * len(key[-1])

    def _borrow(self, version: tuple[str, int, int, int, int]) -> _Connection:
        with self._lock:
            for at in range(len(self._idle) - 1, -1, -1):
                if self._idle[at][0] == version:
                    return self._idle.pop(at)[1]
        return _Connection(version[0])

    def _give_back(self, version: tuple[str, int, int, int, int], connection: _Connection) -> None:
        with self._lock:
            self._idle.append((version, connection))
            surplus = self._idle.pop(0)[1] if len(self._idle) > MAX_IDLE_CONNECTIONS else None
        if surplus is not None:
            surplus.close()


CURRENT_YEAR = re.compile(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)", re.IGNORECASE)


def as_executed(sql: str, keep_distinct: bool) -> str:
    """`sql` as the official evaluation runs it.

    Repairs split operators and the year function; unless `keep_distinct`, drops every DISTINCT and
    everything after the first statement. What is too long to be run stays as it is.
    """
    if len(sql) > MAX_SQL_BYTES:
        return sql
    if len(sql) > 2_000:  # so that the cache stays small
        return _as_executed.__wrapped__(sql, keep_distinct)
    return _as_executed(sql, keep_distinct)


@lru_cache(maxsize=50_000)
def _as_executed(sql: str, keep_distinct: bool) -> str:
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
    gold = as_executed(gold_sql, keep_distinct)
    gold_rows = executor.gold_rows(db_path, gold)
    if pred_sql is None or not pred_sql.strip():
        return False
    pred_rows = executor.predicted_rows(db_path, as_executed(pred_sql, keep_distinct), len(gold_rows))
    if pred_rows is None:
        return False
    return results_equal(gold_rows, pred_rows, "order by" in gold.lower())


def set_match(executor: Executor, db_path: str | Path, gold_sql: str, pred_sql: str | None) -> bool:
    """BIRD's EX, section 8 of the notes: equal sets of rows, in the order of the columns.

    Both queries run as they are written. Wrong if either fails, as in BIRD's evaluation.
    Raises FileNotFoundError if the database is missing.
    """
    if pred_sql is None or not pred_sql.strip():
        return False
    try:
        gold_rows = executor.gold_rows(db_path, gold_sql)
    except ValueError:
        return False
    pred_rows = executor.predicted_rows(db_path, pred_sql, MAX_GOLD_ROWS)
    return pred_rows is not None and set(gold_rows) == set(pred_rows)
