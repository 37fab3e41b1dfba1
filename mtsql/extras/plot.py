"""Figures: the metrics of training runs over one another: reward, EX, length of the responses, entropy.

mtsql plot runs/a runs/b --out both.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mtsql.config import command_line, user_errors

if __name__ == "__main__":  # before matplotlib is imported, so that --help is answered at once
    PARSER = command_line(__doc__)
    PARSER.add_argument("runs", type=Path, nargs="+", help="folders of train_grpo.py or train_sft.py")
    PARSER.add_argument("--out", type=Path, default=Path("training.png"), help="[training.png]")
    CHOSEN = PARSER.parse_args()

import csv
import io
from collections.abc import Sequence

from matplotlib.figure import Figure
from PIL import Image

from mtsql.errors import UserError, loading
from mtsql.files import file_errors, write_atomically

# Okabe and Ito's, which a colour-blind reader tells apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
PANELS = {
    "reward": "mean reward",
    "ex": "execution accuracy",
    "response_tokens": "response length (tokens)",
    "entropy": "entropy (nats a token)",
}


def plot_training(logs: Sequence[Path], path: Path) -> Path:
    """Write a figure with the columns reward, ex, response_tokens and entropy of metrics.csv over steps.

    Several `logs` lie over one another, under the names of their folders. A column that all of them lack
    leaves its panel out, an empty cell its point. Raises UserError for a log without any of the columns, and
    one that cannot be read.
    """
    runs = {log.parent.as_posix(): read_points(log) for log in logs}
    shown = [name for name in PANELS if any(name in points for points in runs.values())]
    figure = Figure(figsize=(4.2 * len(shown), 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for number, (run, points) in enumerate(runs.items()):
            steps, values = zip(*points.get(name, [(0, float("nan"))]), strict=True)
            look = {"color": COLOURS[number % len(COLOURS)], "marker": "o" if len(steps) < 30 else ""}
            axes.plot(steps, values, linewidth=1.5, ms=3, label=run if name == shown[0] else None, **look)
        axes.set_xlabel("step")
        axes.set_title(PANELS[name])
        axes.grid(alpha=0.3)
    if len(runs) > 1:
        figure.legend(loc="outside lower center")
    return save_figure(figure, path)


def read_points(log: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of every column of PANELS that a metrics.csv has."""
    with loading(f"{log} is damaged"), file_errors(log), log.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
        points = {name: [(int(r["step"]), float(r[name])) for r in rows if r.get(name)] for name in PANELS}
    points = {name: found for name, found in points.items() if found}
    if not points:
        raise UserError(f"{log} has no row with any of {', '.join(PANELS)}")
    return points


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG, whole or not at all, and return its path.

    64 colours do for lines and bars, and make the file a quarter as large.
    """
    drawn, png = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn)
    image = Image.open(drawn).convert("RGB")
    image = image.quantize(64, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    image.save(png, "png", optimize=True)
    write_atomically(path, png.getvalue())
    return path


def main(chosen: argparse.Namespace) -> None:
    """Write it. Raises UserError for a folder without metrics, and for another kind of picture."""
    if chosen.out.suffix != ".png":
        raise UserError(f"--out {chosen.out} should end in .png")
    print(plot_training([run / "metrics.csv" for run in chosen.runs], chosen.out))


if __name__ == "__main__":
    user_errors(main, CHOSEN)
