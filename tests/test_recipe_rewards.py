"""Rewards of SkyRL-SQL, SQL-Trail and MTIR-SQL on numbers worked out by hand, and SQL-Trail's measures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import GOLD
from hostile import STATEMENTS
from test_recipes import (
    BROKEN,
    EXAMPLE,
    MTIR,
    SKYRL,
    THINK,
    TRAIL,
    WRONG,
    answer,
    block,
    play,
    query,
    recipe_of,
    rewards_of,
)

from mtsql.learn.samples import Sample, group_metrics
from mtsql.recipes.sql_trail import bigrams, jaccard, schema_items, turns_reward
from mtsql.sql.structure import SqlSchema

HARD = "SELECT name FROM singer WHERE age = (SELECT max(age) FROM singer)"
R, W = answer(MTIR), answer(MTIR, WRONG)
BARE = recipe_of(SKYRL).answer(GOLD)
Q = query(SKYRL, WRONG)
S = answer(SKYRL)


@pytest.mark.parametrize(
    ("name", "messages", "parts", "ex", "total"),
    [
        # MTIR-SQL, Equations 5 to 7: R_f, R_e, R_r, then their sum.
        (MTIR, [query(MTIR, WRONG), R], (0.1, 0.1, 1), 1, 1.2),
        (MTIR, [W], (0.1, 0.1, -1), 0, -0.8),
        (MTIR, [answer(MTIR, BROKEN)], (0.1, -0.1, 0), 0, 0),
        (MTIR, [answer(MTIR, "DROP TABLE singer")], (0.1, -0.1, 0), 0, 0),
        (MTIR, [block(GOLD)], (-0.1, 0, 0), 1, -0.1),  # right, but without the thought
        (MTIR, [THINK + "no idea"], (-0.1, 0, 0), 0, -0.1),
        # SkyRL-SQL, section 4.1: -1 for a broken format, else EX.
        (SKYRL, [Q, S], (1,), 1, 1),
        (SKYRL, [answer(SKYRL, WRONG)], (1,), 0, 0),
        (SKYRL, [answer(SKYRL, "no SQL at all")], (1,), 0, 0),
        (SKYRL, [BARE], (0,), 1, -1),
        (SKYRL, [S + " as you wished"], (0,), 1, -1),
        (SKYRL, [Q] * 5, (0,), 0, -1),
        (SKYRL, [Q], (0,), 0, -1),  # unfinished
        # SQL-Trail, Equations 7 to 12: turns, schema, bigram, syntax, format; then 5 EX + 2 turns + the rest.
        (TRAIL, [Q, S], (1, 1, 1, 1, 1), 1, 5 + 2 + 4),
        # select name from singer where country = 'france': 7 pairs; two answers differ in the last of them.
        (TRAIL, [Q, answer(TRAIL, WRONG)], (1, 1, 6 / 8, 1, 1), 0, 2 + 3.75),
        # Gold: singer, name, country; the answer: singer, nam. Of its 3 pairs "from singer" is shared.
        (TRAIL, [answer(TRAIL, BROKEN)], (1, 1 / 4, 1 / 9, 0, 1), 0, 2 + 1 / 4 + 1 / 9 + 1),
        (TRAIL, [recipe_of(TRAIL).call(WRONG), S], (1, 1, 1, 1, 0), 1, 5 + 2 + 3),
        *((TRAIL, messages, (0,) * 5, 0, 0) for messages in ([], [query(TRAIL)], [Q] * 5, ["what?"])),
    ],
)
def test_rewards_by_hand(tiny, name, messages, parts, ex, total):
    rewards = rewards_of(tiny, name, play(tiny, name, *messages))
    assert (tuple(rewards.parts.values()), rewards.ex) == (pytest.approx(parts), ex)
    assert rewards.total == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "given", "message", "total"),
    [
        (MTIR, "format=0,result=2", W, 0.1 - 2),
        (SKYRL, "ex=3,invalid=-0.5", S, 3),
        (SKYRL, "paper,ex=3,invalid=-0.5", BARE, -0.5),
        (TRAIL, "execution", S, 5),
        (TRAIL, "execution", answer(TRAIL, WRONG), 0),
        (TRAIL, "turns=0,ex=1,bigram=0.5", S, 1 + 1 + 0.5 + 1 + 1),
        (MTIR, "ex=1", W, "should be one of format, execution, result, tau"),
        (SKYRL, "outcome", S, "--rewards outcome is unknown; choose from paper"),
        (SKYRL, "turns=1", S, "'turns=1' should be one of invalid, ex"),
        (TRAIL, "exec=1", S, "one of ex, turns, schema, bigram, syntax, format"),
    ],
)
def test_presets_and_weights(tiny, name, given, message, total):
    episode = play(tiny, name, message)
    if isinstance(total, str):
        with pytest.raises(ValueError, match=total):
            rewards_of(tiny, name, episode, given)
        return
    rewards, plain = (rewards_of(tiny, name, episode, how) for how in (given, ""))
    assert rewards.total == pytest.approx(total)
    assert (rewards.parts, rewards.kept) == (plain.parts, plain.kept)


def test_mtirs_filter_drops_what_is_invalid_and_keeps_wrong_answers(tiny):
    episodes = [play(tiny, MTIR, message) for message in (R, W, answer(MTIR, BROKEN), block(GOLD))]
    rewards = [rewards_of(tiny, MTIR, episode) for episode in episodes]
    assert [r.kept for r in rewards] == [True, True, False, False]
    assert all(rewards_of(tiny, MTIR, episode, "unfiltered").kept for episode in episodes)
    samples = [Sample(e.trajectory, e.example, r) for e, r in zip(episodes, rewards, strict=True)]
    assert group_metrics([samples], torch.tensor([True]), 1.0, tiny.tokens.decode)["left_out"] == 0.5


def test_trails_hard_question_pays_for_a_right_answer_before_the_last_turn(tiny):
    hard = replace(EXAMPLE, gold_sql=HARD)
    right = play(tiny, TRAIL, Q, Q, answer(TRAIL, HARD), example=hard)
    wrong = play(tiny, TRAIL, answer(TRAIL, WRONG), example=hard)
    assert [rewards_of(tiny, TRAIL, right, turns=turns).parts["turns"] for turns in (4, 3)] == [1, 0]
    assert rewards_of(tiny, TRAIL, wrong, turns=4).parts["turns"] == 0
    table = {"easy": [1, 1, 0, 0, 0], "medium": [1, 1, 1, 0, 0], "hard": [0] * 5, "extra": [0] * 5}
    turns = (1, 2, 3, 4, 10)
    assert {level: [turns_reward(level, turn, 10, 0) for turn in turns] for level in table} == table
    assert [turns_reward("extra", turn, 10, 1) for turn in turns] == [1, 1, 1, 1, 0]


# SQL-Trail's measures of SQL

STAFF = SqlSchema({"employees": ("id", "salary"), "offices": ("id", "city")})


def test_bigrams():
    gold, predicted = bigrams("SELECT name FROM student"), bigrams("SELECT name FROM teacher")
    assert gold == {("select", "name"), ("name", "from"), ("from", "student")}  # the paper's example
    assert jaccard(predicted, gold) == 0.5
    spaced = "select  Name\nfrom student /* all */ where a >= 1; SELECT 2 -- x"
    assert bigrams(spaced) == bigrams("SELECT name FROM student WHERE a>=1")
    assert bigrams("") == bigrams("SELECT") == bigrams("x" * 200_000) == set()
    assert jaccard(set(), set()) == 0 and jaccard(set(), gold) == 0


@pytest.mark.parametrize(
    ("sql", "tables", "columns"),
    [
        ("SELECT Salary FROM Employees", "employees", "salary"),  # the paper's example
        ("SELECT Wages FROM Employees", "employees", "wages"),
        ("SELECT e.salary FROM employees AS e", "employees", "salary"),
        ("SELECT count(*), e.* FROM employees e", "employees", ""),
        ("SELECT salary AS s FROM employees ORDER BY s", "employees", "salary"),
        ('SELECT salary FROM employees WHERE id = "x"', "employees", "salary id"),
        ("SELECT city FROM employees JOIN offices USING (id)", "employees offices", "city id"),
        ("WITH top AS (SELECT salary FROM employees) SELECT salary FROM top", "employees", "salary"),
        ("SELECT salary FROM", "", ""),
        ("PRAGMA table_info(employees)", "", ""),
        ("", "", ""),
    ],
)
def test_schema_items(sql, tables, columns):
    named = {("table", table) for table in tables.split()} | {("column", c) for c in columns.split()}
    assert schema_items(sql, STAFF) == named


def test_hostile_sql_raises_nowhere(tiny):
    schema = SqlSchema({"singer": ("singer_id", "name", "country", "age"), "number": ("n",)})
    gold_items, gold_bigrams = schema_items("SELECT n FROM number", schema), bigrams("SELECT n FROM number")
    hostile = [sql for _, sql, _ in STATEMENTS if len(sql) < 10_000]
    hostile += ["SELECT " + "(" * 3_000 + "1" + ")" * 3_000, "'" * 99_999, "\x00", "a " * 200_000]
    for sql in hostile:
        assert 0 <= jaccard(schema_items(sql, schema), gold_items) <= 1
        assert 0 <= jaccard(bigrams(sql), gold_bigrams) <= 1
    for sql in ("'", "DROP TABLE singer", "PRAGMA table_info(singer)", "SELECT (" * 2_000, "\x00", ";"):
        rewards = rewards_of(tiny, TRAIL, play(tiny, TRAIL, answer(TRAIL, sql)))
        assert (rewards.ex, rewards.parts["schema"]) == (0, 0)
