"""Prediction files in the official formats: tables by hand, misaligned lines, comparison, gold values."""

import io
import json
import sqlite3
import sys
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest

from mtsql.config import user_errors
from mtsql.errors import UserError
from mtsql.extras.prediction_files import compare, main, read_pairs
from mtsql.sql.match import whole_clause_f1
from mtsql.sql.structure import SqlSchema
from mtsql.sql.text import with_gold_values

GOLD = """SELECT name FROM singer\tmusic
SELECT name FROM singer WHERE age > 20 AND country = 'France'\tmusic

SELECT DISTINCT country FROM singer\tmusic
SELECT count(*) FROM singer GROUP BY country\tmusic
SELECT name FROM singer ORDER BY age LIMIT 1\tmusic
"""
PRED = """SELECT name FROM singer
SELECT name FROM singer WHERE age > 99 AND country = 'France'

SELECT country FROM singer
SELECT count(*) FROM singer s GROUP BY s.country
none
"""


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "database" / "music"
    folder.mkdir(parents=True)
    connection = sqlite3.connect(folder / "music.sqlite")
    connection.executescript(
        "CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT, country TEXT, age INTEGER);"
        "INSERT INTO singer VALUES (1, 'Ann', 'France', 30), (2, 'Bob', 'France', 25), (3, 'Cy', 'Chad', 30);"
    )
    connection.close()
    entry = {
        "db_id": "music", "table_names_original": ["singer"], "table_names": ["singer"],
        "column_names_original": [[-1, "*"], [0, "id"], [0, "name"], [0, "country"], [0, "age"]],
        "column_names": [[-1, "*"], [0, "id"], [0, "name"], [0, "country"], [0, "age"]],
        "column_types": ["text", "number", "text", "text", "number"], "primary_keys": [1], "foreign_keys": [],
    }  # fmt: skip
    (tmp_path / "tables.json").write_text(json.dumps([entry]))
    (tmp_path / "gold.txt").write_text(GOLD)
    (tmp_path / "pred.txt").write_text(PRED)
    return tmp_path


def evaluate(folder, *options):
    """evaluate.py in this process: what it prints and its exit code."""
    out, err, returncode = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["evaluate.py", *options])
        try:
            user_errors(main)
        except SystemExit as error:
            returncode = error.code
    return SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue(), returncode=returncode)


def evaluate_files(folder, *options, gold="gold.txt", pred="pred.txt"):
    files = ("--gold", gold, "--pred", pred, "--databases", "database", "--tables", "tables.json")
    return evaluate(folder, *files, *options)


def test_the_official_tables(files):
    run = evaluate_files(files, "--etype", "all", "--json", "out.json")
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines()]
    assert ["count", "3", "2", "0", "0", "5", "2"] in rows
    assert ["execution", "1.000", "0.000", "0.000", "0.000", "0.600", "0.000"] in rows
    assert ["exact", "match", "0.667", "0.500", "0.000", "0.000", "0.600", "0.500"] in rows
    assert ["count", "2", "2", "1", "0", "0"] in rows
    assert ["exact", "match", "1.000", "0.500", "0.000", "0.000", "0.000"] in rows
    assert "the official grammar cannot read 2 of 5 predictions" in run.stdout
    saved = json.loads((files / "out.json").read_text())
    items = saved["per_item"]
    assert [item["ex"] for item in items] == [1, 0, 1, 1, 0]
    assert [item["em"] for item in items] == [1, 1, 1, 0, 0]
    assert [item["em_string"] for item in items] == [1, 0, 0, 0, 0]
    assert [item["ex_keep_distinct"] for item in items] == [1, 0, 0, 1, 0]
    assert [item["ex_bird"] for item in items] == [1, 0, 1, 1, 0]
    assert [item["pred_parses"] for item in items] == [True, True, True, False, False]
    assert [item["status"] for item in items] == ["rows", "empty", "rows", "rows", "error"]
    assert [item["hardness"] for item in items] == ["easy", "medium", "easy", "easy", "medium"]
    assert items[4]["partial_f1"]["where"] == 1.0 and items[4]["partial_f1"]["select"] == 0.0
    assert saved["summary"]["joint_all"] == {"count": 2, "ex": 0.0, "em": 0.5}
    nothing = {"acc": 0.0, "rec": 0.0, "f1": 0.0}
    assert set(map(str, saved["summary"]["levels"]["hard"]["partial"].values())) == {str(nothing)}


def test_options_of_the_official_tool(files):
    plugged = evaluate_files(files, "--plug-value", "--etype", "exec", "--json", "out.json")
    assert plugged.returncode == 0 and "EXACT" not in plugged.stdout
    items = json.loads((files / "out.json").read_text())["per_item"]
    assert [item["ex"] for item in items] == [1, 1, 1, 1, 0]
    assert "em" not in items[0] and "em_string" not in items[0]
    assert evaluate_files(files, "--keep-distinct", "--json", "out.json").returncode == 0
    items = json.loads((files / "out.json").read_text())["per_item"]
    assert [item["ex"] for item in items] == [1, 0, 0, 1, 0]
    assert evaluate_files(files, "--etype", "match", "--json", "out.json").returncode == 0
    assert "ex" not in json.loads((files / "out.json").read_text())["per_item"][0]


def test_every_database_of_a_test_suite_must_agree(files):
    folder = files / "database" / "music"
    (folder / "music_2.sqlite").write_bytes((folder / "music.sqlite").read_bytes())
    connection = sqlite3.connect(folder / "music_2.sqlite")
    connection.execute("UPDATE singer SET age = 100 WHERE id = 1")
    connection.commit()
    connection.close()
    (files / "one.txt").write_text("SELECT name FROM singer WHERE age = 25\tmusic\n")
    (files / "other.txt").write_text("SELECT name FROM singer WHERE age < 30\n")
    assert "execution            1.000" in evaluate_files(files, gold="one.txt", pred="other.txt").stdout
    (files / "one.txt").write_text("SELECT name FROM singer WHERE age = 30\tmusic\n")
    (files / "other.txt").write_text("SELECT name FROM singer WHERE age > 25\n")
    run = evaluate_files(files, "--json", "out.json", gold="one.txt", pred="other.txt")
    assert "execution            0.000" in run.stdout
    (item,) = json.loads((files / "out.json").read_text())["per_item"]
    assert (item["ex"], item["ex_keep_distinct"], item["ex_bird"]) == (0, 0, 0)
    assert item["status"] == "rows"
    connection = sqlite3.connect(folder / "music_2.sqlite")
    connection.executescript("DROP TABLE singer; CREATE TABLE singer (id INTEGER, name TEXT, age INTEGER)")
    connection.close()
    (files / "other.txt").write_text("SELECT name FROM singer WHERE age = 30 AND country <> 'x'\n")
    evaluate_files(files, "--json", "out.json", gold="one.txt", pred="other.txt")
    (item,) = json.loads((files / "out.json").read_text())["per_item"]
    assert (item["ex"], item["status"]) == (0, "error")  # of the database that made it wrong


@pytest.mark.parametrize("option", ["--plug-value", "--keep-distinct"])
def test_further_metrics_are_of_the_text_that_ex_tried(files, option):
    (files / "one.txt").write_text("SELECT DISTINCT name FROM singer WHERE country = 'Chad'\tmusic\n")
    (files / "other.txt").write_text("SELECT DISTINCT name FROM singer WHERE country = 'Chile'\n")
    right = int(option == "--plug-value")
    assert evaluate_files(files, option, "--json", "out.json", gold="one.txt", pred="other.txt").stdout
    (item,) = json.loads((files / "out.json").read_text())["per_item"]
    assert (item["ex"], item["ex_keep_distinct"], item["ex_bird"]) == (right,) * 3
    (files / "one.txt").write_text("SELECT name FROM singer WHERE id = 1\tmusic\n")
    (files / "other.txt").write_text("SELECT name FROM singer WHERE id = value\n")  # officially 1
    assert evaluate_files(files, "--json", "out.json", gold="one.txt", pred="other.txt").stdout
    (item,) = json.loads((files / "out.json").read_text())["per_item"]
    metrics = ("ex", "ex_keep_distinct", "ex_bird", "em", "em_string")
    assert [item[metric] for metric in metrics] == [1] * 5


LINES = PRED.splitlines(keepends=True)


@pytest.mark.parametrize(
    ("pred", "message"),
    [
        ("".join(LINES[:-1]), "gold.txt, line 6 has no prediction: interaction 2 has 3 lines there and 2"),
        ("".join(LINES[:2]), "gold.txt, line 4 has no prediction"),
        ("".join(LINES[:1] + LINES[2:]), "gold.txt, line 2 has no prediction"),
        (PRED + "SELECT 1\n", "pred.txt, line 7 has no gold query"),
        (PRED + "\nSELECT 1\n", "pred.txt, line 8 has no gold query"),
        (PRED.replace("\n\n", "\n"), "pred.txt, line 3 has no gold query"),
        ("", "gold.txt, line 1 has no prediction"),
    ],
)
def test_a_line_too_few_or_too_many_is_named(files, pred, message):
    (files / "pred.txt").write_text(pred)
    with pytest.raises(UserError) as raised:
        read_pairs(files / "gold.txt", files / "pred.txt")
    assert message in str(raised.value)


def test_wrong_files_end_with_one_sentence_and_write_nothing(files):
    def fails(message, *options, **changed):
        run = evaluate_files(files, "--json", "out.json", *options, **changed)
        assert run.returncode == 2 and message in run.stderr and "Traceback" not in run.stderr
        assert not (files / "out.json").exists()

    (files / "bad.txt").write_text("SELECT name FROM singer\n")
    fails("bad.txt, line 1: expected SQL, a tab and the name of a database", gold="bad.txt")
    (files / "bad.txt").write_text(GOLD.replace("music", "opera"))
    fails("bad.txt, line 1: there is no database", gold="bad.txt")
    (files / "bad.txt").write_bytes(b"\xff\xfe\x00")
    fails("bad.txt is not UTF-8", pred="bad.txt")
    fails("nowhere.txt does not exist", pred="nowhere.txt")
    fails(". is a folder, not a file", gold=".")
    (entry,) = json.loads((files / "tables.json").read_text())
    entry["column_names_original"][1][1] = None
    (files / "bad.json").write_text(json.dumps([entry | {"foreign_keys": [[1, 2]]}]))
    fails("bad.json: expected databases with Spider's fields", "--tables", "bad.json")
    fails("unrecognized arguments: --plug", "--plug")
    for seconds in ("nan", "-1.0", "0.0", "inf"):
        wrong = f"--sql-timeout: should be at least 0.01 and finite, not {seconds}"
        fails(wrong, f"--sql-timeout={seconds}")
    run = evaluate(files, "--gold", "gold.txt", "--pred", "pred.txt", "--databases", "database")
    assert run.returncode == 2 and "give --tables" in run.stderr


def test_a_prediction_for_another_database_is_misaligned(files):
    (files / "gold.txt").write_text(GOLD.replace("music", "opera", 1))
    (files / "pred.txt").write_text(PRED.replace("\n", "\tmusic\n", 1))
    with pytest.raises(UserError, match=r"pred.txt, line 1 is for database music, but .* asks opera"):
        read_pairs(files / "gold.txt", files / "pred.txt")


def test_gold_that_fails_or_cannot_be_read_is_wrong_and_listed(files):
    (files / "gold.txt").write_text("SELECT upper(name) FROM singer\tmusic\nSELECT name FROM singer\tmusic\n")
    (files / "pred.txt").write_text("SELECT upper(name) FROM singer\nSELECT name FROM singer\n")
    run = evaluate_files(files, "--json", "out.json")
    assert run.returncode == 0 and "gold unreadable: gold line 1" in run.stdout
    items = json.loads((files / "out.json").read_text())["per_item"]
    assert [(i["ex"], i["em"], i["hardness"]) for i in items] == [(1, 0, None), (1, 1, "easy")]


def test_comparison_of_two_evaluations(files):
    assert evaluate_files(files, "--json", "a.json").returncode == 0
    (files / "pred.txt").write_text(GOLD.replace("\tmusic", ""))
    assert evaluate_files(files, "--json", "b.json").returncode == 0
    run = evaluate(files, "--compare", "a.json", "b.json")
    assert run.returncode == 0
    row = next(line.split() for line in run.stdout.splitlines() if line.startswith("ex "))
    assert row[:4] == ["ex", "60.0", "100.0", "-40.0"] and row[-1] == "0.5"
    reverse = compare(files / "b.json", files / "a.json")
    assert "+40.0" in reverse
    (files / "c.json").write_text(
        json.dumps({"per_item": json.loads((files / "a.json").read_text())["per_item"][1:]})
    )
    run = evaluate(files, "--compare", "a.json", "c.json")
    assert run.returncode == 2 and "compare the same questions" in run.stderr
    run = evaluate(files, "--compare", "a.json", "pred.txt")
    assert run.returncode == 2 and "is not valid JSON" in run.stderr
    (files / "c.json").write_text('{"per_item": [{"turn": 0}]}')
    run = evaluate(files, "--compare", "a.json", "c.json")
    assert run.returncode == 2 and "c.json is no evaluation" in run.stderr


def test_gold_values_fill_every_slot():
    gold = "SELECT name FROM t WHERE age > 20 AND city = 'Rome'"
    tried = list(with_gold_values(gold, "SELECT name FROM t1 WHERE age > -3 LIMIT 7"))
    assert tried[0] == "SELECT name FROM t1 WHERE age > -3 LIMIT 7"
    assert sorted(tried[1:]) == sorted(
        f"SELECT name FROM t1 WHERE age > {a} LIMIT {b}" for a in ("20", "'Rome'") for b in ("20", "'Rome'")
    )
    assert list(with_gold_values("SELECT name FROM t", "SELECT 1")) == ["SELECT 1"]
    assert (
        len(list(with_gold_values(gold, "SELECT 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7"))) == 10_001
    )


@pytest.mark.parametrize(
    ("pred", "share"),
    [
        ("SELECT name FROM singer WHERE age > 20 LIMIT 3", 1.0),
        ("SELECT name FROM singer WHERE age > 21 LIMIT 3", 3 / 4),
        ("SELECT name FROM singer WHERE age > 20 LIMIT 4", 3 / 4),
        ("SELECT DISTINCT name FROM singer WHERE age > 20 LIMIT 3", 3 / 4),
        ("SELECT name FROM singer WHERE age > 20 ORDER BY age LIMIT 3", 4 / 5),
        ("SELECT name FROM singer WHERE age > 20 LIMIT value", 0.0),
        ("SELECT upper(name) FROM singer", 0.0),
        (None, 0.0),
    ],
)
def test_the_authors_clause_score(files, pred, share):
    schema = SqlSchema.from_database(files / "database" / "music" / "music.sqlite")
    gold = "SELECT name FROM singer WHERE age > 20 LIMIT 3"
    assert whole_clause_f1(gold, pred, schema) == pytest.approx(share)
