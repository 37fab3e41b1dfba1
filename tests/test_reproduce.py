"""The parts of the reproduction: every command is valid, comes after what it needs, and is not run twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT

from mtsql.config import CurriculumConfig, EvaluateConfig, GrpoConfig, SftConfig, read_options
from mtsql.parts import minutes_of, run_part
from mtsql.toy.imitation import ImitationConfig
from reproduce import SUITES, seed_parts

SCRIPTS = {
    "train_sft.py": SftConfig,
    "train_grpo.py": GrpoConfig,
    "evaluate.py": EvaluateConfig,
    "mtsql.toy.imitation": ImitationConfig,
    "mtsql.commands.curriculum": CurriculumConfig,
}


def configs(name: str, model: str, monkeypatch: pytest.MonkeyPatch) -> dict:
    """The parsed options of every part of a seed, by title; fails on a wrong one."""
    monkeypatch.chdir(ROOT)
    found = {}
    for part in seed_parts(SUITES[name], "data", "other", model, Path("runs/x"), 3):
        words = part.command[1:] if part.command[0] == "-m" else part.command
        found[part.title] = (read_options(SCRIPTS[words[0]], "", words[1:]), part.done)
    return found


@pytest.mark.parametrize(("name", "model"), [("toy", ""), ("sparc", "Qwen/Qwen3-1.7B"), ("cosql", "base")])
def test_commands_are_valid_and_in_order(name, model, monkeypatch):
    made = {model} if model else set()
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
    asked = ("data", "curriculum", "steps", "prompts_per_step", "samples_per_prompt", "seed")
    assert len({tuple(getattr(parts[arm], field) for field in asked) for arm in (*rl, "short_rl")}) == 1
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
    for _ in range(2):
        run_part("works", ["-c", f"{count}; open(r'{done}', 'w')"], done)
    assert (tmp_path / "runs").read_text() == "xxx"
    assert 7.0 <= minutes_of(done) < 7.5
    assert "is there already" in capsys.readouterr().out
