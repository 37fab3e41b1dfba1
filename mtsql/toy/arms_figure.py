"""The quick start's figure: EX of its arms."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from mtsql.report.plots import COLOUR, save_figure


def plot_arms(results: list[dict], path: Path) -> Path:
    """Bar chart of EX with 95 % intervals; each result has the keys name, mean, low and high (0-1)."""
    figure = Figure(figsize=(1.6 + 1.3 * len(results), 3.6), layout="constrained")
    axes = figure.subplots()
    means = [100 * r["mean"] for r in results]
    errors = [
        [100 * (r["mean"] - r["low"]) for r in results],
        [100 * (r["high"] - r["mean"]) for r in results],
    ]
    bars = axes.bar(range(len(results)), means, 0.6, yerr=errors, capsize=4, color=COLOUR)
    axes.bar_label(bars, [f"{mean:.1f}" for mean in means], label_type="center", color="white")
    axes.set_xticks(range(len(results)), [r["name"] for r in results])
    axes.set_ylabel("execution accuracy (%)")
    axes.set_ylim(0, 100)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return save_figure(figure, path)
