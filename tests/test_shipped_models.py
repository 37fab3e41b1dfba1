"""The models in models/toy answer questions over new databases, and training improves them."""

from __future__ import annotations

import csv
import json
from statistics import fmean

import pytest
from conftest import ROOT, TOY, run

from mtsql.config import from_toml
from mtsql.toy import benchmark
from mtsql.toy.imitation import ImitationConfig
from mtsql.toy.tiny import MODELS

SHIPPED = sorted(path.name for path in (ROOT / MODELS).glob("seed*"))


def make_benchmark(folder, **splits):
    """A benchmark of another seed than the models' own."""
    benchmark.write_benchmark(folder, seed=benchmark.MODELS_SEED + 100, splits=splits)
    return folder


def evaluate(model, data, split, out):
    """The summary of greedy answers without tools."""
    run(
        "evaluate.py", *TOY, "--data", data, "--split", split, "--model", model, "--tools", "none",
        "--sampled-runs", 0, "--out", out,
    )  # fmt: skip
    return json.loads((out / "summary.json").read_text())


def test_models_that_are_made_anew_learn_as_the_shipped_ones_did():
    files = ("toy.toml", "toy_suite.toml")
    settings = [from_toml(ROOT / "configs" / file, ImitationConfig) for file in files]
    assert settings[0] == settings[1] and SHIPPED
    for name in SHIPPED:
        made = json.loads((ROOT / MODELS / name / "run.json").read_text())["config"]
        now = json.loads(json.dumps(vars(ImitationConfig(**settings[0], data=("",), out=""))))
        kept = made.keys() & now.keys() - {"data", "out", "seed"}  # some are constants now
        # Nothing was an empty list where it is an empty text today.
        assert {key: made[key] or None for key in kept} == {key: now[key] or None for key in kept}, name


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_knows_its_sql(name, tmp_path):
    data = make_benchmark(tmp_path / "data", train={"known": (1, 1)}, test={"known": (10, 2)})
    summary = evaluate(ROOT / MODELS / name, data, "test", tmp_path / "e")
    assert summary["questions"] >= 30 and summary["ex"]["mean"] >= 0.85 and summary["em"]["mean"] >= 0.9


def test_fine_tuning_teaches_what_it_shows(tmp_path):
    """On themes that no shipped model has seen: it answers less than half of the questions.

    Greedy answers repeat bit by bit, so that training without an effect gains nothing at all.
    """
    themes = make_benchmark(tmp_path / "data", train={"unseen": (4, 2)})
    options = ["--targets", "gold", "--tools", "none", "--questions", 0, "--epochs", 8]
    options += ["--learning-rate", 1e-3]
    model = ROOT / MODELS / "seed0"
    run("train_sft.py", *TOY, "--data", themes, "--model", model, *options, "--out", tmp_path / "sft")
    before = evaluate(model, themes, "train", tmp_path / "before")
    after = evaluate(tmp_path / "sft" / "policy", themes, "train", tmp_path / "after")
    for metric in ("ex", "em"):
        assert after[metric]["mean"] >= before[metric]["mean"] + 0.2, metric


def test_grpo_raises_the_reward_of_the_questions_that_it_asks(tmp_path):
    """Eight questions in each step: without an effect steps differ by 0.09 (one standard deviation)."""
    themes = make_benchmark(tmp_path / "data", train={"unseen": (8, 2)})
    options = ["--tools", "none", "--rewards", "outcome", "--learning-rate", 1e-3, "--out", tmp_path / "grpo"]
    options += ["--questions", 8, "--steps", 8, "--prompts-per-step", 8, "--samples-per-prompt", 8]
    run("train_grpo.py", *TOY, "--data", themes, "--model", ROOT / MODELS / "seed0", *options)
    rewards = [float(r["reward"]) for r in csv.DictReader((tmp_path / "grpo" / "metrics.csv").open())]
    assert fmean(rewards[-3:]) >= rewards[0] + 0.35
