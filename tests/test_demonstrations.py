"""Demonstrations whose mistakes are the model's own: what is found wrong, and what is written."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from conftest import GOLD, TOY, make_episode, run

from mtsql.agent.env import Limits
from mtsql.agent.trajectory import ActionType, Status
from mtsql.data.datasets import HistoryTurn
from mtsql.learn.demonstrations import (
    CUT,
    RIGHT,
    UNSEEN,
    Demonstration,
    demonstrate,
    execution_problem,
    keep_share_of_wrong,
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


def test_a_right_answer_passes_both_checks(tiny):
    shown = demonstrate(make_episode(tiny, history=True), GOLD, right=True)
    expected = ["propose", "execute", "e_verify pass", "m_verify pass", "finalize"]
    assert shown.first == RIGHT and actions(shown) == expected and unlearned(tiny, shown) == ["", "", ""]
    assert shown.trajectory.off_protocol == 0 and shown.trajectory.answer_sql == GOLD


def test_an_error_is_seen_and_repaired_to_the_gold_sql(tiny):
    shown = demonstrate(make_episode(tiny, history=True), "SELECT nme FROM singer", right=False)
    assert shown.first == "error" and shown.trajectory.answer_sql == GOLD
    assert actions(shown)[:6] == [
        "propose", "execute", "e_verify no_pass", "self_correct", "execute", "e_verify pass",
    ]  # fmt: skip
    assert shown.trajectory.off_protocol == 0 and shown.trajectory.status is Status.ANSWERED
    assert unlearned(tiny, shown) == ["SELECT nme FROM singer", "", "", ""]  # its mistake is not taught


def test_sql_is_repaired_to_what_the_tool_can_run(tiny):
    """EX mends "> ="; the tool shows SQLite's error for it, which the model must not learn to pass."""
    episode, split = make_episode(tiny), "SELECT name FROM singer WHERE age > = 30"
    episode.example = replace(episode.example, gold_sql=split)
    proposed = demonstrate(make_episode(tiny), split, right=True)
    assert proposed.first == RIGHT and proposed.trajectory.answer_sql == split.replace("> =", ">=")
    assert "error" not in proposed.trajectory.observations[0].text
    shown = demonstrate(episode, "SELECT nme FROM singer", right=False)
    assert shown.trajectory.answer_sql == "SELECT name FROM singer WHERE age >= 30" and episode.result.ok
    scorer = Scorer({"music": tiny.schema}, tiny.executor)
    record = question_record(shown.trajectory, episode.example, scorer, tiny.tokens.decode)
    assert record["gold_result"] == record["answer_result"] and "Bruno" in record["gold_result"]


def test_what_nothing_shows_is_no_demonstration(tiny):
    wrong = "SELECT name FROM singer WHERE country = 'italy'"
    assert demonstrate(make_episode(tiny), wrong, right=False) == Demonstration(
        make_episode(tiny).example, False, UNSEEN, None
    )


def test_a_lost_constraint_is_seen_in_the_memory(tiny):
    episode = make_episode(tiny, history=True)
    earlier = HistoryTurn("Who is 31?", "SELECT name FROM singer WHERE age = 31")
    episode.example = replace(episode.example, question="Which of those are from France?", history=(earlier,))
    gold = "SELECT name FROM singer WHERE age = 31 AND country = 'france'"
    episode.example = replace(episode.example, gold_sql=gold)
    shown = demonstrate(episode, GOLD, right=False)
    assert shown.first == "a constraint of an earlier turn is gone"
    assert actions(shown)[2:6] == ["e_verify pass", "m_verify no_pass", "self_correct", "execute"]
    assert shown.trajectory.answer_sql == gold and shown.trajectory.off_protocol == 0
    assert unlearned(tiny, shown) == [GOLD, GOLD, "", "", ""]


@pytest.mark.parametrize(
    ("tools", "limits"),
    [
        ("both", Limits(max_response_tokens=30)),
        ("both", Limits(max_prompt_tokens=5)),
        ("none", Limits(max_prompt_tokens=5)),
    ],
)
def test_what_a_limit_cuts_is_no_demonstration(tiny, tools, limits):
    shown = demonstrate(make_episode(tiny, limits=limits, tools=tools), GOLD + " " * 40, right=True)
    assert (shown.right, shown.first, shown.trajectory) == (True, CUT, None)


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
    example = make_episode(tiny).example

    def shown(right: bool, first: str, count: int, tools: str = "both") -> list[Demonstration]:
        return [Demonstration(example, right, first, None, tools) for _ in range(count)]

    right, wrong = shown(True, RIGHT, 60), shown(False, "error", 10)
    found = right + wrong + shown(False, UNSEEN, 30)
    kept = keep_share_of_wrong(found, random.Random(0))
    assert [d.first for d in kept] == [RIGHT] * 15 + ["error"] * 10  # a quarter of the wrong ones: 40 %
    cut = shown(True, CUT, 12) + shown(False, CUT, 32)
    kept = keep_share_of_wrong(found + cut, random.Random(0))
    assert [d.first for d in kept] == [RIGHT] * 10 + ["error"] * 10  # 72 of 144 were wrong
    assert keep_share_of_wrong(right, random.Random(0)) == right
    beside = shown(True, "gold, beside a repaired one", 10)
    assert keep_share_of_wrong(found + beside, random.Random(0))[25:] == beside
    direct = shown(True, RIGHT, 5, "none")
    assert keep_share_of_wrong(found + direct + shown(True, CUT, 3, "none"), random.Random(0))[25:] == direct


def test_a_model_learns_from_the_repair_of_its_own_mistakes(work, tmp_path):
    data = [*TOY, "--data", work / "benchmark", "--model", work / "imitation"]
    out = run(
        "-m", "mtsql.commands.demonstrations", *data, "--out", tmp_path / "shown",
        "--samples-per-question", 2, "--temperature", 1.0, "--questions", 20, "--gold-questions", 8,
    )  # fmt: skip
    path = tmp_path / "shown" / "demonstrations.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = Counter(line["first_proposal"] for line in lines)
    repaired = sum(any("unlearned" in m for m in line["messages"]) for line in lines)
    assert repaired and kinds["gold, beside a repaired one"] == repaired
    alone = [line for line in lines if line["first_proposal"] == "gold, of a question that was not sampled"]
    sampled = {line["example_id"] for line in lines if line not in alone}
    assert len(alone) == 8 and not {line["example_id"] for line in alone} & sampled
    assert not any("unlearned" in m for line in alone for m in line["messages"])
    with_tools = sum(line.get("tool_set") != "none" for line in alone)
    assert re.search(rf"gold, of a question that was not sampled +{with_tools}\n", out)
    assert "left out 0: gold, beyond a limit of the episode" in out
    assert {line.get("tool_set", "both") for line in lines} > {"both"}
    for line in lines:
        assert ("tools: none" in line["messages"][0]["content"]) == (line.get("tool_set") == "none")
    out = run(
        "train_sft.py", *data, "--out", tmp_path / "sft", "--targets", "teacher", "--teacher", path,
        "--rounds", 1, "--epochs", 1,
    )  # fmt: skip
    assert f"{'  kept':<52}{len(lines):>8,}" in out
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
