"""The program that runs untrusted SQL. sandbox.py starts it, and ends it where a statement is past its time.

It imports the standard library alone. A request comes in on its standard input; the seconds that the process
has computed and the result leave on its standard output: eight bytes of length, then what marshal makes of
plain tuples. It ends with its input.

Databases are read-only (URI mode, authorizer and query_only). SQLite's memory is limited, and sorts stay in
it, so that nothing is written but what a write-ahead log asks for. The limits of the process stand behind
that. macOS does not enforce the one on memory: there one row of 2,000 blobs may take 300 MB for a moment.
"""

from __future__ import annotations

import marshal
import resource
import signal
import sqlite3
import sys
import time
from contextlib import suppress
from typing import BinaryIO

ALLOWED_ACTIONS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE})
ALLOWED_PRAGMAS = frozenset(  # FTS5 asks for data_version to read its tables
    "table_info table_xinfo table_list index_list index_info index_xinfo foreign_key_list "
    "data_version".split()
)
PREPARED_TABLES = {"json_each", "json_tree", *(f"pragma_{name}" for name in ALLOWED_PRAGMAS)}
DENIED_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer", "sqlite_log"})
DENIED_TABLES = frozenset({"sqlite_dbpage", "dbstat"})  # raw pages of the file
MAX_SQL_BYTES = 100_000
MAX_CELL_BYTES = 150_000
MAX_MESSAGE = 1_000  # characters of an error, which may repeat the statement
SETTINGS = (  # memory of SQLite in bytes, of one connection's pages in KiB
    "PRAGMA hard_heap_limit = 250000000; PRAGMA cache_size = -500; PRAGMA temp_store = MEMORY; "
    "PRAGMA query_only = ON"
)
CONNECTION_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_CELL_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_SQL_BYTES,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
PROCESS_LIMITS = {
    resource.RLIMIT_AS: 1_000_000_000,
    resource.RLIMIT_FSIZE: 50_000_000,
    resource.RLIMIT_NOFILE: 256,
    resource.RLIMIT_CORE: 0,
}
KEPT_CONNECTIONS = 4  # opening one takes longer than most statements, and reads the whole schema
LOCKED_SECONDS = 1.0  # for which a statement waits, at most half its time, until others let go of the file
ALONE_SECONDS = 1.0  # for which a statement may outlive its time, should nobody be left to end it
NOT_OPEN = "the database does not open"
OUT_OF_MEMORY = "the query needs more memory than it may have"
TOO_LARGE = "a row, or the names of the columns, are larger than a result may be"


class Connection:
    """A read-only connection: the guards, and what they saw last."""

    def __init__(self, uri: str, seconds: float) -> None:
        self.room = sys.maxsize  # bytes that the texts of the next row may take
        wait = min(LOCKED_SECONDS, seconds / 2)
        self.sqlite = sqlite3.connect(uri, timeout=wait, uri=True, isolation_level=None, cached_statements=0)
        self.sqlite.text_factory = self._text
        self.sqlite.executescript(SETTINGS)
        for limit, most in CONNECTION_LIMITS.items():
            self.sqlite.setlimit(limit, most)
        # The first use of a virtual table or table-valued function looks like a write to the authorizer.
        named = self.sqlite.execute("SELECT name, sql LIKE 'CREATE VIRTUAL%' FROM sqlite_master").fetchall()
        known = PREPARED_TABLES - {str(name).lower() for name, _ in named}
        uses = [f"EXPLAIN SELECT 1 FROM {name}" for name in known]
        for use in uses + [f"PRAGMA table_info({quoted(name)})" for name, virtual in named if virtual]:
            with suppress(sqlite3.OperationalError):  # of an extension, or newer than this SQLite
                self.sqlite.execute(use)
        (mode,) = self.sqlite.execute("PRAGMA journal_mode").fetchone()
        self.kept = KEPT_CONNECTIONS * (mode != "wal")  # where it would be in the way of who writes
        self.sqlite.set_authorizer(self._authorize)

    def _text(self, raw: bytes) -> str:
        text = raw.decode(errors="ignore")
        self.room -= sys.getsizeof(text)
        if self.room < 0:
            raise MemoryError
        return text

    def _authorize(self, action: int, name: str | None, detail: str | None, *_: object) -> int:
        if action == sqlite3.SQLITE_FUNCTION:
            allowed = (detail or "").lower() not in DENIED_FUNCTIONS
        elif action == sqlite3.SQLITE_READ:
            allowed = (name or "").lower() not in DENIED_TABLES
        else:
            pragma = action == sqlite3.SQLITE_PRAGMA and (name or "").lower() in ALLOWED_PRAGMAS
            allowed = pragma or action in ALLOWED_ACTIONS
        self.refused |= not allowed
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    def run(self, sql: str, max_rows: int, max_bytes: int) -> tuple:
        """The result of `sql`, cut at `max_rows` rows or `max_bytes` bytes of Python objects."""
        rows: list[tuple] = []
        columns, size, truncated, self.room, self.refused = (), 0, False, max_bytes, False
        try:
            cursor = self.sqlite.execute(sql)
            if cursor.description is None:
                return failure("the query holds no statement")
            columns = tuple(column[0] for column in cursor.description)
            size = sum(map(sys.getsizeof, columns))
            self.room = max_bytes - size
            for row in cursor if self.room > 0 else ():
                size += sys.getsizeof(row) + sum(map(sys.getsizeof, row))
                truncated = len(rows) == max_rows or size > max_bytes
                if truncated:
                    break
                rows.append(row)
                self.room = max_bytes - size
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            several = str(error) == "You can only execute one statement at a time."
            return failure(str(error), "refused" if self.refused or several else "error")
        except MemoryError:
            if self.room >= 0:
                return failure(OUT_OF_MEMORY)
            size, truncated = max_bytes + 1, True
        if size > max_bytes and not rows:
            return ("error", (), (), True, TOO_LARGE, size)
        return ("rows" if rows else "empty", columns, tuple(rows), truncated, "", size)


def quoted(name: str) -> str:
    """A name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


def failure(message: str, status: str = "error") -> tuple:
    """A result without rows."""
    message = message[:MAX_MESSAGE]
    return (status, (), (), False, message, sys.getsizeof(message))


def answer(kept: dict[tuple, Connection], seconds: float, version: tuple, uri: str, *query: object) -> tuple:
    """The result on one version of a database; `kept` has the connections that were used last at its end."""
    try:
        kept[version] = connection = kept.pop(version, None) or Connection(uri, seconds)
    except (sqlite3.Error, MemoryError) as error:
        return failure(f"{NOT_OPEN}: {error or OUT_OF_MEMORY}")
    result = connection.run(*query)
    while len(kept) > (0 if OUT_OF_MEMORY in result else connection.kept):
        kept.pop(next(iter(kept))).sqlite.close()
    return result


def packed(message: tuple) -> bytes:
    """One message as it is sent."""
    data = marshal.dumps(message)
    return len(data).to_bytes(8, "little") + data


def receive(file: BinaryIO) -> tuple:
    """Read one message. Raises EOFError where it ends too early."""
    length = int.from_bytes(file.read(8), "little")
    return marshal.loads(file.read(length))


def serve() -> None:
    """Limit this process, and answer until the input ends; a request for nothing asks whether it is ready."""
    for limit, most in PROCESS_LIMITS.items():
        with suppress(ValueError, OSError):  # a system that has no such limit, or a lower one
            resource.setrlimit(limit, (most, most))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends the process, whatever that does
    kept: dict[tuple, Connection] = {}
    with suppress(EOFError, ConnectionError):
        while True:
            seconds, *request = receive(sys.stdin.buffer)
            signal.setitimer(signal.ITIMER_REAL, seconds + ALONE_SECONDS)
            result = answer(kept, seconds, *request) if request else ()
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.stdout.buffer.write(packed((time.process_time(), result)))
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
