"""Hostile SQL: files unchanged, limits kept, memory bounded, every result of the right type."""

import hashlib
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress

import pytest
from hostile import STATEMENTS, make_database, resident_bytes, run_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtsql.extras.authors_rewards import whole_clause_f1
from mtsql.extras.prediction_files import with_gold_values
from mtsql.sql.execute import Executor, as_scored, execution_match, results_equal
from mtsql.sql.grammar import SqlParseError, SqlSchema
from mtsql.sql.match import exact_set_match, partial_match
from mtsql.sql.score import clause_f1

SECONDS = 0.2
GOLD = "SELECT name FROM singer WHERE age > 20 ORDER BY name LIMIT 3"
SEEDS = (
    GOLD,
    "SELECT T1.name, count(*) FROM singer AS T1 JOIN number AS T2 ON T1.age = T2.n GROUP BY T1.name HAVING count(*) > 1",
    "SELECT DISTINCT country FROM singer WHERE name LIKE '%a%' UNION SELECT w FROM words",
    "WITH x AS (SELECT n FROM number) SELECT max(n) OVER (ORDER BY n) FROM x WHERE n NOT IN (SELECT age FROM singer)",
    "SELECT CASE WHEN age BETWEEN 1 AND 3 THEN 'a' ELSE NULL END FROM singer WHERE country IS NOT NULL OR age <> 3",
)
WORDS = sorted({*" ".join(SEEDS).split(), *"( ) , ; ' \" -- /* */ * . = AS ON \0".split(" ")})


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return make_database(tmp_path_factory.mktemp("hostile") / "concerts.sqlite")


def in_new_process(function, *arguments):
    """What it returns there: the memory of this process moves by what earlier tests left to be freed."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def one_after_the_other(database):
    start = resident_bytes()
    outcomes = run_all(Executor(timeout_seconds=SECONDS), database)
    return outcomes, max(o.resident for o in outcomes) - start


def at_once(database):
    executor = Executor(timeout_seconds=SECONDS)
    start = resident_bytes()
    some = [sql for kind, sql, _ in STATEMENTS if kind in ("unbounded recursion", "cell bomb", "cross join")]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda sql: executor.execute(database, sql), some))
    after = executor.execute(database, "SELECT count(*) FROM singer").rows
    return results, resident_bytes() - start, after


def test_the_hostile_suite(database, monkeypatch):
    monkeypatch.chdir(database.parent)
    before = hashlib.sha256(database.read_bytes()).digest()
    outcomes, more = in_new_process(one_after_the_other, database)
    assert len(outcomes) >= 200
    assert not [(o.kind, o.sql[:100], o.status, o.message[:100]) for o in outcomes if o.status not in o.right]
    assert [(o.kind, o.sql[:100], o.seconds) for o in outcomes if o.seconds > SECONDS + 1] == []
    assert more < 200_000_000
    assert hashlib.sha256(database.read_bytes()).digest() == before
    assert list(database.parent.iterdir()) == [database]
    assert [o for o in outcomes if str(database.parent) in o.message] == []


def test_hostile_statements_at_once(database):
    results, more, after = in_new_process(at_once, database)
    assert results and {r.status for r in results} <= {"rows", "empty", "error", "timeout"}
    assert more < 200_000_000 and after == ((3,),)


texts = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join),
    st.builds(
        lambda seed, at, length, new: seed[:at] + new + seed[at + length :],
        st.sampled_from(SEEDS), st.integers(0, 120), st.integers(0, 20),
        st.one_of(st.sampled_from(WORDS), st.text(max_size=5)),
    ),
)  # fmt: skip


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(sql=texts)
def test_fuzzed_sql_is_run_read_and_scored(database, fuzz_executor, sql):
    schema = SqlSchema.from_database(database)
    gold_rows = fuzz_executor.execute(database, GOLD).rows
    begin = time.monotonic()
    result = fuzz_executor.execute(database, sql)
    assert time.monotonic() - begin < SECONDS + 1
    for keep_limit in (False, True):
        with suppress(SqlParseError):
            assert exact_set_match(sql, sql, schema, {}, keep_limit)
    assert {part.f1 for part in partial_match(GOLD, sql, schema, {}).values()} <= {0.0, 1.0}
    assert 0.0 <= clause_f1(GOLD, sql, schema) <= 1.0
    assert 0.0 <= whole_clause_f1(GOLD, sql, schema) <= 1.0
    for candidate in with_gold_values(GOLD, sql):
        found = fuzz_executor.execute(database, *as_scored(candidate, "official"))
        right = execution_match(fuzz_executor, database, GOLD, candidate)
        expected = found.ok and results_equal(gold_rows, found.rows, True)
        assert found.truncated or right == expected, candidate
    right = execution_match(fuzz_executor, database, GOLD, sql, "bird")
    assert result.truncated or right == (result.ok and set(result.rows) == set(gold_rows))


@pytest.fixture(scope="module")
def fuzz_executor(database):
    before = hashlib.sha256(database.read_bytes()).digest()
    yield Executor(timeout_seconds=SECONDS)
    assert hashlib.sha256(database.read_bytes()).digest() == before
