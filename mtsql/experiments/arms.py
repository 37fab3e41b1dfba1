"""The finished arms of a reproduction, their training logs, and differences between arms with intervals."""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mtsql.report.abilities import ABILITIES
from mtsql.report.metrics import RESAMPLES, bootstrap_interval

DESCRIPTIONS = {
    "base": "untrained, both tools",
    "base_direct": "untrained, no tools",
    "base_no_execution": "untrained, without EXECUTE",
    "base_no_memory": "untrained, without MEMORY-VERIFY",
    "short_sft": "short-horizon SFT",
    "short_rl": "short-horizon RL",
    "round_1": "warm start, round 1",
    "round_2": "warm start, round 2",
    "round_3": "warm start, round 3",
    "rl_outcome": "RL, outcome rewards",
    "rl_process": "RL, outcome + process rewards (final agent)",
    "rl_shuffled": "as `rl_process`, without the curriculum's order",
    "rl_no_execution": "final agent without EXECUTE",
    "rl_no_memory": "final agent without MEMORY-VERIFY",
}


@dataclass(frozen=True)
class Evaluation:
    """One arm evaluated with one seed."""

    summary: dict  # see mtsql.report.metrics.summarise
    records: list[dict]  # one a question, see mtsql.report.evaluation.score_records
    command: str
    response_cap: int | None  # tokens


Seeds: TypeAlias = Mapping[int, Evaluation]  # the finished evaluations of an arm, by seed
Arms: TypeAlias = Mapping[str, Seeds]
Measure: TypeAlias = Callable[[dict], float | None]  # of a record


def read_arms(runs: Path, seeds: Sequence[int]) -> dict[str, dict[int, Evaluation]]:
    """The finished evaluations in runs/seed<S>/evaluation/<arm>, by arm and seed."""
    arms: dict[str, dict[int, Evaluation]] = {}
    for seed in seeds:
        for path in sorted((runs / f"seed{seed}" / "evaluation").glob("*/summary.json")):
            evaluation = read_evaluation(path.parent)
            if evaluation:
                arms.setdefault(path.parent.name, {})[seed] = evaluation
    return arms


def read_evaluation(folder: Path) -> Evaluation | None:
    """The evaluation in a folder; None while its summary or predictions are not there or not whole."""
    summary, run = read_json(folder / "summary.json"), read_json(folder / "run.json") or {}
    records = read_json(folder / "predictions.jsonl", lambda text: list(map(json.loads, text.splitlines())))
    if not summary or len(records or []) != summary["questions"]:
        return None
    return Evaluation(summary, records, _command(run), run.get("config", {}).get("max_response_tokens"))


def read_coverage(runs: Path, seeds: Sequence[int]) -> dict[int, list[dict]]:
    """The rounds in each seed's sft/coverage.json, of the seeds that have one."""
    rounds = {seed: read_json(runs / f"seed{seed}" / "sft" / "coverage.json") for seed in seeds}
    return {seed: found for seed, found in rounds.items() if found}


def read_logs(runs: Path, seeds: Sequence[int], run: str, file: str) -> dict[int, list[dict[str, float]]]:
    """The rows of the CSV file runs/seed<S>/<run>/<file> by seed, without empty cells and cut-off lines."""
    logs = {}
    for seed in seeds:
        path = runs / f"seed{seed}" / run / file
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as lines:
                rows = [row for row in csv.DictReader(lines) if None not in row and None not in row.values()]
            logs[seed] = [{name: float(cell) for name, cell in row.items() if cell} for row in rows]
    return {seed: rows for seed, rows in logs.items() if rows}


def read_json(path: Path, parse: Callable[[str], Any] = json.loads) -> Any:
    """What a file holds, None if it is not there, or not whole yet."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _command(run: dict) -> str:
    """The command line that run.json holds."""
    return "python " + shlex.join(run["command"]) if "command" in run else ""


def command_of(runs: Path, seeds: Sequence[int], name: str) -> tuple[int, str] | None:
    """The first seed whose training of this name has its run.json, and its command."""
    for seed in seeds:
        run = read_json(runs / f"seed{seed}" / name / "run.json")
        if run:
            return seed, _command(run)
    return None


def look_up(summary: dict, *keys: str) -> float | None:
    """The number below these keys, None if it is not there."""
    found: Any = summary
    for key in keys:
        found = found.get(key) if found else None
    return found


def mean_over_seeds(seeds: Seeds, *keys: str, scale: float = 1) -> float | None:
    """The mean of a number of the summaries, by its keys, times `scale`; None if none has it."""
    found = [n for e in seeds.values() if (n := look_up(e.summary, *keys)) is not None]
    return scale * fmean(found) if found else None


def breakdown_keys(quantity: str, by: str) -> tuple[str, ...]:
    """Where a summary has EX, tokens or interactions by "turn" or by "hardness"."""
    return ("ex", f"by_{by}") if quantity == "ex" else (f"{quantity}_by_{by}",)


def ability_keys(sampled: bool) -> dict[str, tuple[str, ...]]:
    """Where a summary has the five abilities and EX, greedy or at temperature 1."""
    suffix = "_sampled" if sampled else ""
    keys = {text: (f"abilities{suffix}", ability) for ability, text in ABILITIES.items()}
    return keys | {"EX": ("ex_sampled",) if sampled else ("ex", "mean")}


class Answer(NamedTuple):
    """What one question of one seed was measured to be."""

    seed: int
    record: dict
    value: float


@dataclass(frozen=True)
class Difference:
    """A mean with its 95 % interval (None if there is none), and each seed's."""

    mean: float
    interval: tuple[float, float] | None
    by_seed: dict[int, float]


def answers(seeds: Seeds, measure: Measure) -> list[Answer]:
    """The measured questions of an arm, all seeds together."""
    measured = ((seed, record, measure(record)) for seed, e in seeds.items() for record in e.records)
    return [Answer(*found) for found in measured if found[2] is not None]


def measure_of(key: str) -> Measure:
    """The measure that reads the number `key` of a record, None where there is none."""
    return lambda record: record.get(key)


OF_EX = measure_of("ex")


def paired_answers(better: Seeds, worse: Seeds, measure: Measure = OF_EX) -> list[Answer]:
    """`better` minus `worse` on each question that both measure, of the seeds that both have."""
    found = []
    for seed in sorted(better.keys() & worse.keys()):
        other = {record["example_id"]: measure(record) for record in worse[seed].records}
        for answer in answers({seed: better[seed]}, measure):
            subtrahend = other.get(answer.record["example_id"])
            if subtrahend is not None:
                found.append(answer._replace(value=answer.value - subtrahend))
    return found


def estimate(found: Sequence[Answer]) -> Difference | None:
    """The mean over questions; None without any.

    The interval resamples dialogues, with all seeds' answers to a dialogue together. Of differences it
    is that of `mtsql.report.metrics.paired_difference`.
    """
    if not found:
        return None
    by_dialogue: dict[str, list[float]] = {}
    for answer in found:
        by_dialogue.setdefault(answer.record["dialogue_id"], []).append(answer.value)
    interval = bootstrap_interval(list(by_dialogue.values()))
    return Difference(fmean(a.value for a in found), interval, _by_seed(found))


def contrast(more: Sequence[Answer], less: Sequence[Answer]) -> Difference | None:
    """Mean of `more` minus mean of `less`, different questions of the same dialogues; None if one is empty.

    The interval resamples dialogues, each with its questions of both kinds.
    """
    if not more or not less:
        return None
    places: dict[str, int] = {}
    for answer in (*more, *less):
        places.setdefault(answer.record["dialogue_id"], len(places))
    sums, counts = np.zeros((2, len(places))), np.zeros((2, len(places)))  # (kinds, dialogues)
    for kind, group in enumerate((more, less)):
        at = [places[answer.record["dialogue_id"]] for answer in group]
        np.add.at(sums[kind], at, [answer.value for answer in group])
        np.add.at(counts[kind], at, 1)
    drawn = np.random.default_rng(0).integers(len(places), size=(RESAMPLES, len(places)))
    drawn_sums, drawn_counts = sums[:, drawn].sum(-1), counts[:, drawn].sum(-1)  # (kinds, resamples)
    whole = drawn_counts.all(0)  # a resample may lack one kind
    means = drawn_sums[:, whole] / drawn_counts[:, whole]
    low, high = np.percentile(means[0] - means[1], [2.5, 97.5])
    of_more, of_less = _by_seed(more), _by_seed(less)
    by_seed = {s: of_more[s] - of_less[s] for s in sorted(of_more.keys() & of_less.keys())}
    mean = fmean(a.value for a in more) - fmean(a.value for a in less)
    return Difference(mean, (float(low), float(high)), by_seed)


def _by_seed(found: Sequence[Answer]) -> dict[int, float]:
    """The mean of each seed."""
    seeds = dict.fromkeys(a.seed for a in found)
    return {seed: fmean(a.value for a in found if a.seed == seed) for seed in seeds}
