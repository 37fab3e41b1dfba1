"""Runs SQL that nobody vouches for, and reads databases that nobody vouches for, in processes of their own.

A few workers (sql_worker.py) answer one statement at a time each. The one whose statement is past its time
is killed, which stops whatever SQLite does, and the next statement starts another. So no statement runs
without a limit: not in a fork, which has workers of its own, nor where no process can be started.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from queue import LifoQueue

from mtsql.data.sql_worker import NOT_OPEN, OUT_OF_MEMORY, packed, quoted, receive
from mtsql.errors import UserError

PROGRAM = Path(__file__).with_name("sql_worker.py")
MAX_WORKERS = 4
START_SECONDS = 20.0  # a start takes 0.04 on an idle machine
LOCKED = "database is locked"  # as SQLite says it
ENDED = "the query ended the process that ran it"
BUSY = "stopped before it had computed for half of its"  # time: others had the processor or the disk
LONGEST_SECONDS = 1e6  # more is too large for a socket's clock
OF_THE_MOMENT = (OUT_OF_MEMORY, ENDED, LOCKED, NOT_OPEN, BUSY)  # how a failure begins that may pass
SCHEMA_SECONDS = 5.0  # for all that is read of one schema,
EXAMPLE_SECONDS = 2.0  # and for one statement that may run a view
MAX_SCHEMA_ROWS, MAX_SCHEMA_BYTES = 1_000_000, 64_000_000
UNUSABLE = (
    "is not a database", "disk image is malformed", "malformed database schema", NOT_OPEN, LOCKED, ENDED
)  # fmt: skip
# A file's path, inode, size and times, and its write-ahead log's size and time, which a commit may change
# alone: what was read from the file holds while these stay the same.
FileVersion = tuple[str | int, ...]


@dataclass(frozen=True)
class ExecutionResult:
    """What came of one statement: "rows", "empty", "error", "timeout" or "refused" (unsafe)."""

    status: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple, ...] = ()
    truncated: bool = False
    message: str = ""
    bytes: int = 0  # of memory that the rows, the columns' names or the message take

    @property
    def ok(self) -> bool:
        """True if the statement ran to its end or to the row limit."""
        return self.status in ("rows", "empty")


def file_version(path: str | Path) -> FileVersion:
    """The version of a database file. Raises FileNotFoundError if it does not exist."""
    if not os.path.isfile(path):
        raise FileNotFoundError(errno.ENOENT, "the database file does not exist", str(path))
    stat, log = os.stat(path), (0, 0)
    with suppress(FileNotFoundError):
        of_log = os.stat(f"{os.path.realpath(path)}-wal")  # SQLite has it beside what a link leads to
        log = (of_log.st_size, of_log.st_mtime_ns) if of_log.st_size else log  # a reader makes an empty one
    return (os.fspath(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, *log)


def read_only_uri(path: Path) -> str:
    """The URI that opens a SQLite file for reading.

    A file in WAL mode needs others beside it, even to be read. Where none can be made, and nothing waits to
    be written into the file, it is opened as one that does not change.
    """
    path = Path(os.path.realpath(path))
    uri, waiting = path.as_uri() + "?mode=ro", path.with_name(f"{path.name}-wal")
    if os.access(path.parent, os.W_OK):  # opening it here would drop the locks of our own process
        return uri
    with suppress(OSError), path.open("rb") as file:
        in_wal_mode = file.read(20)[18:20] == b"\2\2"
        if in_wal_mode and not (waiting.exists() and waiting.stat().st_size):
            return uri + "&immutable=1"
    return uri


class Worker:
    """A process that answers requests. Raises OSError, or what `ask` does, if it does not start."""

    def __init__(self) -> None:
        self.socket, its_own = socket.socketpair()
        with its_own:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(PROGRAM)],
                stdin=its_own, stdout=its_own, stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C in the terminal is not meant for it
            )  # fmt: skip
        self._answers = self.socket.makefile("rb")
        self._computed = 0.0  # seconds, until the last answer
        self.ask(START_SECONDS)

    def ask(self, seconds: float, *request: object) -> tuple:
        """Its answer; without one it is ended.

        Raises TimeoutError, with the seconds that it has computed, after `seconds`, and EOFError or
        ConnectionError if it has ended by itself.
        """
        try:
            self.socket.settimeout(seconds)
            self.socket.sendall(packed((seconds, *request)))
            self._computed, answer = receive(self._answers)
        except TimeoutError:
            raise TimeoutError(self.end()) from None
        except BaseException:
            self.end()
            raise
        return answer

    def end(self) -> float:
        """Kill it. The seconds that it has computed since its last answer, 0 if it had ended by itself."""
        self.process.kill()
        computed = 0.0
        with suppress(ChildProcessError):
            used = os.wait4(self.process.pid, 0)[2]
            computed = used.ru_utime + used.ru_stime - self._computed
        self.process.wait()
        self._answers.close()
        self.socket.close()
        return computed


@lru_cache(maxsize=1)
def _workers(process: int) -> LifoQueue[Worker | None]:
    """Those of one process, None for one that is not started: a fork must not speak to its parent's."""
    idle = LifoQueue()
    for _ in range(MAX_WORKERS):
        idle.put(None)
    return idle


def _ask(seconds: float, *request: object) -> tuple:
    """The answer of the next worker that is idle. Raises what `Worker` and its `ask` do."""
    idle = _workers(os.getpid())
    worker = idle.get()
    try:
        if worker is None or worker.process.poll() is not None:  # it, or somebody, has ended it
            worker = Worker()
        return worker.ask(seconds, *request)
    finally:
        idle.put(worker)


def run_sql(path: str | Path, sql: str, seconds: float, max_rows: int, max_bytes: int) -> ExecutionResult:
    """The result of `sql`, cut at `max_rows` rows or `max_bytes` bytes of Python objects."""
    seconds = min(seconds, LONGEST_SECONDS)
    for last in (False, True):  # something else may have ended the first worker, or had its time
        try:
            if seconds <= 0:
                raise TimeoutError(0.0)
            opened = (file_version(path), read_only_uri(Path(path)))
            return ExecutionResult(*_ask(seconds, *opened, sql, max_rows, max_bytes))
        except TimeoutError as timeout:
            computed = timeout.args[0] > seconds / 2
            if not computed and not last:
                continue
            how = "stopped after" if computed else BUSY
            return ExecutionResult("timeout", message=f"{how} {seconds:g} seconds")
        except (EOFError, ConnectionError):
            continue
        except OSError as error:
            return ExecutionResult("error", message=f"{NOT_OPEN}: {error}")
    return ExecutionResult("error", message=ENDED)


class Reader:
    """Reads the schema of a database within SCHEMA_SECONDS. Raises FileNotFoundError if it does not exist."""

    def __init__(self, path: Path | str) -> None:
        file_version(path)
        self.path = path
        self._deadline = time.monotonic() + SCHEMA_SECONDS

    def rows(self, sql: str, needed: bool = True) -> tuple[tuple, ...]:
        """All rows of `sql`; if they are not `needed`, none if it fails or takes too long, as a view may.

        Raises UserError if the database cannot be read at all.
        """
        seconds = min(SCHEMA_SECONDS if needed else EXAMPLE_SECONDS, self._deadline - time.monotonic())
        result = run_sql(self.path, sql, seconds, MAX_SCHEMA_ROWS, MAX_SCHEMA_BYTES)
        if result.ok and not result.truncated:
            return result.rows
        late = time.monotonic() > self._deadline
        reason = "reading it takes too long" if late else result.message or "its schema is too large"
        if needed or any(words in reason for words in UNUSABLE):
            raise UserError(
                f"{self.path} is not a usable SQLite database now ({reason}); "
                "is it encrypted or damaged, or is another program writing?"
            )
        return ()

    def columns(self, table: str, needed: bool) -> list[tuple[str, str, int]]:
        """The columns of a table or view that * shows: names, declared types, places in the primary key.

        `needed` as in `rows`: of an ordinary table nothing but the moment keeps them from being read.
        """
        found = self.rows(f"PRAGMA table_xinfo({quoted(table)})", needed)
        return [(name, kind, place) for _, name, kind, _, _, place, hidden in found if hidden != 1]
