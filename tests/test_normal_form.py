"""The normal form of SQL: how it reads, and that no verdict depends on it."""

from dataclasses import replace
from time import process_time

import pytest
from conftest import GOLD, SAMPLE, SHARED, environment_of, make_episode, say

from mtsql.agent.tools import MEMORY_RETRIEVE
from mtsql.data.datasets import HistoryTurn, examples, load_dataset
from mtsql.recipes.mtsql_r1 import tool_call
from mtsql.report.records import chat_record
from mtsql.sql.execute import Executor
from mtsql.sql.score import Scorer
from mtsql.sql.text import normal_form

REAL = SHARED / "data"
FILES = [SAMPLE / "dev.json", *(REAL / f"{name}/dev.json" for name in ("sparc", "cosql", "spider"))]


T1 = "SELECT T1 . Name FROM singer AS T1 join label as t2 ON t1 . label_id = T2 . ID"


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("SELECT COUNT ( * ) FROM Singer AS T1", "SELECT count(*) FROM singer AS t1"),
        (T1, "SELECT t1.name FROM singer AS t1 JOIN label AS t2 ON t1.label_id = t2.id"),
        ('SELECT "Name" WHERE country="it\'s  France"', "SELECT \"Name\" WHERE country = 'it''s  France'"),
        ("SELECT name WHERE age > =30 AND age! = -1.5", "SELECT name WHERE age >= 30 AND age != -1.5"),
        ("SELECT age-1, age - 1, age * 2, 'a'||name", "SELECT age-1, age - 1, age * 2, 'a' || name"),
        ("select  NAME , id -- all\nIN(SELECT 1 from SINGER);", "SELECT name, id IN (SELECT 1 FROM singer)"),
        ('SELECT "NAME" WHERE age = "a ""b"""', 'SELECT "NAME" WHERE age = \'a "b"\''),
        ('SELECT \'say "x"\', "" -- "y"', "SELECT 'say \"x\"', ''"),
        ("SELECT [Name], `age`, x'ff' FROM singer", "SELECT [Name], `age`, x'ff' FROM singer"),
        ("SELECT NAME WHERE name = 'open", "SELECT NAME WHERE name = 'open"),
        ('SELECT age "n", id AS "M" ORDER BY "N", "m"', 'SELECT age "n", id AS "M" ORDER BY "N", "m"'),
        ('WITH c("x") AS (SELECT 1) SELECT "x"', 'WITH c("x") AS (SELECT 1) SELECT "x"'),
        ("SELECT 1. AS n,.5 FROM t WHERE a < 2.e3", "SELECT 1. AS n,.5 FROM t WHERE a < 2.e3"),
        # `count` is a column, since no bracket follows.
        ('SELECT "ROWID", "max" (AGE), count FROM t', 'SELECT "ROWID", "max" (age), count FROM t'),
        ("SELECT price$,prix€, cafe\u0301 FROM t", "SELECT price$, prix€, cafe\u0301 FROM t"),
    ],
)
def test_how_it_reads(written, normal, tiny):
    assert normal_form(written, tiny.schema) == normal
    assert normal_form(normal, tiny.schema) == normal


def test_of_two_spellings_the_one_of_the_table_that_is_read_counts():
    tables, databases = SAMPLE / "tables.json", SAMPLE / "database"
    schema = load_dataset([(SAMPLE / "dev.json", tables, databases)]).schemas["concert_singer"]
    assert normal_form("select NAME, YEAR from CONCERT", schema) == "SELECT Name, Year FROM concert"
    assert normal_form("select COUNTRY from SINGER", schema) == "SELECT Country FROM singer"


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{len(file.parts)}")
def test_no_verdict_depends_on_it(file):
    """EX and EM of a gold SQL's normal form against the gold SQL; no exception is known among all."""
    if not file.exists():
        pytest.skip("../shared/data is not here")
    own = file.is_relative_to(SAMPLE)
    tables, databases = (SAMPLE, SAMPLE) if own else (REAL / "sparc", REAL)
    dataset = load_dataset([(file, tables / "tables.json", databases / "database")], allow_missing=True)
    scorer, seen = Scorer(dataset.schemas, Executor()), set()
    for example in examples(dataset.dialogues)[:: 1 if own else 4]:
        key = example.db_id, example.gold_sql
        if key in seen or scorer.gold_problem(*key):
            continue
        seen.add(key)
        normal = normal_form(example.gold_sql, dataset.schemas[example.db_id])
        assert normal_form(normal, dataset.schemas[example.db_id]) == normal
        assert scorer.ex(*key, normal), (example.gold_sql, normal)
        assert scorer.em(*key, normal) == scorer.em(*key, example.gold_sql), (example.gold_sql, normal)
    assert len(seen) > 80


@pytest.mark.parametrize("piece", ["(1),", "(select ", "w AS (ORDER BY 1),"])
def test_a_long_query_takes_no_square_time(tiny, piece):
    schema, started = make_episode(tiny).schema, process_time()
    normal_form("VALUES " + piece * (90_000 // len(piece)), schema)
    assert process_time() - started < 3


def test_prompt_memory_and_exported_chat_show_it(tiny):
    turn = HistoryTurn("How many?", 'select COUNT ( * ) from SINGER where Country = "france"')
    example = replace(make_episode(tiny).example, history=(turn,))
    environment = environment_of(tiny)
    (episode,) = environment.episodes(example, [0])
    normal = "SELECT count(*) FROM singer WHERE country = 'france'"
    assert f"1. How many?\n{normal}\n" in tiny.tokens.decode(episode.trajectory.ids)
    assert say(episode, tool_call(MEMORY_RETRIEVE, GOLD))
    assert f"1. {normal} -> 1" in episode.trajectory.observations[-1].text
    say(episode, environment.recipe.answer(GOLD))
    assert normal in chat_record(episode.trajectory, example, environment)["messages"][0]["content"]
