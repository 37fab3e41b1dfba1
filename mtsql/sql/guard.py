"""One connection to a database that statements from a model can neither harm nor hold up.

It is read-only (URI mode, authorizer and query_only), with limits on time, rows, memory, disk and the size of
a cell that really stop the statement.

A watchdog thread interrupts a statement that is past its time, which SQLite obeys between the rounds of a
loop (a progress handler would do the same, but takes Python's lock again and again: beside a busy thread
a query that takes 13 ms then took 4 s); while it prepares a statement, the authorizer looks at the clock at
every name. What runs in between is kept short by the limits on cells, patterns, function calls and the
statement's length; what grows in between is stopped by the heap limit. What a sort does not hold in memory
goes to temporary files; the watchdog looks at their size too.
"""

from __future__ import annotations

import os
import re
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from mtsql.data.schema import read_only_uri

ALLOWED_ACTIONS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE})
ALLOWED_PRAGMAS = frozenset(  # FTS5 asks for data_version to read its tables
    "table_info table_xinfo table_list index_list index_info index_xinfo foreign_key_list "
    "data_version".split()
)
DENIED_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer", "sqlite_log"}) | {"json_patch"}  # is slow
SLOW_FUNCTIONS = frozenset({"instr", "replace"})  # a fifth of a second a call, with the longest cells
PREPARED_TABLES = (  # table-valued functions; their first use looks like a CREATE to the authorizer
    *(f"pragma_{name}" for name in sorted(ALLOWED_PRAGMAS)),
    "json_each",
    "json_tree",
)
LONG_FORMAT = re.compile(r"%[^%a-zA-Z]*(\*|\d{5})")
DENIED_TABLES = frozenset({"sqlite_dbpage", "dbstat"})  # raw pages of the file
WATCH_SECONDS = 0.02  # between two looks at the clock
LOOKS_A_MEASURE = 5  # of the clock, to one of the temporary files
OPEN_FILES = "/proc/self/fd"  # Linux; elsewhere nothing limits temporary files
MAX_SQL_BYTES = 100_000
MAX_CELL_BYTES = 150_000
MAX_PATTERN_BYTES = 250  # of LIKE and GLOB
MAX_FUNCTION_CALLS = 50  # written in one statement
MAX_SLOW_CALLS = 6  # the same, of SLOW_FUNCTIONS
MAX_TRIMMED = 100  # characters that trim looks for
MAX_HEAP_BYTES = 80_000_000  # SQLite's own memory, in the whole process
MAX_TEMPORARY_BYTES = 500_000_000  # of SQLite's sorts on disk, in the whole process
PAGE_CACHE_KIB = 500  # of one connection
OUT_OF_MEMORY = "the query needs more memory than it may have"
LOCKED = "database is locked"  # as SQLite says it
LOCKED_SECONDS = 1.0  # for which a statement waits until another program lets go of the file


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


class Connection:
    """A read-only connection, for one thread at a time: the guards, and what they saw last."""

    def __init__(self, path: str) -> None:
        self.deadline = 0.0
        self.timed_out = False
        self.overflowed = False
        self.refused = False
        self.functions = self.slow_functions = 0
        self.sqlite = sqlite3.connect(
            read_only_uri(Path(path)),
            timeout=LOCKED_SECONDS,
            uri=True,
            isolation_level=None,
            cached_statements=0,
            check_same_thread=False,
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
        # The first use of a virtual table looks like a write to the authorizer, too.
        made = self.sqlite.execute("SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE VIRTUAL%'")
        for (name,) in made.fetchall():
            with suppress(sqlite3.OperationalError):  # of an extension that is not there
                self.sqlite.execute("SELECT 1 FROM pragma_table_info(?)", (name,)).fetchone()
        self.formatter = sqlite3.connect(":memory:", check_same_thread=False, cached_statements=0)
        self.formatter.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
        for name in ("printf", "format"):
            # Not a method: SQLite would hold this connection alive where no garbage collector looks.
            self.sqlite.create_function(name, -1, partial(_printf, self.formatter), deterministic=True)
        for name in ("trim", "ltrim", "rtrim"):
            self.sqlite.create_function(name, 2, partial(_trim, self.formatter, name), deterministic=True)
        self.sqlite.set_authorizer(self._authorize)

    def close(self) -> None:
        """Closes both databases; no statement may be running."""
        self.sqlite.close()
        self.formatter.close()

    def _authorize(self, action: int, name: str | None, detail: str | None, *_: object) -> int:
        if time.monotonic() > self.deadline:
            self.timed_out = True
            return sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_FUNCTION:
            function = (detail or "").lower()
            self.functions += 1
            self.slow_functions += function in SLOW_FUNCTIONS
            few = self.functions <= MAX_FUNCTION_CALLS and self.slow_functions <= MAX_SLOW_CALLS
            allowed = few and function not in DENIED_FUNCTIONS
        elif action == sqlite3.SQLITE_READ:
            allowed = (name or "").lower() not in DENIED_TABLES
        elif action == sqlite3.SQLITE_PRAGMA:
            allowed = (name or "").lower() in ALLOWED_PRAGMAS
        else:
            allowed = action in ALLOWED_ACTIONS
        self.refused |= not allowed
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    def run(self, sql: str, seconds: float, max_rows: int, max_bytes: int) -> ExecutionResult:
        """The result of `sql`, cut at `max_rows` rows or `max_bytes` bytes of Python objects.

        `seconds` is the time limit, for the message; `deadline` is what stops the statement.
        """
        self.timed_out = self.overflowed = self.refused = False
        self.functions = self.slow_functions = 0
        cursor = self.sqlite.cursor()
        rows: list[tuple] = []
        size, truncated = 0, False
        try:
            cursor.execute(sql)
            if cursor.description is None:
                return ExecutionResult("error", message="the query holds no statement")
            columns = tuple(column[0] for column in cursor.description)
            for row in cursor:
                size += sys.getsizeof(row) + sum(map(sys.getsizeof, row))
                truncated = len(rows) == max_rows or size > max_bytes
                if truncated:
                    break
                rows.append(row)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            return self._failure(str(error), seconds)
        except MemoryError:
            return ExecutionResult("error", message=OUT_OF_MEMORY)
        finally:
            cursor.close()
        return ExecutionResult("rows" if rows else "empty", columns, tuple(rows), truncated, bytes=size)

    def _failure(self, message: str, seconds: float) -> ExecutionResult:
        if self.timed_out:
            return ExecutionResult("timeout", message=f"stopped after {seconds:g} seconds")
        if self.overflowed:
            return ExecutionResult("error", message=OUT_OF_MEMORY)
        if self.refused or message == "You can only execute one statement at a time.":
            return ExecutionResult("refused", message=message)
        return ExecutionResult("error", message=message)


def _printf(formatter: sqlite3.Connection, *arguments: object) -> str | None:
    """SQLite's own printf, which would write a width of a billion character by character."""
    if arguments and LONG_FORMAT.search(str(arguments[0])):
        raise ValueError("the width is too large")
    places = ", ".join("?" * len(arguments))
    return formatter.execute(f"SELECT printf({places})", arguments).fetchone()[0]


def _trim(formatter: sqlite3.Connection, name: str, text: object, characters: object) -> str | None:
    """SQLite's own trim, which would look for each character of a long text in a long list of them."""
    if isinstance(characters, str | bytes) and len(characters) > MAX_TRIMMED:
        raise ValueError("the list of characters is too long")
    return formatter.execute(f"SELECT {name}(?, ?)", (text, characters)).fetchone()[0]


def temporary_bytes() -> int:
    """The size of SQLite's temporary files, which have no name any more and no owner that one could see."""
    total = 0
    with suppress(FileNotFoundError):
        for number in os.listdir(OPEN_FILES):
            with suppress(OSError):  # closed meanwhile
                if "/etilqs_" in os.readlink(f"{OPEN_FILES}/{number}"):
                    total += os.stat(f"{OPEN_FILES}/{number}").st_size
    return total


class Watchdog:
    """Interrupts statements that are past their time, from a thread that lives while any run.

    All that run, where temporary files are too large: the executor tries them again one at a time.
    """

    def __init__(self) -> None:
        self._running: set[Connection] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, connection: Connection) -> Iterator[None]:
        """Interrupts what `connection` runs inside the block once its deadline is past."""
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
        for look in count():
            time.sleep(WATCH_SECONDS)
            measured = bool(self._running) and look % LOOKS_A_MEASURE == 0
            overflow = measured and temporary_bytes() > MAX_TEMPORARY_BYTES
            with self._lock:
                idle = 0.0 if self._running else idle + WATCH_SECONDS
                if idle > 1:
                    self._thread = None
                    return
                for connection in self._running:
                    connection.timed_out |= time.monotonic() > connection.deadline
                    connection.overflowed |= overflow
                    if connection.timed_out or connection.overflowed:
                        connection.sqlite.interrupt()
