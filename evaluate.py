"""Evaluate a policy: answer every question of a split once, and report EX and EM.

    python evaluate.py --config configs/toy.toml --model runs/grpo/policy --data DATA --out runs/eval

EX is the official execution match, EM the official exact set match; both over all questions, by turn,
by hardness, and for whole interactions. Also reported: how every episode ended, tool calls and tokens.
The run folder gets summary.json, predictions.jsonl (one record a question) and trajectories.jsonl.

Departures from the paper:
- One database a question, DISTINCT ignored (the official default), as in the authors' code.
- --history predicted puts the policy's own earlier answers in the memory; the paper's numbers are
  with gold history, our default.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from tqdm import tqdm

from mtsql.agent.rollout import Sampling
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.trajectory import Trajectory
from mtsql.config import Common, load_config, option, save_config
from mtsql.data.datasets import Example
from mtsql.learn.checkpoint import write_atomically
from mtsql.learn.model import load_policy, load_tokenizer
from mtsql.report.evaluation import answer_dialogues, score_records
from mtsql.report.metrics import format_summary, summarise
from mtsql.report.viewer import trajectory_record
from mtsql.run import (
    load_split,
    make_environment,
    make_scorer,
    pick_device,
    show,
    trajectory_seed,
    user_errors,
)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Common):
    """Configuration of an evaluation."""

    model: str = option(..., "local folder or hub name of a causal LM or a PEFT adapter")
    split: str = option("dev", "train, dev or test")
    dialogues: int = option(0, "first dialogues of the split only; 0 is all of them")
    sampled_runs: int = option(0, "further runs at temperature 1, reported beside the greedy one")


def main() -> None:
    """The evaluation protocol."""
    config = load_config(EvaluateConfig, "evaluate", __doc__)
    out = Path(config.out)
    device = pick_device(config.device)
    tokenizer = load_tokenizer(config.model)
    tokens = ChatTokens(tokenizer, config.thinking)
    dataset = load_split(config, config.split)
    environment = make_environment(config, dataset, tokens, config.tools)
    policy = load_policy(config.model, config.dtype, device)
    dialogues = dataset.dialogues[: config.dialogues or None]
    scorer = make_scorer(environment)

    def answer(temperature: float, run: int) -> list[tuple[Example, Trajectory]]:
        sampling = Sampling(temperature, max_turn_tokens=config.max_turn_tokens)
        seed = trajectory_seed(config.seed, run)
        with tqdm(desc=f"evaluate at temperature {temperature:g}") as bar:
            return answer_dialogues(
                policy, environment, dialogues, config.history, sampling, seed, config.rows, show(bar)
            )

    answered = answer(0.0, 0)
    records = score_records(answered, scorer)
    sampled = [score_records(answer(1.0, run + 1), scorer) for run in range(config.sampled_runs)]
    summary = summarise(records)
    if sampled:
        for metric in ("ex", "em"):
            for record, *others in zip(records, *sampled, strict=True):
                record[f"{metric}_sampled"] = fmean(other[metric] for other in others)
            summary[f"{metric}_sampled"] = fmean(r[f"{metric}_sampled"] for r in records)
    save_config(config, out)
    write_atomically(out / "summary.json", json.dumps(summary, indent=1))
    write_atomically(out / "predictions.jsonl", "".join(json.dumps(r) + "\n" for r in records))
    shown = (trajectory_record(t, tokenizer.decode) for _, t in answered)
    write_atomically(out / "trajectories.jsonl", "".join(json.dumps(r) + "\n" for r in shown))
    print(
        f"{config.model} on {config.split} of {config.data}: history {config.history}, tools "
        f"{config.tools}, greedy"
        + (f", {dataset.skipped} dialogues without database skipped" if dataset.skipped else "")
    )
    print(format_summary(summary))
    if sampled:
        ex, em = (100 * summary[f"{metric}_sampled"] for metric in ("ex", "em"))
        print(f"at temperature 1, mean of {config.sampled_runs} run(s): EX {ex:.1f} %, EM {em:.1f} %")


if __name__ == "__main__":
    user_errors(main)
