"""Questions for RL that are hard yet solvable (SQL-Trail, sections 4.2 and A.6).

    python -m mtsql.extras.hard_yet_solvable --counts runs/counts/counts.jsonl --out runs/chosen

reads the success counts of `python -m mtsql curriculum` and writes OUT/counts.jsonl with the
lines of the chosen questions, for `train_grpo.py --curriculum OUT/counts.jsonl --level-size 0`. First
comes the balanced set, the lowest scores of Equation 13, then the exploration set, questions that no
sample solved, extra-hard ones first. Ties are broken by the seed.

Departures: the paper scores 2,800 questions of SynSQL with 6 samples each, and draws its exploration set from
three sources (failures on the questions of fine-tuning, SynSQL, extra-hard ones of Spider); here all are from
the counts of one file.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from mtsql.config import option, read_options, save_config, user_errors
from mtsql.errors import UserError
from mtsql.files import json_lines, write_atomically
from mtsql.learn.curriculum import HARDEST_FIRST, SuccessCount, read_counts


@dataclass(frozen=True, kw_only=True)
class Args:
    """Options of the selection."""

    SECTION: ClassVar = "selection"
    counts: str = option(..., "counts.jsonl of python -m mtsql curriculum (paper: 6 samples)")
    out: str = option(..., "folder to write, another than that of the counts")
    balanced: int = option(700, "hard yet solvable questions (paper: 700)", least=0)
    exploration: int = option(327, "questions that no sample solved (paper: 327)", least=0)
    seed: int = option(0, "that breaks ties", least=0)


def score(count: SuccessCount) -> float:
    """S(q), Equation 13: the share of right samples, and 1 where all or none are (or there is none)."""
    return count.right / count.sampled if 0 < count.right < count.sampled else 1.0


def choose(
    counts: Sequence[SuccessCount], balanced: int, exploration: int, rng: random.Random
) -> tuple[list[SuccessCount], list[SuccessCount]]:
    """The balanced set and the exploration set, each as large as there are questions for it."""
    shuffled = rng.sample(counts, len(counts))  # sorting is stable
    solvable = sorted((c for c in shuffled if score(c) < 1), key=score)
    unsolved = [c for c in shuffled if c.right == 0 and c.sampled]
    unsolved.sort(key=lambda c: HARDEST_FIRST.index(c.hardness))
    return solvable[:balanced], unsolved[:exploration]


def main(config: Args) -> None:
    """Choose. Raises UserError if there is nothing to choose, or --out would replace --counts."""
    source, path = Path(config.counts), Path(config.out) / "counts.jsonl"
    counts = read_counts(source)
    if os.path.realpath(source) == os.path.realpath(path):
        raise UserError(f"--out {config.out} would replace the counts that are read; choose another folder")
    balanced, exploration = choose(counts, config.balanced, config.exploration, random.Random(config.seed))
    if not balanced + exploration:
        raise UserError(
            f"{source}: nothing to choose; no question was ever wrong, or --balanced and --exploration are 0"
        )
    if (path.parent / "run.json").exists():
        raise UserError(f"{path.parent} holds a run already; give another --out")
    write_atomically(path, json_lines(map(vars, balanced + exploration)))
    save_config(config, path.parent)  # with which it is done
    print(
        f"{len(balanced)} of {config.balanced} questions that are hard yet solvable, "
        f"{len(exploration)} of {config.exploration} that no sample solved"
    )


if __name__ == "__main__":
    user_errors(main, read_options(Args, __doc__))
