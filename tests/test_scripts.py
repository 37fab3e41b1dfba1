"""The three scripts end to end on a small benchmark, and their error messages."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, SAMPLE, TOY, data_of, json_lines, refusal, rows_of, run

import evaluate
import train_grpo
import train_sft
from mtsql.config import read_options, user_errors
from mtsql.data.datasets import Example, examples
from mtsql.data.sandbox import run_sql
from mtsql.errors import UserError
from mtsql.learn.curriculum import read_counts
from mtsql.learn.parallel import Processes
from mtsql.recipes import RECIPES
from mtsql.sql import execute
from mtsql.task import DEV_DIALOGUES, Task, begin_questions, dev_task, load_split, training_questions
from train_grpo import Args as GrpoArgs


def options_of(work: Path, **options: object) -> GrpoArgs:
    data = (str(work / "benchmark"),)
    return GrpoArgs(**{"model": "", "data": data, "out": "", "wording": "compact"} | options)


def test_recipe_end_to_end(work, tmp_path):
    sft, grpo, answers = (tmp_path / name for name in ("sft", "grpo", "evaluation"))
    # Without tools the model knows some answers by heart; that makes the collection short.
    options = "--questions 20 --samples-per-question 4 --rounds 2 --epochs 1 --learning-rate 1e-4"
    out = run("train_sft.py", *data_of(work), "--out", sft, *options.split(), "--tools", "none")
    assert "have trajectories (round 2)" in out
    assert (sft / "policies" / "round_1" / "config.json").is_file()
    rounds = json.loads((sft / "coverage.json").read_text())
    assert [r["round"] for r in rounds] == [1, 2] and rounds[0]["sampled"] == 20 * 4
    assert rounds[1]["questions_asked"] == 20 - rounds[0]["questions_solved"]
    assert rounds[1]["questions_covered"] == sum(r["questions_solved"] for r in rounds)
    chats, kept = json_lines(sft / "chat.jsonl"), json_lines(sft / "trajectories.jsonl")
    assert len(chats) == rounds[1]["trajectories"]
    assert all("<answer_sql>" in chat["messages"][-1]["content"] for chat in chats)
    assert kept and all(t["status"] == "answered" for t in kept)
    rates = [float(row["learning_rate"]) for row in rows_of(sft / "metrics.csv")]
    assert max(rates) > 1e-4 / 2  # of a few steps the first is no warm-up alone

    data = [*TOY, "--data", work / "benchmark"]
    options = "--steps 2 --prompts-per-step 4 --samples-per-prompt 4 --evaluate-every 2 --rewards process"
    run("train_grpo.py", *data, "--model", sft / "policy", "--out", grpo, *options.split(), "--beta", 0.01)
    rows = rows_of(grpo / "metrics.csv")
    assert [row["step"] for row in rows] == ["0", "1"]
    for row in rows:
        assert sum(float(v) for k, v in row.items() if k.startswith("status_")) == pytest.approx(1.0)
        assert float(row["logprob_gap"]) < 1e-3
        assert float(row["clip_fraction"]) == 0  # one update a batch: the ratio is exactly 1
    assert {"run.json", "trajectories.jsonl", "dev.csv"} <= {p.name for p in grpo.iterdir()}

    asked = ["--model", grpo / "policy", "--out", answers, "--split", "test", "--history", "predicted"]
    out = run("evaluate.py", *data, *asked)
    assert "EX %" in out
    records = json_lines(answers / "predictions.jsonl")
    assert len(records) == json.loads((answers / "summary.json").read_text())["questions"]


def test_gold_answers_and_the_protocol_with_its_repairs_are_learned(work, tmp_path):
    options = ["--targets", "gold", "--rounds", 1, "--epochs", 0.2, "--error-hints"]
    command = ["train_sft.py", *data_of(work), *options]

    def learned(name: str, *options: object) -> tuple[dict, list[dict], list[list[dict]]]:
        """Coverage, trajectories, and the observations in each of them."""
        run(*command, *options, "--out", tmp_path / name)
        (coverage,) = json.loads((tmp_path / name / "coverage.json").read_text())
        kept = json_lines(tmp_path / name / "trajectories.jsonl")
        return coverage, kept, [[s for s in t["segments"] if s["role"] == "environment"] for t in kept]

    coverage, kept, seen = learned("direct", "--tools", "none")
    assert len(kept) == coverage["right"] == coverage["sampled"] == coverage["questions_solved"]
    assert not any(seen) and all(t["segments"][1]["loss_mask_sum"] > 0 for t in kept)
    coverage, kept, seen = learned("shown", "--databases-per-step", 2)
    assert len(kept) == coverage["sampled"] and not all(seen)
    assert sum(any("error: no such" in s["text"] for s in observed) for observed in seen) > 1
    chats = json_lines(tmp_path / "shown" / "chat.jsonl")
    assert len(chats) < len(kept)  # a conversation over a stale schema is no answer to the question


def test_databases_for_rl_are_trained_on_by_rl_alone(work, tmp_path):
    options = options_of(work, data=(str(SAMPLE / "dev.json"),), held_out=2, for_rl=3)  # of ten databases
    splits = [load_split(options, split).dialogues for split in ("train", "held_out", "rl")]
    databases = [{d.db_id for d in dialogues} for dialogues in splits]
    assert list(map(len, databases)) == [5, 2, 3] and len(set.union(*databases)) == 10
    assert load_split(replace(options, for_rl=0), "held_out").dialogues == splits[1]
    for asked in (replace(options, for_rl=0), replace(options, for_rl=8)):
        with pytest.raises(UserError, match="--held-out and --for-rl should be above 0"):
            load_split(asked, "rl")
    few = ["--steps", 1, "--prompts-per-step", 2, "--samples-per-prompt", 2]
    run("train_grpo.py", *data_of(work), *few, "--for-rl", 1, "--out", tmp_path)
    asked = json.loads((tmp_path / "asked.json").read_text())
    kept = load_split(options_of(work, for_rl=1), "rl").dialogues
    assert len(asked) == 2 and set(asked) <= {example.id for example in examples(kept)}


def test_curriculum_is_counted_and_followed_level_by_level(work, tmp_path):
    data, counted, levels = [*data_of(work), "--held-out", 1], tmp_path / "counts", tmp_path / "levels"
    few = ["--questions", 12, "--samples-per-question", 4]
    out = run("-m", "mtsql.extras.curriculum", *data, "--out", counted, *few)
    counts = read_counts(counted / "counts.jsonl")
    assert "12 questions, right of 4 samples" in out and len(counts) == 12
    wrong = sorted((c for c in counts if c.right < 4), key=lambda c: -c.right)
    assert len(wrong) >= 4
    size = len(wrong) // 2
    data += ["--out", levels, "--curriculum", counted / "counts.jsonl", "--level-size", size]
    few = "--steps 4 --prompts-per-step 2 --samples-per-prompt 2 --rewards process --dtype bfloat16"
    run("train_grpo.py", *data, *few.split())
    rows = rows_of(levels / "metrics.csv")
    weights = [float(row["tis_weight"]) for row in rows if float(row["informative_groups"])]
    assert weights == pytest.approx([1.0] * len(weights), abs=0.1)  # over the tokens that were trained on
    assert [p.name for p in (levels / "checkpoints").iterdir()] == ["step_00000004"]
    level = [int(row["level"]) for row in rows]
    assert level == sorted(level) and set(level) == set(range(1, -(-len(wrong) // size) + 1))
    place = {c.example_id: i // size + 1 for i, c in enumerate(wrong)}
    shown = json_lines(levels / "trajectories.jsonl")  # one group of each step
    asked = json.loads((levels / "asked.json").read_text())
    assert {record["example_id"] for record in shown} < set(asked) <= set(place)
    for record in shown:
        assert place[record["example_id"]] == level[record["step"]]
        scores = record["scores"]
        process = 0.8 * scores["proposal"] + 0.1 * (scores["e_verify"] + scores["m_verify"])
        assert record["reward"] == pytest.approx(scores["ex"] + scores["em"] + process)
    train = load_split(options_of(work, held_out=1), "train").dialogues
    assert {c.example_id for c in counts} <= {example.id for example in examples(train)}


def test_questions_are_drawn_by_the_seed_and_left_out_by_all_processes(work, capsys, monkeypatch):
    """A gold SQL near the time limit may be in time in one process alone; a prompt may be too long."""
    config = options_of(work)
    asked = examples(load_split(config, "train").dialogues)
    ids = [example.id for example in asked]

    def task_of(config: GrpoArgs, processes: object) -> SimpleNamespace:
        made = begin_questions(config, "train", str(work / "imitation"))
        return SimpleNamespace(**made | {"processes": processes})

    def kept(config: GrpoArgs, everywhere: Callable) -> list[str]:
        processes = SimpleNamespace(all_gather=everywhere, share=list, gather=list, is_main=False)
        return [example.id for example in training_questions(config, task_of(config, processes))]

    def fitting(longest: int) -> list[Example]:
        limited = replace(config, max_prompt_tokens=longest)
        return training_questions(limited, task_of(limited, Processes(0, 1)))

    assert kept(config, lambda own: [own, own[:1] + own[2:]]) == ids[:1] + ids[2:]
    assert set(kept(replace(config, questions=2), lambda own: [own])) == set(random.Random(0).sample(ids, 2))
    assert fitting(10_000) == asked and capsys.readouterr().out == ""
    gone_on, limits = task_of(config, None), []
    monkeypatch.setattr(execute, "run_sql", lambda *given: limits.append(given[2]) or run_sql(*given))
    assert training_questions(replace(config, questions=2), gone_on, known=ids) == [
        e for name in random.Random(0).sample(ids, 2) for e in asked if e.id == name
    ]
    assert set(limits) == {10 * config.sql_timeout} and not limits.clear()
    assert training_questions(config, gone_on, known=ids[2:5]) == asked[2:5]
    limits.clear()  # every gold SQL of these has run, patiently
    assert all(gone_on.scorer.ex(e.db_id, e.gold_sql, e.gold_sql) for e in asked[2:5]) and not limits
    assert gone_on.scorer.executor.timeout_seconds == config.sql_timeout
    episodes = task_of(config, None).environment.episodes
    lengths = {e.id: len(episodes(e, [0])[0].trajectory.ids) for e in asked}
    middle = sorted(lengths.values())[len(asked) // 2]
    short = [e for e in asked if lengths[e.id] <= middle]
    assert 0 < len(short) < len(asked) and fitting(middle) == short
    left_out = f"left out {len(asked) - len(short)} of {len(asked)} questions: their prompt is longer than"
    assert capsys.readouterr().out == f"{left_out} --max-prompt-tokens {middle}\n"
    with pytest.raises(UserError, match="the prompt of every question is longer than --max-prompt-tokens 5"):
        fitting(5)


def test_the_dev_task_has_the_same_options_and_other_questions(work):
    config = options_of(work, ex="bird")
    task = Task(**begin_questions(config, "train", str(work / "imitation")), policy=None, play=None)
    assert task.scorer.kind == "bird"
    for options, split in ((config, "dev"), (replace(config, held_out=1), "held_out")):
        dev = dev_task(options, task)
        assert dev.dataset.dialogues == load_split(options, split).dialogues[:DEV_DIALOGUES] != ()
        assert dev.scorer.kind == "bird" and dev.environment.schemas == dev.dataset.schemas


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "mtsql_r1"])
def test_every_other_paper_is_evaluated_by_its_file(work, tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(ROOT)
    options = [*data_of(work), "--config", f"configs/{name}.toml", "--wording", "compact", "--split", "dev"]
    options += ["--dialogues", 4, "--max-turn-tokens", 12, "--out", tmp_path / "out"]
    evaluate.main(read_options(evaluate.Args, "", list(map(str, options))))
    records = json_lines(tmp_path / "out" / "predictions.jsonl")
    assert {r["dialogue_id"] for r in records} == {f"{i:05d}" for i in range(4)}
    assert all(r["sampled_tokens"] for r in records) and f": {name}, " in capsys.readouterr().out


def test_errors_are_one_sentence_and_exit_code_2(work, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    out = ["--out", tmp_path / "out"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("{}")
    one_split = ["--data", work / "benchmark" / "train.json", "--databases", work / "benchmark" / "database"]
    no_module = "--rewards no.such cannot be imported (No module named 'no')"
    thoughts = ["--recipe", "skyrl_sql", "--tools", "none", "--wording", "paper"]
    for script, options, sentence in (
        (evaluate, ["--model", tmp_path / "nowhere"], "is not a folder"),
        (evaluate, ["--out", tmp_path / "other"], "holds a run already"),
        (evaluate, ["--data", tmp_path], "has no dev split"),
        (evaluate, ["--split", "held_out"], "--held-out and --for-rl should be above 0 where they are asked"),
        (train_grpo, [*one_split, "--evaluate-every", 1], "train.json has one split; give --held-out"),
        (train_grpo, ["--rewards", "no.such"], no_module),
        (train_grpo, ["--curriculum", tmp_path / "none"], "none: No such file"),
        (train_sft, ["--targets", "gold", "--rounds", 2], "--targets gold needs --rounds 1: another"),
        (train_sft, ["--targets", "gold", "--recipe", "skyrl_sql", "--tools", "no_memory"], "--tools none"),
        (train_sft, ["--targets", "gold", *thoughts], "no thoughts: --wording compact"),
    ):
        config = read_options(script.Args, "", [str(word) for word in (*data_of(work), *out, *options)])
        assert sentence in refusal(capsys, user_errors, script.main, config)
    assert not (tmp_path / "out").exists()
