"""The questions that a run with levels asks, as a curriculum of their own for a run without levels.

    python -m mtsql.experiments.asked_questions --config CONFIG --curriculum COUNTS.jsonl --seed SEED \\
        --data DATA --model MODEL --out OUT

takes train_grpo.py's options and writes OUT/counts.jsonl. A run on these counts with --level-size 0 and the
same steps and prompts has the same questions in another order; on all counts it would have others as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mtsql.config import GrpoConfig, read_options, save_config, user_errors
from mtsql.data.datasets import examples
from mtsql.errors import UserError
from mtsql.files import write_atomically
from mtsql.learn.curriculum import curriculum_levels, level_of_step, question_order, read_counts
from mtsql.task import load_split


def asked_questions(config: GrpoConfig, sizes: Sequence[int]) -> set[tuple[int, int]]:
    """(level, index in it) of all that the steps of a run ask, where `sizes` are the levels' questions."""
    asked = set()
    for step in range(config.steps):
        level, place = level_of_step(step, config.steps, sizes)
        wanted = min(config.prompts_per_step, sizes[level])
        order = question_order(config.seed, sizes[level], wanted, level, place)
        asked.update((level, index) for index in order)
    return asked


def main(config: GrpoConfig) -> None:
    """Write the counts of what is asked."""
    if not config.curriculum or config.resample_rounds:
        raise UserError("this needs --curriculum, and no --resample-rounds, which ask what rewards decide")
    counts = read_counts(Path(config.curriculum))
    questions = examples(load_split(config, "train").dialogues, config.history)
    levels = curriculum_levels(questions, counts, config.level_size)
    asked = {levels[level][index].id for level, index in asked_questions(config, list(map(len, levels)))}
    lines = (json.dumps(vars(count)) + "\n" for count in counts if count.example_id in asked)
    out = Path(config.out)
    save_config(config, out)
    write_atomically(out / "counts.jsonl", "".join(lines))
    print(f"{len(asked)} of {sum(map(len, levels))} questions are asked: {out / 'counts.jsonl'}")


if __name__ == "__main__":
    user_errors(main, read_options(GrpoConfig, __doc__))
