"""The parts of the reproduction: every command is valid, comes after what it needs, and is not run twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TOY, run

from mtsql.config import CurriculumConfig, EvaluateConfig, GrpoConfig, SftConfig, from_toml, read_options
from mtsql.data.datasets import examples
from mtsql.experiments.asked_questions import asked_questions
from mtsql.learn.curriculum import SuccessCount, question_order, read_counts
from mtsql.parts import minutes_of, run_part
from mtsql.task import load_split
from mtsql.toy.imitation import ImitationConfig
from mtsql.toy.tiny import MODELS
from reproduce import SUITES, seed_parts

SCRIPTS = {
    "train_sft.py": SftConfig,
    "train_grpo.py": GrpoConfig,
    "evaluate.py": EvaluateConfig,
    "mtsql.toy.imitation": ImitationConfig,
    "mtsql.extras.curriculum": CurriculumConfig,
    "mtsql.experiments.asked_questions": GrpoConfig,
}


def configs(name: str, model: str, monkeypatch: pytest.MonkeyPatch) -> dict:
    """The parsed options of every part of a seed, by title; fails on a wrong one."""
    monkeypatch.chdir(ROOT)
    found = {}
    for part in seed_parts(SUITES[name], "data", "other", model, Path("runs/x"), 3):
        words = part.command[1:] if part.command[0] == "-m" else part.command
        found[part.title] = (read_options(SCRIPTS[words[0]], "", words[1:]), part.done)
    return found


@pytest.mark.parametrize("rank", [16, 0])
def test_the_configuration_says_whether_adapters_are_trained(rank, tmp_path):
    text = (ROOT / SUITES["sparc"].config).read_text().replace("lora_rank = 32", f"lora_rank = {rank}")
    (tmp_path / "c.toml").write_text(text)
    suite = SUITES["sparc"]._replace(config=str(tmp_path / "c.toml"))
    parts = {part.title: part.command for part in seed_parts(suite, "data", "", "m", Path("x"), 0)}
    of = {name: read_options(SCRIPTS[parts[name][0]], "", parts[name][1:]).lora_rank for name in parts
          if name in ("sft", "sft_no_memory", "short_sft", "short_rl", "rl_process")}  # fmt: skip
    assert of.pop("rl_process") == 0  # goes on with the warm start's
    assert set(of.values()) == {rank}


@pytest.mark.parametrize(
    ("name", "model"), [("toy", ""), ("toy", "base"), ("sparc", "Qwen/Qwen3-1.7B"), ("cosql", "base")]
)
def test_commands_are_valid_and_in_order(name, model, monkeypatch):
    made = {model} if model else set(map(str, MODELS.glob("seed*")))
    for title, (config, done) in configs(name, model, monkeypatch).items():
        assert config.seed == 3 and done.is_relative_to(config.out), title
        assert title == "imitation" or config.model in made, title
        if getattr(config, "curriculum", ""):
            assert config.curriculum in made, title
        made.add(str(done))
        made.add(config.out)
        if title == "sft":
            assert config.rounds == 3
            made |= {f"{config.out}/policies/round_{n}" for n in (1, 2)}


def test_arms_differ_in_what_they_are_named_after(monkeypatch):
    parts = {title: config for title, (config, _) in configs("toy", "", monkeypatch).items()}
    rl = [
        f"rl_{arm}" for arm in ("outcome", "process", "shuffled", "no_execution_trained", "no_memory_trained")
    ]
    asked = ("data", "steps", "prompts_per_step", "samples_per_prompt", "seed")
    assert len({tuple(getattr(parts[arm], field) for field in asked) for arm in (*rl, "short_rl")}) == 1
    ordered = {parts[arm].curriculum for arm in (*rl, "short_rl", "asked") if arm != "rl_shuffled"}
    assert len(ordered) == 1  # and what they ask of it, the shuffled run asks in another order
    assert parts["rl_shuffled"].curriculum == str(Path(parts["asked"].out) / "counts.jsonl")
    for tools in ("no_execution", "no_memory"):
        assert parts[f"sft_{tools}"].tools == parts[f"rl_{tools}_trained"].tools == tools
        assert parts[f"evaluate rl_{tools}_trained"].tools == tools
        assert parts[f"rl_{tools}_trained"].model == str(Path(parts[f"sft_{tools}"].out) / "policy")
    assert (parts["rl_process"].level_size > 0, parts["rl_shuffled"].level_size) == (True, 0)
    assert (parts["rl_outcome"].rewards, parts["rl_process"].rewards) == ("outcome", "process")
    assert {parts[f"evaluate {arm}"].tools for arm in ("base_direct", "short_sft", "short_rl")} == {"none"}
    final = parts["evaluate rl_process"]
    for arm, field, value in (
        ("rl_no_execution", "tools", "no_execution"),
        ("rl_no_memory", "tools", "no_memory"),
        ("rl_process_predicted", "history", "predicted"),
        ("rl_cap_60", "max_response_tokens", 60),
        ("rl_process_elsewhere", "data", ("other",)),
    ):
        other = parts[f"evaluate {arm}"]
        different = {k for k in vars(final) if vars(final)[k] != vars(other)[k]}
        assert getattr(other, field) == value
        timed = {"sampled_runs", "latency_questions"} if arm != "rl_cap_60" else set()
        assert different - {"split"} == {field, "out", *timed}


@pytest.mark.parametrize("sizes", [(250, 250, 250, 250, 248), (250, 250, 250, 250, 180), (30,), (7, 3)])
def test_the_shuffled_run_asks_what_the_ordered_one_asks(sizes):
    suite = from_toml(ROOT / SUITES["toy"].config, GrpoConfig)
    config = GrpoConfig(**suite | {"model": "m", "data": ("d",), "out": "o", "seed": 3})
    asked = asked_questions(config, sizes)
    step_sizes = [min(config.prompts_per_step, size) for size in sizes]
    assert all(0 <= index < sizes[level] for level, index in asked)
    if sum(sizes) > config.steps * config.prompts_per_step:
        assert len(asked) == config.steps * config.prompts_per_step < sum(sizes)
        shuffled = [
            index
            for step in range(config.steps)
            for index in question_order(config.seed, len(asked), config.prompts_per_step, 0, step)
        ]
        assert sorted(shuffled) == list(range(len(asked)))  # each once, as in the ordered run
    else:
        assert len(asked) >= max(step_sizes)


def test_the_asked_questions_are_written_with_their_counts(work, tmp_path):
    data = [*TOY, "--data", work / "benchmark", "--model", work / "imitation"]
    options = EvaluateConfig(model="", data=(str(work / "benchmark"),), out="")
    questions = examples(load_split(options, "train").dialogues)
    counts = [SuccessCount(e.id, n % 3, 3, e.db_id) for n, e in enumerate(questions)]
    path = tmp_path / "counts.jsonl"
    path.write_text("".join(json.dumps(vars(c)) + "\n" for c in counts))
    steps = ["--curriculum", path, "--level-size", 8, "--steps", 4, "--prompts-per-step", 2]
    said = run("-m", "mtsql.experiments.asked_questions", *data, *steps, "--out", tmp_path / "asked")
    kept = read_counts(tmp_path / "asked" / "counts.jsonl")
    assert len(kept) == 8 and set(kept) < set(counts) and f"8 of {len(counts)} questions are asked" in said
    run("-m", "mtsql.experiments.asked_questions", *data, "--out", tmp_path / "none", expect=2)


def test_a_part_that_is_interrupted_has_time_to_save(tmp_path):
    """As Ctrl-C in a terminal, which reaches the program and its part."""
    part = (
        "import signal, time\nfrom mtsql.learn.interrupt import finish_step_on_interrupt\n"
        "with finish_step_on_interrupt() as interrupted:\n"
        "    print('begun', flush=True)\n"
        "    while not interrupted: time.sleep(0.1)\n"
        "    time.sleep(1)\n"
        f"open(r'{tmp_path}/saved', 'w')"
    )
    program = (
        "import signal; from pathlib import Path; from mtsql.parts import run_part\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # what starts the tests may ignore it
        f"run_part('trains', ['-c', {part!r}], Path(r'{tmp_path}/part/done'))"
    )
    command = [sys.executable, "-c", program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as process:
        while process.stdout.readline() != "begun\n":
            pass
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate()[1]
    assert process.returncode == 130 and (tmp_path / "saved").exists()
    assert "then saving" in said and "goes on from here" in said and "Traceback" not in said
    assert minutes_of(tmp_path / "part" / "done") > 0


def test_a_runner_that_is_terminated_takes_its_part_along(tmp_path):
    part = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    program = (
        "from pathlib import Path; from mtsql.parts import run_part\n"
        f"run_part('trains', ['-c', {part!r}], Path(r'{tmp_path}/part/done'))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as runner:
        while not (said := runner.stdout.readline()).strip().isdecimal():
            pass
        runner.terminate()
        assert runner.wait(20) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(said), 0)


def test_a_part_runs_once_and_its_minutes_add_up(tmp_path, capsys):
    done = tmp_path / "part" / "done"
    count = f"open(r'{tmp_path}/runs', 'a').write('x')"
    with pytest.raises(SystemExit) as stop:
        run_part("fails", ["-c", f"{count}; raise SystemExit(3)"], done)
    assert stop.value.code == 3 and not done.exists()
    with pytest.raises(SystemExit) as stop:
        run_part("makes nothing", ["-c", count], done)
    assert stop.value.code == 1
    (tmp_path / "part" / "done.minutes").write_text("7.00\n")
    anew = f"import shutil; shutil.rmtree(r'{done.parent}'); import os; os.mkdir(r'{done.parent}')"
    for _ in range(2):
        run_part("works, in a new folder", ["-c", f"{count}; {anew}; open(r'{done}', 'w')"], done)
    assert (tmp_path / "runs").read_text() == "xxx"
    assert 7.0 <= minutes_of(done) < 7.5
    assert "is there already" in capsys.readouterr().out
