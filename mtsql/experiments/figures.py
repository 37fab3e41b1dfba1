"""The figures of MTSQL-R1 (Figures 4 to 13) from the finished arms and their training logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mtsql.experiments.arms import (
    Arms,
    ability_keys,
    both_sides,
    breakdown_keys,
    mean_over_seeds,
    read_logs,
)
from mtsql.report.errors import ERRORS
from mtsql.report.metrics import HARDNESS, TURNS
from mtsql.report.plots import save_figure

DPI = 110
AVERAGED = ("base_direct", "base", "short_sft", "short_rl", "round_3", "rl_outcome", "rl_process")
MAIN_STAGES = ("base", "short_sft", "round_3", "rl_outcome", "rl_process")
ABILITY_STAGES = ("base", "round_3", "rl_outcome", "rl_process")
COLOURS = {
    "base": "#9a9a9a",
    "base_direct": "#c4c4c4",
    "short_sft": "#e0a030",
    "short_rl": "#a0622d",
    "round_3": "#7fb8d8",
    "rl_outcome": "#2b6ca3",
    "rl_process": "#b03060",
    "rl": "#b03060",
    "rl_shuffled": "#4c9a52",
}
TRAINING_PANELS = {
    "reward": "mean reward (Fig. 8, 9)",
    "ex": "EX of the sampled batch, %",
    "response_tokens": "response length, tokens (Fig. 10)",
    "entropy": "entropy, nats a token (Fig. 13)",
    "calls_exec_sql": "EXECUTE calls an answer",
    "calls_memory_retrieve": "MEMORY-VERIFY calls an answer",
    "informative_groups": "share of informative groups",
    "clip_fraction": "share of clipped tokens",
}
TRAINING_RUNS = ("rl_outcome", "rl_process", "rl_shuffled", "short_rl")
DEV_RUNS = ("rl_outcome", "rl_process", "rl_shuffled")
Rows = Mapping[int, Sequence[Mapping[str, float]]]  # of a training log, by seed


def write_figures(arms: Arms, runs: Path, seeds: Sequence[int], folder: Path, name: str) -> dict[str, Path]:
    """Write folder/<name>_<figure>.png for every figure that has numbers. Returns figure -> path."""
    training = {run: read_logs(runs, seeds, run, "metrics.csv") for run in TRAINING_RUNS}
    dev = {run: read_logs(runs, seeds, run, "dev.csv") for run in DEV_RUNS}
    dev_panels = {"ex": "EX, % (Fig. 11)", **{f"ex_{h}": f"EX, {h}, %" for h in HARDNESS}}
    figures = {
        "averages": averages_figure(arms),
        "breakdown": breakdown_figure(arms),
        "abilities": abilities_figure(arms),
        "errors": errors_figure(arms),
        "training": log_figure(training, TRAINING_PANELS),
        "dev": log_figure(dev, dev_panels),
    }
    return {
        key: save_figure(figure, folder / f"{name}_{key}.png", DPI)
        for key, figure in figures.items()
        if figure is not None
    }


def averages_figure(arms: Arms) -> Figure | None:
    """EX of the main arms, the mean of in and out of domain (Figure 1)."""
    here, there = both_sides(arms)
    shown = [arm for arm in AVERAGED if here.get(arm)]
    if not shown:
        return None
    figure = Figure(figsize=(1.4 * len(shown) + 1, 3.4), layout="constrained")
    axes = figure.subplots()
    means = [
        fmean(mean_over_seeds(of[arm], "ex", "mean", scale=100) for of in (here, there)) for arm in shown
    ]
    bars = axes.bar(range(len(shown)), means, 0.6, color=[COLOURS[arm] for arm in shown])
    axes.bar_label(bars, [f"{mean:.1f}" for mean in means])
    axes.set_xticks(range(len(shown)), shown)
    axes.set_ylabel("EX, mean of in and out of domain (%)")
    return figure


def breakdown_figure(arms: Arms) -> Figure | None:
    """EX, tokens and interactions by hardness (Figure 4) and by turn (Figure 12)."""
    shown = [arm for arm in MAIN_STAGES if arm in arms]
    if not shown:
        return None
    figure = Figure(figsize=(15, 6.4), layout="constrained")
    panels = iter(figure.subplots(2, 3).flatten())
    for by, groups, place in (("hardness", HARDNESS, "Fig. 4"), ("turn", TURNS, "Fig. 12")):
        for quantity, title, scale in (
            ("ex", "EX (%)", 100),
            ("sampled_tokens", "tokens the model wrote", 1),
            ("interactions", "interactions", 1),
        ):
            axes, keys = next(panels), breakdown_keys(quantity, by)
            series = {a: [mean_over_seeds(arms[a], *keys, g, scale=scale) for g in groups] for a in shown}
            _bars(axes, series)
            axes.set_xticks(range(len(groups)), groups)
            axes.set_title(f"{title} by {by} ({place})")
    _legend(figure)
    return figure


def abilities_figure(arms: Arms) -> Figure | None:
    """The five abilities and EX over the stages, greedy and at temperature 1 (Figures 5 and 6)."""
    stages = [arm for arm in ABILITY_STAGES if arm in arms]
    if not stages:
        return None
    modes = {"greedy": False}
    if any("abilities_sampled" in e.summary for arm in stages for e in arms[arm].values()):
        modes["at temperature 1"] = True
    figure = Figure(figsize=(6 * len(modes), 4.2), layout="constrained")
    panels = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    for axes, (title, sampled) in zip(panels, modes.items(), strict=True):
        for text, keys in ability_keys(sampled).items():
            heights = [mean_over_seeds(arms[arm], *keys, scale=100) for arm in stages]
            style = {"color": "black", "linestyle": "--"} if text == "EX" else {}
            axes.plot(range(len(stages)), heights, marker="o", label=text, **style)
        axes.set_xticks(range(len(stages)), stages)
        axes.set_title(f"{title} (Fig. 5, 6)")
        axes.set_ylim(0, 102)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("%")
    _legend(figure)
    return figure


def errors_figure(arms: Arms) -> Figure | None:
    """How many questions in a hundred show each kind of error (Figure 7)."""
    shown = [arm for arm in MAIN_STAGES if arm in arms]
    if not shown:
        return None
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    axes = figure.subplots()
    _bars(axes, {arm: [mean_over_seeds(arms[arm], "errors", k, scale=100) for k in ERRORS] for arm in shown})
    axes.set_xticks(range(len(ERRORS)), [kind.replace("_", " ") for kind in ERRORS])
    axes.set_title("questions with an error of the kind, % (Fig. 7)")
    _legend(figure)
    return figure


def log_figure(logs: Mapping[str, Rows], columns: Mapping[str, str]) -> Figure | None:
    """Columns of training logs over steps: the mean over seeds, and each seed as a thin line.

    Dotted lines stand where a run's level of the curriculum changes.
    """
    logged = {c for seeds in logs.values() for rows in seeds.values() for row in rows for c in row}
    shown = [column for column in columns if column in logged and _varies(logs, column)]
    if not shown:
        return None
    width = len(shown) if len(shown) <= 5 else 4
    height = -(-len(shown) // width)
    figure = Figure(figsize=(3.4 * width, 2.7 * height + 0.3), layout="constrained")
    panels = figure.subplots(height, width, squeeze=False).flatten()
    for axes in panels[len(shown) :]:
        axes.axis("off")
    for axes, column in zip(panels, shown, strict=False):
        scale = 100 if column.startswith("ex") else 1
        for run, seeds in logs.items():
            curves = (
                {row["step"] + 1: scale * row[column] for row in rows if column in row}
                for rows in seeds.values()
            )
            _mean_and_seeds(axes, list(filter(None, curves)), run)
            for step in sorted({step for rows in seeds.values() for step in level_starts(rows)}):
                axes.axvline(step, color=COLOURS[run], linestyle=":", linewidth=0.9)
        axes.set_title(columns[column])
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    _legend(figure)
    return figure


def _varies(logs: Mapping[str, Rows], column: str) -> bool:
    """Whether a column is more than one number: a constant panel shows nothing."""
    rows = [row for seeds in logs.values() for rows in seeds.values() for row in rows]
    return len({row[column] for row in rows if column in row}) > 1


def _mean_and_seeds(axes: Axes, curves: Sequence[Mapping[float, float]], run: str) -> None:
    """Draw each of a run's curves (step -> value) thin, and their mean at the steps that all of them have."""
    if not curves:
        return
    for curve in curves if len(curves) > 1 else []:
        axes.plot(list(curve), list(curve.values()), color=COLOURS[run], linewidth=0.5, alpha=0.5)
    steps = sorted(set.intersection(*map(set, curves)))
    means = [fmean(curve[step] for curve in curves) for step in steps]
    marker = "o" if len(steps) < 30 else ""
    axes.plot(steps, means, color=COLOURS[run], linewidth=1.6, label=run, marker=marker, ms=3)


def level_starts(rows: Sequence[Mapping[str, float]]) -> list[float]:
    """The steps, counted from 1, at which a log's `level` changes."""
    found = [row for row in rows if "level" in row]
    return [b["step"] + 1 for a, b in pairwise(found) if a["level"] != b["level"]]


def _bars(axes: Axes, series: Mapping[str, Sequence[float | None]]) -> None:
    """Draw groups of bars; each group has one bar for each arm."""
    width = 0.82 / len(series)
    for i, (arm, heights) in enumerate(series.items()):
        places = [g + (i - (len(series) - 1) / 2) * width for g in range(len(heights))]
        shown = [float("nan") if h is None else h for h in heights]  # no bar where nothing was measured
        axes.bar(places, shown, width, color=COLOURS[arm], label=arm)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _legend(figure: Figure) -> None:
    """One legend below the figure for all its panels."""
    labelled = {
        text: h for axes in figure.axes for h, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=len(labelled))
