"""What an agent could do for process reward without a better answer, and that it does not pay.

All by the preset `process`; where the paper's formula leaves a gain, its exact number.
"""

from __future__ import annotations

import time

import pytest
from conftest import GOLD, Tiny, make_episode, say
from test_rewards import ALL, BROKEN, NO_PASS, PASS, SPAIN, answer, call

from mtsql.agent.env import Limits
from mtsql.agent.tools import MEMORY_RETRIEVE
from mtsql.extras.authors_rewards import _answer as authors_answer
from mtsql.extras.authors_rewards import _calls as authors_calls
from mtsql.recipes import RECIPES, load_recipe
from mtsql.recipes.mtsql_r1_prompts import verdict
from mtsql.recipes.mtsql_r1_rewards import reward
from mtsql.recipes.prompt_options import PromptOptions
from mtsql.sql.score import Scorer

AGREES, DISAGREES = (verdict(MEMORY_RETRIEVE, passed) for passed in (True, False))
ALIAS = "SELECT s.name FROM singer AS s WHERE s.country = 'france'"  # GOLD in other words
EMPTY = "SELECT name FROM singer WHERE country = 'spain'"


def total(
    tiny: Tiny,
    *messages: str,
    history: bool = False,
    gold: str = GOLD,
    tools: str = "both",
    plain: bool = False,
) -> float:
    episode = make_episode(tiny, history=history, tools=tools, limits=Limits(max_interactions=10))
    assert [say(episode, m) for m in messages] == [True] * (len(messages) - 1) + [False]
    example = type(episode.example)(**vars(episode.example) | {"gold_sql": gold})
    scorer = Scorer({"music": tiny.schema}, tiny.executor)
    return reward(episode.trajectory, example, scorer, ALL, plain=plain).total


def memory(sql: str) -> str:
    return call(sql, MEMORY_RETRIEVE)


REPAIRED = (call(BROKEN), NO_PASS + call(GOLD), PASS + answer(GOLD))  # honest: proposals 1/3 and 1
WARY = (call(SPAIN), NO_PASS + call(GOLD), PASS + answer(GOLD))  # a verdict of no worth, then one of worth
RIGHT = (call(GOLD), PASS + answer(GOLD))
CHECKED = (call(GOLD), PASS + memory(GOLD), AGREES + answer(GOLD))
CHECKED_WRONG = (call(SPAIN), PASS + memory(SPAIN), AGREES + answer(SPAIN))


def test_honest_trajectories_earn_what_the_papers_formula_says(tiny):
    for plain in (False, True):
        assert total(tiny, *RIGHT, plain=plain) == pytest.approx(2 + 0.8 + 0.1)
        assert total(tiny, *REPAIRED, plain=plain) == pytest.approx(2 + 0.8 * (1 / 3 + 1) / 2 + 0.1)
        assert total(tiny, *WARY, plain=plain) == pytest.approx(2 + 0.8 * (2 / 3 + 1) / 2 + 0.1 * 1 / 2)
        agreed = 1 + 0.8 * 2 / 3 + 0.1 + 0.1 * 2 / 3
        assert total(tiny, *CHECKED_WRONG, history=True, plain=plain) == pytest.approx(agreed)


def test_the_plain_formula_counts_every_action(tiny):
    again = (*WARY[:2], PASS + call(GOLD), PASS + answer(GOLD))  # the right one asked twice
    assert total(tiny, *again, plain=True) == pytest.approx(2 + 0.8 * (2 / 3 + 1) / 2 + 0.1 * 2 / 3)
    assert total(tiny, *again) == total(tiny, *WARY)
    to_and_fro = (*WARY[:2], NO_PASS + call(SPAIN), NO_PASS + call(GOLD), PASS + answer(GOLD))
    assert total(tiny, *to_and_fro, plain=True) == pytest.approx(2 + 0.8 * (2 / 3 + 1) / 2 + 0.1 / 4)
    unjudged = (call(SPAIN), PASS + memory(SPAIN), answer(SPAIN))  # no verdict: "otherwise"
    assert total(tiny, *unjudged, history=True, plain=True) == pytest.approx(
        1 + 0.8 * 2 / 3 + 0.1 + 0.1 * (1 - 2 / 3)
    )


@pytest.mark.parametrize(
    ("hack", "honest"),
    [
        # The same query again, for another right verdict.
        ((*WARY[:2], PASS + call(GOLD), PASS + call(GOLD), PASS + answer(GOLD)), WARY),
        # And in another layout, which was a proposal once: 2.63 became 2.72.
        (
            (*REPAIRED[:2], PASS + call(GOLD + " ;"), PASS + call(GOLD + " -- x"), PASS + answer(GOLD)),
            REPAIRED,
        ),
        (
            (call(SPAIN), NO_PASS + call(SPAIN + ";"), PASS + answer(SPAIN)),
            (call(SPAIN), PASS + answer(SPAIN)),
        ),
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
    ],
)
def test_no_hack_pays_on_a_first_question(tiny, hack, honest):
    assert total(tiny, *hack) <= total(tiny, *honest) + 1e-9


@pytest.mark.parametrize(
    ("hack", "honest"),
    [
        # The memory again, and again.
        ((*CHECKED[:2], AGREES + memory(GOLD), AGREES + answer(GOLD)), CHECKED),
        (
            (*CHECKED[:2], DISAGREES + memory(GOLD), AGREES + memory(GOLD), AGREES + answer(GOLD)),
            (*CHECKED[:2], DISAGREES + answer(GOLD)),
        ),
        ((*CHECKED_WRONG[:2], AGREES + memory(SPAIN + ";"), DISAGREES + answer(SPAIN)), CHECKED_WRONG),
        # An incoherent first query, to be rejected by the memory.
        ((call("SELECT 1"), PASS + memory("SELECT 1"), DISAGREES + call(GOLD), *CHECKED[1:]), CHECKED),
        # The memory is asked about another query than the one that ran and is answered.
        ((call(SPAIN), PASS + memory(GOLD), AGREES + answer(SPAIN)), CHECKED_WRONG),
        # A rejected right query in other words.
        ((*CHECKED[:2], DISAGREES + call(ALIAS), PASS + memory(ALIAS), AGREES + answer(ALIAS)), CHECKED),
    ],
)
def test_no_hack_pays_on_a_later_question(tiny, hack, honest):
    assert total(tiny, *hack, history=True) <= total(tiny, *honest, history=True) + 1e-9


def test_no_hack_pays_with_a_tool_that_is_switched_off(tiny):
    honest = total(tiny, answer(GOLD), tools="none")
    for hack in (
        (call(GOLD), PASS + answer(GOLD)),
        (call(BROKEN), NO_PASS + memory(GOLD), AGREES + answer(GOLD)),
    ):
        assert total(tiny, *hack, tools="none") <= honest
    assert total(tiny, call(GOLD), PASS + answer(GOLD), tools="no_execution") == honest


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


TAGS = (
    "<tool_call>{ <tool_call> <answer_sql> <answer> <think> <sql> <solution> <exec_verify> ``` ```sql".split()
)


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
        assert authors_calls([message]) == [] and authors_answer(message, []) == message
        assert time.process_time() - start < 1, tag
    calls = '<tool_call>{"name": "exec_sql", "arguments": {"code": "SELECT 1"}}</tool_call>' * 3_000
    start = time.process_time()
    made = authors_calls([calls, calls + "<exec_verify>no_pass</exec_verify>", calls])
    verdicts = [call.passed for call in made]
    assert verdicts == [False] * 6_000 + [True] * 3_000
    assert time.process_time() - start < 1
