"""The viewer of trajectories: in the terminal, and as a page."""

import base64
import gzip
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import json_lines, refusal, write_lines

from mtsql.agent.trajectory import Segment, Status, Trajectory, trajectory_record
from mtsql.config import user_errors
from mtsql.extras.viewer import main, render

GREEN, YELLOW, DIM, RESET = "\033[32m", "\033[33m", "\033[2m", "\033[0m"


def decode(ids):
    return " ".join(f"<{i}>" for i in ids)


def record_of(decode=decode, reward=None):
    segments = [Segment.given("prompt", [1, 2]), Segment.sampled([3, 4, 5], [-0.1, -0.2, -0.3])]
    segments.append(Segment.given("environment", [6]))
    trajectory = Trajectory("7/1", 3, segments, status=Status.ANSWERED, answer_sql="SELECT 1")
    return trajectory_record(trajectory, decode) | {"reward": reward}


@pytest.fixture
def records(tmp_path):
    return write_lines(tmp_path / "trajectories.jsonl", [record_of(reward=reward) for reward in (0.25, 0.75)])


def page_data(page):
    packed = re.search(r'id="data">([A-Za-z0-9+/=]+)</script>', page.read_text())[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_the_loss_mask_in_colour_and_without():
    coloured = render(record_of(reward=0.5), colour=True)
    for code, text in ((DIM, "<1> <2>"), (GREEN, "<3> <4> <5>"), (YELLOW, "<6>")):
        assert f"{code}{text}{RESET}" in coloured
    record = record_of(reward=0.5)
    record["segments"][1]["loss_mask_sum"] = 0  # a demonstration's mistake
    assert GREEN not in render(record, colour=True)
    plain = render(record_of(reward=0.5), colour=False)
    assert "\033" not in plain
    assert "7/1   status answered   reward 0.500   3 of 6 tokens trained" in plain
    assert "[model: 3 tokens, 3 trained]" in plain and "[answer] SELECT 1" in plain


def test_terminal_control_characters_are_shown_not_obeyed():
    record = record_of(lambda ids: "a\033[2Jb\n\tc\r")
    text = render(record, colour=False)
    assert "a\\x1b[2Jb\n\tc\\x0d" in text and "\033" not in text and "reward -" in text
    assert "\033" not in render(record | {"example_id": "\033[2J", "status": "\033[2J"}, colour=False)


def test_options(records, capsys, monkeypatch):
    def shown(*options):
        main([str(records), *options])
        return capsys.readouterr().out

    monkeypatch.delenv("NO_COLOR", raising=False)
    out = shown()
    assert "0.250" in out and "0.750" in out and "\033" not in out  # no terminal
    out = shown("--index", "1", "--color", "always")
    assert "0.250" not in out and GREEN in out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert GREEN in shown() and "\033" not in shown("--color", "never")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in shown()


def test_errors_are_one_sentence(records, tmp_path, capsys):
    def said(*arguments):
        return refusal(capsys, user_errors, main, [str(argument) for argument in (records, *arguments)])

    assert said("--index", 2) == f"error: --index 2: {records} has 2 trajectories, from 0\n"
    (folder := tmp_path / "folder.html").mkdir()
    assert said("--html", folder) == f"error: {folder}: Is a directory\n"
    assert said("--html", records) == f"error: --html {records} should end in .html\n"
    assert "File exists" in said("--html", records / "page.html")
    assert "--beside needs --html" in said("--beside", records)
    assert "--index is for the terminal" in said("--index", 0, "--html", records.with_suffix(".html"))
    row = records.read_text().splitlines()[0]
    whole = json.loads(row)
    first, second, _ = whole["segments"]
    odd = [{"role": "model", "text": "x"}, first | {"loss_mask_sum": "1"}, first | {"role": "nobody"}]
    odd += [second | {name: 7} for name in ("text", "ids", "tokens")]
    broken = [{"a": 1}, {"segments": []}, *(whole | {"segments": [segment]} for segment in odd)]
    for record in [*broken, *(whole | {"reward": reward} for reward in ("high", "0.5", [], 10**400))]:
        write_lines(records, [record])
        assert said().startswith(f"error: {records}, line 1: not a trajectory (")
    for noise in ("[" * 100_000, "9" * 5_000, row.replace("0.25", "1" + "0" * 5_000 + '"')):
        records.write_text(noise + "\n")
        assert said().count("\n") == 1
    records.unlink()
    assert "No such file" in said()


def test_numbers_that_no_page_can_hold_are_shown_as_none(records, tmp_path, capsys):
    row, page = records.read_text().splitlines()[0], tmp_path / "page.html"
    for number in ("-Infinity", "NaN"):
        records.write_text(row.replace('"reward": 0.25', f'"reward": {number}') + "\n")
        main([str(records)])
        assert "reward -" in capsys.readouterr().out
        main([str(records), "--html", str(page)])
        assert page_data(page)["files"][0]["records"][0]["reward"] is None


def test_the_page_holds_every_record_and_is_safe_from_what_they_say(records, tmp_path, capsys):
    hostile = "</script><script>alert(1)</script> <|im_end|> \ud800"
    rows = json_lines(records)
    rows[1] |= {"question": hostile, "answer_sql": hostile}
    rows[1]["segments"][2]["text"] = hostile
    write_lines(records, rows)
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


def test_it_runs_as_a_module_and_into_a_closed_pipe(records):
    """What a terminal cannot show is shown as a number."""
    row = records.read_text().splitlines()[0].replace("<3>", "größe 😀")
    records.write_text((row + "\n") * 2000, "utf-8")
    command = f"'{sys.executable}' -m mtsql.extras.viewer '{records}' --color always | head -n 9"
    command = ["bash", "-o", "pipefail", "-c", command]
    for errors in ("strict", "surrogateescape"):  # the second is Python's own in the locale C
        how = {"env": os.environ | {"PYTHONIOENCODING": f"ascii:{errors}"}, "timeout": 60}
        done = subprocess.run(command, capture_output=True, text=True, **how)
        assert (done.stderr, done.returncode) == ("", 1)
        assert "7/1" in done.stdout and r"gr\xf6\xdfe \U0001f600" in done.stdout
