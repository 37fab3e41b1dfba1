"""MTSQL-R1's rewards, on numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import GOLD, make_episode, say

from mtsql.agent.env import Limits
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.extras import authors_rewards
from mtsql.recipes import mtsql_r1_rewards
from mtsql.recipes.mtsql_r1_prompts import tool_call, verdict
from mtsql.recipes.mtsql_r1_rewards import E_VERIFY_TABLE, PRESETS, RewardWeights, reward
from mtsql.recipes.rewards import chosen_rewards, is_right
from mtsql.report.evaluation import abilities
from mtsql.sql.score import Scorer

ALL = RewardWeights(ex=1.0, em=1.0, proposal=0.8, verify=0.1)
WRONG_VALUE = "SELECT name FROM singer WHERE country = 'France'"
SPAIN = "SELECT name FROM singer WHERE country = 'italy'"
BROKEN = "SELECT nam FROM singer"
MORE = GOLD + " AND age > 20"  # the same row; of WHERE one condition of two is right
OTHER = "SELECT name FROM singer WHERE id = 2"  # the same row
PASS, NO_PASS = verdict(EXEC_SQL, True), verdict(EXEC_SQL, False)
LONG = Limits(max_prompt_tokens=10_000, max_response_tokens=20_000, max_tool_tokens=10_000)


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


def call(sql, tool=EXEC_SQL):
    return tool_call(tool, sql)


def test_right_answer_with_right_verdicts(tiny, scorer):
    episode = play(
        tiny,
        tool_call(EXEC_SQL, GOLD),
        verdict(EXEC_SQL, True) + tool_call(MEMORY_RETRIEVE, GOLD),
        verdict(MEMORY_RETRIEVE, True) + answer(GOLD),
        history=True,
    )
    r = reward(episode.trajectory, episode.example, scorer, ALL)
    assert (r.ex, r.em, r.parts["proposal"], r.parts["e_verify"], r.parts["m_verify"]) == (1, 1, 1, 1, 1)
    assert r.total == pytest.approx(1 + 1 + 0.8 + 0.1 * 2)


def test_exact_match_ignores_values_execution_does_not(tiny, scorer):
    episode = play(tiny, tool_call(EXEC_SQL, SPAIN), verdict(EXEC_SQL, True) + answer(SPAIN))
    r = reward(episode.trajectory, episode.example, scorer, RewardWeights())
    assert (r.ex, r.em, r.total) == (0, 1, 1)


def test_verdicts_are_averaged_over_their_actions(tiny, scorer):
    # E-verify: error and no_pass 1, null and no_pass 0.1, ok and pass 1.
    assert sum(E_VERIFY_TABLE.values()) == 1 + 0.1 + 1 and len(E_VERIFY_TABLE) == 6  # the others earn 0
    episode = play(
        tiny,
        tool_call(EXEC_SQL, BROKEN),
        verdict(EXEC_SQL, False) + tool_call(EXEC_SQL, WRONG_VALUE),
        verdict(EXEC_SQL, False) + tool_call(EXEC_SQL, GOLD),
        verdict(EXEC_SQL, True) + answer(GOLD),
    )
    r = reward(episode.trajectory, episode.example, scorer, ALL)
    assert r.parts["e_verify"] == pytest.approx((1 + 0.1 + 1) / 3)
    assert r.parts["m_verify"] == 0


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
        assert r.parts["m_verify"] == pytest.approx(f1 if passed else 1 - f1)
        # What replaces a candidate that passed is no correction.
        assert r.parts["proposal"] == pytest.approx(2 / 3 if passed else (2 / 3 + 1.0) / 2)


def test_unanswered_question_is_never_right(tiny, scorer):
    # The right SQL was executed, and the tool's text even holds an answer tag; neither counts.
    episode = play(tiny, tool_call(EXEC_SQL, "SELECT '<answer_sql>" + "SELECT 1</answer_sql>'"), "no idea")
    assert episode.trajectory.answer_sql is None
    r = reward(episode.trajectory, episode.example, scorer, ALL)
    assert (r.ex, r.em) == (0, 0)
    empty_gold = play(tiny, "no idea")
    assert reward(empty_gold.trajectory, empty_gold.example, scorer, ALL).total == 0


def made(name, tiny, scorer):
    """The rewards of a preset, of the released code where it is "authors"."""
    module = authors_rewards if name == "authors" else mtsql_r1_rewards
    given = name.replace("authors", "mtsql.extras.authors_rewards")
    return module.make_reward(given, scorer, tiny.tokens.decode, 5)


def rewards_of(tiny, scorer, *messages, gold=GOLD, preset="authors", **options):
    """Rewards by `process`, and by another preset."""
    episode = play(tiny, *messages, **options)
    example = replace(episode.example, gold_sql=gold)
    return tuple(made(name, tiny, scorer)(episode.trajectory, example) for name in ("process", preset))


def test_rewards_read_the_record_and_never_the_text(tiny, scorer):
    episode = play(tiny, call(BROKEN), NO_PASS + call(GOLD), PASS + answer(GOLD))
    trajectory = episode.trajectory
    expected = reward(trajectory, episode.example, scorer, ALL)
    # Proposals: of BROKEN only the table is right, one of three clauses; both verdicts are right.
    assert expected.total == pytest.approx(1 + 1 + 0.8 * (1 / 3 + 1) / 2 + 0.1 * 1)
    trajectory.segments = trajectory.segments[:1]
    trajectory.observations = [
        replace(seen, sql="DROP TABLE singer", text=answer("SELECT 1")) for seen in trajectory.observations
    ]
    assert reward(trajectory, episode.example, scorer, ALL) == expected


def test_presets(tiny, scorer):
    with_process = dict.fromkeys(("process", "paper", "formula"), ALL)
    assert {"outcome": RewardWeights(1, 1, 0, 0)} | with_process == PRESETS
    lower = GOLD.lower()
    # Verdicts are missing. Authors: E 1, M 1; proposals (2/3 + 1) / 2 over the calls, (8/9 + 1) / 2 over the
    # candidates for the others: the answer in lower case is none of its own.
    episode = play(tiny, call(MORE), call(GOLD, MEMORY_RETRIEVE), answer(lower), history=True)
    proposal = 0.8 * (8 / 9 + 1) / 2
    for preset, total in {
        "outcome": 2,
        "process": 2 + proposal,
        "paper": 1 + proposal,
        "authors": 2 + 0.8 * (2 / 3 + 1) / 2 + 0.1 * (1 + 1),
        "formula": 1 + proposal,  # no verdict is no pass: E 0, and M 1 - 1
    }.items():
        rewards = made(preset, tiny, scorer)
        assert rewards(episode.trajectory, episode.example).total == pytest.approx(total)


@pytest.mark.parametrize("history", [False, True])
def test_an_empty_memory_is_nothing_to_verify(tiny, scorer, history):
    """Nothing is earned or lost by asking it on a first question; the authors pay for it."""
    said = (call(GOLD), PASS + call(GOLD, MEMORY_RETRIEVE), verdict(MEMORY_RETRIEVE, True) + answer(GOLD))
    process, authors = rewards_of(tiny, scorer, *said, history=history)
    assert process.total == pytest.approx(2 + 0.8 + 0.1 + 0.1 * history)
    assert authors.parts["m_verify"] == 1
    without, _ = rewards_of(tiny, scorer, call(GOLD), PASS + answer(GOLD), history=False)
    assert process.total - 0.1 * history == pytest.approx(without.total)


def test_abilities_of_those_that_called_are_counted_apart(tiny, scorer):
    executed = (call(BROKEN), verdict(EXEC_SQL, True) + answer(GOLD))
    checked = (call(GOLD, MEMORY_RETRIEVE), verdict(MEMORY_RETRIEVE, True) + answer(GOLD))
    measured = []
    for said, history in (((answer(GOLD),), True), (executed, True), (checked, True), (checked, False)):
        episode = play(tiny, *said, history=history)
        measured.append(abilities(episode.trajectory, episode.example, scorer))
    assert [a["call_execution"] for a in measured] == [0, 1, 0, 0]
    assert [a["e_verify"] for a in measured] == [0, 0, 0, 0]
    assert [a["e_verify_called"] for a in measured] == [None, 0, None, None]
    assert [a["call_memory"] for a in measured] == [0, 0, 1, None]
    assert [a["m_verify"] for a in measured] == [0, 0, 1, None]
    assert [a["m_verify_called"] for a in measured] == [None, None, 1, None]
    episode = play(tiny, *executed)
    others = abilities(episode.trajectory, episode.example, scorer, verifies=False)
    assert {name: value for name, value in others.items() if value is not None} == {"call_execution": 1}


def test_string_em(tiny, scorer):
    default, strict = rewards_of(tiny, scorer, answer(GOLD.lower()), preset="paper")
    assert (default.em, strict.em) == (1, 0)
    default, strict = rewards_of(tiny, scorer, answer(GOLD.replace(" ", "\n ") + ";"), preset="paper")
    assert (default.em, strict.em) == (1, 1)


@pytest.mark.parametrize(("limit", "em"), [("1", 1), ("2", 0), ("value", 0)])
def test_nested_limit_em(tiny, scorer, limit, em):
    gold = "SELECT name FROM singer WHERE age > (SELECT age FROM singer ORDER BY age LIMIT 1)"
    pred = answer(gold.replace("LIMIT 1", f"LIMIT {limit}"))
    default, limits = rewards_of(tiny, scorer, pred, gold=gold)
    assert (default.em, limits.em) == (1, em)


def test_whole_clause_f1(tiny, scorer):
    # SELECT and tables agree; WHERE has precision 1/2 and recall 1.
    said = (call(MORE, MEMORY_RETRIEVE), verdict(MEMORY_RETRIEVE, True) + answer(MORE))
    default, whole = rewards_of(tiny, scorer, *said, history=True)
    assert default.parts["proposal"] == default.parts["m_verify"] == pytest.approx((1 + 1 + 2 / 3) / 3)
    assert whole.parts["proposal"] == whole.parts["m_verify"] == pytest.approx(2 / 3)
    assert whole.ex == default.ex == 1


def test_a_gold_that_the_official_grammar_cannot_read_is_rewarded(tiny, scorer):
    gold = "SELECT name FROM singer ORDER BY age LIMIT 0,1"  # SQLite runs it, as it does CoSQL's
    assert scorer.gold_problem("music", gold) is None
    default, authors = rewards_of(tiny, scorer, call(gold), verdict(EXEC_SQL, True) + answer(gold), gold=gold)
    assert (default.parts["proposal"], authors.parts["proposal"]) == (1, 0)
    assert authors.ex == default.ex == 1


@pytest.mark.parametrize(
    ("said", "proposed", "called"),
    [
        # The repeat of the memory tool counts again.
        ((call(SPAIN), NO_PASS + call(GOLD), call(GOLD, MEMORY_RETRIEVE), answer(GOLD)), 5 / 6, 8 / 9),
        ((call(SPAIN), answer(GOLD)), 5 / 6, 2 / 3),  # the answer does not count
        ((f"<think>{call(SPAIN)}</think>" + call(GOLD), answer(GOLD)), 1, 5 / 6),
        ((call(GOLD), call(SPAIN, "no_such_tool")), 5 / 6, 5 / 6),
    ],
)
def test_all_calls_propose(tiny, scorer, said, proposed, called):
    default, all_calls = rewards_of(tiny, scorer, *said, history=True)
    assert default.parts["proposal"] == pytest.approx(proposed)
    assert all_calls.parts["proposal"] == pytest.approx(called)


@pytest.mark.parametrize(
    ("said", "default_verdicts", "tag_verdicts"),
    [
        # (E-verify, M-verify). The memory tool's own verdict is never read.
        ((call(GOLD), PASS + call(GOLD, MEMORY_RETRIEVE), verdict(MEMORY_RETRIEVE, True)), (1, 1), (1, 1)),
        # The verdict on memory is that on the execution after it: "no_pass" becomes "pass".
        (
            (call(SPAIN, MEMORY_RETRIEVE), verdict(MEMORY_RETRIEVE, False) + call(GOLD), PASS + answer(GOLD)),
            (1, 1 / 3),
            (1, 2 / 3),
        ),
        # A verdict one message late, and one in a thought, before the one that is meant.
        ((call(GOLD), call(SPAIN), PASS), (1 / 2, 0), (1, 0)),
        ((call(GOLD), f"<think>not {NO_PASS}</think>" + PASS), (1, 0), (0, 0)),
        ((f"{call(GOLD)} {PASS}", "hm"), (0, 0), (1, 0)),
    ],
)
def test_first_exec_tag(tiny, scorer, said, default_verdicts, tag_verdicts):
    default, tag = rewards_of(tiny, scorer, *said, history=True)
    assert (default.parts["e_verify"], default.parts["m_verify"]) == pytest.approx(default_verdicts)
    assert (tag.parts["e_verify"], tag.parts["m_verify"]) == pytest.approx(tag_verdicts)


def test_a_call_without_response_is_paid_as_right(tiny, scorer):
    said = (call(BROKEN), NO_PASS + call(WRONG_VALUE))
    default, authors = rewards_of(tiny, scorer, *said, limits=Limits(max_interactions=1))
    assert (default.parts["e_verify"], authors.parts["e_verify"]) == (1, 1)
    said = (call(BROKEN), NO_PASS + call(WRONG_VALUE), NO_PASS)
    assert rewards_of(tiny, scorer, *said)[1].parts["e_verify"] == pytest.approx((1 + 0.1) / 2)


@pytest.mark.parametrize(
    ("sql", "known"),
    [
        (BROKEN, True),
        ("SELECT name FROM singers", True),
        ("SELECT id FROM singer JOIN label", True),
        ("SELEC name FROM singer", True),
        ("SELECT name FROM singer WHERE count(*) > 1", False),
        ("SELECT 1; SELECT 2", False),
    ],
)
def test_four_errors(tiny, scorer, sql, known):
    for passed in (True, False):
        said = (call(sql), verdict(EXEC_SQL, passed) + answer(GOLD))
        default, four = rewards_of(tiny, scorer, *said)
        assert default.parts["e_verify"] == (not passed)
        assert four.parts["e_verify"] == (passed is not known)


@pytest.mark.parametrize(
    ("sql", "default_passed", "passed", "default_failed", "failed"),
    [
        ("SELECT country FROM singer WHERE id = 1", 0, 1, 0.1, 0),  # [(None,)]
        ("SELECT count(*) FROM singer WHERE id = 9", 1, 1, 0, 0),  # [(0,)]
        ("SELECT shout(name) FROM singer", 0, 1, 1, 0),  # an error that they do not know
    ],
)
def test_null_rows_ok(tiny, scorer, sql, default_passed, passed, default_failed, failed):
    default, nulls = rewards_of(tiny, scorer, call(sql), PASS)
    assert (default.parts["e_verify"], nulls.parts["e_verify"]) == (default_passed, passed)
    default, nulls = rewards_of(tiny, scorer, call(sql), NO_PASS)
    assert (default.parts["e_verify"], nulls.parts["e_verify"]) == (default_failed, failed)


@pytest.mark.parametrize(
    ("said", "ex", "tag_ex"),
    [
        ((call(BROKEN), answer(GOLD)), 1, 1),
        ((f"{answer(GOLD)}<think>{answer(SPAIN)}</think>{answer(GOLD)}",), 1, 1),
        # No answer: the last call is paid in full, then the last thought, then the bare text.
        ((call(SPAIN), call(GOLD), "no idea"), 0, 1),
        ((f"<think>{SPAIN}</think><think>{GOLD}</think>yes",), 0, 1),
        ((GOLD,), 0, 1),
        # An answer in a thought that never ended.
        ((f"<think>{answer(GOLD)}",), 0, 1),
        # A tag that stands in the result alone.
        ((call(f"SELECT '<answer' || '_sql>{OTHER}</answer_' || 'sql>'"), "no idea"), 0, 1),
    ],
)
def test_last_answer_tag(tiny, scorer, said, ex, tag_ex):
    default, tag = rewards_of(tiny, scorer, *said, result_characters=200)
    assert (default.ex, tag.ex) == (ex, tag_ex)


def test_last_answer_tag_of_the_papers_tool_text(tiny, scorer):
    # The instructions hold <answer_sql>...</answer_sql>: the right SQL of the last call is not paid.
    said = (call(GOLD), "no idea")
    assert [r.ex for r in rewards_of(tiny, scorer, *said, limits=LONG)] == [0, 1]
    assert [r.ex for r in rewards_of(tiny, scorer, *said, compact=False, limits=LONG)] == [0, 0]


def test_newlines_to_blanks(tiny, scorer):
    commented = "SELECT name FROM singer -- all\nWHERE country = 'france'"
    default, blanks = rewards_of(tiny, scorer, answer(commented))
    assert (default.ex, blanks.ex) == (1, 0)
    hidden = GOLD + " -- or older\nAND age > 90"
    default, blanks = rewards_of(tiny, scorer, answer(hidden))
    assert (default.ex, blanks.ex) == (0, 1)


def test_weights_that_are_given_replace_those_of_the_preset(tiny, scorer):
    changed = RewardWeights(1, 0, 0.8, 0.5)
    assert chosen_rewards(PRESETS, "paper, verify=0.5, em=0") == ("paper", changed)
    assert chosen_rewards(PRESETS, "") == ("outcome", RewardWeights(1.0, 1.0, 0.0, 0.0))
    assert chosen_rewards(PRESETS, "proposal=1") == ("outcome", RewardWeights(1.0, 1.0, 1.0, 0.0))
    episode = play(tiny, call(GOLD), PASS + answer(GOLD))
    for preset in PRESETS:
        rewards = made(f"{preset},em=0,proposal=0,verify=3", tiny, scorer)
        assert rewards(episode.trajectory, episode.example).total == 1 + 3
    with pytest.raises(ValueError, match="--rewards best is unknown; choose from outcome, process"):
        chosen_rewards(PRESETS, "best")
    for wrong in ("proposals=1", "process,ex", "ex=", "ex=much", "ex=nan", "ex=inf", "=1"):
        with pytest.raises(ValueError, match="should be one of ex, em, proposal, verify, =, and a number"):
            chosen_rewards(PRESETS, wrong)


def test_right_is_what_the_presets_rewards_say(tiny, scorer):
    episode = play(tiny, answer(GOLD.lower()))
    other = play(tiny, answer(OTHER))
    for preset, right in {"outcome": True, "paper": False, "authors": True}.items():
        rewards = made(preset, tiny, scorer)
        assert is_right(rewards(episode.trajectory, episode.example), "ex_em") is right
        assert is_right(rewards(episode.trajectory, episode.example), "ex")
        assert not is_right(rewards(other.trajectory, other.example), "ex_em")
        assert is_right(rewards(other.trajectory, other.example), "ex")
