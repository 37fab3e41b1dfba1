"""The finished arms of a reproduction, their training logs, and differences between arms with intervals."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mtsql.errors import UserError
from mtsql.files import load_json, load_json_lines
from mtsql.report.abilities import ABILITIES
from mtsql.report.metrics import at_most, interval_of, smaller_tail

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
    "rl_no_execution": "final agent, EXECUTE taken away",
    "rl_no_memory": "final agent, MEMORY-VERIFY taken away",
    "rl_no_execution_trained": "as `rl_process`, but warm start and RL without EXECUTE",
    "rl_no_memory_trained": "as `rl_process`, but warm start and RL without MEMORY-VERIFY",
}


@dataclass(frozen=True)
class Evaluation:
    """One arm evaluated with one seed."""

    summary: dict  # see mtsql.report.metrics.summarise
    records: list[dict]  # one a question, see mtsql.report.evaluation.score_records
    command: str
    commit: str
    response_cap: int | None  # tokens


Seeds: TypeAlias = Mapping[int, Evaluation]  # the finished evaluations of an arm, by seed
Arms: TypeAlias = Mapping[str, Seeds]
Measure: TypeAlias = Callable[[dict], float | None]  # of a record

RESAMPLES = 100_000
ELSEWHERE = "_elsewhere"  # behind an arm's name: on unseen themes, or on the other data set


def elsewhere(arms: Arms) -> Arms:
    """The arms as they were evaluated elsewhere, under their own names."""
    return {arm.removesuffix(ELSEWHERE): seeds for arm, seeds in arms.items() if arm.endswith(ELSEWHERE)}


def both_sides(arms: Arms) -> tuple[Arms, Arms]:
    """The arms that are finished here and elsewhere, as evaluated here and there, with the same seeds."""
    away = elsewhere(arms)
    seeds = {arm: sorted(arms[arm].keys() & away[arm].keys()) for arm in arms if arm in away}
    here, there = ({arm: {s: of[arm][s] for s in both} for arm, both in seeds.items()} for of in (arms, away))
    return here, there


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
    records = read_json(folder / "predictions.jsonl", read_lines)
    if not summary or len(records or []) != summary["questions"]:
        return None
    cap = run.get("config", {}).get("max_response_tokens")
    return Evaluation(summary, records, _command(run), run.get("commit") or "", cap)


def read_coverage(runs: Path, seeds: Sequence[int]) -> dict[int, list[dict]]:
    """The rounds in each seed's sft/coverage.json, of the seeds whose warm start is finished."""
    folders = {seed: runs / f"seed{seed}" / "sft" for seed in seeds}
    finished = {s: sft / "coverage.json" for s, sft in folders.items() if (sft / "policy").exists()}
    return {seed: found for seed, path in finished.items() if (found := read_json(path))}


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


def read_json(path: Path, read: Callable[[Path], Any] = load_json) -> Any:
    """What a file holds, None if it is not there, or not whole yet."""
    try:
        return read(path)
    except UserError:
        return None


def read_lines(path: Path) -> list[dict]:
    """The rows of a JSONL file."""
    return [row for _, row in load_json_lines(path)]


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
    return (quantity, f"by_{by}") if quantity in ("ex", "em") else (f"{quantity}_by_{by}",)


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
    """A mean with its 95 % interval and two-sided p (None if there are none), and each seed's."""

    mean: float
    interval: tuple[float, float] | None
    by_seed: dict[int, float]
    p: float | None = None


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
    """The mean of the seeds' means with its interval and p, see `drawn_means`; None without any."""
    if not found:
        return None
    by_seed = _by_seed(found)
    return _difference(fmean(by_seed.values()), by_seed, [found])


def contrast(more: Sequence[Answer], less: Sequence[Answer]) -> Difference | None:
    """Mean of `more` minus mean of `less`, of different questions, likewise; None if no seed has both."""
    of_more, of_less = _by_seed(more), _by_seed(less)
    by_seed = {s: of_more[s] - of_less[s] for s in sorted(of_more.keys() & of_less.keys())}
    return _difference(fmean(by_seed.values()), by_seed, [more, less]) if by_seed else None


def drawn_means(mean: float, by_seed: Mapping[int, float], groups: Sequence[Sequence[Answer]]) -> np.ndarray:
    """What other seeds and other databases would have given for `mean`: (RESAMPLES,), float64.

    `mean` is that over seeds of a group of answers, or of the first group less that of the second.
    Databases are drawn anew with replacement, a database's answers of all seeds and groups together (a
    resample that lacks a group is left out). Seeds are too few for that: five of the same sign, drawn with
    replacement, would claim p below 0.001 in one of sixteen cases without any effect. So the spread of the
    seeds' own means is added as Student's t with one degree of freedom less than seeds. With one seed nothing
    is said of others.
    """
    rng = np.random.default_rng(0)
    databases = sorted({a.record["db_id"] for group in groups for a in group})
    places = {database: place for place, database in enumerate(databases)}
    drawn = rng.multinomial(len(databases), [1 / len(databases)] * len(databases), size=RESAMPLES)
    means = []
    for group in groups:
        sums, counts = np.zeros((2, len(databases)))
        np.add.at(sums, at := [places[a.record["db_id"]] for a in group], [a.value for a in group])
        np.add.at(counts, at, 1)
        total, count = drawn @ sums, drawn @ counts  # (RESAMPLES,)
        means.append(np.divide(total, count, out=np.full(RESAMPLES, np.nan), where=count > 0))
    found = means[0] - means[1] if len(means) == 2 else means[0]
    pooled = [fmean(a.value for a in group) for group in groups]  # seeds by their numbers of questions
    centre = pooled[0] - pooled[1] if len(pooled) == 2 else pooled[0]
    found = mean + (found - centre) * np.sqrt(len(databases) / max(1, len(databases) - 1))
    if len(by_seed) > 1:
        error = stdev(by_seed.values()) / len(by_seed) ** 0.5
        found += error * rng.standard_t(len(by_seed) - 1, size=RESAMPLES)
    return found[~np.isnan(found)]


def _difference(mean: float, by_seed: dict[int, float], groups: Sequence[Sequence[Answer]]) -> Difference:
    drawn = drawn_means(mean, by_seed, groups)
    return Difference(mean, interval_of(drawn), by_seed, min(1.0, 2 * smaller_tail(drawn)))


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p of a family of tests, in the order given (Holm, 1979).

    The smallest counts as often as there are tests, the next once less, and none is below one before it.
    """
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, at in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[at]))
        adjusted[at] = largest
    return adjusted


class Verdict(NamedTuple):
    """What is said of a claim, and Holm's adjusted p where it was tested."""

    said: str = ""
    p: float | None = None


def verdicts(differences: Sequence[Difference], seeds: Sequence[int]) -> list[Verdict]:
    """On the claim of each that it is above 0, where all are one family of tests (Holm).

    Without all of the page's seeds nothing is tested (one may be unfinished, or have no answers to compare),
    nor with one, which says nothing of others. What holds does so with each p at the upper end of its own
    Monte-Carlo error, so that other draws would not take it back.
    """
    whole = [d for d in differences if len(seeds) > 1 and d.p is not None and d.by_seed.keys() >= set(seeds)]
    ps = [d.p for d in whole]
    adjusted = zip(holm(ps), holm([2 * at_most(p / 2, RESAMPLES) for p in ps]), strict=True)
    found = []
    for difference in differences:
        if difference.p is None:
            found.append(Verdict())
        elif difference not in whole:
            found.append(Verdict("untested" if len(seeds) > 1 else "one seed"))
        else:
            p, highest = next(adjusted)
            sure = difference.mean != 0 and highest <= 0.05
            said = "holds" if difference.mean > 0 else "the contrary holds"
            found.append(Verdict(said if sure else "not beyond chance", p))
    return found


def least_effect(seeds: int, tests: int) -> float:
    """The mean, in standard deviations of seeds, that the first of so many tests to hold needs at least.

    It is that of seeds' spread alone; what databases spread comes on top.
    """
    t = np.abs(np.random.default_rng(0).standard_t(seeds - 1, size=2_000_000))
    return float(np.quantile(t, 1 - 0.05 / tests)) / seeds**0.5


def _by_seed(found: Sequence[Answer]) -> dict[int, float]:
    """The mean of each seed."""
    seeds = dict.fromkeys(a.seed for a in found)
    return {seed: fmean(a.value for a in found if a.seed == seed) for seed in seeds}
