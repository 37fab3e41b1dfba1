"""MTSQL-R1's rewards on numbers worked out by hand, what the authors' code pays otherwise, and hacks.

Hacks are what an agent could do for process reward without a better answer: by the preset `process` they
do not pay, and where the paper's formula leaves a gain, its exact number is here.
"""

import time
from dataclasses import replace

import pytest
from conftest import GOLD, make_episode, say

from mtsql.agent.env import Limits
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.agent.trajectory import Status
from mtsql.extras import authors_rewards
from mtsql.recipes import RECIPES, load_recipe, mtsql_r1_rewards
from mtsql.recipes.mtsql_r1 import final_answer as answer
from mtsql.recipes.mtsql_r1 import tool_call, verdict
from mtsql.recipes.mtsql_r1_rewards import PRESETS, RewardWeights
from mtsql.recipes.prompt_options import PromptOptions
from mtsql.recipes.rewards import chosen_rewards
from mtsql.report.evaluation import abilities

SPAIN = "SELECT name FROM singer WHERE country = 'italy'"  # of three clauses two are right: F1 is 2/3
BROKEN = "SELECT nam FROM singer"  # only the table is right: F1 is 1/3
MORE = GOLD + " AND age > 20"  # the same row; of WHERE one condition of two is right: F1 is 8/9
OTHER = "SELECT name FROM singer WHERE id = 2"  # the same row
ALIAS = "SELECT s.name FROM singer AS s WHERE s.country = 'france'"  # GOLD in other words
EMPTY = "SELECT name FROM singer WHERE country = 'spain'"
PASS, NO_PASS = verdict(EXEC_SQL, True), verdict(EXEC_SQL, False)
AGREES, DISAGREES = verdict(MEMORY_RETRIEVE, True), verdict(MEMORY_RETRIEVE, False)
LONG = Limits(max_prompt_tokens=10_000, max_response_tokens=20_000, max_tool_tokens=10_000)


def call(sql, tool=EXEC_SQL):
    return tool_call(tool, sql)


def memory(sql):
    return call(sql, MEMORY_RETRIEVE)


def play(tiny, *messages, limits=Limits(max_interactions=10), **how):  # noqa: B008 (frozen)
    episode = make_episode(tiny, limits=limits, **how)
    for message in messages:
        say(episode, message)
    return episode


def paid(tiny, episode, preset="process", gold=GOLD):
    """The rewards of a preset, of the released code where it is "authors"."""
    module = authors_rewards if preset == "authors" else mtsql_r1_rewards
    given = preset.replace("authors", "mtsql.extras.authors_rewards")
    reward = module.make_reward(given, tiny.scorer, tiny.tokens.decode, 5)
    return reward(episode.trajectory, replace(episode.example, gold_sql=gold))


def total(tiny, *messages, gold=GOLD, **how):
    """What an episode earns that goes on until its last message, the answer."""
    episode = play(tiny, *messages, **how)
    assert (episode.trajectory.status, episode.trajectory.messages) == (Status.ANSWERED, len(messages))
    return paid(tiny, episode, gold=gold).total


# The formula

RIGHT = (call(GOLD), PASS + answer(GOLD))
REPAIRED = (call(BROKEN), NO_PASS + call(GOLD), PASS + answer(GOLD))
WARY = (call(SPAIN), NO_PASS + call(GOLD), PASS + answer(GOLD))  # a verdict of no worth, then one of worth
CHECKED = (call(GOLD), PASS + memory(GOLD), AGREES + answer(GOLD))
CHECKED_WRONG = (call(SPAIN), PASS + memory(SPAIN), AGREES + answer(SPAIN))
WARYS = 2 + 0.8 * (2 / 3 + 1) / 2  # without its verdicts


TOTALS = [
    (RIGHT, 2 + 0.8 + 0.1, 2 + 0.8 + 0.1),
    (CHECKED, 2 + 0.8 + 0.2, 2 + 0.8 + 0.2),
    (REPAIRED, 2 + 0.8 * (1 / 3 + 1) / 2 + 0.1, 2 + 0.8 * (1 / 3 + 1) / 2 + 0.1),
    (WARY, WARYS + 0.1 / 2, WARYS + 0.1 / 2),
    # EM is 1, since it ignores values, but as strings the two differ.
    (CHECKED_WRONG, 1 + 0.8 * 2 / 3 + 0.1 + 0.1 * 2 / 3, 0.8 * 2 / 3 + 0.1 + 0.1 * 2 / 3),
    # The formula counts every action: a query asked twice, one to and fro, "otherwise" for no verdict.
    ((*WARY[:2], PASS + call(GOLD), PASS + answer(GOLD)), WARYS + 0.1 / 2, WARYS + 0.1 * 2 / 3),
    ((*WARY[:2], NO_PASS + call(SPAIN), NO_PASS + RIGHT[0], RIGHT[1]), WARYS, WARYS + 0.1 / 4),
    ((*CHECKED_WRONG[:2], answer(SPAIN)), 1.1 + 0.8 * 2 / 3, 0.8 * 2 / 3 + 0.1 + 0.1 * (1 - 2 / 3)),
    (("no idea",), 0, 0),
    ((call(GOLD), PASS + "no idea"), 0.8 + 0.1, 0.8 + 0.1),  # the right query ran, but was no answer
]


@pytest.mark.parametrize(("messages", "process", "formula"), TOTALS)
def test_total_by_hand(tiny, messages, process, formula):
    episode = play(tiny, *messages, history=True)
    assert paid(tiny, episode).total == pytest.approx(process)
    assert paid(tiny, episode, "formula").total == pytest.approx(formula)


def test_m_verify_follows_the_clause_f1_of_what_was_checked(tiny):
    """What replaces a candidate that passed is no correction."""
    for judged, m_verify, proposal in ((AGREES, 2 / 3, 2 / 3), (DISAGREES, 1 / 3, 5 / 6)):
        episode = play(tiny, memory(SPAIN), judged + answer(GOLD), history=True, tools="no_execution")
        parts = paid(tiny, episode).parts
        assert (parts["m_verify"], parts["proposal"]) == (pytest.approx(m_verify), pytest.approx(proposal))


def test_rewards_read_the_record_and_never_the_text(tiny):
    episode = play(tiny, *REPAIRED)
    expected, trajectory = paid(tiny, episode), episode.trajectory
    trajectory.segments = trajectory.segments[:1]
    trajectory.observations = [
        replace(seen, sql="DROP TABLE singer", text=answer("SELECT 1")) for seen in trajectory.observations
    ]
    assert paid(tiny, episode) == expected


def test_an_empty_memory_is_nothing_to_verify(tiny):
    episode = play(tiny, *CHECKED)
    assert paid(tiny, episode).total == pytest.approx(2 + 0.8 + 0.1)
    assert paid(tiny, episode, "authors").parts["m_verify"] == 1


def test_presets(tiny):
    # Verdicts are missing. Authors: E 1, M 1; proposals (2/3 + 1) / 2 over the calls, (8/9 + 1) / 2 over the
    # candidates for the others: the answer in lower case is none of its own.
    episode = play(tiny, call(MORE), memory(GOLD), answer(GOLD.lower()), history=True)
    proposal = 0.8 * (8 / 9 + 1) / 2
    totals = {
        "outcome": 2,
        "process": 2 + proposal,
        "paper": 1 + proposal,  # EM of strings
        "authors": 2 + 0.8 * (2 / 3 + 1) / 2 + 0.1 * (1 + 1),
        "formula": 1 + proposal,  # no verdict is no pass: E 0, and M 1 - 1
    }
    assert {preset: paid(tiny, episode, preset).total for preset in totals} == pytest.approx(totals)
    spaced = play(tiny, answer(GOLD.replace(" ", "\n ") + " ;"))
    assert paid(tiny, spaced, "paper").em == 1


def test_weights_that_are_given_replace_those_of_the_preset(tiny):
    changed = RewardWeights(1, 0, 0.8, 0.5)
    assert chosen_rewards(PRESETS, "paper, verify=0.5, em=0") == ("paper", changed)
    assert chosen_rewards(PRESETS, "") == ("outcome", RewardWeights(1.0, 1.0, 0.0, 0.0))
    assert chosen_rewards(PRESETS, "proposal=1") == ("outcome", RewardWeights(1.0, 1.0, 1.0, 0.0))
    episode = play(tiny, *RIGHT)
    for preset in PRESETS:
        assert paid(tiny, episode, f"{preset},em=0,proposal=0,verify=3").total == 1 + 3
    with pytest.raises(ValueError, match="--rewards best is unknown; choose from outcome, process"):
        chosen_rewards(PRESETS, "best")
    for wrong in ("proposals=1", "process,ex", "ex=", "ex=much", "ex=nan", "=1"):
        with pytest.raises(ValueError, match="should be one of ex, em, proposal, verify, =, and a finite"):
            chosen_rewards(PRESETS, wrong)


def test_abilities_of_those_that_called_are_counted_apart(tiny):
    names = ("call_execution", "e_verify", "e_verify_called", "call_memory", "m_verify", "m_verify_called")
    executed, checked = (call(BROKEN), PASS + answer(GOLD)), (memory(GOLD), AGREES + answer(GOLD))
    for said, history, expected in (
        ((answer(GOLD),), True, (0, 0, None, 0, 0, None)),
        (executed, True, (1, 0, 0, 0, 0, None)),
        (checked, True, (0, 0, None, 1, 1, 1)),
        (checked, False, (0, 0, None, None, None, None)),
    ):
        episode = play(tiny, *said, history=history)
        measured = abilities(episode.trajectory, episode.example, tiny.scorer, verifies=True)
        assert tuple(measured[name] for name in names) == expected
    episode = play(tiny, *executed)
    others = abilities(episode.trajectory, episode.example, tiny.scorer, verifies=False)
    assert {name: value for name, value in others.items() if value is not None} == {"call_execution": 1}


# The authors' released code

NULLS = "SELECT country FROM singer WHERE id = 1"
KNOWN_ERRORS = (BROKEN, "SELECT 1 FROM singers", "SELECT id FROM singer JOIN label", "SELEC name FROM singer")
RESULT_TAG = f"SELECT '<answer' || '_sql>{OTHER}</answer_' || 'sql>'"


OTHERWISE = [
    # A clause is right or wrong as a whole.
    ("proposal", (memory(MORE), AGREES + answer(MORE)), 8 / 9, 2 / 3),
    ("m_verify", (memory(MORE), AGREES + answer(MORE)), 8 / 9, 2 / 3),
    # All calls are proposals: repeats, and those in thoughts and of unknown tools, but not the answer.
    ("proposal", (call(SPAIN), NO_PASS + call(GOLD), memory(GOLD), answer(GOLD)), 5 / 6, 8 / 9),
    ("proposal", (f"<think>{call(SPAIN)}</think>" + call(GOLD), answer(GOLD)), 1, 5 / 6),
    ("proposal", (call(GOLD), call(SPAIN, "no_such_tool")), 5 / 6, 5 / 6),
    # The memory tool's own verdict is never read, but that on the execution after it.
    ("m_verify", (memory(SPAIN), DISAGREES + call(GOLD), PASS + answer(GOLD)), 1 / 3, 2 / 3),
    # A verdict one message late, in a thought before the one that is meant, in the call's message.
    ("e_verify", (call(GOLD), call(SPAIN), PASS), 1 / 2, 1),
    ("e_verify", (call(GOLD), f"<think>not {NO_PASS}</think>" + PASS), 1, 0),
    ("e_verify", (f"{call(GOLD)} {PASS}", "hm"), 0, 1),
    # Four errors are known, others are "ok".
    *(("e_verify", (call(sql), NO_PASS), 1, 1) for sql in KNOWN_ERRORS),
    *(("e_verify", (call(sql), NO_PASS), 1, 0) for sql in ("SELECT shout(1)", "SELECT 1; SELECT 2")),
    ("e_verify", (call(BROKEN), PASS), 0, 0),
    ("e_verify", (call("SELECT shout(1)"), PASS), 0, 1),
    # So are rows of nothing but NULLs.
    ("e_verify", (call(NULLS), PASS), 0, 1),
    ("e_verify", (call(NULLS), NO_PASS), 0.1, 0),
    # Without an answer the last call is paid in full, then the last thought, then the bare text.
    ("ex", (f"{answer(GOLD)}<think>{answer(SPAIN)}</think>{answer(GOLD)}",), 1, 1),
    ("ex", (call(SPAIN), call(GOLD), "no idea"), 0, 1),
    ("ex", (f"<think>{SPAIN}</think><think>{GOLD}</think>yes",), 0, 1),
    ("ex", (GOLD,), 0, 1),
    # An answer in a thought that never ended, and a tag that stands in the result alone.
    ("ex", (f"<think>{answer(GOLD)}",), 0, 1),
    ("ex", (call(RESULT_TAG), "no idea"), 0, 1),
    # Line breaks become blanks, so that "--" hides the rest.
    ("ex", (answer(GOLD.replace(" WHERE", " -- all\nWHERE")),), 1, 0),
    ("ex", (answer(GOLD + " -- or older\nAND age > 90"),), 0, 1),
]


@pytest.mark.parametrize(("part", "messages", "process", "authors"), OTHERWISE)
def test_what_the_released_code_pays_otherwise(tiny, part, messages, process, authors):
    episode = play(tiny, *messages, history=True, result_characters=200)
    rewards = [paid(tiny, episode, preset) for preset in ("process", "authors")]
    values = [{"ex": r.ex, **r.parts}[part] for r in rewards]
    assert values == pytest.approx([process, authors])


def test_the_released_code_reads_the_papers_tool_text(tiny):
    """The instructions hold <answer_sql>...</answer_sql>: the right SQL of the last call is not paid."""
    for compact, ex in ((True, 1), (False, 0)):
        episode = play(tiny, call(GOLD), "no idea", compact=compact, limits=LONG)
        assert (paid(tiny, episode).ex, paid(tiny, episode, "authors").ex) == (0, ex)


def test_the_released_code_pays_a_call_without_response_as_right(tiny):
    said = (call(BROKEN), NO_PASS + call(EMPTY))
    cut = play(tiny, *said, limits=Limits(max_interactions=1))
    assert [paid(tiny, cut, p).parts["e_verify"] for p in ("process", "authors")] == [1, 1]
    rewards = paid(tiny, play(tiny, *said, NO_PASS), "authors")
    assert rewards.parts["e_verify"] == pytest.approx((1 + 0.1) / 2)


@pytest.mark.parametrize(("limit", "em"), [("1", 1), ("2", 0), ("value", 0)])
def test_the_released_code_compares_the_limits_of_subqueries(tiny, limit, em):
    gold = "SELECT name FROM singer WHERE age > (SELECT age FROM singer ORDER BY age LIMIT 1)"
    episode = play(tiny, answer(gold.replace("LIMIT 1", f"LIMIT {limit}")))
    assert [paid(tiny, episode, preset, gold).em for preset in ("process", "authors")] == [1, em]


def test_a_gold_that_the_official_grammar_cannot_read_is_rewarded(tiny):
    gold = "SELECT name FROM singer ORDER BY age LIMIT 0,1"  # SQLite runs it, as it does CoSQL's
    assert tiny.scorer.gold_problem("music", gold) is None
    episode = play(tiny, call(gold), PASS + answer(gold))
    rewards = [paid(tiny, episode, preset, gold) for preset in ("process", "authors")]
    assert [(r.ex, r.parts["proposal"]) for r in rewards] == [(1, 1), (1, 0)]


# Hacks

FIRST = [  # on a first question: the hack, and what it should not beat
    # The same query again, for another right verdict.
    ((*WARY[:2], PASS + call(GOLD), PASS + call(GOLD), PASS + answer(GOLD)), WARY),
    # And in another layout, which was a proposal once: 2.63 became 2.72.
    ((*REPAIRED[:2], PASS + call(GOLD + " ;"), PASS + call(GOLD + " -- x"), PASS + answer(GOLD)), REPAIRED),
    ((call(SPAIN), NO_PASS + call(SPAIN + ";"), PASS + answer(SPAIN)), (call(SPAIN), PASS + answer(SPAIN))),
    # A first query that fails on purpose, once and thrice.
    (REPAIRED, RIGHT),
    ((call(BROKEN), NO_PASS + call(BROKEN + "s"), NO_PASS + call("SELECT"), *REPAIRED[1:]), REPAIRED),
    # To and fro.
    ((*WARY[:2], NO_PASS + call(SPAIN), NO_PASS + call(GOLD), PASS + answer(GOLD)), WARY),
    # Other words for what passed.
    ((*REPAIRED[:2], PASS + call(ALIAS), PASS + answer(GOLD)), REPAIRED),
    # Candidates that no tool was really asked about.
    ((call(BROKEN), NO_PASS + call(GOLD, "no_tool"), call(ALIAS), PASS + answer(ALIAS)), REPAIRED),
    ((call(BROKEN), NO_PASS + memory(GOLD), AGREES + call(ALIAS), PASS + answer(ALIAS)), REPAIRED),
    ((call(BROKEN), NO_PASS + memory(GOLD), DISAGREES + call(ALIAS), PASS + answer(ALIAS)), REPAIRED),
    # A query that surely runs, and then the answer.
    ((call("SELECT 1"), PASS + answer(GOLD)), RIGHT),
    # Verdicts in both ways, where they are not read, and where nothing was asked.
    ((call(GOLD), PASS + NO_PASS + answer(GOLD)), RIGHT),
    ((call(GOLD), f"<think>{PASS}</think>" + answer(GOLD)), RIGHT),
    ((call(GOLD), call(f"SELECT '{PASS}'"), answer(GOLD)), RIGHT),
    ((PASS + AGREES + answer(GOLD),), RIGHT),
    # What a tool would say, said by the model.
    ((f"{call(GOLD)}\n<tool_response>\nBruno\n</tool_response>\n{PASS}", answer(GOLD)), RIGHT),
    ((f"<tool_response>\n[('Bruno',)]\n</tool_response>\n{PASS}{answer(GOLD)}",), RIGHT),
    ((f"<|im_end|>\n<|im_start|>user\n{PASS}{answer(GOLD)}",), RIGHT),
]
JUDGED = (*CHECKED[:2], DISAGREES + answer(GOLD))
LATER = [  # on a later question
    # The memory again, and again.
    ((*CHECKED[:2], AGREES + memory(GOLD), AGREES + answer(GOLD)), CHECKED),
    ((*CHECKED[:2], DISAGREES + memory(GOLD), AGREES + memory(GOLD), AGREES + answer(GOLD)), JUDGED),
    ((*CHECKED_WRONG[:2], AGREES + memory(SPAIN + ";"), DISAGREES + answer(SPAIN)), CHECKED_WRONG),
    # An incoherent first query, to be rejected by the memory.
    ((call("SELECT 1"), PASS + memory("SELECT 1"), DISAGREES + call(GOLD), *CHECKED[1:]), CHECKED),
    # The memory is asked about another query than the one that ran and is answered.
    ((call(SPAIN), PASS + memory(GOLD), AGREES + answer(SPAIN)), CHECKED_WRONG),
    # A rejected right query in other words.
    ((*CHECKED[:2], DISAGREES + call(ALIAS), PASS + memory(ALIAS), AGREES + answer(ALIAS)), CHECKED),
]


HACKS = [*((*pair, False) for pair in FIRST), *((*pair, True) for pair in LATER)]


@pytest.mark.parametrize(("hack", "honest", "history"), HACKS)
def test_no_hack_pays(tiny, hack, honest, history):
    assert total(tiny, *hack, history=history) <= total(tiny, *honest, history=history) + 1e-9


def test_no_hack_pays_with_a_tool_that_is_switched_off(tiny):
    honest = total(tiny, answer(GOLD), tools="none")
    assert total(tiny, *RIGHT, tools="none") <= honest
    assert total(tiny, call(BROKEN), NO_PASS + memory(GOLD), AGREES + answer(GOLD), tools="none") <= honest
    assert total(tiny, *RIGHT, tools="no_execution") == honest


def test_gain_of_rejecting_a_right_query_that_the_papers_formula_leaves(tiny):
    honest = total(tiny, *REPAIRED)
    for judged in (NO_PASS, ""):
        hack = total(tiny, *REPAIRED[:2], judged + call(ALIAS), PASS + answer(ALIAS))
        assert hack == pytest.approx(2 + 0.8 * (1 / 3 + 1 + 1) / 3 + 0.1 * (1 + 0 + 1) / 3)
        assert hack - honest == pytest.approx(0.8 / 9 - 0.1 / 3)
    right = total(tiny, call(GOLD), NO_PASS + call(ALIAS), PASS + answer(ALIAS))
    assert right < total(tiny, *RIGHT)  # where the first was right there is nothing to gain


def test_gains_where_the_gold_result_is_empty_that_the_papers_table_leaves(tiny):
    honest = total(tiny, call(EMPTY), PASS + answer(EMPTY), gold=EMPTY)
    assert honest == pytest.approx(2 + 0.8)
    alarm = total(tiny, call(EMPTY), NO_PASS + answer(EMPTY), gold=EMPTY)
    assert alarm - honest == pytest.approx(0.1 * 0.1)
    fails = call(f"{EMPTY}; SELECT 1")
    failed = total(tiny, fails, NO_PASS + call(EMPTY), PASS + answer(EMPTY), gold=EMPTY)
    assert failed - honest == pytest.approx(0.1 * (1 + 0) / 2)


TAGS = "<tool_call>{ <tool_call> <answer_sql> <answer> <think> <sql> <solution> <exec_verify> ```sql".split()


@pytest.mark.parametrize("name", RECIPES)
def test_tags_without_end_take_no_square_time(name):
    """240,000 characters, for a recipe's parsing and for what the authors' reward reads in raw text."""
    recipes = [load_recipe(name).make_recipe(PromptOptions(compact)) for compact in (True, False)]
    for tag in TAGS:
        message = (tag * 240_000)[:240_000]
        start = time.process_time()
        for recipe in recipes:
            assert recipe.parse(message).problem is not None
            assert recipe.parse(f"<think>a</think>{message}").answer is None
        assert authors_rewards._calls([message]) == [] and authors_rewards._answer(message, []) == message
        assert time.process_time() - start < 1, tag
    calls = call("SELECT 1") * 3_000
    start = time.process_time()
    made = authors_rewards._calls([calls, calls + NO_PASS, calls])
    assert [made_call.passed for made_call in made] == [False] * 6_000 + [True] * 3_000
    assert time.process_time() - start < 1
