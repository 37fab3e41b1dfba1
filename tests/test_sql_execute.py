"""The read-only executor and execution match: section 6 of the notes, design invariant 10."""

import gc
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import hostile
import psutil
import pytest
from conftest import ROOT, make_database

from mtsql.data import sql_worker
from mtsql.errors import UserError
from mtsql.sql.execute import Executor, execution_match, results_equal
from mtsql.sql.grammar import SqlSchema

ENDLESS = hostile.ENDLESS.format("max(x)")
NAMES = "SELECT name FROM singer"


@pytest.fixture
def database(tmp_path):
    return hostile.make_database(tmp_path / "concerts.sqlite")


@pytest.fixture
def executor():
    return Executor(timeout_seconds=0.5, max_rows=100)


def test_rows_are_cut_at_the_bytes_that_a_result_may_have(database):
    wide = Executor(max_rows=2_000).execute(database, "SELECT zeroblob(140000) FROM number")
    assert wide.truncated and 0 < len(wide.rows) < 120 and wide.bytes < 17_000_000


def test_missing_database(executor, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"database file does not exist: .*gone"):
        executor.execute(tmp_path / "gone.sqlite", "SELECT 1")


def test_cache_follows_the_file_and_its_write_ahead_log(executor, database):
    query, insert = "SELECT count(*) FROM singer", "INSERT INTO singer VALUES ({}, 'x', 'y', 1)"
    assert executor.execute(str(database), query) is executor.execute(database, query)
    make_database(database, insert.format(10) + "; PRAGMA journal_mode = WAL")
    with closing(sqlite3.connect(database)) as connection:
        for number in range(4, 7):
            assert executor.execute(database, query).rows == ((number,),)
            connection.execute(insert.format(number + 10))
            connection.commit()
        connection.execute("CREATE TABLE late (a)")
        connection.commit()
        assert "late" in SqlSchema.from_database(database).tables


def test_a_table_function_that_this_sqlite_lacks_is_no_reason_not_to_open(database, monkeypatch):
    monkeypatch.setattr(sql_worker, "PREPARED_TABLES", {"pragma_of_another_version"})
    opened = sql_worker.Connection(f"{database.as_uri()}?mode=ro", 1.0)
    assert "rows" in opened.run("SELECT 1", 1, 9_000)
    opened.sqlite.close()


def test_full_text_tables_can_be_read(executor, database):
    song = "CREATE VIRTUAL TABLE song USING fts5(title); INSERT INTO song VALUES ('a red rose')"
    make_database(database, f"{song}; CREATE VIEW broken AS SELECT a FROM nowhere")
    found = executor.execute(database, "SELECT title FROM song WHERE song MATCH 'rose'")
    assert found.rows == (("a red rose",),)
    for write in ("DELETE FROM song", "INSERT INTO song (song) VALUES ('rebuild')"):
        assert executor.execute(database, write).status == "refused"


def test_a_table_of_an_absent_module_is_left_out(database):
    made = "'table', 'odd', 'odd', 0, 'CREATE VIRTUAL TABLE odd USING absent(a)'"
    make_database(database, f"PRAGMA writable_schema = ON; INSERT INTO sqlite_master VALUES ({made})")
    assert set(SqlSchema.from_database(database).tables) == {"singer", "number", "words", "pairs"}


def test_a_locked_database_is_an_error_of_the_moment(executor, database):
    query = "SELECT count(*) FROM singer"
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        locked = executor.execute(database, query)
    assert locked.status == "error" and "database is locked" in locked.message
    assert executor.execute(database, query).ok


def test_a_timeout_counts_only_if_the_statement_had_the_processor(executor, database):
    executor.execute(database, "SELECT 1")  # starts a worker
    for worker in workers():
        worker.suspend()
    assert executor.execute(database, "SELECT 2").rows == ((2,),)  # by the next worker
    for worker in workers():  # of earlier tests
        worker.resume()
    late = executor.execute(database, ENDLESS)
    had_it = late.message == "stopped after 0.5 seconds"  # not on a machine with much else to do
    assert had_it or late.message == "stopped before it had computed for half of its 0.5 seconds"
    assert (executor.execute(database, ENDLESS) is late) == had_it


def test_a_gold_result_is_kept_when_the_machine_is_busy(database, monkeypatch):
    monkeypatch.setattr("mtsql.sql.execute.MAX_CACHED_BYTES", 2_000)
    executor, gold = Executor(), NAMES
    rows = executor.gold_rows(database, gold)
    executor.execute(database, "SELECT 1")  # pushes it out of the cache
    executor.timeout_seconds = 0.0
    assert execution_match(executor, database, gold, gold) is False  # the prediction has no time to run
    assert executor.gold_rows(database, gold) == rows
    with pytest.raises(ValueError, match="gold query failed"):
        executor.gold_rows(database, gold + " ORDER BY name")


def test_cached_results_respect_the_limit_asked_for(executor, database):
    query = "SELECT n FROM number"
    assert len(executor.gold_rows(database, query)) == 2_000
    assert len(executor.execute(database, query).rows) == 100
    assert executor.execute(database, query).truncated
    assert executor.predicted_rows(database, 1_999, query) is None
    assert len(executor.predicted_rows(database, 2_000, query)) == 2_000


@pytest.mark.parametrize(
    ("gold", "pred", "ordered", "equal"),
    [
        ([], [], False, True),
        ([(1,)], [], False, False),
        ([(1, "a")], [("a", 1)], True, True),
        ([(1,), (2,)], [(2,), (1,)], False, True),
        ([(1,), (2,)], [(2,), (1,)], True, False),
        ([(1,), (1,), (2,)], [(1,), (2,), (2,)], False, False),
        ([(3,)], [(3.0,)], False, True),
        ([(1, 10)], [(1.0, 10)], False, False),  # "1.0" sorts behind "10", so says the official check
        ([(3,)], [("3",)], False, False),
        ([(1,)], [(1, 1)], False, False),
        ([(1, 2), (2, 1)], [(1, 1), (2, 2)], False, False),
        ([(1, 2), (3, 4)], [(2, 1), (3, 4)], False, False),  # no one permutation does both
        ([(None, b"x")], [(b"x", None)], False, True),
    ],
)
def test_results_equal(gold, pred, ordered, equal):
    assert results_equal(gold, pred, ordered) is equal


def test_results_equal_ends_where_columns_are_permutations_of_one_another():
    """Each row is there in all rotations; half of them are then turned round."""
    rng = random.Random(0)
    rows = [rng.sample(range(9), 9) for _ in range(5_000)]
    gold = [tuple(row[(j + i) % 9] for j in range(9)) for row in rows for i in range(9)]
    start = time.process_time()
    assert results_equal(gold, [row[3:] + row[:3] for row in reversed(gold)], False)
    assert not results_equal(gold, [row[::-1] if i % 2 else row for i, row in enumerate(gold)], False)
    assert time.process_time() - start < 4
    shuffled = [list(zip(*(rng.sample(range(50_000), 50_000) for _ in range(9)), strict=True)) for _ in "ab"]
    wide = [tuple((i * j) % 7 for j in range(1_999)) for i in range(50)]
    start = time.process_time()
    assert not results_equal(*shuffled, False)
    assert results_equal(wide, [row[::-1] for row in wide], False)
    assert time.process_time() - start < 4


@pytest.mark.parametrize(
    ("gold", "pred", "match", "keeping_distinct"),
    [
        ("SELECT DISTINCT country FROM singer", "SELECT country FROM singer", True, False),
        ("SELECT count(DISTINCT age) FROM singer", "SELECT count(age) FROM singer", True, False),
        (NAMES, NAMES + " ORDER BY age", True, True),
        (NAMES + " ORDER BY name", NAMES + " ORDER BY name DESC", False, False),
        (NAMES + " ORDER  BY name", NAMES + " ORDER BY name DESC", True, True),  # two spaces: unordered
        (NAMES + " WHERE age > 90", "SELECT name, age FROM singer WHERE age > 90", True, True),
        (NAMES, NAMES + "; DROP TABLE singer", True, False),
        (NAMES + " WHERE age < 2020", NAMES + " WHERE age < YEAR(CURDATE())", True, True),
        (NAMES, NAMES + " WHERE age < YEAR ( CURDATE ( ) ) AND age > 1", False, False),  # it becomes 2020AND
        ("SELECT '2020'", "SELECT 'year(curdate())'", True, True),  # even there, as officially
        ("SELECT count(*) FROM singer", "SELECT count(*) FROM singer WHERE age > = 1", True, True),
        ("SELECT count(*) FROM singer", "SELECT count(*) FROM nowhere", False, False),
        (NAMES + " WHERE age > 90", "", False, False),
        (NAMES, f" ;\n{NAMES}", True, True),
        ("SELECT 'a;b distinct'", "SELECT 'a;b distinct'", True, True),
        ("SELECT n FROM number", "SELECT n + 0 FROM number", True, True),  # beyond the row limit
        ("SELECT n FROM number", "SELECT max(n, 1) FROM number", False, False),
        # DISTINCT as an operator is kept, and what is in quotes is not rewritten: both departures
        (NAMES + " WHERE age IS NOT DISTINCT FROM 30", NAMES + " WHERE age = 30", True, True),
        ("SELECT DISTINCT 1 is /**/ distinct -- y\n FROM 2 FROM singer", "SELECT 1 FROM singer", True, False),
        ("SELECT 'a > = b', \"< =\" FROM (SELECT 1 AS [< =])", "SELECT 'a > ' || '= b', 1", True, True),
    ],
)
def test_execution_match(executor, database, gold, pred, match, keeping_distinct):
    assert execution_match(executor, database, gold, pred) is match
    assert execution_match(executor, database, gold, pred, "keep_distinct") is keeping_distinct


ONE = "(SELECT DISTINCT 1 FROM number)"
LARGE = "SELECT 9223372036854775807 AS x"


@pytest.mark.parametrize(
    ("slow", "right"),
    [
        (f"SELECT count(*) FROM {ONE}, {ONE}, {ONE}", "SELECT 1"),  # no time for 2,000 ** 3
        (f"SELECT sum(DISTINCT x) FROM ({LARGE} UNION ALL {LARGE})", LARGE),  # the sum overflows
    ],
)
def test_distinct_stays_where_nothing_runs_without_it(executor, database, slow, right):
    for gold, pred in ((slow, slow), (slow, right), (right, slow)):
        assert execution_match(executor, database, gold, pred)
    assert not execution_match(executor, database, slow, NAMES)


def test_where_the_gold_query_keeps_its_distinct_the_prediction_does(executor, database, monkeypatch):
    monkeypatch.setattr("mtsql.sql.execute.MAX_GOLD_ROWS", 1_999)
    gold, even_and_odd = "SELECT DISTINCT n % 2 FROM number", "SELECT DISTINCT (n + 1) % 2 FROM number"
    assert execution_match(executor, database, gold, even_and_odd)
    assert not execution_match(executor, database, gold, "SELECT (n + 1) % 2 FROM number")
    with pytest.raises(ValueError, match=r"no such column: m.*SELECT DISTINCT m FROM number"):
        execution_match(executor, database, "SELECT DISTINCT m FROM number", even_and_odd)


def test_workers_do_not_pile_up(database):
    """As in training: new threads for every rollout, no garbage collection for long."""
    end_workers()  # those of other tests
    executor, before = Executor(), len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        for turn in range(5):
            with ThreadPoolExecutor(8) as pool:
                queries = [f"SELECT {number}, {turn}, max(n) FROM number" for number in range(40)]
                results = list(pool.map(lambda query: executor.execute(database, query), queries))
            assert [r.rows for r in results] == [((number, turn, 1_999),) for number in range(40)]
            assert len(os.listdir("/proc/self/fd")) - before <= 2 * 4
            assert len(workers()) <= 4
            assert max(worker.num_fds() for worker in workers()) <= 4
    finally:
        gc.enable()


def test_sorts_stay_in_memory_and_are_stopped(database):
    executor = Executor(timeout_seconds=20)
    small = executor.execute(database, "SELECT a.n FROM number a, singer, singer b ORDER BY a.n * b.age DESC")
    assert len(small.rows) == 10_000  # of 18,000: more than the page cache holds
    query = "SELECT zeroblob(140000) FROM number a, number b ORDER BY a.n + b.n"
    large = executor.execute(database, query)
    assert (large.status, large.message) == ("error", "the query needs more memory than it may have")
    assert executor.execute(database, query) is not large  # it is not remembered
    assert executor.execute(database, "SELECT 1").rows == ((1,),)


def workers(parent: int | None = None) -> list[psutil.Process]:
    """The processes that run SQL for `parent`, or for this one."""
    found = []
    for child in psutil.Process(parent).children():
        with suppress(psutil.Error):  # it has ended
            if "sql_worker" in " ".join(child.cmdline()):
                found.append(child)
    return found


def end_workers() -> None:
    while running := workers():
        for worker in running:
            worker.kill()


def test_a_worker_that_somebody_ended_is_replaced(executor, database):
    assert executor.execute(database, "SELECT 1").ok
    end_workers()
    assert executor.execute(database, "SELECT 2").rows == ((2,),)
    (worker,) = workers()
    assert os.getsid(worker.pid) != os.getsid(0)  # out of reach of a Ctrl-C


def test_without_a_free_descriptor_nothing_runs_and_later_limits_hold(executor, database):
    end_workers()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        result = executor.execute(database, "SELECT 1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert result.status == "error" and "the database does not open" in result.message
    assert executor.execute(database, "SELECT 1").rows == ((1,),)  # not remembered
    assert executor.execute(database, ENDLESS).status == "timeout"


def test_a_fork_has_limits_and_workers_of_its_own(executor, database):
    assert executor.execute(database, "SELECT 1").ok
    before = workers()
    if not (child := os.fork()):
        ran = executor.execute(database, ENDLESS).status, executor.execute(database, "SELECT 2").rows
        os._exit(0 if ran == ("timeout", ((2,),)) and not set(workers()) & set(before) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert executor.execute(database, "SELECT 3").rows == ((3,),) and set(workers()) == set(before)


def test_an_interrupted_statement_leaves_no_answer_behind(database):
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            Executor(timeout_seconds=5).execute(database, ENDLESS)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert Executor().execute(database, "SELECT 7").rows == ((7,),)


def test_a_statement_does_not_outlive_a_killed_process(database):
    call = f"Executor(timeout_seconds=2.0).execute({str(database)!r}, {ENDLESS!r})"
    code = f"from mtsql.sql.execute import Executor; {call}"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        while not (found := [w for w in workers(process.pid) if w.cpu_times().user > 0.12]):
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    _, running = psutil.wait_procs(found, timeout=10)
    assert not running


def test_values_are_those_of_sqlite(executor, database):
    values = "9223372036854775807, -9223372036854775807 - 1, -0.0, 1e999, 0.1, NULL, '', x'00ff'"
    values += ", 'Ä' || char(0, 128512)"
    assert executor.execute(database, "SELECT CAST(x'41FF42' AS TEXT)").rows == (("AB",),)
    with closing(sqlite3.connect(database)) as connection:
        expected = connection.execute(f"SELECT {values}").fetchall()
    assert repr(executor.execute(database, f"SELECT {values}").rows) == repr(tuple(expected))


def test_names_of_columns_and_messages_count_as_memory(database, monkeypatch):
    monkeypatch.setattr("mtsql.sql.execute.MAX_CACHED_BYTES", 2_000_000)
    executor, names = Executor(), "WITH t AS (SELECT 1 AS {}) SELECT {} FROM t"
    queries = [names.format("x" * length, ", ".join(["*"] * 100)) for length in range(9_000, 9_003)]
    results = [executor.execute(database, query) for query in queries]
    assert min(result.bytes for result in results) > 900_000
    assert executor.execute(database, queries[2]) is results[2]
    assert executor.execute(database, queries[0]) is not results[0]  # pushed out
    assert len(executor.execute(database, f"SELECT {'x' * 90_000}").message) == 1_000


def test_a_file_that_is_no_database_is_an_error_not_an_exception(tmp_path):
    path = tmp_path / "broken.sqlite"
    path.write_text("this is no database " * 100)
    assert Executor().execute(path, "SELECT 1 FROM t").status == "error"
    with pytest.raises(UserError, match="not a usable SQLite database"):
        SqlSchema.from_database(path)
