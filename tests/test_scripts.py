"""The three scripts end to end on a small benchmark, and their error messages."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TOY, run
from transformers import AutoTokenizer

import evaluate
import train_grpo
import train_sft
from evaluate import Args as EvaluateArgs
from mtsql.agent.rollout import Sampling, rollout
from mtsql.agent.tokens import ChatTokens
from mtsql.config import read_options, user_errors
from mtsql.data.datasets import examples
from mtsql.errors import UserError
from mtsql.learn.curriculum import read_counts
from mtsql.learn.model import load_policy
from mtsql.learn.parallel import Processes
from mtsql.model_folder import load_tokenizer
from mtsql.report.evaluation import answer_dialogues
from mtsql.sql.score import Scorer
from mtsql.task import fitting_questions, load_split, make_environment, training_questions
from train_grpo import Args as GrpoArgs
from train_sft import Args as SftArgs

CONFIGS = {train_sft: SftArgs, train_grpo: GrpoArgs, evaluate: EvaluateArgs}
SHARED = ROOT.parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not here")


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_trained_tiny_model_answers_as_generate_does(work):
    """Whole greedy episodes against Hugging Face `generate` with every turn prefilled anew."""
    config = EvaluateArgs(
        model=str(work / "imitation"), data=(str(work / "benchmark"),), out="", wording="compact",
        result_characters=40, max_prompt_tokens=600, max_response_tokens=600, max_turn_tokens=120,
        max_tool_tokens=300,
    )  # fmt: skip
    policy, tokens = load_policy(config.model).eval(), ChatTokens(load_tokenizer(config.model))
    dataset = load_split(config, "test")
    environment = make_environment(config, dataset, tokens, "both")
    sampling = Sampling(0.0, max_turn_tokens=config.max_turn_tokens)

    def play(episodes):
        return rollout(policy, tokens, episodes, sampling, 16)

    answered = answer_dialogues(play, environment, dataset.dialogues, "gold", 0)
    messages = 0
    for _, trajectory in answered:
        before: list[int] = []
        for segment in trajectory.segments:
            if segment.role == "model":
                prefix = torch.tensor([before])  # (1, positions)
                full = policy.generate(
                    prefix,
                    attention_mask=torch.ones_like(prefix),
                    do_sample=False,
                    eos_token_id=list(tokens.end_of_turn_ids),
                    max_new_tokens=len(segment.ids),
                )
                assert full[0, len(before) :].tolist() == list(segment.ids)
                messages += 1
            before += segment.ids
    assert messages > len(answered) > 5


def test_recipe_end_to_end(work):
    data = ["--data", work / "benchmark"]
    # Without tools the model knows some answers by heart; that makes the collection short.
    out = run(
        "train_sft.py", *TOY, *data, "--model", work / "imitation", "--out", work / "sft",
        "--questions", 20, "--samples-per-question", 4, "--rounds", 2, "--epochs", 1,
        "--learning-rate", 1e-4, "--tools", "none",
    )  # fmt: skip
    assert "have trajectories (round 2)" in out
    assert (work / "sft" / "policies" / "round_1" / "config.json").is_file()
    rounds = json.loads((work / "sft" / "coverage.json").read_text())
    assert [r["round"] for r in rounds] == [1, 2] and rounds[0]["sampled"] == 20 * 4
    assert rounds[1]["questions_asked"] == 20 - rounds[0]["questions_solved"]
    assert rounds[1]["questions_covered"] == sum(r["questions_solved"] for r in rounds)
    chats = [json.loads(line) for line in (work / "sft" / "chat.jsonl").open()]
    assert len(chats) == rounds[1]["trajectories"]
    assert all("<answer_sql>" in chat["messages"][-1]["content"] for chat in chats)
    peak = json.loads((work / "sft" / "run.json").read_text())["config"]["learning_rate"]
    rates = [float(row["learning_rate"]) for row in rows_of(work / "sft" / "metrics.csv")]
    assert max(rates) > peak / 2  # of a few steps the first is no warm-up alone
    kept = [json.loads(line) for line in (work / "sft" / "trajectories.jsonl").open()]
    assert kept and all(t["status"] == "answered" for t in kept)
    out = run(
        "train_grpo.py", *TOY, *data, "--model", work / "sft" / "policy", "--out", work / "grpo",
        "--steps", 2, "--prompts-per-step", 4, "--samples-per-prompt", 4, "--evaluate-every", 2,
        "--evaluate-dialogues", 4, "--rewards", "process", "--beta", 0.01,
    )  # fmt: skip
    rows = rows_of(work / "grpo" / "metrics.csv")
    assert [row["step"] for row in rows] == ["0", "1"]
    for row in rows:
        statuses = sum(float(v) for k, v in row.items() if k.startswith("status_"))
        assert statuses == pytest.approx(1.0)
        assert float(row["logprob_gap"]) < 1e-3
        assert float(row["clip_fraction"]) == 0  # one update a batch: the ratio is exactly 1
    for name in ("run.json", "trajectories.jsonl", "dev.csv"):
        assert (work / "grpo" / name).is_file()
    out = run(
        "evaluate.py", *TOY, *data, "--model", work / "grpo" / "policy", "--out", work / "eval",
        "--split", "test", "--history", "predicted",
    )  # fmt: skip
    for part in (
        "ability: calls EXECUTE",
        "error: schema_linking",
        "EX %",
        "whole dialogues",
        "turn 1",
        "easy",
        "out_of_interactions",
        "interactions",
    ):
        assert part in out
    records = [json.loads(line) for line in (work / "eval" / "predictions.jsonl").open()]
    assert len(records) == json.loads((work / "eval" / "summary.json").read_text())["questions"]
    shown = run("-m", "mtsql.extras.viewer", work / "eval" / "trajectories.jsonl", "--color", "always")
    assert "\x1b[" in shown and "<tool_call>" in shown


def test_short_horizon_fine_tuning_learns_the_gold_answers(work):
    base = ["train_sft.py", *TOY, "--data", work / "benchmark", "--model", work / "imitation"]
    options = ["--tools", "none", "--rounds", 1, "--epochs", 1]
    run(*base, "--targets", "gold", *options, "--out", work / "gold")
    kept = [json.loads(line) for line in (work / "gold" / "trajectories.jsonl").open()]
    (coverage,) = json.loads((work / "gold" / "coverage.json").read_text())
    assert len(kept) == coverage["right"] == coverage["sampled"] == coverage["questions_solved"]
    environment_said = [s for t in kept for s in t["segments"] if s["role"] == "environment"]
    assert not environment_said and all(t["segments"][1]["loss_mask_sum"] > 0 for t in kept)


def test_the_warm_start_learns_the_protocol_and_its_repairs(work):
    command = ["train_sft.py", *TOY, "--data", work / "benchmark", "--model", work / "imitation"]
    command += ["--targets", "gold", "--rounds", 1, "--epochs", 0.2, "--error-hints"]
    run(*command, "--databases-per-step", 2, "--out", work / "shown")
    kept = [json.loads(line) for line in (work / "shown" / "trajectories.jsonl").open()]
    chats = [json.loads(line) for line in (work / "shown" / "chat.jsonl").open()]
    calls = [[s for s in t["segments"] if s["role"] == "environment"] for t in kept]
    failed = sum(any("error: no such" in s["text"] for s in seen) for seen in calls)
    (coverage,) = json.loads((work / "shown" / "coverage.json").read_text())
    assert len(kept) == coverage["sampled"] and failed > 1 and any(not seen for seen in calls)
    assert len(chats) < len(kept)  # a conversation over a stale schema is no answer to the question
    assert (
        run(
            *command, "--out", work / "never", "--recipe", "skyrl_sql", "--tools", "no_memory", expect=2
        ).count("--tools none")
        == 1
    )


def test_databases_for_rl_are_trained_on_by_rl_alone(work):
    data = ROOT / "tests" / "data" / "sparc" / "dev.json"  # ten databases
    options = EvaluateArgs(model="", data=(str(data),), out="", held_out=2, for_rl=3)
    splits = [load_split(options, split).dialogues for split in ("train", "held_out", "rl")]
    databases = [{d.db_id for d in dialogues} for dialogues in splits]
    assert list(map(len, databases)) == [5, 2, 3] and len(set.union(*databases)) == 10
    assert load_split(replace(options, for_rl=0), "held_out").dialogues == splits[1]
    for asked in (replace(options, for_rl=0), replace(options, for_rl=8)):
        with pytest.raises(UserError, match="--held-out and --for-rl should be above 0"):
            load_split(asked, "rl")
    command = ["train_grpo.py", *TOY, "--data", work / "benchmark", "--model", work / "imitation"]
    command += ["--steps", 1, "--prompts-per-step", 2, "--samples-per-prompt", 2]
    run(*command, "--for-rl", 1, "--out", work / "for_rl")
    asked = json.loads((work / "for_rl" / "asked.json").read_text())
    kept = load_split(replace(config_for(work, 0), for_rl=1), "rl").dialogues
    assert len(asked) == 2 and set(asked) <= {example.id for example in examples(kept)}


def test_evaluation_during_rl_refuses_the_questions_that_are_trained_on(work, tmp_path):
    command = ["train_grpo.py", *TOY, "--data", work / "benchmark" / "train.json", "--out", tmp_path / "grpo"]
    command += ["--databases", work / "benchmark" / "database", "--model", work / "imitation"]
    refused = run(*command, "--evaluate-every", 1, "--steps", 1, expect=2)
    assert "train.json has one split; give --held-out" in refused and not (tmp_path / "grpo").exists()


def test_curriculum_is_counted_and_followed_level_by_level(work):
    data = [*TOY, "--data", work / "benchmark", "--model", work / "imitation", "--held-out", 1]
    out = run(
        "-m", "mtsql.extras.curriculum", *data, "--out", work / "counts", "--questions", 12,
        "--samples-per-question", 4,
    )  # fmt: skip
    counts = read_counts(work / "counts" / "counts.jsonl")
    assert "12 questions, right of 4 samples" in out and len(counts) == 12
    wrong = sorted((c for c in counts if c.right < 4), key=lambda c: -c.right)
    assert len(wrong) >= 4
    size = len(wrong) // 2
    run(
        "train_grpo.py", *data, "--out", work / "levels", "--curriculum", work / "counts" / "counts.jsonl",
        "--level-size", size, "--steps", 4, "--prompts-per-step", 2, "--samples-per-prompt", 2,
        "--tis-cap", 2, "--rewards", "process",
    )  # fmt: skip
    rows = rows_of(work / "levels" / "metrics.csv")
    weights = [float(row["tis_weight"]) for row in rows if float(row["informative_groups"])]
    assert weights == pytest.approx([1.0] * len(weights), abs=1e-3)  # over the tokens that were trained on
    assert [p.name for p in (work / "levels" / "checkpoints").iterdir()] == ["step_00000004"]
    levels = [int(row["level"]) for row in rows]
    count = -(-len(wrong) // size)
    assert levels == sorted(levels) and set(levels) == set(range(1, count + 1))
    place = {c.example_id: i // size + 1 for i, c in enumerate(wrong)}
    shown = [json.loads(line)["example_id"] for line in (work / "levels" / "trajectories.jsonl").open()]
    asked = json.loads((work / "levels" / "asked.json").read_text())
    assert set(shown) < set(asked) <= set(place)  # a file shows one group of each step
    for line in (work / "levels" / "trajectories.jsonl").open():
        record = json.loads(line)
        assert place[record["example_id"]] == levels[record["step"]]
        scores = record["scores"]
        process = 0.8 * scores["proposal"] + 0.1 * (scores["e_verify"] + scores["m_verify"])
        assert record["reward"] == pytest.approx(scores["ex"] + scores["em"] + process)
    splits = {split: load_split(config_for(work), split).dialogues for split in ("train", "held_out")}
    databases = {split: {d.db_id for d in dialogues} for split, dialogues in splits.items()}
    assert len(databases["held_out"]) == 1 and not databases["train"] & databases["held_out"]
    assert len({d.id for dialogues in splits.values() for d in dialogues}) == sum(map(len, splits.values()))
    assert {c.example_id.split("/")[0] for c in counts} <= {d.id for d in splits["train"]}


def config_for(work, held_out=1):
    return EvaluateArgs(model="", data=(str(work / "benchmark"),), out="", held_out=held_out)


def test_all_processes_leave_out_what_one_cannot_score(work):
    """A gold SQL near the time limit may be in time in one process alone."""
    config = GrpoArgs(model="", data=(str(work / "benchmark"),), out="", wording="compact")
    tokens = ChatTokens(load_tokenizer(work / "imitation"))
    dataset = load_split(config, "train")
    environment = make_environment(config, dataset, tokens, "both")
    scorer = Scorer(environment.schemas, environment.executor)
    processes = SimpleNamespace(all_gather=lambda ids: [ids, ids[:1] + ids[2:]])
    asked = examples(dataset.dialogues)
    kept = training_questions(config, SimpleNamespace(dataset=dataset, scorer=scorer, processes=processes))
    assert [e.id for e in kept] == [e.id for e in asked[:1] + asked[2:]]


def test_questions_whose_prompt_is_too_long_are_left_out_at_the_start(work, capsys):
    options = dict(model="", data=(str(work / "benchmark"),), out="", wording="compact")
    tokens = ChatTokens(load_tokenizer(work / "imitation"))
    dataset = load_split(GrpoArgs(**options), "train")

    def fitting(longest):
        config = GrpoArgs(**options, max_prompt_tokens=longest)
        environment = make_environment(config, dataset, tokens, "both")
        run = SimpleNamespace(environment=environment, processes=Processes(0, 1))
        return fitting_questions(config, run, asked)

    asked = examples(dataset.dialogues)
    assert fitting(10_000) == asked and capsys.readouterr().out == ""
    environment = make_environment(GrpoArgs(**options), dataset, tokens, "both")
    lengths = {e.id: environment.episodes(e, [0])[0].trajectory.prompt_length for e in asked}
    middle = sorted(lengths.values())[len(asked) // 2]
    short = [e for e in asked if lengths[e.id] <= middle]
    assert 0 < len(short) < len(asked) and fitting(middle) == short
    assert capsys.readouterr().out == (
        f"left out {len(asked) - len(short)} of {len(asked)} questions: "
        f"their prompt is longer than --max-prompt-tokens {middle}\n"
    )
    said = run(
        "train_grpo.py", *TOY, "--data", work / "benchmark", "--model", work / "imitation", "--questions", 2,
        "--out", work / "too_long", "--max-prompt-tokens", 5, expect=2,
    )  # fmt: skip
    assert "the prompt of every question is longer than --max-prompt-tokens 5" in said


def test_grpo_plays_the_questions_that_the_seed_draws(work):
    run(
        "train_grpo.py", *TOY, "--data", work / "benchmark", "--model", work / "imitation", "--steps", 3,
        "--questions", 2, "--prompts-per-step", 4, "--samples-per-prompt", 2,
        "--out", work / "drawn",
    )  # fmt: skip
    played = json.loads((work / "drawn" / "asked.json").read_text())
    every = [e.id for e in examples(load_split(config_for(work, 0), "train").dialogues)]
    assert set(played) == set(random.Random(0).sample(every, 2))


def test_grpo_with_lora_is_resumed_to_the_same_weights(work):
    options = [
        "train_grpo.py", *TOY, "--data", work / "benchmark", "--model", work / "imitation",
        "--prompts-per-step", 3, "--samples-per-prompt", 4, "--steps", 4, "--save-every", 2, "--lora-rank", 4,
        "--rewards", "proposal=1", "--beta", 0.01,
    ]  # fmt: skip
    run(*options, "--out", work / "unbroken")
    run(*options, "--out", work / "broken", "--steps", 2)
    out = run(*options, "--out", work / "broken", expect=2)
    assert "go on with --resume" in out
    run(*options, "--out", work / "broken", "--resume")
    kept = sorted(p.name for p in (work / "broken" / "checkpoints").iterdir())
    assert kept == ["step_00000002", "step_00000004"]
    assert len(list((work / "unbroken" / "checkpoints").iterdir())) == 2
    first, second = (
        (work / name / "policy" / "adapter_model.safetensors").read_bytes() for name in ("unbroken", "broken")
    )
    assert first == second
    dropped = {"minutes", "rollout_seconds", "train_seconds", "sampled_tokens_per_second"}
    logs = [rows_of(work / name / "metrics.csv") for name in ("unbroken", "broken")]
    for a, b in zip(*logs, strict=True):
        assert {k: v for k, v in a.items() if k not in dropped} == {
            k: v for k, v in b.items() if k not in dropped
        }


def test_groups_without_signal_are_replaced(work):
    options = [
        "train_grpo.py", *TOY, "--data", work / "benchmark", "--model", work / "imitation", "--steps", 1,
        "--prompts-per-step", 6, "--samples-per-prompt", 2, "--temperature", 0.3,
    ]  # fmt: skip
    run(*options, "--out", work / "as_they_come")
    run(*options, "--out", work / "replaced", "--resample-rounds", 5)
    (one,), (other,) = (rows_of(work / name / "metrics.csv") for name in ("as_they_come", "replaced"))
    assert float(one["dropped_groups"]) == 0 < float(other["dropped_groups"]) < 1
    assert float(one["informative_groups"]) < float(other["informative_groups"])


def test_errors_are_one_sentence_and_exit_code_2(work, tmp_path, monkeypatch, capsys):
    def refused(script, *options):
        with pytest.raises(SystemExit) as stop:
            user_errors(script.main, read_options(CONFIGS[script], "", [*TOY, *map(str, options)]))
        assert stop.value.code == 2
        return capsys.readouterr().err

    monkeypatch.chdir(ROOT)
    out = run(
        "evaluate.py", *TOY, "--out", tmp_path / "out", "--data", work / "benchmark",
        "--model", tmp_path / "nowhere", expect=2,
    )  # fmt: skip
    assert "is not a folder" in out and "Traceback" not in out
    base = ["--out", tmp_path / "out"]
    out = refused(evaluate, *base, "--data", tmp_path, "--model", work / "imitation")
    assert "has no dev split" in out
    bare = tmp_path / "bare"
    tokenizer = AutoTokenizer.from_pretrained(work / "imitation")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    assert "has no chat template" in refused(evaluate, *base, "--data", work / "benchmark", "--model", bare)
    model = [*base, "--data", work / "benchmark", "--model", work / "imitation"]
    for script, options, sentence in (
        (train_grpo, ["--save-every", 0], "--save-every: should be at least 1"),
        (train_grpo, ["--samples-per-prompt", 1], "--samples-per-prompt should be at least 2"),
        (train_grpo, ["--temperature", 0], "--temperature should be above 0"),
        (train_grpo, ["--tis-cap", -0.5], "--tis-cap should be above 0, 0 for none, or -1, not -0.5"),
        (train_grpo, ["--rewards", "best"], "--rewards best is unknown; choose from outcome, process"),
        (
            train_grpo,
            ["--held-out", 1000],
            "--held-out and --for-rl should be above 0 where they are asked for, and leave",
        ),
        (train_grpo, ["--held-out", -1], "--held-out should be at least 0"),
        (train_grpo, ["--rewards", "no.such"], "--rewards no.such cannot be imported (No module named 'no')"),
        (train_grpo, ["--curriculum", tmp_path / "none.jsonl"], "none.jsonl is not there; make it with"),
        (
            train_sft,
            ["--history", "predicted"],
            "--history predicted is unknown; choose from gold, questions",
        ),
        (train_sft, ["--targets", "gold", "--rounds", 2], "--targets gold needs --rounds 1: another"),
        (train_sft, ["--embedding", tmp_path / "none"], "no embedding model could be loaded from"),
        (
            evaluate,
            ["--split", "held_out"],
            "--held-out and --for-rl should be above 0 where they are asked for, and leave",
        ),
        (evaluate, ["--typo", 1], "unrecognized arguments: --typo"),
    ):
        assert sentence in refused(script, *model, *options)
    assert not (tmp_path / "out").exists()


@needs_shared
@pytest.mark.parametrize("dataset", ["sparc", "cosql"])
def test_trained_tiny_model_on_real_questions(dataset, work, tmp_path):
    run(
        "evaluate.py", "--model", work / "imitation", "--data", SHARED / dataset / "dev.json",
        "--databases", SHARED / "database", "--wording", "compact", "--dialogues", 6,
        "--max-turn-tokens", 40, "--rows", 16, "--out", tmp_path / "out",
    )  # fmt: skip
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["dialogues"] == 6
    assert sum(summary["status"].values()) == pytest.approx(1.0)
