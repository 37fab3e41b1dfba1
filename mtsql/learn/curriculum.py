"""The curriculum of RL (MTSQL-R1, section 3.3.1): success counts, and levels from easy to hard.

`python -m mtsql curriculum` makes the counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from mtsql.data.datasets import Example
from mtsql.errors import UserError, loading
from mtsql.files import load_json_lines

HARDEST_FIRST = ("extra", "hard", "medium", "easy", "unread")
HOW_TO_MAKE = "make the file with python -m mtsql curriculum"


@dataclass(frozen=True)
class SuccessCount:
    """How many of a question's sampled trajectories were right, and Spider's level of its gold SQL."""

    example_id: str
    right: int
    sampled: int
    db_id: str
    hardness: str = "unread"


def read_counts(path: Path) -> list[SuccessCount]:
    """The counts that `mtsql.extras.curriculum` wrote.

    Raises UserError if no count is in the file, and for a line that is none, or of a question that was
    counted before, with its number.
    """
    counts: dict[str, SuccessCount] = {}
    for number, record in load_json_lines(path):
        with loading(f"{path}, line {number}: not a success count; {HOW_TO_MAKE}"):
            count = SuccessCount(**record)
            if not 0 <= count.right <= count.sampled:
                raise ValueError(f"{count.right} of {count.sampled}")
            if not isinstance(count.example_id, str) or count.hardness not in HARDEST_FIRST:
                raise ValueError(f"question {count.example_id!r}, hardness {count.hardness!r}")
        if count.example_id in counts:
            raise UserError(f"{path}, line {number}: question {count.example_id} is counted twice")
        counts[count.example_id] = count
    if not counts:
        raise UserError(f"{path} holds no success count; {HOW_TO_MAKE}")
    return list(counts.values())


def curriculum_levels(
    questions: Sequence[Example], counts: Sequence[SuccessCount], size: int
) -> list[list[Example]]:
    """The questions in levels of `size`, those that were right most often first (section 3.3.1).

    Questions that were always right teach nothing and are left out, as are those without a count.
    Ties stay in the order of the counts. `size` 0 makes one level of all. Raises UserError if no
    question is left, and for counts of other data.
    """
    by_id = {question.id: question for question in questions}
    known = [count for count in counts if count.example_id in by_id]
    for count in known:
        if by_id[count.example_id].db_id != count.db_id:
            raise UserError(
                f"the curriculum is of other data: question {count.example_id} is over {count.db_id} in it, "
                f"but over {by_id[count.example_id].db_id} in --data; "
                "make it from the same --data in the same order"
            )
    left = [count for count in known if count.right < count.sampled]
    if not left:
        raise UserError("no question of the curriculum is in the training data and was ever wrong")
    left.sort(key=lambda c: c.right / c.sampled, reverse=True)
    ordered = [by_id[c.example_id] for c in left]
    size = size or len(ordered)
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


def level_of_step(step: int, steps: int, sizes: Sequence[int]) -> tuple[int, int]:
    """(level, step within the level) at a step of a run, all counted from 0.

    A level's share of the `steps` is its share of all questions, and the first has one; `sizes` are the
    levels' questions.
    """
    ends = [-(-steps * questions // sum(sizes)) for questions in accumulate(sizes)]
    level = bisect_right(ends, step)
    return level, step - (ends[level - 1] if level else 0)


def question_order(seed: int, count: int, per_step: int, level: int, step: int) -> list[int]:
    """Indices of a step's questions among the `count` of its level; `step` counts within the level.

    Each epoch of a level goes through a new permutation, which depends on the seed, `per_step` questions a
    step, or all if there are no more; what is left at its end is not asked in it.
    """
    per_step = min(per_step, count)
    steps_in_epoch = count // per_step
    epoch, place = divmod(step, steps_in_epoch)
    permutation = np.random.default_rng((seed, level, epoch)).permutation(count)
    return permutation[place * per_step : (place + 1) * per_step].tolist()
