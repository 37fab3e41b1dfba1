"""The page of a suite (page.md.jinja): tables and differences for every set of questions, curves, bars.

All of it is made of rows, one an evaluation, which stand beside the page as JSON. Finished evaluations below
the run folder replace their rows, and the others stay: parts may run on several machines. Intervals are over
databases, 95 %.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jinja2 import Template
from matplotlib.figure import Figure

from mtsql.errors import UserError
from mtsql.extras.plot import COLOURS, save_figure
from mtsql.extras.reproduce.suites import Suite
from mtsql.files import load_json, load_json_lines, write_atomically
from mtsql.report.metrics import RESAMPLES, bootstrap_means, excludes_zero, interval_of

Values: TypeAlias = Sequence[tuple[str, float]]  # database and value of each question, in order
Row = dict[str, Any]
ByArm = dict[str, dict[int, Row]]  # arm: seed: row
BITS = {"ex": "right", "em": "exact"}  # a character a question


class Estimate(NamedTuple):
    """The mean of the seeds' means, its interval (None with fewer than two databases), and each seed's mean.

    `sure` is whether the interval lies beside 0 by more than the Monte-Carlo error of its ends.
    """

    mean: float
    interval: tuple[float, float] | None
    by_seed: dict[int, float]
    sure: bool


def estimate(
    by_seed: Mapping[int, Values], other_seeds: bool = False, draws: int = RESAMPLES, comparisons: int = 1
) -> Estimate:
    """Mean and interval of some questions' values, all seeds together.

    Databases are drawn anew with replacement, a database's answers of all seeds together. Seeds are too few
    for that: five of the same sign, drawn with replacement, would be beside 0 without any effect. So with
    `other_seeds` the spread of the seeds' own means is added as Student's t with one degree of freedom less
    than seeds. Without, or with one seed, nothing is said of others. `comparisons` widens the interval.
    """
    means = {seed: fmean(value for _, value in values) for seed, values in by_seed.items()}
    mean = fmean(means.values())
    pooled = [pair for values in by_seed.values() for pair in values]
    groups: dict[str, list[float]] = {}
    for database, value in pooled:
        groups.setdefault(database, []).append(value)
    count = len(groups)
    if count < 2:
        return Estimate(mean, None, means, False)
    drawn = bootstrap_means([groups[name] for name in sorted(groups)], draws=draws)
    drawn = mean + (drawn - fmean(value for _, value in pooled)) * np.sqrt(count / (count - 1))
    if other_seeds and len(means) > 1:
        error = stdev(means.values()) / len(means) ** 0.5
        drawn += error * np.random.default_rng(1).standard_t(len(means) - 1, size=draws)
    return Estimate(mean, interval_of(drawn, comparisons), means, excludes_zero(drawn, comparisons))


def decimal(number: float) -> str:
    """With one decimal."""
    return f"{number:.1f}"


def signed(number: float) -> str:
    """With its sign and one decimal; what rounds to 0 is +0."""
    return f"{round(number, 1) + 0.0:+.1f}"


def with_interval(found: Estimate, show: Callable[[float], str]) -> str:
    """The mean with its interval, if there is one: +3.4 [+1.7, +5.2]."""
    ends = f" [{', '.join(map(show, found.interval))}]" if found.interval else ""
    return show(found.mean) + ends


def write_page(suite: Suite, made_by: str, path: Path, base: str = "") -> Path:
    """Bring the .json beside `path` up to date, write the page and its figures and return its path.

    `made_by` is the command that it names, `base` the model of those that are finished now. Evaluations are
    looked for in the folder of `path`. Raises UserError if there are none and no .json, and for a row
    with other questions than the others of its set.
    """
    rows = up_to_date_rows(suite, path, base)
    of: dict[str, ByArm] = {}  # by set
    for row in rows:
        of.setdefault(row["dataset"], {}).setdefault(row["arm"], {})[row["seed"]] = row
    accuracy = {dataset: accuracies(by_arm) for dataset, by_arm in of.items()}
    figures = {"bars": bar_figure(accuracy), "curves": curve_figure(rows)}
    for name, figure in figures.items():
        if figure:
            save_figure(figure, path.with_name(f"{path.stem}_{name}.png"))

    def listed(key: str, length: int = 99) -> str:
        return ", ".join(sorted({str(r[key])[:length] for r in rows if r.get(key) is not None})) or "not kept"

    sets = {
        dataset: {
            "questions": next(row["questions"] for row in rows if row["dataset"] == dataset),
            "accuracy": [accuracy_row(suite, arm, of_arm) for arm, of_arm in accuracy[dataset].items()],
            "differences": difference_rows(suite, by_arm),
            "parts": part_tables(by_arm),
        }
        for dataset, by_arm in of.items()
    }
    shown = {"suite": suite, "made_by": made_by, "sets": sets, "listed": listed, "stem": path.stem}
    shown["means"] = means_of_both(*(accuracy.get(dataset, {}) for dataset in ("sparc", "cosql")))
    shown["lacking"] = {
        asked: [a for a in suite.arms if asked in suite.sets_of(a) and a not in of.get(asked, {})]
        for asked in suite.sets
    }
    shown |= {"curves": figures["curves"], "notes": path.with_name(f"{path.stem}_notes.md").exists()}
    template = Path(__file__).with_name("page.md.jinja").read_text(encoding="utf-8")
    text = Template(template, trim_blocks=True, lstrip_blocks=True).render(shown)
    write_atomically(path, text.rstrip() + "\n")
    return path


def up_to_date_rows(suite: Suite, path: Path, base: str) -> list[Row]:
    """The rows beside `path`, with those of finished evaluations, in the order of the suite; written back."""
    beside = path.with_suffix(".json")
    known = load_json(beside) if beside.exists() else []
    folders, first_set = path.parent.glob("seed*/evaluation/*/*"), next(iter(suite.sets))
    folders = (folder for folder in folders if folder.parts[-4].removeprefix("seed").isdecimal())  # no copy
    known += [finished_row(folder, first_set, base) for folder in folders]
    rows: dict[tuple[str, str, int], Row] = {}
    for row in filter(None, known):
        key = (row["dataset"], row["arm"], row["seed"])
        rows[key] = rows.get(key, {}) | row  # --page without --model knows no base, and keeps it
    if not rows:
        raise UserError(
            f"{path.parent} has no finished evaluation of this suite yet, and no {path.stem}.json"
        )
    arms = [*suite.arms, *sorted({arm for _, arm, _ in rows} - suite.arms.keys())]
    sets = [*suite.sets, *sorted({dataset for dataset, *_ in rows} - suite.sets.keys())]
    order = sorted(rows, key=lambda key: (sets.index(key[0]), arms.index(key[1]), key[2]))
    found = [rows[key] for key in order]
    check_questions(found)
    write_atomically(beside, "[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
    return found


def finished_row(folder: Path, first_set: str, base: str) -> Row | None:
    """The row of the evaluation in out/seed<S>/evaluation/<set>/<arm>, None if it is not finished.

    The curve of the training of the same name is kept once, with `first_set`.
    """
    try:
        summary = load_json(folder / "summary.json")
        records = [row for _, row in load_json_lines(folder / "predictions.jsonl")]
        run = load_json(folder / "run.json")
    except UserError:
        return None
    if len(records) != summary["questions"]:
        return None
    done, home = datetime.fromtimestamp((folder / "summary.json").stat().st_mtime, UTC), folder.parents[2]
    return {
        "dataset": folder.parent.name,
        "arm": folder.name,
        "seed": int(home.name.removeprefix("seed")),
        **({"base": base} if base else {}),
        **{metric: round(100 * summary[metric]["mean"], 4) for metric in BITS},
        "parts": parts_of_summary(summary),
        "questions": len(records),
        "date": done.date().isoformat(),
        "hardware": run.get("hardware"),
        "commit": run.get("commit"),
        "databases": [[name, len(list(group))] for name, group in groupby(r["db_id"] for r in records)],
        "curve": curve(home / folder.name) if folder.parent.name == first_set else [],
        **{bits: "".join(str(int(r[metric])) for r in records) for metric, bits in BITS.items()},
    }


def parts_of_summary(summary: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What a summary says of turns, hardness, errors and abilities, in % (docs/evaluation.md)."""
    parts = {
        "EX by turn": summary["ex"].get("by_turn", {}),
        "EX by hardness": summary["ex"].get("by_hardness", {}),
        "errors, of all questions": summary.get("errors", {}),
        "abilities": summary.get("abilities", {}),
    }
    return {
        title: {name: round(100 * value, 2) for name, value in part.items() if value is not None}
        for title, part in parts.items()
    }


def curve(training: Path) -> list[list[float]]:
    """Steps done and EX in % of the run of GRPO in a folder; none of another."""
    for name, done in (("dev.csv", 1), ("metrics.csv", 0)):  # the latter is of what a step begins with
        path = training / name
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                rows = [row for row in csv.DictReader(file) if row.get("ex")]
            if rows:  # dev.csv is empty without --evaluate-every
                return [[int(row["step"]) + done, round(100 * float(row["ex"]), 2)] for row in rows]
    return []


def check_questions(rows: Sequence[Row]) -> None:
    """Raise UserError for a row whose questions are not those of its set's first row."""
    first = {r["dataset"]: r for r in reversed(rows)}
    for row in rows:
        other = first[row["dataset"]]
        if any(row.get(key) != other.get(key) for key in ("questions", "databases")):
            raise UserError(
                f"{row['dataset']}: {row['arm']}, seed {row['seed']}, has other questions than "
                f"{other['arm']}, seed {other['seed']}; evaluate it on the same data and databases"
            )


def values_of(row: Row, metric: str) -> Values:
    """100 or 0 of each question; the mean alone, of no database, where the answers were not kept."""
    if BITS[metric] not in row:
        return [("", row[metric])]
    names = (name for name, count in row["databases"] for _ in range(count))
    return [(name, 100.0 * int(bit)) for name, bit in zip(names, row[BITS[metric]], strict=True)]


def differences(row: Row, other: Row, metric: str) -> Values:
    """What a row has more than another on each question."""
    pairs = zip(values_of(row, metric), values_of(other, metric), strict=True)
    return [(database, value - others) for (database, value), (_, others) in pairs]


Accuracies: TypeAlias = dict[str, dict[str, Estimate]]  # arm: metric: estimate


def accuracies(by_arm: ByArm) -> Accuracies:
    """EX and EM of every arm."""
    return {
        arm: {m: estimate({seed: values_of(row, m) for seed, row in rows.items()}) for m in BITS}
        for arm, rows in by_arm.items()
    }


def means_of_both(one: Accuracies, other: Accuracies) -> dict[str, list[str]]:
    """Of each arm that both sets have of the same seeds: EX and EM, the sets weighing the same (Figure 1)."""
    return {
        arm: [decimal((of[metric].mean + other[arm][metric].mean) / 2) for metric in BITS]
        for arm, of in one.items()
        if arm in other and of["ex"].by_seed.keys() == other[arm]["ex"].by_seed.keys()
    }


def accuracy_row(suite: Suite, arm: str, of: Mapping[str, Estimate]) -> list[str]:
    """The cells of an arm on one set: EX, EM, EX of each seed."""
    what = suite.arms[arm].what if arm in suite.arms else ""
    cells = [with_interval(of_metric, decimal) for of_metric in of.values()]
    return [f"`{arm}`", what, *cells, seeds_text(of["ex"], decimal)]


def difference_rows(suite: Suite, by_arm: ByArm) -> list[list[str]]:
    """The cells of the paired differences on one set: EX, EX of each seed, EM."""
    rows, comparisons = [], len(suite.pairs) * len(BITS) if suite.corrected else 1
    for what, better, worse in suite.pairs:
        others = by_arm.get(worse, {})
        pairs = {
            seed: (row, others[other])
            for seed, row in by_arm.get(better, {}).items()
            if (other := 0 if suite.is_once(worse) else seed) in others
        }
        if not pairs:
            continue
        found = {}
        for metric in BITS:
            gained = {seed: differences(*pair, metric) for seed, pair in pairs.items()}
            found[metric] = estimate(gained, other_seeds=True, comparisons=comparisons)
        claimed = not suite.corrected or len(pairs) > 1  # a grid of one seed claims nothing
        bold = {metric: "**" * (claimed and of.sure) for metric, of in found.items()}
        ex, em = (f"{bold[m]}{with_interval(of, signed)}{bold[m]}" for m, of in found.items())
        rows.append([what, f"`{better}` - `{worse}`", ex, seeds_text(found["ex"], signed), em])
    return rows


def part_tables(by_arm: ByArm) -> dict[str, list[list[str]]]:
    """The tables of `parts_of_summary`, their columns first: means of the seeds of each arm."""
    tables: dict[str, list[list[str]]] = {}
    seeds = {arm: [row["parts"] for row in of.values() if "parts" in row] for arm, of in by_arm.items()}
    every = [parts for of_arm in seeds.values() for parts in of_arm]
    for title in dict.fromkeys(title for parts in every for title in parts):
        columns = list(dict.fromkeys(name for parts in every for name in parts[title]))
        tables[title] = [columns]
        for arm, of_arm in seeds.items():
            values = [[parts[title][name] for parts in of_arm if name in parts[title]] for name in columns]
            if any(values):
                tables[title].append([f"`{arm}`", *(decimal(fmean(v)) if v else "" for v in values)])
    return {title: table for title, table in tables.items() if table[0]}


def bar_figure(accuracy: Mapping[str, Mapping[str, Mapping[str, Estimate]]]) -> Figure:
    """EX of every arm with its interval, a panel for each set."""
    arms = list(dict.fromkeys(arm for found in accuracy.values() for arm in found))
    figure = Figure(figsize=(2.2 + 3 * len(accuracy), 0.8 + 0.2 * len(arms)), layout="constrained")
    panels = figure.subplots(1, len(accuracy), sharey=True, squeeze=False)[0]
    for axes, (dataset, found) in zip(panels, accuracy.items(), strict=True):
        for arm, of in found.items():
            low, high = of["ex"].interval or (of["ex"].mean,) * 2
            errors = [[max(0, of["ex"].mean - low)], [max(0, high - of["ex"].mean)]]
            axes.barh(arms.index(arm), of["ex"].mean, 0.7, xerr=errors, color="#7fa8cc", ecolor="#444444")
            axes.text(1.5, arms.index(arm), decimal(of["ex"].mean), va="center", fontsize=8)
        axes.set_title(f"{dataset}: EX, %")
        axes.set_xlim(0, 100)
        axes.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(arms)), arms)
    panels[0].invert_yaxis()
    return figure


def curve_figure(rows: Sequence[Row]) -> Figure | None:
    """EX over the steps of RL: each seed thin, and the mean at the steps that all seeds of a run have."""
    runs: dict[str, list[dict[float, float]]] = {}
    for row in rows:
        if row["curve"]:
            runs.setdefault(row["arm"], []).append(dict(map(tuple, row["curve"])))
    if not runs:
        return None
    figure = Figure(figsize=(8, 4 + 0.1 * len(runs)), layout="constrained")
    axes = figure.subplots()
    for number, (arm, curves) in enumerate(runs.items()):
        colour = COLOURS[number % len(COLOURS)]
        for seed in curves if len(curves) > 1 else ():
            axes.plot(seed.keys(), seed.values(), color=colour, linewidth=0.5, alpha=0.5)
        steps = sorted(set.intersection(*map(set, curves)))
        means = [fmean(seed[step] for seed in curves) for step in steps]
        axes.plot(steps, means, color=colour, linewidth=1.6, label=arm, marker="o", ms=2)
    axes.set_xlabel("step")
    axes.set_ylabel("EX, %")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def seeds_text(found: Estimate, show: Callable[[float], str]) -> str:
    """The means of the seeds, each with its number."""
    return ", ".join(f"{seed}: {show(mean)}" for seed, mean in sorted(found.by_seed.items()))
