"""Training runs that are killed at random moments and resumed give the bits of unbroken ones."""

from __future__ import annotations

import csv
import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, TOY, run

from evaluate import Args as EvaluateArgs
from mtsql.config import read_options, save_config
from mtsql.errors import UserError
from mtsql.files import folder_atomically, hold_folder, refuse_filled, write_atomically
from mtsql.learn.checkpoint import changed_options, new_checkpoint, newest_checkpoint
from mtsql.model_folder import check_exists
from mtsql.report.answer_log import AnswerLog
from mtsql.task import answer_options, load_split
from train_grpo import Args as GrpoArgs
from train_sft import Args as SftArgs

CLOCKS = {"minutes", "rollout_seconds", "train_seconds", "sampled_tokens_per_second"}
KILLS = 3  # of each script
SCRIPTS = {
    "train_grpo": [
        "--steps", 3, "--prompts-per-step", 2, "--samples-per-prompt", 4, "--save-every", 1, "--beta", 0.01,
        "--evaluate-every", 2, "--evaluate-dialogues", 2, "--lora-rank", 4, "--max-turn-tokens", 60,
    ],
    "train_sft": [
        "--questions", 8, "--samples-per-question", 4, "--rounds", 2, "--epochs", 2, "--save-every", 2,
        "--trajectories-per-step", 3, "--tools", "none",
    ],
}  # fmt: skip


def play(script: str, arguments: list[str]) -> None:
    """A script's main in a process of its own, on one thread, without its output."""
    sys.path.insert(0, str(ROOT))
    import torch

    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    config = read_options({"train_grpo": GrpoArgs, "train_sft": SftArgs}[script], "", arguments)
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        __import__(script).main(config)


@pytest.fixture(scope="module")
def start():
    """Starts a script quickly: the heavy imports are done once, in the server that processes fork from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "train_grpo", "train_sft"])

    def begin(script: str, arguments: list) -> multiprocessing.Process:
        process = context.Process(target=play, args=(script, [str(a) for a in arguments]))
        process.start()
        return process

    return begin


def outcome(folder: Path) -> tuple[dict[str, bytes], list[dict]]:
    """The weights, and every figure that is not a time."""
    weights = {p.name: p.read_bytes() for p in sorted((folder / "policy").glob("*.safetensors"))}
    rows = []
    for name in ("metrics.csv", "dev.csv"):
        if (folder / name).is_file():
            with (folder / name).open(newline="") as file:
                rows += [{k: v for k, v in r.items() if k not in CLOCKS} for r in csv.DictReader(file)]
    return weights, rows


@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_and_resumed_is_bit_equal(script, start, work, tmp_path):
    data = ["--config", ROOT / "configs" / "toy.toml", "--data", work / "benchmark", "--resume"]
    arguments = [*data, "--model", work / "imitation", *SCRIPTS[script]]
    began = time.perf_counter()
    unbroken = start(script, [*arguments, "--out", tmp_path / "unbroken"])
    unbroken.join()
    assert unbroken.exitcode == 0
    duration = time.perf_counter() - began
    expected = outcome(tmp_path / "unbroken")
    assert expected[0] and expected[1]
    draw, kills, runs = random.Random(script), 0, 0
    while kills < KILLS:
        folder = tmp_path / f"broken{runs}"
        while True:
            process = start(script, [*arguments, "--out", folder])
            process.join(draw.uniform(0.1, 1.0) * duration if kills < KILLS else None)
            if process.exitcode is not None:
                break
            process.kill()
            process.join()
            if process.exitcode == 0:
                break  # it had just finished
            assert process.exitcode == -signal.SIGKILL
            kills += 1
        assert process.exitcode == 0
        assert outcome(folder) == expected
        runs += 1


def test_a_second_run_in_one_folder_is_refused(work, tmp_path):
    out = tmp_path / "run"
    lock = hold_folder(out)  # what a run holds as long as it lives
    common = [*TOY, "--model", work / "imitation", "--data", work / "benchmark", "--out", out]
    for command in (["train_grpo.py", *common, "--steps", 1], ["evaluate.py", *common]):
        assert f"another run writes to {out}; wait for it, or take another --out" in run(*command, expect=2)
    assert [p.name for p in tmp_path.iterdir()] == [".run.lock"]
    lock.release()
    hold_folder(out).release()


def test_answers_to_other_data_are_not_gone_on_with(tiny, tmp_path):
    folder = shutil.copytree(tiny.folder, tmp_path / "data")
    database = folder / "database" / "music" / "music.sqlite"
    turns = [{"utterance": "How many?", "query": "SELECT count(*) FROM singer"}]
    dialogues = json.dumps([{"database_id": "music", "interaction": turns}])
    (folder / "dev.json").write_text(dialogues)
    config = EvaluateArgs(data=(str(folder),), out="")

    def options() -> dict:
        task = SimpleNamespace(dataset=load_split(config, "dev"), about={})
        return answer_options(config, task)

    log, before = tmp_path / "answers.jsonl", options()
    AnswerLog(log, before)
    assert AnswerLog(log, options()).answers == {}
    for path, old, new in (
        (folder / "dev.json", b"How many", b"Count"),
        (folder / "tables.json", b"singer", b"singers"),
        (database, b"", b""),
    ):
        path.write_bytes(path.read_bytes().replace(old, new))
        os.utime(path, (0, len(path.name)))  # a clock may be too coarse
        assert options() != before, path
        what = "files of --model and --data" if path is database else "questions"
        with pytest.raises(UserError, match=f"differs in {what}"):
            AnswerLog(log, options())
        before = options()
        log.unlink()
        AnswerLog(log, before)


def test_what_stands_in_the_way_of_a_file_or_folder_is_one_sentence(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("kept")
    for write in (hold_folder, lambda path: write_atomically(path, ""), enter_folder):
        with pytest.raises(UserError, match="file/out cannot be written, since a file stands"):
            write(file / "out")
    for write in (hold_folder, enter_folder):
        with pytest.raises(UserError, match="file cannot be written, since a file stands"):
            write(file)
    for folder in (tmp_path, Path(".")):
        with pytest.raises(UserError, match="is a folder; name a file"):
            write_atomically(folder, "")
    assert file.read_text() == "kept" and list(tmp_path.iterdir()) == [file]

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", forbidden)  # who runs the tests may be allowed everything
    for write in (hold_folder, lambda path: write_atomically(path, ""), enter_folder):
        with pytest.raises(UserError, match="out cannot be written without permission"):
            write(tmp_path / "out")


def enter_folder(path: Path) -> None:
    with folder_atomically(path):
        raise AssertionError("it cannot be there")


def test_a_resumed_run_names_what_changed_and_refuses_other_questions(tmp_path):
    config = GrpoArgs(model="m", data=("d",), out=str(tmp_path), learning_rate=1e-3, steps=5)
    save_config(config, tmp_path)
    assert changed_options(replace(config, resume=True), tmp_path) == []
    other = replace(config, learning_rate=5e-4, steps=9, resume=True)
    assert changed_options(other, tmp_path) == [
        "--steps was 5, is now 9",
        "--learning-rate was 0.001, is now 0.0005",
    ]
    said = r"only: --data was \['d'\], is now \['e'\]; --seed was 0, is now 3"
    with pytest.raises(UserError, match=said):
        changed_options(replace(other, data=("e",), seed=3), tmp_path)
    with pytest.raises(UserError, match="--lora-rank was 0, is now 4"):
        changed_options(replace(other, lora_rank=4), tmp_path)
    with pytest.raises(UserError, match="--rewards was , is now process"):  # metrics.csv has other columns
        changed_options(replace(other, rewards="process"), tmp_path)
    with pytest.raises(UserError, match="--optimizer was adamw, is now adamw8bit"):
        changed_options(replace(other, optimizer="adamw8bit"), tmp_path)
    with pytest.raises(UserError, match="--max-prompt-tokens was 4000, is now 3000"):  # other questions fit
        changed_options(replace(other, max_prompt_tokens=3000), tmp_path)
    assert changed_options(other, tmp_path / "new") == []
    levels = replace(config, curriculum="counts.jsonl", out=str(tmp_path / "levels"))
    save_config(levels, tmp_path / "levels")
    with pytest.raises(UserError, match="--steps was 5, is now 9"):  # another level would be due
        changed_options(replace(levels, steps=9), tmp_path / "levels")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("policy/weights", b"cut"),
        ("training_state.pt", None),
        ("checksums.json", None),
        ("checksums.json", bytes(range(256))),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, capsys, name, content):
    def save(step: int) -> Path:
        with new_checkpoint(tmp_path, step) as folder:
            (folder / "policy").mkdir()
            (folder / "policy" / "weights").write_bytes(b"whole weights")
            (folder / "training_state.pt").write_bytes(b"whole state")
        return tmp_path / "checkpoints" / f"step_{step:08d}"

    older, newer = save(20), save(40)
    assert newest_checkpoint(tmp_path) == newer
    if content is None:
        (newer / name).unlink()
    else:
        (newer / name).write_bytes(content)
    assert newest_checkpoint(tmp_path) == older
    assert f"{newer} is not used: {name} is damaged or missing" in capsys.readouterr().err
    third = save(30)  # what goes on from the older one leaves the damaged one behind
    assert sorted((tmp_path / "checkpoints").iterdir()) == [older, third]
    for folder in (older, third):
        (folder / "policy" / "weights").write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint in"):
        newest_checkpoint(tmp_path)


def test_a_damaged_run_json_is_said(tmp_path):
    config = GrpoArgs(model="m", data=("d",), out=str(tmp_path))
    for content in (b"", b'{"config": {', b"\xff\x00", b"[1]", b'{"config": 7}'):
        (tmp_path / "run.json").write_bytes(content)
        (sentence,) = changed_options(config, tmp_path)
        assert "run.json is damaged" in sentence


def test_a_reader_between_a_writers_renames_loses_nothing(tmp_path, monkeypatch):
    folder, rename, readers = tmp_path / "run", Path.rename, []

    def renamed(path: Path, target: Path) -> None:
        rename(path, target)
        if path == folder and not readers:
            readers.append(check_exists(folder))  # as a command that reads it does

    for name in ("old", "new"):
        with folder_atomically(folder) as temporary:
            (temporary / name).touch()
            monkeypatch.setattr(Path, "rename", renamed)
    assert [p.name for p in folder.iterdir()] == ["new"] and list(tmp_path.iterdir()) == [folder] and readers


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path):
    dead = multiprocessing.get_context("fork").Process(target=int)
    dead.start()
    dead.join()
    for name in ("file", "folder"):
        (tmp_path / f".{name}.{dead.pid}.tmp").mkdir()
        (tmp_path / f".{name}.{os.getppid()}.tmp").touch()  # of a process that lives
    write_atomically(tmp_path / "file", "")
    with folder_atomically(tmp_path / "folder"):
        pass
    left = {f".{name}.{os.getppid()}.tmp" for name in ("file", "folder")}
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder", *left}


def test_names_that_no_disk_takes_are_one_sentence(tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    for path in (tmp_path / ("n" * 300), tmp_path / "circle" / "out"):
        for write in (hold_folder, lambda path: write_atomically(path, ""), enter_folder, refuse_filled):
            with pytest.raises(UserError, match="cannot be written"):
                write(path)
        with pytest.raises(UserError):
            check_exists(path)
