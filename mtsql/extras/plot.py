"""Figure of the metrics of training runs over one another: reward, EX, length of the responses, entropy.

mtsql plot runs/a runs/b --out both.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mtsql.config import user_errors


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders of train_grpo.py or train_sft.py")
    parser.add_argument("--out", type=Path, default=Path("training.png"), help="[training.png]")
    return parser.parse_args()


if __name__ == "__main__":  # before matplotlib is imported, so that --help is answered at once
    CHOSEN = read_arguments()

from mtsql.report.plots import plot_training


def main(chosen: argparse.Namespace) -> None:
    """Write it. Raises UserError for a folder without metrics."""
    print(plot_training([run / "metrics.csv" for run in chosen.runs], chosen.out))


if __name__ == "__main__":
    user_errors(main, CHOSEN)
