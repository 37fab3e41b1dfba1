"""What Algorithm 1 keeps, why it rejects the rest, and what a checkpoint remembers of it."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from conftest import GOLD, environment_of, make_episode, say

from mtsql.agent.trajectory import Status, Stop
from mtsql.extras.demonstrations import gold_trajectories
from mtsql.learn.warm_start import Collected, Progress, rejection
from mtsql.recipes.mtsql_r1 import MtsqlR1, final_answer, make_reward
from mtsql.recipes.skyrl_sql import SkyrlSql

REWRITTEN = GOLD.replace("SELECT", "select")  # another string, the same clauses
OTHER_CLAUSES = "SELECT name FROM singer WHERE country IN ('france')"  # the same result
WRONG = "SELECT name FROM singer"


@pytest.mark.parametrize(
    ("sql", "tools", "preset", "recipe", "expected"),
    [
        (GOLD, "none", "", MtsqlR1, None),
        (GOLD, "both", "", MtsqlR1, "off_protocol"),  # answered without executing
        (None, "none", "", MtsqlR1, "no_answer"),  # out of tokens
        (WRONG, "none", "", MtsqlR1, "wrong_ex"),
        (OTHER_CLAUSES, "none", "", MtsqlR1, "wrong_em"),
        (OTHER_CLAUSES, "none", "", SkyrlSql, None),
        (REWRITTEN, "none", "", MtsqlR1, None),
        (REWRITTEN, "none", "paper", MtsqlR1, "wrong_em"),  # the paper's text compares strings
        (GOLD, "none", "paper", MtsqlR1, None),
    ],
)
def test_the_first_filter_that_rejects_is_named(tiny, sql, tools, preset, recipe, expected):
    episode = make_episode(tiny, tools=tools)
    if sql is None:
        episode.step([1, 2], [0.0, 0.0], Stop.LIMIT)
    else:
        say(episode, final_answer(sql))
    rewards = make_reward(preset, tiny.scorer, tiny.tokens.decode, 5)(episode.trajectory, episode.example)
    assert rejection(episode.trajectory, rewards, recipe) == expected


def test_rounds_are_counted_solved_questions_leave_and_a_checkpoint_remembers(tiny):
    episodes = [make_episode(tiny, history=history, tools="none") for history in (False, True)]
    for episode in episodes:
        say(episode, final_answer(GOLD))
    pool = [episodes[0].example]
    progress, rng = Progress(list(pool)), random.Random(0)
    found = Collected(pool[0].id, 4, 2, [episodes[0].trajectory], Counter(wrong_ex=2, not_selected=1))
    progress.add([found], rng)
    (round_1,) = progress.coverage
    assert round_1["rejected"] == {"not_selected": 1, "wrong_ex": 2} and round_1["questions_solved"] == 1
    progress.index, progress.step = 3, 7
    plain = json.loads(json.dumps(progress.to_plain()))
    again = Progress.from_plain(plain | {"rng_state": progress.rng_state}, pool)
    assert again.kept == progress.kept and isinstance(again.kept[0].status, Status)
    assert (again.round, again.index, again.step, again.collected) == (0, 3, 7, True)
    assert (again.remaining, again.solved, again.coverage) == (pool, {pool[0].id}, progress.coverage)
    again.drop_solved()
    assert again.remaining == [] and not again.collected and again.index == 0


def test_gold_answers_are_learned_as_they_run(tiny):
    split = replace(make_episode(tiny).example, gold_sql="SELECT name FROM singer WHERE age ! = 30")
    ((trajectory,),) = gold_trajectories(environment_of(tiny, "none"), [split], 0)
    assert trajectory.answer_sql == "SELECT name FROM singer WHERE age != 30"
