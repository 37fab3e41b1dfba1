"""Hints behind SQLite's errors: the names that there are."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from time import process_time

import pytest
from conftest import environment_of, make_episode, say

from mtsql.data.schema import Schema, SchemaTable
from mtsql.sql.execute import Executor
from mtsql.sql.hints import error_hint


@pytest.fixture(scope="module")
def schema(tmp_path_factory) -> Schema:
    """Albums of singers, in a file and as the agent knows it."""
    path = tmp_path_factory.mktemp("hints") / "music.sqlite"
    columns = {"Singer": ("id", "Name", "Home Town"), "album": ("id", "singer_id", "year")}
    with closing(sqlite3.connect(path)) as connection:
        for table, names in columns.items():
            quoted = ", ".join(f'"{name}"' for name in names)
            connection.execute(f"create table {table} ({quoted})")
    tables = tuple(
        SchemaTable(table, tuple((n, "text") for n in names), (), (), None)
        for table, names in columns.items()
    )
    return Schema("music", path, tables, {})


@pytest.mark.parametrize(
    ("sql", "hint"),
    [
        ("SELECT title FROM album", "album has id, singer_id, year"),
        ("SELECT T1.name FROM album AS T1", "name is in Singer; album has id, singer_id, year"),
        ("SELECT nmae FROM singer", "Singer has id, Name, \"Home Town\""),
        ("SELECT b.name FROM singer a JOIN album b ON a.id = b.singer_id",
         "name is in Singer; album has id, singer_id, year"),
        ("SELECT c.name FROM album", "name is in Singer"),
        ("SELECT title FROM singer JOIN album ON singer.id = singer_id",
         "Singer has id, Name, \"Home Town\"; album has id, singer_id, year"),
        ("SELECT year FROM singer WHERE id IN (SELECT singer_id FROM albums)", "tables: Singer, album"),
        ("SELECT id FROM singer JOIN album ON singer.id = singer_id", "id is in Singer, album"),
        ("SELECT count(* FROM singer", ""),
        ("SELECT max(count(*)) FROM singer", ""),
        ("SELECT name FROM singer", ""),
    ],
)  # fmt: skip
def test_a_hint_names_what_there_is(schema, sql, hint):
    result = Executor().execute(schema.path, sql)
    assert error_hint(result.message, sql, schema) == hint


def test_sql_that_cannot_be_read_has_a_hint_without_its_tables(schema):
    for sql in ("", "SELECT " + "(" * 5_000 + "x", "SELECT x FROM album" + " JOIN album" * 40, "x" * 200_000):
        assert error_hint("no such column: year", sql, schema) == "year is in album"
        assert error_hint("no such column: nothing", sql, schema) == ""


def test_quotes_and_dots_of_a_message_are_no_part_of_the_name(schema):
    message = 'no such column: "Home Town" - should this be a string literal in single-quotes?'
    assert error_hint(message, "SELECT 1", schema) == '"Home Town" is in Singer'
    assert error_hint("no such column: T1.Home Town", "SELECT 1", schema) == '"Home Town" is in Singer'


@pytest.mark.parametrize("piece", ["a.", " - should ", '"', "a"])
def test_a_long_name_takes_no_square_time(schema, piece):
    begun = process_time()
    for kind in ("no such table", "no such column", "ambiguous column name"):
        error_hint(f"{kind}: {100_000 // len(piece) * piece}\n", "SELECT 1", schema)
    assert process_time() - begun < 1  # square time is a minute and more


def test_the_agent_sees_hints_only_where_they_are_asked_for(tiny):
    example = make_episode(tiny).example
    call = '<tool_call>\n{"name": "exec_sql", "arguments": {"code": "SELECT nme FROM singer"}}\n</tool_call>'
    shown = []
    for asked in (False, True):
        environment = environment_of(tiny, error_hints=asked)
        (episode,) = environment.episodes(example, [0])
        assert say(episode, call)
        shown.append(episode.trajectory.observations[0])
    assert [seen.outcome for seen in shown] == ["error", "error"]
    assert shown[0].text == "error: no such column: nme"
    assert shown[1].text == f"{shown[0].text}; singer has id, name, country, age, label_id"
