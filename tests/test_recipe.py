"""MTSQL-R1's rewards, on numbers worked out by hand."""

from __future__ import annotations

import pytest
from conftest import GOLD, make_episode, say

from mtsql.agent.env import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.recipes.mtsql_r1 import E_VERIFY_TABLE, RewardWeights, reward, tool_call, verdict
from mtsql.sql.score import Scorer

ALL = RewardWeights(ex=1.0, em=1.0, proposal=0.8, verify=0.1)
WRONG_VALUE = "SELECT name FROM singer WHERE country = 'France'"
SPAIN = "SELECT name FROM singer WHERE country = 'italy'"
BROKEN = "SELECT nam FROM singer"


@pytest.fixture
def scorer(tiny):
    return Scorer({"music": tiny.schema}, tiny.executor)


def play(tiny, *messages, **options):
    episode = make_episode(tiny, **options)
    for message in messages:
        say(episode, message)
    return episode


def answer(sql):
    return f"<answer_sql>{sql}</answer_sql>"


def test_right_answer_with_right_verdicts(tiny, scorer):
    episode = play(
        tiny,
        tool_call(EXEC_SQL, GOLD),
        verdict(EXEC_SQL, True) + tool_call(MEMORY_RETRIEVE, GOLD),
        verdict(MEMORY_RETRIEVE, True) + answer(GOLD),
        history=True,
    )
    r = reward(episode.trajectory, episode.example, scorer, ALL)
    assert (r.ex, r.em, r.proposal, r.e_verify, r.m_verify) == (1, 1, 1, 1, 1)
    assert r.total == pytest.approx(1 + 1 + 0.8 + 0.1 * 2)


def test_exact_match_ignores_values_execution_does_not(tiny, scorer):
    episode = play(tiny, tool_call(EXEC_SQL, SPAIN), verdict(EXEC_SQL, True) + answer(SPAIN))
    r = reward(episode.trajectory, episode.example, scorer, RewardWeights())
    assert (r.ex, r.em, r.total) == (0, 1, 1)


def test_verdicts_are_averaged_over_their_actions(tiny, scorer):
    # E-verify: error and no_pass 1, null and no_pass 0.1, ok and pass 1.
    episode = play(
        tiny,
        tool_call(EXEC_SQL, BROKEN),
        verdict(EXEC_SQL, False) + tool_call(EXEC_SQL, WRONG_VALUE),
        verdict(EXEC_SQL, False) + tool_call(EXEC_SQL, GOLD),
        verdict(EXEC_SQL, True) + answer(GOLD),
    )
    r = reward(episode.trajectory, episode.example, scorer, ALL)
    assert r.e_verify == pytest.approx((1 + 0.1 + 1) / 3)
    assert r.m_verify == 0


def test_e_verify_table_is_the_papers():
    assert E_VERIFY_TABLE == {
        ("ok", False): 0, ("ok", True): 1, ("null", False): 0.1,
        ("null", True): 0, ("error", False): 1, ("error", True): 0,
    }  # fmt: skip


def test_m_verify_follows_the_clause_f1_of_what_was_checked(tiny, scorer):
    for passed in (True, False):
        episode = play(
            tiny,
            tool_call(MEMORY_RETRIEVE, SPAIN),
            verdict(MEMORY_RETRIEVE, passed) + answer(GOLD),
            history=True,
            tools="no_execution",
        )
        f1 = scorer.clause_f1("music", GOLD, SPAIN)
        assert f1 == pytest.approx(2 / 3)  # SELECT and the tables of JOIN agree, WHERE does not
        r = reward(episode.trajectory, episode.example, scorer, ALL)
        assert r.m_verify == pytest.approx(f1 if passed else 1 - f1)
        assert r.proposal == pytest.approx((2 / 3 + 1.0) / 2)  # the proposal and the correction


def test_missing_verdict_earns_nothing(tiny, scorer):
    episode = play(tiny, tool_call(EXEC_SQL, GOLD), answer(GOLD))
    r = reward(episode.trajectory, episode.example, scorer, ALL)
    assert r.e_verify == 0
    assert r.ex == 1


def test_unanswered_question_is_never_right(tiny, scorer):
    # The right SQL was executed, and the tool's text even holds an answer tag; neither counts.
    episode = play(tiny, tool_call(EXEC_SQL, "SELECT '<answer_sql>" + "SELECT 1</answer_sql>'"), "no idea")
    assert episode.trajectory.answer_sql is None
    r = reward(episode.trajectory, episode.example, scorer, ALL)
    assert (r.ex, r.em) == (0, 0)
    empty_gold = play(tiny, "no idea")
    assert reward(empty_gold.trajectory, empty_gold.example, scorer, ALL).total == 0
