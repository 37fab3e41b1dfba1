"""Demonstrations whose mistakes are the model's own: what is found wrong, and what is written."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from conftest import GOLD, TOY, environment_of, make_episode, run

from mtsql.agent.env import Limits
from mtsql.agent.trajectory import ActionType, Segment, Status
from mtsql.data.datasets import Example, HistoryTurn
from mtsql.learn.demonstrations import (
    CUT,
    RIGHT,
    UNREPAIRED,
    UNSEEN,
    Demonstration,
    choose_demonstrations,
    demonstrate,
    demonstrate_samples,
    execution_problem,
    memory_problem,
)
from mtsql.report.records import question_record
from mtsql.sql.execute import ExecutionResult
from mtsql.sql.score import Scorer


def actions(demonstration: Demonstration) -> list[str]:
    shown = {ActionType.E_VERIFY, ActionType.M_VERIFY}
    return [
        f"{a.type} {'pass' if a.passed else 'no_pass'}" if a.type in shown else str(a.type)
        for a in demonstration.trajectory.actions
    ]


def unlearned(tiny, demonstration: Demonstration) -> list[str]:
    """What of each message has loss mask 0."""
    found = []
    for message in (s for s in demonstration.trajectory.segments if s.role == "model"):
        left_out = [i for i, bit in zip(message.ids, message.loss_mask, strict=True) if not bit]
        found.append(tiny.tokens.decode(left_out).strip())
    return found


MISSPELT, RENAMED = "SELECT nme FROM singer", "SELECT title FROM singer"


def play(
    tiny, wrong: list[str], end: str | None, example: Example | None = None, history: bool = False, **kinds
) -> Demonstration:
    """A demonstration for make_episode's question or another, the environment as in `environment_of`."""
    example = example or make_episode(tiny, history).example
    return demonstrate(environment_of(tiny, **kinds), example, wrong, end)


def test_a_right_answer_passes_both_checks(tiny):
    shown = play(tiny, [], GOLD, history=True)
    expected = ["propose", "execute", "e_verify pass", "m_verify pass", "finalize"]
    assert shown.right and shown.first == RIGHT
    assert actions(shown) == expected and unlearned(tiny, shown) == ["", "", ""]
    assert shown.trajectory.off_protocol == 0 and shown.trajectory.answer_sql == GOLD


def test_an_error_is_seen_and_repaired(tiny):
    shown = play(tiny, [MISSPELT], GOLD, history=True)
    assert not shown.right and shown.first == "error" and shown.trajectory.answer_sql == GOLD
    assert actions(shown)[:6] == [
        "propose", "execute", "e_verify no_pass", "self_correct", "execute", "e_verify pass",
    ]  # fmt: skip
    assert shown.trajectory.off_protocol == 0 and shown.trajectory.status is Status.ANSWERED
    assert unlearned(tiny, shown) == [MISSPELT, "", "", ""]  # its mistake is not taught


def test_a_second_query_may_fail_too(tiny):
    shown = play(tiny, [MISSPELT, RENAMED], GOLD, history=True)
    verdicts = [a for a in actions(shown) if "verify" in a]
    assert verdicts == ["e_verify no_pass", "e_verify no_pass", "e_verify pass", "m_verify pass"]
    assert shown.trajectory.off_protocol == 0 and shown.trajectory.answer_sql == GOLD
    assert unlearned(tiny, shown) == [MISSPELT, RENAMED, "", "", ""]


def test_sql_is_repaired_to_what_the_tool_can_run(tiny):
    """EX mends "> ="; the tool shows SQLite's error for it, which the model must not learn to pass."""
    split = "SELECT name FROM singer WHERE age > = 30"
    example = replace(make_episode(tiny).example, gold_sql=split)
    shown = play(tiny, [MISSPELT], split, example)
    assert shown.trajectory.answer_sql == split.replace("> =", ">=")
    assert "error" not in shown.trajectory.observations[1].text
    scorer = Scorer({"music": tiny.schema}, tiny.executor)
    record = question_record(shown.trajectory, example, scorer, tiny.tokens.decode)
    assert record["gold_result"] == record["answer_result"] and "Bruno" in record["gold_result"]


def test_texts_are_shown_in_single_quotes_which_json_need_not_escape(tiny):
    wrong = 'SELECT nme FROM singer WHERE country = "france"'
    shown = play(tiny, [wrong], 'SELECT "name" FROM singer WHERE country = "france"')
    assert shown.trajectory.answer_sql == "SELECT \"name\" FROM singer WHERE country = 'france'"
    assert unlearned(tiny, shown)[0] == wrong.replace('"', "'")


def test_what_nothing_shows_or_nothing_repairs_is_no_demonstration(tiny):
    hidden, question = "SELECT name FROM singer WHERE country = 'italy'", make_episode(tiny).example
    assert play(tiny, [hidden], GOLD) == Demonstration(question, False, UNSEEN, None)
    assert play(tiny, [MISSPELT, hidden], GOLD) == Demonstration(question, False, UNSEEN, None)
    assert play(tiny, [MISSPELT], None) == Demonstration(question, False, UNREPAIRED, None)


def test_a_lost_constraint_is_seen_in_the_memory(tiny):
    earlier = HistoryTurn("Who is 31?", "SELECT name FROM singer WHERE age = 31")
    gold = "SELECT name FROM singer WHERE age = 31 AND country = 'france'"
    example = make_episode(tiny).example
    example = replace(example, question="Which of those are from France?", history=(earlier,), gold_sql=gold)
    shown = play(tiny, [GOLD], gold, example)
    assert shown.first == "a constraint of an earlier turn is gone"
    assert actions(shown)[2:6] == ["e_verify pass", "m_verify no_pass", "self_correct", "execute"]
    assert shown.trajectory.answer_sql == gold and shown.trajectory.off_protocol == 0
    assert unlearned(tiny, shown) == [GOLD, GOLD, "", "", ""]


@pytest.mark.parametrize(
    ("tools", "limits"),
    [
        ("both", Limits(max_response_tokens=30)),
        ("both", Limits(max_turn_tokens=30)),
        ("none", Limits(max_turn_tokens=10)),
        ("both", Limits(max_prompt_tokens=5)),
        ("none", Limits(max_prompt_tokens=5)),
    ],
)
def test_what_a_limit_cuts_is_no_demonstration(tiny, tools, limits):
    shown = play(tiny, [], GOLD + " " * 40, limits=limits, tools=tools)
    assert (shown.right, shown.first, shown.trajectory) == (True, CUT, None)


def test_a_sample_is_repaired_to_the_right_one_that_is_most_like_it(tiny):
    environment, example = environment_of(tiny), make_episode(tiny).example
    lower = GOLD.replace("'france'", "lower('FRANCE')")
    hidden = "SELECT name FROM singer WHERE country = 'italy'"
    near = GOLD.replace("country", "contry")
    samples = [near, GOLD, lower, near.replace("'france'", "lower('FRANCE')"), hidden]
    right = [False, True, True, False, False]
    answers, failed_twice = [], 0
    for seed in range(40):
        found = demonstrate_samples(environment, example, samples, right, random.Random(seed))
        assert [d.first for d in found] == ["error", RIGHT, RIGHT, "error", UNSEEN]
        calls = [sum(o.tool == "exec_sql" for o in d.trajectory.observations) for d in found[:4]]
        assert calls[1:3] == [1, 1] and {calls[0], calls[3]} <= {2, 3}
        failed_twice += calls[0] == 3
        answers += [(calls[0], found[0].trajectory.answer_sql)]
    # The repair is of what failed last: the other sample, where there were two.
    assert set(answers) == {(2, GOLD), (3, lower)} and 1 <= failed_twice <= 12


def test_a_second_failure_is_another_query_also_when_its_quotes_are_made_single(tiny):
    environment, example = environment_of(tiny), make_episode(tiny).example
    samples = [GOLD.replace("country", "contry"), GOLD.replace("country", "contry").replace("'", '"')]
    for seed in range(20):  # a second failure in a quarter of cases
        for shown in demonstrate_samples(environment, example, samples, [False] * 2, random.Random(seed)):
            assert sum(o.tool == "exec_sql" for o in shown.trajectory.observations) == 2
            assert shown.trajectory.off_protocol == 0


def test_where_no_sample_is_right_the_repair_is_the_gold_sql_if_it_looks_right(tiny):
    environment, example = environment_of(tiny), make_episode(tiny).example
    samples = [MISSPELT, "SELECT name FROM singer WHERE country = 'italy'"]
    (repaired, hidden) = demonstrate_samples(environment, example, samples, [False] * 2, random.Random(0))
    assert (repaired.first, repaired.trajectory.answer_sql, hidden.first) == ("error", GOLD, UNSEEN)
    empty = replace(example, gold_sql=GOLD.replace("france", "nowhere"))
    found = demonstrate_samples(environment, empty, samples, [False] * 2, random.Random(0))
    assert [d.first for d in found] == [UNREPAIRED, UNSEEN]


@pytest.mark.parametrize(
    ("question", "rows", "problem"),
    [
        ("How many singers are there?", ((3,),), None),
        ("How many singers are there?", (("Anna",),), "no number where one is asked for"),
        ("List all singers.", ((3,),), "a number where none is asked for"),
        ("List the total of all ages.", ((3,),), None),
        ("Who is the oldest singer?", (("Anna",), ("Bruno",)), "several rows where one is asked for"),
        ("Who are the latest singers?", (("Anna",), ("Bruno",)), None),
        ("List all singers.", (("Anna",), ("Bruno",)), None),
        ("List all singers.", (), "empty result"),
        ("List all singers.", ((None,),), "empty result"),
    ],
)
def test_only_what_question_and_result_show_is_a_problem(question, rows, problem):
    assert execution_problem(question, ExecutionResult("rows" if rows else "empty", rows=rows)) == problem


def test_values_of_the_last_turn_are_looked_for_where_a_question_refers_back(tiny):
    example = make_episode(tiny, history=True).example

    def problem(question: str, before: str | None, sql: str) -> str | None:
        history = (HistoryTurn("?", before),)
        return memory_problem(replace(example, question=question, history=history), sql)

    lost = "a constraint of an earlier turn is gone"
    assert (
        problem("And those?", "select a from t where b = 'X' and c > 3", "select a from t where b = 'x'")
        == lost
    )
    assert problem("And those?", "select a from t where b = 'X'", 'select b from t where b = "x"') is None
    assert problem("And those?", "select a, 5 from t limit 3", "select b from t") is None
    assert problem("List all.", "select a from t where b = 'X'", "select b from t") is None
    assert problem("And those?", None, "select b from t") is None


def test_the_share_of_wrong_proposals_stays(tiny):
    example, played = make_episode(tiny).example, play(tiny, [], GOLD).trajectory

    def shown(right: bool, first: str, tools: str = "both", words: int = 0) -> Demonstration:
        """One of a trajectory that is like no other of other `words`, without any if nothing can be shown."""
        usable = first in (RIGHT, "error")
        other = replace(played, segments=[*played.segments, Segment.given("environment", [5] * words)])
        return Demonstration(example, right, first, other if usable else None, tools, tools != "none")

    # Of eight samples four are right, two of them the same; of the wrong ones one cannot be shown.
    question = [shown(True, RIGHT, words=n) for n in (1, 1, 2, 3)]
    question += [shown(False, "error", words=n) for n in (4, 5, 6)] + [shown(False, UNSEEN)]
    kept = choose_demonstrations([question] * 10, 2, random.Random(0))
    assert Counter(d.right for d in kept) == {True: 20, False: 20}  # two of each kind, and half are wrong
    kept = choose_demonstrations([question] * 10, 5, random.Random(0))
    assert Counter(d.right for d in kept) == {True: 30, False: 30}  # all that differ
    unsolved = [shown(False, UNREPAIRED)] * 8
    kept = choose_demonstrations([question, unsolved] * 10, 2, random.Random(0))
    assert Counter(d.right for d in kept) == {True: 7, False: 20}  # three of four are wrong
    direct = [shown(True, RIGHT, "none")]
    kept = choose_demonstrations([question, direct, [shown(True, CUT, "none")]], 2, random.Random(0))
    assert kept[-1:] == direct and len(kept) == 5
    assert len(choose_demonstrations([question[:4]], 2, random.Random(0))) == 2  # none is wrong


def test_a_model_learns_from_the_repair_of_its_own_mistakes(work, tmp_path):
    data = [*TOY, "--data", work / "benchmark", "--model", work / "imitation"]
    out = run(
        "-m", "mtsql.commands.demonstrations", *data, "--out", tmp_path / "shown",
        "--samples-per-question", 6, "--temperature", 1.0, "--questions", 20, "--gold-questions", 8,
    )  # fmt: skip
    path = tmp_path / "shown" / "demonstrations.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    repaired = [line for line in lines if any("unlearned" in m for m in line["messages"])]
    kinds = Counter(line["first_proposal"] for line in lines)
    assert repaired and len(repaired) == kinds.total() - kinds["right"] - kinds["gold"]
    assert max(Counter(line["example_id"] for line in repaired).values()) <= 2
    gold = [line for line in lines if line["first_proposal"] == "gold"]
    with_tools = [line["example_id"] for line in gold if line.get("tool_set") != "none"]
    assert with_tools and not set(with_tools) & {line["example_id"] for line in lines if line not in gold}
    assert re.search(rf"right +\d+ +{kinds['right']}\n", out)
    assert re.search(rf"gold SQL, with tools +{len(with_tools)}\n", out)
    assert {line.get("tool_set", "both") for line in lines} > {"both"}
    for line in lines:
        assert ("tools: none" in line["messages"][0]["content"]) == (line.get("tool_set") == "none")
    out = run(
        "train_sft.py", *data, "--out", tmp_path / "sft", "--targets", "teacher", "--teacher", path,
        "--rounds", 1, "--epochs", 1, "--correct", "ex",
    )  # fmt: skip
    assert f"{'  kept':<52}{len(lines):>8,}" in out, out
    assert "another observation" not in out
    chat = [json.loads(line) for line in (tmp_path / "sft" / "chat.jsonl").read_text().splitlines()]
    names = ("example_id", "messages", "tool_set")
    assert sorted(json.dumps([line.get(name) for name in names]) for line in chat) == sorted(
        json.dumps([line.get(name) for name in names]) for line in lines
    )
    refused = run(
        "-m", "mtsql.commands.demonstrations", *data, "--out", tmp_path, "--tools", "none", expect=2
    )
    assert "leave out --tools" in refused
    refused = run(
        "-m", "mtsql.commands.demonstrations", *data, "--out", tmp_path, "--gold-questions", 2, expect=2
    )
    assert "--gold-questions needs --questions above 0" in refused
