"""Training runs that are killed at random moments and resumed give the bits of unbroken ones."""

import json
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import data_of, rows_of, run, start
from decoders import random_model

from evaluate import Args as EvaluateArgs
from mtsql.config import save_config
from mtsql.errors import UserError
from mtsql.files import hold_folder
from mtsql.learn.checkpoint import changed_options, resume, save_checkpoint
from mtsql.learn.model import make_optimizer
from mtsql.learn.parallel import Processes
from mtsql.model_folder import ADAPTER_FILE
from mtsql.report.records import AnswerLog
from mtsql.task import answer_options, load_split
from train_grpo import Args as GrpoArgs

KILLS = 3  # of each script
SCRIPTS = {
    "train_grpo.py": "--steps 3 --prompts-per-step 2 --samples-per-prompt 4 --save-every 1 --beta 0.01 "
    "--evaluate-every 2 --lora-rank 4 --max-turn-tokens 60 --rewards proposal=1",
    "train_sft.py": "--questions 8 --samples-per-question 4 --rounds 2 --epochs 2 --save-every 2 "
    "--trajectories-per-step 3 --tools none",
}


def outcome(folder: Path) -> tuple[dict[str, bytes], list[dict]]:
    """The weights, and every figure that is not a time."""
    weights = {p.name: p.read_bytes() for p in sorted((folder / "policy").glob("*.safetensors"))}
    return weights, [row for path in sorted(folder.glob("*.csv")) for row in rows_of(path)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_and_resumed_is_bit_equal(script, work, tmp_path):
    base = [script, *data_of(work), *SCRIPTS[script].split()]
    run("-m", "mtsql.errors")  # so that the process is there that forks the others, and is not timed
    began = time.perf_counter()
    run(*base, "--out", tmp_path / "unbroken")
    duration = time.perf_counter() - began
    expected = outcome(tmp_path / "unbroken")
    assert expected[0] and expected[1]
    draw, kills, runs = random.Random(script), 0, 0
    while kills < KILLS:
        folder = tmp_path / f"broken{runs}"
        words = [str(word) for word in (*base, "--resume", "--out", folder)]
        exitcode = None
        while exitcode != 0:
            process = start(words, tmp_path / "printed")
            process.join(draw.uniform(0.1, 1.0) * duration if kills < KILLS else None)
            process.kill()
            process.join()
            exitcode = process.exitcode
            assert exitcode in (0, -signal.SIGKILL), (tmp_path / "printed").read_text()
            kills += exitcode != 0
        assert outcome(folder) == expected
        runs += 1
    kept = [{p.name for p in (of / "checkpoints").iterdir()} for of in (folder, tmp_path / "unbroken")]
    assert kept[0] == kept[1] and len(kept[0]) == 2
    assert "go on with --resume" in run(*base, "--out", folder, expect=2)
    fewer = ["--steps", 2] if script == "train_grpo.py" else ["--rounds", 1]
    assert "at least so many" in run(*base, *fewer, "--resume", "--out", folder, expect=2)


def test_a_second_run_in_one_folder_is_refused(work, tmp_path):
    out = tmp_path / "run"
    lock = hold_folder(out)  # what a run holds as long as it lives
    common = [*data_of(work), "--out", out]
    for command in (["train_grpo.py", *common, "--steps", 1], ["evaluate.py", *common]):
        assert f"another run writes to {out}; wait for it, or take another --out" in run(*command, expect=2)
    assert [p.name for p in tmp_path.iterdir()] == [".run.lock"]
    lock.release()
    hold_folder(out).release()


def test_answers_to_other_data_are_not_gone_on_with(tiny, tmp_path):
    folder = shutil.copytree(tiny.folder, tmp_path / "data")
    turns = [{"utterance": "How many?", "query": "SELECT count(*) FROM singer"}]
    (folder / "dev.json").write_text(json.dumps([{"database_id": "music", "interaction": turns}]))
    policy, base = tmp_path / "adapter", tmp_path / "base"
    for path in (policy / ADAPTER_FILE, base / "model.safetensors"):
        path.parent.mkdir()
        path.write_text('{"base_model_name_or_path": "../base"}')
    config, log = EvaluateArgs(data=(str(folder),), model=str(policy), out=""), tmp_path / "answers.jsonl"

    def options() -> dict:
        return answer_options(config, load_split(config, "dev"))

    for name, old, new, what in (
        ("dev.json", b"How many", b"Count", "questions"),
        ("tables.json", b"singer", b"singers", "questions"),
        ("database/music/music.sqlite", b"", b"", "files of --model and --data"),
        ("../base/model.safetensors", b"", b"", "files of --model and --data"),
    ):
        before, path = options(), folder / name
        (policy / "evaluation").mkdir(exist_ok=True)  # --out may lie in the folder of --model
        AnswerLog(log, before)
        assert AnswerLog(log, options()).answers == {}
        path.write_bytes(path.read_bytes().replace(old, new))
        os.utime(path, (0, len(name)))  # a clock may be too coarse
        with pytest.raises(UserError, match=f"differs in {what}"):
            AnswerLog(log, options())
        log.unlink()


def test_a_resumed_run_names_what_changed_and_refuses_other_questions(tmp_path):
    config = GrpoArgs(model="m", data=("d",), out=str(tmp_path), learning_rate=1e-3, steps=5)
    save_config(config, tmp_path)
    assert changed_options(replace(config, resume=True), tmp_path) == []
    other = replace(config, learning_rate=5e-4, steps=9, resume=True)
    changed = ["--steps was 5, is now 9", "--learning-rate was 0.001, is now 0.0005"]
    assert changed_options(other, tmp_path) == changed
    for change, said in (
        ({"data": ("e",), "seed": 3}, r"only: --data was \['d'\], is now \['e'\]; --seed was 0, is now 3"),
        ({"rewards": "process"}, "--rewards was , is now process"),  # metrics.csv has other columns
        ({"max_prompt_tokens": 3000}, "--max-prompt-tokens was 4000, is now 3000"),  # other questions fit
    ):
        with pytest.raises(UserError, match=said):
            changed_options(replace(other, **change), tmp_path)
    assert changed_options(other, tmp_path / "new") == []
    levels = replace(config, curriculum="counts.jsonl", out=str(tmp_path / "levels"))
    save_config(levels, tmp_path / "levels")
    with pytest.raises(UserError, match="--steps was 5, is now 9"):  # another level would be due
        changed_options(replace(levels, steps=9), tmp_path / "levels")


@pytest.mark.parametrize("name", ["policy/model.safetensors", "training_state.pt", "checksums.json"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, capsys, name):
    config = GrpoArgs(model="m", data=("d",), out=str(tmp_path), resume=True)
    model = random_model("llama")
    optimizer = make_optimizer(model, 1e-3, 0.95)

    def save(step: int) -> None:
        save_checkpoint(tmp_path, model, SimpleNamespace(save_pretrained=lambda _: None), optimizer, step, {})

    def resumed() -> int:
        return resume(config, tmp_path, model, Processes(0, 1))[1]

    for step in (20, 40, 60):
        save(step)
    older, newer = sorted((tmp_path / "checkpoints").iterdir())
    assert resumed() == 60
    whole = (newer / name).read_bytes()
    noisy = bytes(byte ^ 85 for byte in whole)
    for damaged in (whole[:-1], b"", noisy, b"[" * 100_000, None):
        (newer / name).unlink(missing_ok=True)
        if damaged is not None:
            (newer / name).write_bytes(damaged)
        assert resumed() == 40
        assert f"{newer} is not used: {name} is damaged or missing" in capsys.readouterr().err
    save(50)  # what goes on from the older one leaves the damaged one behind
    assert sorted((tmp_path / "checkpoints").iterdir()) == [older, older.with_name("step_00000050")]
    for folder in (tmp_path / "checkpoints").iterdir():
        (folder / name).write_bytes(noisy)
    with pytest.raises(UserError, match="no checkpoint in"):
        resumed()


def test_a_damaged_run_json_is_said(tmp_path):
    config = GrpoArgs(model="m", data=("d",), out=str(tmp_path))
    for content in (b"", b'{"config": {', b"\xff\x00", b"[1]", b'{"config": 7}'):
        (tmp_path / "run.json").write_bytes(content)
        (sentence,) = changed_options(config, tmp_path)
        assert "run.json is damaged" in sentence
