"""Evaluation numbers, the metrics log, figures and the viewer."""

from __future__ import annotations

import base64
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from matplotlib.image import imread

from mtsql.agent.trajectory import Segment, Status, Trajectory, trajectory_record
from mtsql.config import user_errors
from mtsql.errors import UserError
from mtsql.extras.plot import plot_training
from mtsql.extras.viewer import main, render
from mtsql.report.answer_log import AnswerLog
from mtsql.report.evaluation import ABILITIES
from mtsql.report.metrics import (
    MetricsLog,
    bootstrap_interval,
    bootstrap_means,
    excludes_zero,
    format_coverage,
    format_summary,
    paired_difference,
    summarise,
)
from mtsql.report.records import drop_later_records
from mtsql.sql.score import FURTHER_METRICS

GREEN, YELLOW, DIM, RESET = "\033[32m", "\033[33m", "\033[2m", "\033[0m"


def test_interval_of_hand_cases():
    assert bootstrap_interval([[1, 1], [1]]) == (1.0, 1.0)
    assert bootstrap_interval([[1, 0, 1]]) == pytest.approx((2 / 3, 2 / 3))  # one dialogue
    assert bootstrap_interval([[0], [1]]) == (0.0, 1.0)  # 0, 1/2, 1 at 25, 50, 25 %
    low, high = bootstrap_interval([[0, 0, 0], [1]])  # a mean over questions: 0, 1/4 or 1
    assert (low, high) == (0.0, 1.0)
    with pytest.raises(ValueError, match="at least one group"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match="a question in each"):
        bootstrap_interval([[1], []])


def test_interval_agrees_with_theory_and_repeats():
    """100 one-question dialogues at 50 %: 1.96 standard errors of 5 % on both sides."""
    values = [[i % 2] for i in range(100)]
    low, high = bootstrap_interval(values)
    assert low == pytest.approx(0.5 - 0.098, abs=0.015)
    assert high == pytest.approx(0.5 + 0.098, abs=0.015)
    assert bootstrap_interval(values) == (low, high)
    uneven = [[i % 7 / 6] for i in range(100)]
    assert bootstrap_interval(uneven, seed=1) != bootstrap_interval(uneven)
    many = [[i % 2] for i in range(400)]  # equal ones are drawn as one
    assert bootstrap_interval(many) == pytest.approx((0.5 - 0.049, 0.5 + 0.049), abs=0.008)


def test_an_end_within_its_own_error_of_zero_claims_nothing():
    """EXECUTE on SParC dev once stood as 1.7 [0.1, 3.8], which other seeds of the draws take back."""
    rows = json.loads((ROOT / "docs" / "results" / "real.json").read_text())
    claimed = {}
    for dataset in ("sparc", "cosql"):
        of = {r["arm"]: r for r in rows if (r["dataset"], r["seed"]) == (dataset, 0)}
        names = [name for name, count in of["rl"]["databases"] for _ in range(count)]
        groups: dict[str, list[int]] = {}
        for name, x, y in zip(names, of["rl"]["right"], of["rl_no_execution"]["right"], strict=True):
            groups.setdefault(name, []).append(int(x) - int(y))
        claimed[dataset] = [excludes_zero(bootstrap_means(list(groups.values()), seed)) for seed in range(5)]
    assert claimed == {"sparc": [False] * 5, "cosql": [True] * 5}
    draws = np.ones(10_000)
    for beyond, excluded in ((0, True), (200, True), (240, False), (250, False), (300, False)):
        draws[:beyond] = -1  # the interval's end is above 0 up to 249; its own error is 31 draws
        assert (excludes_zero(draws), excludes_zero(-draws)) == (excluded, excluded), beyond
    assert not excludes_zero(np.zeros(10_000))


def test_paired_difference_by_hand():
    a = [[1, 1], [1, 1], [1, 0]]
    b = [[1, 0], [0, 0], [0, 0]]
    difference, low, high, p = paired_difference(a, b)
    assert difference == pytest.approx(4 / 6)
    assert low == pytest.approx(0.5) and high == pytest.approx(5 / 6, abs=0.2)
    assert p == pytest.approx(2 * 0.5**4)  # four discordant questions, all one way
    assert paired_difference(b, a)[0] == pytest.approx(-4 / 6)
    assert paired_difference(a, a) == (0.0, 0.0, 0.0, 1.0)
    assert paired_difference([[1, 0, 1]], [[0, 1, 1]])[3] == 1.0
    with pytest.raises(ValueError, match="same questions"):
        paired_difference([[1]], [[1, 0]])


def make_record(dialogue: object, turn: int, ex: int, em: int, **changes) -> dict:
    return {
        "dialogue_id": dialogue,
        "turn_index": turn,
        "hardness": "easy",
        "ex": ex,
        "em": em,
        **dict.fromkeys(FURTHER_METRICS, ex),
        "predicted": "SELECT 1",
        "pred_parses": dialogue == "a",
        "status": "answered",
        "interactions": 2,
        "turns": 3,
        "tool_calls": {"exec_sql": 1},
        "sampled_tokens": 10,
        "response_tokens": 20,
        "abilities": dict.fromkeys(ABILITIES, 1.0),
    } | changes


RECORDS = [
    make_record("a", 0, 1, 1),
    make_record("a", 1, 1, 0, hardness="hard", sampled_tokens=30, abilities=dict.fromkeys(ABILITIES, 0.25)),
    make_record("b", 0, 1, 1, tool_calls={}, abilities=dict.fromkeys(ABILITIES, 0.5) | {"m_verify": None}),
    make_record(
        "b",
        5,
        0,
        0,
        hardness="unknown",
        status=Status.OUT_OF_TOKENS,
        interactions=4,
    ),
]


def test_turns_thoughts_and_parts_of_rewards_by_hand():
    more = [(3, 10, 1.0, "simple"), (3, 30, 0.5, "simple"), (3, 0, 1.0, "challenging"), (5, 40, 0.0, "")]
    names = ("turns", "thought_characters", "reward_parts", "difficulty")
    records = [
        r | dict(zip(names, (turns, length, {"syntax": syntax}, difficulty), strict=True))
        for r, (turns, length, syntax, difficulty) in zip(RECORDS, more, strict=True)
    ]
    summary = summarise(records)
    assert (summary["turns"], summary["turns_deviation"]) == (3.5, pytest.approx(0.75**0.5))
    assert summary["turns_by_difficulty"] == {"simple": 3, "challenging": 3}
    assert summary["thought_characters_by_difficulty"] == {"simple": 20, "challenging": 0}
    assert summary["reward_parts"] == {"syntax": 0.625}
    text = format_summary(summary)
    assert "3.50 an answer, deviation 0.87" in text and "reward: syntax" in text
    assert "thought_characters" not in summarise(RECORDS) and summarise(RECORDS)["reward_parts"] == {}


def test_summary_by_hand():
    summary = summarise(RECORDS)
    assert (summary["questions"], summary["dialogues"]) == (4, 2)
    ex, em = summary["ex"], summary["em"]
    assert (ex["mean"], ex["low"], ex["high"], ex["interaction_match"]) == (0.75, 0.5, 1.0, 0.5)
    assert (em["mean"], em["interaction_match"]) == (0.5, 0.0)
    assert ex["by_turn"] == {"1": 1.0, "2": 1.0, "3": None, "4": None, ">4": 0.0}
    assert em["by_turn"]["2"] == 0.0
    assert summary["questions_by_turn"] == {"1": 2, "2": 1, "3": 0, "4": 0, ">4": 1}
    assert ex["by_hardness"] == {
        "easy": 1.0, "medium": None, "hard": 1.0, "extra": None, "unknown": 0.0,
    }  # fmt: skip
    assert set(summary["status"]) == {str(s) for s in Status}
    assert (summary["status"]["answered"], summary["status"]["out_of_tokens"]) == (0.75, 0.25)
    assert summary["tool_calls"] == {"exec_sql": 0.75}
    assert summary["further"]["ex_bird"] == 0.75
    assert (summary["official_grammar_cannot_read"], summary["answers"]) == (2, 4)
    assert (summary["interactions"], summary["sampled_tokens"]) == (2.5, 15.0)
    assert summary["interactions_by_turn"] == {"1": 2.0, "2": 2.0, "3": None, "4": None, ">4": 4.0}
    assert summary["sampled_tokens_by_hardness"]["hard"] == 30.0
    assert summary["abilities"]["generation"] == (1 + 0.25 + 0.5 + 1) / 4
    assert summary["abilities"]["m_verify"] == 0.75  # over the three questions that have one
    assert json.loads(json.dumps(summary)) == summary
    with pytest.raises(ValueError, match="nothing to summarise"):
        summarise([])


def test_questions_whose_prompt_is_too_long_are_counted():
    lines = format_summary(summarise(RECORDS)).splitlines()
    table = lines[2 : lines.index("", 2)]
    assert {len(line) for line in table} == {50}  # it is aligned
    assert "turn >4                        1      0.0      0.0" in table
    assert "turn 3                         0        -        -" in table
    assert not any("not asked" in line for line in lines)  # one ran out of tokens, but had been asked
    ended = RECORDS[-1]
    assert ended["status"] == Status.OUT_OF_TOKENS and ended["response_tokens"] > 0
    summary = summarise([*RECORDS, ended | {"response_tokens": 0, "sampled_tokens": 0}])
    assert summary["not_asked"] == 1
    assert "1 of 5 were not asked, and count as wrong: their prompt is longer than --max-prompt-tokens" in (
        format_summary(summary).splitlines()
    )


def test_coverage_is_shown_as_in_table_7():
    rounds = [
        {"round": 1, "sampled": 160, "right": 90, "questions_asked": 8, "questions_solved": 5}
        | {"questions_covered": 5, "trajectories": 9},
        {"round": 2, "sampled": 60, "right": 10, "questions_asked": 3, "questions_solved": 1}
        | {"questions_covered": 6, "trajectories": 12},
    ]
    lines = format_coverage(8, rounds).splitlines()
    assert [line.split()[-1] for line in lines[:4]] == ["8", "5", "6", "12"]
    assert lines[4] == "round 2: 10 of 60 rollouts right, 1 of 3 questions solved"


def test_metrics_log_columns_and_resume(tmp_path):
    path = tmp_path / "metrics.csv"
    log = MetricsLog(path)
    for step in range(4):
        log.append({"step": step, "reward": step / 2, "note": 'a "b", c'} if step != 1 else {"step": 1})
    with pytest.raises(ValueError, match="not in fieldnames: 'late'"):
        log.append({"step": 9, "late": 1})
    with pytest.raises(ValueError, match="needs a step"):
        log.append({"reward": 1})
    text = path.read_text()
    assert text.splitlines() == [
        "step,reward,note",
        '0,0.0,"a ""b"", c"',
        "1,,",
        '2,1.0,"a ""b"", c"',
        '3,1.5,"a ""b"", c"',
    ]
    path.write_text(text + "4,2.")  # cut off by a crash
    MetricsLog(path, resume_step=2).append({"note": "again", "step": 2})
    assert path.read_text().splitlines()[1:] == ['0,0.0,"a ""b"", c"', "1,,", "2,,again"]
    MetricsLog(path).append({"step": 0, "other": 1})  # a new run starts anew
    assert path.read_text() == "step,other\n0,1\n"
    MetricsLog(path, resume_step=5).append({"step": 5, "other": 2})
    assert path.read_text() == "step,other\n0,1\n5,2\n"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="no column named step"):
        MetricsLog(path, resume_step=1)
    for cut_off in ("1,0.5", "1"):  # 0.5 of 0.5625, and whatever its step
        path.write_text("step,reward\n0,0.25\n" + cut_off)
        MetricsLog(path, resume_step=5)
        assert path.read_text() == "step,reward\n0,0.25\n"


def test_figures_are_written(tmp_path):
    path = tmp_path / "metrics.csv"
    log = MetricsLog(path)
    for step in range(5):
        log.append({"step": step, "reward": 0.1 * step, "ex": "" if step % 2 else 0.5, "entropy": 1})
    figure = tmp_path / "plots" / "training.png"
    assert plot_training([path], figure) == figure
    alone = imread(figure)
    other = tmp_path / "other" / "metrics.csv"
    other.parent.mkdir()
    MetricsLog(other).append({"step": 0, "reward": 1.0})
    assert imread(plot_training([other], figure)).shape[1] < alone.shape[1]  # one panel, not three
    assert imread(plot_training([path, other], figure)).shape == alone.shape
    MetricsLog(path).append({"step": 0, "loss": 1.0})
    with pytest.raises(UserError, match="no row with any of reward, ex"):
        plot_training([path], figure)


def make_trajectory() -> Trajectory:
    segments = [
        Segment.given("prompt", [1, 2]),
        Segment.sampled([3, 4, 5], [-0.1, -0.2, -0.3]),
        Segment.given("environment", [6]),
    ]
    return Trajectory("7/1", 3, segments, status=Status.ANSWERED, answer_sql="SELECT 1")


def decode(ids: tuple[int, ...]) -> str:
    return " ".join(f"<{i}>" for i in ids)


def test_loss_mask_in_colour_and_without():
    record = trajectory_record(make_trajectory(), decode, reward=0.5)
    coloured = render(record, colour=True)
    for code, text in ((DIM, "<1> <2>"), (GREEN, "<3> <4> <5>"), (YELLOW, "<6>")):
        assert f"{code}{text}{RESET}" in coloured
    plain = render(record, colour=False)
    assert "\033" not in plain
    assert "7/1   status answered   reward 0.500   3 of 6 tokens trained" in plain
    assert "[model: 3 tokens, 3 trained]" in plain and "[answer] SELECT 1" in plain


def test_terminal_control_characters_are_shown_not_obeyed():
    record = trajectory_record(make_trajectory(), lambda ids: "a\033[2Jb\n\tc\r", None)
    text = render(record, colour=False)
    assert "a\\x1b[2Jb\n\tc\\x0d" in text and "\033" not in text and "reward -" in text
    assert "\033" not in render(record | {"example_id": "\033[2J", "status": "\033[2J"}, colour=False)


@pytest.fixture
def records(tmp_path) -> Path:
    path = tmp_path / "trajectories.jsonl"
    rows = [trajectory_record(make_trajectory(), decode, reward=r) for r in (0.25, 0.75)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_viewer_options(records, capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    main([str(records)])
    out = capsys.readouterr().out
    assert "0.250" in out and "0.750" in out and "\033" not in out  # no terminal
    main([str(records), "--index", "1", "--color", "always"])
    out = capsys.readouterr().out
    assert "0.250" not in out and GREEN in out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main([str(records)])
    assert GREEN in capsys.readouterr().out
    main([str(records), "--color", "never"])
    assert "\033" not in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    main([str(records)])
    assert "\033" not in capsys.readouterr().out


def refuse(arguments: list[str]) -> None:
    """The viewer ends with exit code 2."""
    with pytest.raises(SystemExit) as stop:
        user_errors(main, arguments)
    assert stop.value.code == 2


def test_viewer_errors_are_one_sentence(records, tmp_path, capsys):
    refuse([str(records), "--index", "2"])
    assert capsys.readouterr().err == f"error: --index 2: {records} has 2 trajectories, from 0\n"
    refuse([str(tmp_path / "none")])
    assert "none is no file" in capsys.readouterr().err
    refuse([str(records), "--html", str(tmp_path)])
    assert capsys.readouterr().err == f"error: {tmp_path} is a folder; name a file\n"
    refuse([str(records), "--html", str(records / "page.html")])
    assert "a file stands where it needs a folder" in capsys.readouterr().err
    whole = json.loads(records.read_text().splitlines()[0])
    for broken in (
        {"a": 1},
        {"segments": []},
        whole | {"reward": "high"},
        whole | {"segments": [whole["segments"][0] | {"role": "nobody"}]},
        whole | {"segments": [{"role": "model", "text": "x"}]},
    ):
        records.write_text(json.dumps(broken) + "\n")
        refuse([str(records)])
        assert capsys.readouterr().err == f"error: {records}, line 1: not a trajectory\n"


def test_numbers_that_no_page_can_hold_are_shown_as_none_and_noise_is_one_sentence(records, tmp_path, capsys):
    row, page = records.read_text().splitlines()[0], tmp_path / "page.html"
    for number in ("1e999", "-Infinity", "NaN", "9" * 400):
        records.write_text(row.replace('"reward": 0.25', f'"reward": {number}') + "\n")
        main([str(records)])
        assert "reward -" in capsys.readouterr().out
        main([str(records), "--html", str(page)])
        assert page_data(page)["files"][0]["records"][0]["reward"] is None
    for line in ("[" * 100_000, "9" * 5_000, row.replace("0.25", "1" + "0" * 5_000 + '"')):
        records.write_text(line + "\n")
        refuse([str(records)])
    records.write_bytes(row.encode() + b"\n\xff\xfe\n")
    with pytest.raises(UserError, match="line 2: not a trajectory"):
        drop_later_records(records, 3)
    for read in (lambda path: MetricsLog(path, 2), lambda path: AnswerLog(path, {})):
        (tmp_path / "noise").write_bytes(b"step,a\nx,\xff\x00\n")
        with pytest.raises(UserError, match="noise is damaged"):
            read(tmp_path / "noise")


def page_data(page: Path) -> dict:
    packed = re.search(r'id="data">([A-Za-z0-9+/=]+)</script>', page.read_text())[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_the_page_holds_every_record_and_is_safe_from_what_they_say(records, tmp_path, capsys):
    hostile = "</script><script>alert(1)</script> <|im_end|> \ud800"
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    rows[1] |= {"question": hostile, "answer_sql": hostile}
    rows[1]["segments"][2]["text"] = hostile
    records.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = tmp_path / "new" / "page.html"
    main([str(records), "--html", str(page), "--beside", str(records)])
    assert f"2 trajectories in {page}" in capsys.readouterr().out
    assert "alert(1)" not in page.read_text() and "http" not in page.read_text().replace("http-equiv", "")
    data = page_data(page)
    assert [file["name"] for file in data["files"]] == [records.as_posix()] * 2
    assert data["prompts"] == ["<1> <2>"]  # held once
    first, second = data["files"][0]["records"]
    assert second["question"] == hostile.replace("\ud800", "?")
    assert [s["loss_mask_sum"] for s in first["segments"]] == [0, 3, 0]
    assert first["segments"][1]["logprobs"] == [-0.1, -0.2, -0.3]
    refuse([str(records), "--beside", str(records)])
    assert "--beside needs --html" in capsys.readouterr().err


def test_viewer_runs_as_a_module_and_into_a_closed_pipe(records):
    row = records.read_text().splitlines()[0]
    records.write_text((row + "\n") * 2000)
    command = f"'{sys.executable}' -m mtsql.extras.viewer '{records}' --color always | head -n 2"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and "7/1" in done.stdout
