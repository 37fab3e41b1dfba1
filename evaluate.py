"""Evaluate a policy: answer every question of a split once, and report EX and EM.

    python evaluate.py --config configs/toy.toml --model runs/grpo/policy --data DATA --out runs/eval

or score prediction files in the official Spider, SParC and CoSQL formats, or compare two evaluations:

    python evaluate.py --gold GOLD.txt --pred PRED.txt --databases DIR --tables tables.json --etype all
    python evaluate.py --compare A.json B.json

(`python evaluate.py --gold --help` lists the options of the second form.)

EX is the official execution match, EM the official exact set match; both over all questions, by turn,
by hardness, and for whole interactions. Also reported: how every episode ended, tool calls, tokens, the
five abilities of section 4.3, the kinds of errors of section 4.4 by rules, and latency.
--sampled-runs N adds the mean of N runs at temperature 1 and, from 2 on, the majority vote of each
question's N answers by execution result, and pass@k (SQL-Trail, section 4.3: N = 8).
The run folder gets summary.json, predictions.jsonl (one record a question) and trajectories.jsonl.

Departures from the paper:
- One database a question, DISTINCT ignored (the official default), as in the authors' code.
- --history predicted puts the policy's own earlier answers in the memory; the paper's numbers are
  with gold history, our default. There is no vote then: the N answers have different histories.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from tqdm import tqdm

from mtsql.agent.trajectory import Trajectory, trajectory_record
from mtsql.commands import official
from mtsql.config import Common, load_config, option, save_config, user_errors
from mtsql.data.datasets import Example
from mtsql.files import write_atomically
from mtsql.report.metrics import format_summary, summarise


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Common):
    """Configuration of an evaluation."""

    model: str = option(..., "local folder or hub name of a causal LM or a PEFT adapter")
    split: str = option("dev", "train, dev, test or held_out (see --held-out)")
    dialogues: int = option(0, "first dialogues of the split only; 0 is all of them")
    sampled_runs: int = option(0, "further runs at temperature 1: mean, majority vote, pass@k (SQL-Trail: 8)")
    latency_questions: int = option(0, "so many questions are also answered one at a time, for the latency")


def main() -> None:
    """Choose the form: a policy, prediction files, or a comparison."""
    flags = {argument.partition("=")[0] for argument in sys.argv[1:]}
    if flags & {"--gold", "--pred", "--compare"}:
        official.main()
    else:
        evaluate_policy()


def evaluate_policy() -> None:
    """The evaluation protocol."""
    # Here, because they take seconds to import, which the scoring of files can do without.
    from mtsql.agent.rollout import trajectory_seed
    from mtsql.agent.tokens import ChatTokens
    from mtsql.learn.model import load_policy, load_tokenizer
    from mtsql.learn.parallel import join_processes, leave_processes
    from mtsql.report.evaluation import answer_dialogues, score_records
    from mtsql.report.voting import add_votes, format_votes
    from mtsql.run import (
        load_split,
        make_environment,
        make_sampling,
        make_scorer,
        pick_device,
        show,
    )

    config = load_config(EvaluateConfig, "evaluate", __doc__)
    processes = join_processes()
    out = Path(config.out)
    device = pick_device(config.device)
    tokenizer = load_tokenizer(config.model)
    tokens = ChatTokens(tokenizer, config.thinking)
    dataset = load_split(config, config.split)
    environment = make_environment(config, dataset, tokens, config.tools)
    policy = load_policy(
        config.model, config.dtype, device, attention=config.attention, quantise=config.quantise
    )
    dialogues = dataset.dialogues[: config.dialogues or None]
    scorer = make_scorer(environment)

    def answer(temperature: float, run: int) -> list[tuple[Example, Trajectory]]:
        sampling = make_sampling(config, environment, temperature)
        seed = trajectory_seed(config.seed, run)
        with tqdm(desc=f"evaluate at temperature {temperature:g}", disable=not processes.first) as bar:
            answered = answer_dialogues(
                policy,
                environment,
                processes.share(dialogues),
                config.history,
                sampling,
                seed,
                config.rows,
                show(bar),
                config.cache_gib,
            )
        everything = [pair for share in processes.of_each(answered) for pair in share]
        return sorted(everything, key=lambda pair: (pair[0].dialogue_id, pair[0].turn_index))

    latency = None
    if config.latency_questions and processes.first:  # before any result is cached
        started, asked = time.perf_counter(), []
        for dialogue in dialogues:
            if len(asked) >= config.latency_questions:
                break
            greedy = make_sampling(config, environment, 0.0)
            asked += answer_dialogues(policy, environment, [dialogue], config.history, greedy, 0, rows=1)
        latency = (time.perf_counter() - started) / len(asked)
    answered = answer(0.0, 0)
    samples = [answer(1.0, run + 1) for run in range(config.sampled_runs)]
    leave_processes(processes)
    if not processes.first:
        return
    verifies = environment.recipe.verifies
    records = score_records(answered, scorer, verifies)
    sampled = [score_records(pairs, scorer, verifies) for pairs in samples]
    summary = summarise(records)
    if latency is not None:
        summary["latency_seconds"] = latency
    if sampled:
        for metric in ("ex", "em"):
            for record, *others in zip(records, *sampled, strict=True):
                record[f"{metric}_sampled"] = fmean(other[metric] for other in others)
            summary[f"{metric}_sampled"] = fmean(r[f"{metric}_sampled"] for r in records)
        runs = [summarise(run)["abilities"] for run in sampled]
        summary["abilities_sampled"] = {
            ability: fmean(run[ability] for run in runs)
            for ability in runs[0]
            if runs[0][ability] is not None
        }
    if len(sampled) > 1 and config.history != "predicted":
        summary |= add_votes(records, sampled, scorer)
    save_config(config, out)
    write_atomically(out / "summary.json", json.dumps(summary, indent=1))
    write_atomically(out / "predictions.jsonl", "".join(json.dumps(r) + "\n" for r in records))
    shown = (trajectory_record(t, tokenizer.decode) for _, t in answered)
    write_atomically(out / "trajectories.jsonl", "".join(json.dumps(r) + "\n" for r in shown))
    print(
        f"{config.model} on {config.split} of {config.data}: {config.recipe}, history {config.history}, "
        f"tools {config.tools}, greedy"
        + (f", {dataset.skipped} dialogues without database skipped" if dataset.skipped else "")
    )
    print(format_summary(summary))
    if sampled:
        ex, em = (100 * summary[f"{metric}_sampled"] for metric in ("ex", "em"))
        print(f"at temperature 1, mean of {config.sampled_runs} run(s): EX {ex:.1f} %, EM {em:.1f} %")
    if "pass_at_k" in summary:
        print(format_votes(summary))
    elif len(sampled) > 1:
        print("no majority vote and no pass@k: with --history predicted each run has its own history")


if __name__ == "__main__":
    user_errors(main)
