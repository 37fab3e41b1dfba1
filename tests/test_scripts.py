"""The three scripts end to end on a small benchmark, and their error messages."""

from __future__ import annotations

import csv
import json
import re

import pytest
import torch
from conftest import ROOT, TOY, run
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from evaluate import EvaluateConfig
from mtsql.agent.rollout import Sampling
from mtsql.agent.tokens import ChatTokens
from mtsql.learn.model import load_policy, load_tokenizer
from mtsql.report.evaluation import answer_dialogues
from mtsql.run import load_split, make_environment

SHARED = ROOT.parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not here")


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_trained_tiny_model_answers_as_generate_does(work):
    """Whole greedy episodes against Hugging Face `generate` with every turn prefilled anew."""
    config = EvaluateConfig(
        model=str(work / "imitation"), data=str(work / "benchmark"), out="", wording="compact",
        result_characters=40, max_prompt_tokens=600, max_response_tokens=600, max_turn_tokens=120,
        max_tool_tokens=300,
    )  # fmt: skip
    policy, tokens = load_policy(config.model).eval(), ChatTokens(load_tokenizer(config.model))
    dataset = load_split(config, "test")
    environment = make_environment(config, dataset, tokens, "both")
    sampling = Sampling(0.0, max_turn_tokens=config.max_turn_tokens)
    answered = answer_dialogues(policy, environment, dataset.dialogues, "gold", sampling, 0, 16)
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
    assert "trajectories kept" in out
    kept = [json.loads(line) for line in (work / "sft" / "trajectories.jsonl").open()]
    assert kept and all(t["status"] == "answered" for t in kept)
    out = run(
        "train_grpo.py", *TOY, *data, "--model", work / "sft" / "policy", "--out", work / "grpo",
        "--steps", 2, "--prompts-per-step", 4, "--samples-per-prompt", 4, "--evaluate-every", 2,
        "--evaluate-dialogues", 4, "--w-proposal", 0.8, "--w-verify", 0.1, "--beta", 0.01,
    )  # fmt: skip
    rows = rows_of(work / "grpo" / "metrics.csv")
    assert [row["step"] for row in rows] == ["0", "1"]
    for row in rows:
        statuses = sum(float(v) for k, v in row.items() if k.startswith("status_"))
        assert statuses == pytest.approx(1.0)
        assert float(row["logprob_gap"]) < 1e-3
        assert float(row["clip_fraction"]) == 0  # one update a batch: the ratio is exactly 1
    for name in ("training.png", "run.json", "trajectories.jsonl", "dev.csv"):
        assert (work / "grpo" / name).is_file()
    out = run(
        "evaluate.py", *TOY, *data, "--model", work / "grpo" / "policy", "--out", work / "eval",
        "--split", "test", "--history", "predicted",
    )  # fmt: skip
    for part in ("EX %", "whole dialogues", "turn 1", "easy", "out_of_interactions", "interactions"):
        assert part in out
    records = [json.loads(line) for line in (work / "eval" / "predictions.jsonl").open()]
    assert len(records) == json.loads((work / "eval" / "summary.json").read_text())["questions"]
    shown = run("-m", "mtsql.report.viewer", work / "eval" / "trajectories.jsonl", "--color", "always")
    assert "\x1b[" in shown and "<tool_call>" in shown


def test_quickstart_ends_with_its_table(work):
    small = (ROOT / "configs" / "toy.toml").read_text()
    for option, value in (
        ("questions", 20),
        ("samples_per_question", 8),
        ("steps", 1),
        ("prompts_per_step", 4),
    ):
        small, replaced = re.subn(rf"^{option} = \d+$", f"{option} = {value}", small, flags=re.MULTILINE)
        assert replaced == 1
    (work / "small.toml").write_text(small)
    out = run(
        "-m", "mtsql.quickstart", "--config", work / "small.toml", "--base", work, "--out", work / "quick"
    )  # fmt: skip
    assert "rl - warm_start:" in out
    results = json.loads((work / "quick" / "results.json").read_text())
    assert [r["arm"] for r in results] == [
        "imitation", "short_horizon", "warm_start", "rl", "rl_no_execution", "rl_no_memory",
    ]  # fmt: skip
    for result in results:
        assert 0 <= result["ex_low"] <= result["ex"] <= result["ex_high"] <= 1
        assert result["questions"] > 0 and result["minutes"] >= 0 and "ex_sampled" in result


def test_grpo_with_lora_is_resumed_to_the_same_weights(work):
    options = [
        "train_grpo.py", *TOY, "--data", work / "benchmark", "--model", work / "imitation",
        "--prompts-per-step", 3, "--samples-per-prompt", 4, "--steps", 4, "--save-every", 2, "--lora-rank", 4,
        "--w-proposal", 1.0, "--beta", 0.01,
    ]  # fmt: skip
    run(*options, "--out", work / "unbroken")
    run(*options, "--out", work / "broken", "--steps", 2)
    out = run(*options, "--out", work / "broken", expect=2)
    assert "go on with --resume" in out
    run(*options, "--out", work / "broken", "--resume", "--keep-checkpoints", 1)
    assert [p.name for p in (work / "broken" / "checkpoints").iterdir()] == ["step_00000004"]
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


def test_errors_are_one_sentence_and_exit_code_2(work, tmp_path):
    base = ["evaluate.py", *TOY, "--out", tmp_path / "out"]
    out = run(*base, "--data", work / "benchmark", "--model", tmp_path / "nowhere", expect=2)
    assert "is not a folder" in out and "Traceback" not in out
    out = run(*base, "--data", tmp_path, "--model", work / "imitation", expect=2)
    assert "has no dev split" in out and "Traceback" not in out
    bare = tmp_path / "bare"
    tokenizer = AutoTokenizer.from_pretrained(work / "imitation")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    out = run(*base, "--data", work / "benchmark", "--model", bare, expect=2)
    assert "has no chat template" in out and "Traceback" not in out
    model = ["--data", work / "benchmark", "--model", work / "imitation", "--out", tmp_path / "out"]
    for script, options, sentence in (
        ("train_grpo.py", ["--save-every", 0], "--save-every should be at least 1"),
        ("train_grpo.py", ["--samples-per-prompt", 1], "--samples-per-prompt should be at least 2"),
        ("train_grpo.py", ["--temperature", 0], "--temperature should be above 0"),
        ("train_grpo.py", ["--dual-clip", 0.5], "--dual-clip should be above 1"),
        ("train_sft.py", ["--history", "predicted"], "--history predicted is for evaluation"),
    ):
        out = run(script, *TOY, *model, *options, expect=2)
        assert sentence in out and "Traceback" not in out
    out = run(*base, "--data", work / "benchmark", "--model", work / "imitation", "--typo", 1, expect=2)
    assert "unrecognized arguments: --typo" in out
    assert not (tmp_path / "out").exists()


@needs_shared
@pytest.mark.parametrize("dataset", ["sparc", "cosql"])
def test_real_questions_with_the_real_tokenizer_and_the_papers_prompts(dataset, work, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizer_qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
        max_position_embeddings=16384,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "random")
    tokenizer.save_pretrained(tmp_path / "random")
    real = ["--data", SHARED / dataset / "dev.json", "--databases", SHARED / "database"]
    for model, wording in ((tmp_path / "random", "paper"), (work / "imitation", "compact")):
        run(
            "evaluate.py", "--model", model, *real, "--wording", wording, "--dialogues", 6,
            "--max-turn-tokens", 40, "--rows", 16, "--out", tmp_path / wording,
        )  # fmt: skip
        summary = json.loads((tmp_path / wording / "summary.json").read_text())
        assert summary["dialogues"] == 6
        assert sum(summary["status"].values()) == pytest.approx(1.0)
