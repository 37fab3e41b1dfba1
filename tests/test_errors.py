"""Wrong SQL: the kinds of error of a prediction, by rules; hints of the names that there are."""

import random
from dataclasses import replace
from time import process_time

import pytest
from conftest import GOLD, make_database, make_episode, say
from hostile import STATEMENTS

from mtsql.data.schema import Schema
from mtsql.extras.chat.conversation import read_schema
from mtsql.extras.errors import ERRORS, add_errors, error_kinds
from mtsql.sql.execute import Executor, error_hint
from mtsql.sql.grammar import SqlSchema

COLUMNS = {"singer": "id name country age label_id", "label": "id city owner", "concert": "singer_id year"}
SCHEMA = SqlSchema({table: tuple(columns.split()) for table, columns in COLUMNS.items()})
NAMES = "SELECT name FROM singer"
JOINED = "SELECT T1.name FROM singer AS T1 JOIN label AS T2 ON T1.label_id = T2.id WHERE T2.city = 'Rome'"
CONCERTS = "SELECT T1.name FROM singer T1 JOIN concert T2 ON T1.id = T2.singer_id"
BUSY = CONCERTS + " GROUP BY T1.id HAVING count(*) > 2"
COMMA = "SELECT S.name FROM label AS L, singer S WHERE L.id = S.label_id"
BY_COUNTRY = "SELECT count(*), country FROM singer GROUP BY country"
LABELS = "FROM singer T1 JOIN label T2 ON T1.label_id = T2.id WHERE age"


def where(condition: str) -> str:
    return f"{NAMES} WHERE {condition}"


OLDER = where("age > (SELECT avg(age) FROM singer)")
BOTH = f"{where('age = 1')} INTERSECT {where('id = 2')}"
AGES = "SELECT name, age FROM singer"


PAIRS = [  # gold, prediction, kinds
    # one slip in a condition
    (where("age > 30"), where("age >= 30"), "constraint"),
    (where("age > 3 AND id < 9"), where("age > 3 OR id < 9"), "constraint"),
    (f"{NAMES} ORDER BY age LIMIT 3", f"{NAMES} ORDER BY age LIMIT 1", "constraint"),
    # a lost condition takes its joins, its grouping and its sub-query along
    (JOINED, NAMES, "constraint"),
    (JOINED, JOINED.replace("T2.city", "T2.owner"), "schema_linking"),
    (BUSY, NAMES, "constraint"),
    (BUSY, BUSY.replace("count(*)", "max(T2.year)"), "aggregation"),
    (where("id NOT IN (SELECT singer_id FROM concert)"), NAMES, "constraint"),
    (OLDER, OLDER.replace("avg", "max"), "aggregation"),
    # columns and tables
    (NAMES, "SELECT country FROM singer", "schema_linking"),
    (f"{NAMES} ORDER BY age", f"{NAMES} ORDER BY id", "schema_linking"),
    # aggregates, grouping, order, set operations, nesting
    (BY_COUNTRY, "SELECT count(*), country FROM singer", "aggregation"),
    (f"{NAMES} ORDER BY age DESC LIMIT 1", f"{NAMES} ORDER BY age LIMIT 1", "aggregation"),
    ("SELECT DISTINCT country FROM singer", "SELECT country FROM singer", "aggregation"),
    (BOTH, BOTH.replace("INTERSECT", "UNION"), "aggregation"),
    (BOTH, where("age = 1 AND id = 2"), "aggregation"),
    (f"{NAMES} EXCEPT {CONCERTS}", where("id NOT IN (SELECT singer_id FROM concert)"), "aggregation"),
    (where("age = (SELECT max(age) FROM singer)"), f"{NAMES} ORDER BY age DESC LIMIT 1", "aggregation"),
    # joins
    (CONCERTS, NAMES, "join_path"),
    (JOINED, JOINED.replace("JOIN", "LEFT JOIN"), "join_path"),
    (JOINED, JOINED.replace("label_id = ", "label_id != "), "join_path"),
    # two slips
    (where("age = 1"), where("country = 'x'"), "constraint schema_linking"),
    (JOINED, JOINED.replace("T1.label_id", "T1.id").replace("Rome", "Bern"), "constraint join_path"),
    # what is written otherwise is no slip, and so not counted beside one
    (JOINED + " AND T1.age = 5", COMMA + " AND S.age = '5'", "constraint"),
    (f"SELECT T2.id {LABELS} BETWEEN 1 AND 2", f"SELECT label_id {LABELS} >= 1 AND age <= 3", "constraint"),
    (BY_COUNTRY, "SELECT country AS c, count(id) AS n FROM singer GROUP BY 1 ORDER BY n", "aggregation"),
    (where("age = 1 OR age = 2"), f"SELECT x.name FROM ({AGES}) AS x WHERE x.age IN (1, 2, 3)", "constraint"),
    (where("age = 1"), f"WITH x AS ({AGES}) SELECT name FROM x WHERE x.age = 2", "constraint"),
    ("SELECT * FROM singer WHERE age = 1", "SELECT T1.* FROM singer AS T1 WHERE T1.age = 2", "constraint"),
    # neither rule applies
    ("SELECT age + id FROM singer", "SELECT age - id FROM singer", "other"),
]


@pytest.mark.parametrize(("gold", "predicted", "kinds"), PAIRS)
def test_pairs_by_hand(gold, predicted, kinds):
    assert error_kinds(gold, predicted, SCHEMA, True) == tuple(kinds.split())


def test_execution_stands_alone():
    assert error_kinds(JOINED, None, SCHEMA, True) == ("execution",)
    assert error_kinds(JOINED, NAMES, SCHEMA, False) == ("execution",)


WORDS = sorted({word for pair in PAIRS for query in pair[:2] for word in query.split()} | set("(),;'*.[]`"))


def mutated(draw: random.Random) -> str:
    """A prediction of PAIRS in which some words stand for some characters."""
    sql, at = draw.choice(PAIRS)[1], draw.randrange(120)
    words = draw.choices(WORDS, k=draw.randrange(10))
    return sql[:at] + " ".join(words) + sql[at + draw.randrange(20) :]


def test_unreadable_or_odd_sql_never_raises():
    draw = random.Random(0)
    odd = ["", "\0", "SELECT " * 3000, "x" * 200_000, "SELECT (" + "(" * 3000 + "1" + ")" * 3000 + ")"]
    odd += [where(" AND ".join(["age = 1"] * 400)), "SELECT count(*) FROM singer" + " JOIN label" * 50]
    odd += ["SELECT * FROM singer NATURAL JOIN (SELECT 1) JOIN nothing USING (id)"]
    odd += sorted({sql for _, sql, _ in STATEMENTS if len(sql) < 5_000})
    for text in odd + [mutated(draw) for _ in range(300)]:
        for gold, predicted in ((JOINED, text), (text, JOINED)):
            kinds = error_kinds(gold, predicted, SCHEMA, True)
            assert kinds == tuple(kind for kind in ERRORS if kind in kinds), text
            assert kinds and "execution" not in kinds and ("other" not in kinds or kinds == ("other",)), text


def test_shares_of_an_evaluation_by_hand(tiny):
    """A right answer, a wrong one, one that does not run, and a question whose gold SQL does not run."""
    right = {"db_id": "music", "gold": GOLD, "predicted": GOLD, "ex": 1, "gold_problem": None}
    wrong = right | {"predicted": GOLD.replace("france", "italy"), "ex": 0}
    failing = right | {"predicted": "SELECT x", "ex": 0}
    records = [right, wrong, failing, right | {"ex": 0, "gold_problem": "no such table"}]
    shares = add_errors(records, tiny.scorer)["errors"]
    assert [r["errors"] for r in records] == [[], ["constraint"], ["execution"], []]
    assert shares == dict.fromkeys(ERRORS, 0.0) | {"constraint": 0.25, "execution": 0.25}


# Hints


@pytest.fixture(scope="module")
def schema(tmp_path_factory) -> Schema:
    """Albums of singers, in a file and as the agent knows it."""
    script = 'create table Singer (id, Name, "Home Town"); create table album (id, singer_id, year);'
    return read_schema(make_database(tmp_path_factory.mktemp("hints") / "music.sqlite", script))


def hint_of(schema: Schema, sql: str) -> str:
    return error_hint(Executor().execute(schema.path, sql).message, sql, schema)


SINGER, ALBUM = 'Singer has id, Name, "Home Town"', "album has id, singer_id, year"
HINTS = {
    "SELECT title FROM album": ALBUM,
    "SELECT T1.name FROM album AS T1": f"name is in Singer; {ALBUM}",
    "SELECT nmae FROM singer": SINGER,
    "SELECT b.name FROM singer a JOIN album b ON a.id = b.singer_id": f"name is in Singer: a.name; {ALBUM}",
    "SELECT c.name FROM album": "name is in Singer",
    "SELECT title FROM singer JOIN album ON singer.id = singer_id": f"{SINGER}; {ALBUM}",
    "SELECT year FROM singer WHERE id IN (SELECT singer_id FROM albums)": "tables: Singer, album",
    "SELECT id FROM singer, album b": "id is in album: b.id; id is in Singer: singer.id",
    **dict.fromkeys(("SELECT count(* FROM singer", "SELECT max(count(*)) FROM singer", NAMES), ""),
}


@pytest.mark.parametrize(("sql", "hint"), HINTS.items())
def test_a_hint_names_what_there_is(schema, sql, hint):
    assert hint_of(schema, sql) == hint


def test_a_hint_says_how_a_query_gets_at_a_column(tmp_path):
    """By an alias, by joins over foreign keys either way, by none where no key leads; nearest first."""
    script = """create table label (id primary key, name, city);
        create table Singer (id primary key, name, label_id references label(id));
        create table album (id primary key, singer references Singer(id), title);
        create table "Hit List" (album_id references album(id), rank); create table town (city, size);"""
    schema = read_schema(make_database(tmp_path / "music.sqlite", script))

    def hint(sql: str) -> str:
        return hint_of(schema, sql).partition("; Singer has")[0].partition("; album has")[0]

    joined = "SELECT a.title FROM Singer AS a JOIN album AS B ON a.id = B.singer"
    assert hint(joined) == "title is in album: B.title"
    assert hint("SELECT title FROM Singer") == "title is in album: JOIN album ON album.singer = Singer.id"
    two = 'JOIN album ON album.singer = t1.id JOIN "Hit List" ON "Hit List".album_id = album.id'
    assert hint("SELECT t1.RANK FROM Singer AS t1") == f'RANK is in "Hit List": {two}'
    join, label = "JOIN Singer ON Singer.id = album.singer", "JOIN label ON label.id = Singer.label_id"
    assert hint("SELECT name FROM album") == f"name is in Singer: {join}; name is in label: {join} {label}"
    assert hint("SELECT size FROM Singer") == "size is in town"
    assert hint("SELECT city FROM Singer") == f"city is in label: {label}; city is in town"


def test_a_hint_is_about_the_part_of_the_query_that_fails(tmp_path):
    """A name of another SELECT cannot be used there, one of a SELECT around it can."""
    script = """create table Singer (id primary key, name);
        create table album (id primary key, singer references Singer(id), title); create table town (size);"""
    schema = read_schema(make_database(tmp_path / "music.sqlite", script))
    has = "album has id, singer, title"
    joined = f"name is in Singer: JOIN Singer ON Singer.id = album.singer; {has}"
    assert hint_of(schema, "SELECT name FROM Singer EXCEPT SELECT name FROM album") == joined
    assert hint_of(schema, "SELECT title FROM album WHERE name IN (SELECT name FROM Singer)") == joined
    parts = "SELECT t1.size FROM album AS t1 EXCEPT SELECT t1.size FROM town AS t1"
    assert hint_of(schema, parts) == f"size is in town; {has}"
    within = "SELECT name FROM Singer AS a WHERE id IN (SELECT B.name FROM album AS b)"
    assert hint_of(schema, within) == f"name is in Singer: a.name; {has}"
    shadowed = "SELECT title FROM album AS a WHERE id IN (SELECT a.size FROM Singer AS a)"
    assert hint_of(schema, shadowed) == "size is in town; Singer has id, name"
    both = "SELECT size FROM town WHERE size IN (SELECT id FROM Singer JOIN album AS b)"
    assert hint_of(schema, both) == "id is in album: b.id; id is in Singer: Singer.id"
    assert hint_of(schema, "SELECT t.title FROM (SELECT id FROM album) AS t") == "title is in album"
    title = "title is in album: JOIN album ON album.singer = Singer.id"
    assert hint_of(schema, "SELECT name FROM Singer ORDER BY title") == f"{title}; Singer has id, name"


def test_a_hint_in_a_wide_schema_takes_no_square_time(schema):
    """3,000 tables in a ring of foreign keys, all with the column that is missed."""
    one = replace(schema.tables[0], columns=(("a", ""),))
    made = [replace(one, name=f"t{i}", foreign_keys=(("a", f"t{(i + 1) % 3000}", "a"),)) for i in range(3000)]
    begun = process_time()
    said = error_hint("no such column: t0.a", "SELECT b FROM t9", replace(schema, tables=tuple(made)))
    assert said.startswith("a is in t9: t9.a; a is in t8: JOIN t8 ON t8.a = t9.a; a is in t10: JOIN t10")
    assert process_time() - begun < 1


def test_sql_that_cannot_be_read_has_a_hint_without_its_tables(schema):
    for sql in ("", "SELECT " + "(" * 5_000 + "x", "SELECT x FROM album" + " JOIN album" * 40, "x" * 200_000):
        assert error_hint("no such column: year", sql, schema) == "year is in album"
        assert error_hint("no such column: nothing", sql, schema) == ""


def test_quotes_and_dots_of_a_message_are_no_part_of_the_name(schema):
    message = 'no such column: "Home Town" - should this be a string literal in single-quotes?'
    assert error_hint(message, "SELECT 1", schema) == '"Home Town" is in Singer'
    assert error_hint("no such column: T1.Home Town", "SELECT 1", schema) == '"Home Town" is in Singer'
    assert error_hint("no such column: main.T1.Home Town", "SELECT 1", schema) == '"Home Town" is in Singer'
    odd = replace(schema, tables=(replace(schema.tables[0], columns=(('a "b', ""), ("c.d", ""))),))
    assert error_hint('no such column: T1.a "b', "SELECT 1", odd) == '"a ""b" is in Singer'
    assert error_hint("no such column: c.d", "SELECT 1", odd) == '"c.d" is in Singer'


@pytest.mark.parametrize("piece", ["a.", " - should ", '"', "a"])
def test_a_long_name_takes_no_square_time(schema, piece):
    begun = process_time()
    for kind in ("no such table", "no such column", "ambiguous column name"):
        error_hint(f"{kind}: {100_000 // len(piece) * piece}\n", "SELECT 1", schema)
    assert process_time() - begun < 1  # square time is a minute and more


def test_the_agent_sees_hints_only_where_they_are_asked_for(tiny):
    call = '<tool_call>\n{"name": "exec_sql", "arguments": {"code": "SELECT nme FROM singer"}}\n</tool_call>'
    shown = []
    for asked in (False, True):
        episode = make_episode(tiny, error_hints=asked)
        assert say(episode, call)
        shown.append(episode.trajectory.observations[0])
    assert [seen.outcome for seen in shown] == ["error", "error"]
    assert shown[0].text == "error: no such column: nme"
    assert shown[1].text == f"{shown[0].text}; singer has id, name, country, age, label_id"
