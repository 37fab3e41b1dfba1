"""Prediction files in the official formats: tables by hand, misaligned lines, comparison, gold values."""

import io
import itertools
import json
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from conftest import make_database, refusal

from mtsql.config import user_errors
from mtsql.errors import UserError
from mtsql.extras.authors_rewards import whole_clause_f1
from mtsql.extras.prediction_files import compare, main, read_pairs, with_gold_values

GOLD = """SELECT name FROM singer\tmusic
SELECT name FROM singer WHERE age > 20 AND country = 'france'\tmusic

SELECT DISTINCT label_id FROM singer\tmusic
SELECT count(*) FROM singer GROUP BY country\tmusic
SELECT name FROM singer ORDER BY age LIMIT 1\tmusic
"""
PRED = """SELECT name FROM singer
SELECT name FROM singer WHERE age > 99 AND country = 'france'

SELECT label_id FROM singer
SELECT count(*) FROM singer s GROUP BY s.country
none
"""


@pytest.fixture
def files(tiny, tmp_path, monkeypatch):
    """Here: the tiny database, five queries about it in two dialogues, and their predictions."""
    shutil.copytree(tiny.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "gold.txt").write_text(GOLD)
    (tmp_path / "pred.txt").write_text(PRED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluate(*options):
    """What evaluate.py prints in this process."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", ["evaluate.py", *options])
        user_errors(main)
    return printed.getvalue()


def evaluate_files(*options, gold="gold.txt", pred="pred.txt"):
    files = ("--gold", gold, "--pred", pred, "--databases", "database", "--tables", "tables.json")
    return evaluate(*files, "--json", "out.json", *options)


def evaluated(*options):
    """What it prints, and what it has saved."""
    return evaluate_files(*options), json.loads(Path("out.json").read_text())


def evaluated_pair(gold, pred, *options):
    """The item of one prediction."""
    Path("gold.txt").write_text(f"{gold}\tmusic\n")
    Path("pred.txt").write_text(f"{pred}\n")
    (item,) = evaluated(*options)[1]["per_item"]
    return item


def test_the_official_tables(files):
    printed, saved = evaluated("--etype", "all")
    rows = [line.split() for line in printed.splitlines()]
    assert ["count", "3", "2", "0", "0", "5", "2"] in rows
    assert ["execution", "1.000", "0.000", "0.000", "0.000", "0.600", "0.000"] in rows
    assert ["exact", "match", "0.667", "0.500", "0.000", "0.000", "0.600", "0.500"] in rows
    assert ["count", "2", "2", "1", "0", "0"] in rows
    assert ["exact", "match", "1.000", "0.500", "0.000", "0.000", "0.000"] in rows
    assert "the official grammar cannot read 2 of 5 predictions" in printed
    expected = {"ex": [1, 0, 1, 1, 0], "ex_keep_distinct": [1, 0, 0, 1, 0], "ex_bird": [1, 0, 1, 1, 0]}
    expected |= {"em": [1, 1, 1, 0, 0], "em_string": [1, 0, 0, 0, 0], "pred_parses": [True] * 3 + [False] * 2}
    expected["status"] = ["rows", "empty", "rows", "rows", "error"]
    expected["hardness"] = ["easy", "medium", "easy", "easy", "medium"]
    items = saved["per_item"]
    assert {name: [item[name] for item in items] for name in expected} == expected
    assert items[4]["partial_f1"]["where"] == 1.0 and items[4]["partial_f1"]["select"] == 0.0
    assert saved["summary"]["joint_all"] == {"count": 2, "ex": 0.0, "em": 0.5}
    nothing = {"acc": 0.0, "rec": 0.0, "f1": 0.0}
    assert all(scores == nothing for scores in saved["summary"]["levels"]["hard"]["partial"].values())


def test_options_of_the_official_tool(files):
    printed, saved = evaluated("--plug-value", "--etype", "exec")
    assert "EXACT" not in printed and not {"em", "em_string"} & saved["per_item"][0].keys()
    assert [item["ex"] for item in saved["per_item"]] == [1, 1, 1, 1, 0]
    assert [item["ex"] for item in evaluated("--keep-distinct")[1]["per_item"]] == [1, 0, 0, 1, 0]
    assert "ex" not in evaluated("--etype", "match")[1]["per_item"][0]


def test_every_database_of_a_test_suite_must_agree(files):
    music = files / "database" / "music"
    shutil.copy(music / "music.sqlite", music / "music_2.sqlite")

    make_database(music / "music_2.sqlite", "UPDATE singer SET age = 100 WHERE id = 1")
    names = "SELECT name FROM singer WHERE age"
    assert evaluated_pair(f"{names} = 27", f"{names} < 30")["ex"] == 1
    item = evaluated_pair(f"{names} = 45", f"{names} > 31")
    assert [item[name] for name in ("ex", "ex_keep_distinct", "ex_bird", "status")] == [0, 0, 0, "rows"]
    make_database(music / "music_2.sqlite", "ALTER TABLE singer DROP country")
    item = evaluated_pair(f"{names} = 45", f"{names} = 45 AND country <> 'x'")
    assert (item["ex"], item["status"]) == (0, "error")  # of the database that made it wrong


def test_hidden_files_beside_a_database_are_none_of_its_suite(files):
    """macOS writes ._name beside each file on a disk of another system."""
    music = files / "database" / "music"
    (music / "database_description").mkdir()
    for hidden in ("._music.sqlite", "database_description/._singer.csv"):
        (music / hidden).write_bytes(b"\0\5\x16\7 no database")
    printed, saved = evaluated()
    assert "gold failed" not in printed and [item["ex"] for item in saved["per_item"]] == [1, 0, 1, 1, 0]


@pytest.mark.parametrize("option", ["--plug-value", "--keep-distinct"])
def test_further_metrics_are_of_the_text_that_ex_tried(files, option):
    names = "SELECT DISTINCT name FROM singer WHERE country ="
    item = evaluated_pair(f"{names} 'italy'", f"{names} 'spain'", option)
    assert (item["ex"], item["ex_keep_distinct"], item["ex_bird"]) == (int(option == "--plug-value"),) * 3
    names = "SELECT s{0}.name FROM singer AS s{0} WHERE s{0}.id = {0}"
    item = evaluated_pair(names.format(1), names.format("value"))  # officially 1, in names too
    assert [item[name] for name in ("ex", "ex_keep_distinct", "ex_bird", "em", "em_string")] == [1] * 5


LINES = PRED.splitlines(keepends=True)


@pytest.mark.parametrize(
    ("pred", "message"),
    [
        ("".join(LINES[:-1]), "gold.txt, line 6 has no prediction: interaction 2 has 3 lines there and 2"),
        ("".join(LINES[:1] + LINES[2:]), "gold.txt, line 2 has no prediction"),
        (PRED + "SELECT 1\n", "pred.txt, line 7 has no gold query"),
        (PRED + "\nSELECT 1\n", "pred.txt, line 8 has no gold query"),
        (PRED.replace("\n\n", "\n"), "pred.txt, line 3 has no gold query"),
        ("", "gold.txt, line 1 has no prediction"),
    ],
)
def test_a_line_too_few_or_too_many_is_named(files, pred, message):
    (files / "pred.txt").write_text(pred)
    with pytest.raises(UserError, match=message):
        read_pairs(files / "gold.txt", files / "pred.txt")


def test_wrong_files_end_with_one_sentence_and_write_nothing(files, capsys):
    def fails(message, *options, **changed):
        assert message in refusal(capsys, lambda: evaluate_files(*options, **changed))
        assert not (files / "out.json").exists()

    (files / "bad.txt").write_text("SELECT name FROM singer\n")
    fails("bad.txt, line 1: expected SQL, a tab and the name of a database", gold="bad.txt")
    (files / "bad.txt").write_text(GOLD.replace("music", "opera"))
    fails("bad.txt, line 1: there is no database", gold="bad.txt")
    (files / "bad.txt").write_bytes(b"\xff\xfe\x00")
    fails("bad.txt is not UTF-8", pred="bad.txt")
    fails("nowhere.txt: No such file", pred="nowhere.txt")
    fails(".: Is a directory", gold=".")
    (tables,) = json.loads((files / "tables.json").read_text())
    tables["column_names_original"][1] = [0, None]
    (files / "bad.json").write_text(json.dumps([tables]))
    fails("bad.json: expected databases with Spider's fields", "--tables", "bad.json")
    fails("unrecognized arguments: --plug", "--plug")
    fails("--sql-timeout: should be at least 0.01 and finite, not nan", "--sql-timeout=nan")
    no_tables = ("--gold", "gold.txt", "--pred", "pred.txt", "--databases", "database")
    assert "give --tables" in refusal(capsys, evaluate, *no_tables)


def test_a_prediction_for_another_database_is_misaligned(files):
    (files / "gold.txt").write_text(GOLD.replace("music", "opera", 1))
    (files / "pred.txt").write_text(PRED.replace("\n", "\tmusic\n", 1))
    with pytest.raises(UserError, match=r"pred.txt, line 1 is for music, but .* asks opera"):
        read_pairs(files / "gold.txt", files / "pred.txt")


def test_gold_that_fails_or_cannot_be_read_is_wrong_and_listed(files):
    queries = ["SELECT upper(name) FROM singer", "SELECT name FROM singer", "SELECT nothing FROM singer"]
    (files / "gold.txt").write_text("".join(f"{sql}\tmusic\n" for sql in queries))
    (files / "pred.txt").write_text("".join(f"{sql}\n" for sql in queries))
    printed, saved = evaluated()
    assert "gold failed: gold line 3\ngold unreadable: gold line 1" in printed
    assert [(i["ex"], i["em"]) for i in saved["per_item"]] == [(1, 0), (1, 1), (0, 0)]


def test_comparison_of_two_evaluations(files, capsys):
    first = evaluated()[1]
    (files / "a.json").write_text(json.dumps(first))
    (files / "pred.txt").write_text(GOLD.replace("\tmusic", ""))
    evaluated()
    printed = evaluate("--compare", "a.json", "out.json")
    row = next(line.split() for line in printed.splitlines() if line.startswith("ex "))
    assert row[:4] == ["ex", "60.0", "100.0", "-40.0"] and row[-1] == "0.5"
    assert "+40.0" in compare(files / "out.json", files / "a.json")
    shorter = json.dumps({"per_item": first["per_item"][1:]})
    odd = json.dumps({"per_item": [*first["per_item"][:-1], first["per_item"][-1] | {"ex": "1"}]})
    for content, problem in (
        (shorter, "do not hold the same questions"),
        (odd, "c.json is no evaluation"),
        ('{"per_item": [{"turn": 0}]}', "c.json is no evaluation"),
        (PRED, "is not valid JSON"),
    ):
        (files / "c.json").write_text(content)
        assert problem in refusal(capsys, evaluate, "--compare", "a.json", "c.json")


def test_gold_values_fill_every_slot():
    gold = "SELECT name FROM t WHERE age > 20 AND city = 'Rome'"
    predicted = "SELECT name FROM t1 WHERE age > -3 LIMIT 7"
    first, *others = with_gold_values(gold, predicted)
    values = itertools.product(("20", "'Rome'"), repeat=2)
    assert first == predicted
    assert sorted(others) == sorted(f"SELECT name FROM t1 WHERE age > {a} LIMIT {b}" for a, b in values)
    assert list(with_gold_values("SELECT name FROM t", "SELECT 1")) == ["SELECT 1"]
    many = with_gold_values(gold, "SELECT 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7")
    assert len(list(many)) == 10_001


@pytest.mark.parametrize(
    ("rest", "share"),
    [
        ("DISTINCT name FROM singer WHERE age > 20 LIMIT 3", 3 / 4),
        ("name FROM singer WHERE age > 20 ORDER BY age LIMIT 3", 4 / 5),
        ("name FROM singer WHERE age > 20 LIMIT value", 0.0),
    ],
)
def test_the_authors_clause_score(tiny, rest, share):
    gold = "SELECT name FROM singer WHERE age > 20 LIMIT 3"
    assert whole_clause_f1(gold, f"SELECT {rest}", tiny.scorer.schemas["music"]) == pytest.approx(share)
