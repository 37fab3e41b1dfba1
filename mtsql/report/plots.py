"""Figures: the course of a training run."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from mtsql.files import write_atomically

COLOUR = "#2b6ca3"
PANELS = {
    "reward": "mean reward",
    "ex": "execution accuracy",
    "response_tokens": "response length (tokens)",
    "entropy": "entropy (nats a token)",
}


def plot_training(metrics_csv: Path, folder: Path) -> Path:
    """Write `training.png` with the columns reward, ex, response_tokens and entropy over steps.

    A column that the log lacks leaves its panel out, an empty cell its point. Raises ValueError if
    the log has none of them.
    """
    with metrics_csv.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    shown = [name for name in PANELS if any(row.get(name) for row in rows)]
    if not shown:
        raise ValueError(f"{metrics_csv} has no row with any of {', '.join(PANELS)}")
    figure = Figure(figsize=(4.2 * len(shown), 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        points = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
        steps, values = zip(*points, strict=True)
        sparse = len(points) < 30
        axes.plot(steps, values, color=COLOUR, linewidth=1.5, marker="o" if sparse else "", ms=3)
        axes.set_xlabel("step")
        axes.set_title(PANELS[name])
        axes.grid(alpha=0.3)
    return save_figure(figure, folder / "training.png")


def save_figure(figure: Figure, path: Path, dpi: int = 100) -> Path:
    """Write a figure as PNG, whole or not at all, and return its path.

    64 colours do for lines and bars, and make the file a quarter as large.
    """
    figure.set_dpi(dpi)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    image = image.quantize(64, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    png = io.BytesIO()
    image.save(png, "png", optimize=True)
    write_atomically(path, png.getvalue())
    return path
