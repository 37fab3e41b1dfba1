"""What the rewards of all recipes have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeAlias, TypeVar

from mtsql.agent.env import Recipe
from mtsql.agent.trajectory import Status, Trajectory
from mtsql.data.datasets import Example
from mtsql.errors import UserError
from mtsql.sql.score import Scorer

Weights = TypeVar("Weights")


@dataclass(frozen=True)
class Rewards:
    """A trajectory's reward `total`, EX and EM of its answer (0 or 1), and the recipe's other `parts`.

    `kept` is False for what stays out of the loss (GRPO-Filter of MTIR-SQL, Equation 3); its group's mean and
    deviation count it all the same.
    """

    ex: float
    em: float
    total: float
    parts: dict[str, float]
    kept: bool = True


RewardFunction: TypeAlias = Callable[[Trajectory, Example], Rewards]
Decode: TypeAlias = Callable[[Sequence[int]], str]  # token ids to text with control tokens visible


def ex_em(trajectory: Trajectory, example: Example, scorer: Scorer) -> tuple[float, float]:
    """EX and EM of the answer, 0 or 1; an unanswered question is never right."""
    answer = trajectory.answer_sql
    if answer is None:
        return 0.0, 0.0
    db_id, gold = example.db_id, example.gold_sql
    return float(scorer.ex(db_id, gold, answer)), float(scorer.em(db_id, gold, answer))


def keeps_format(trajectory: Trajectory) -> bool:
    """Whether it has an answer and every one of its messages was well formed."""
    return trajectory.status is Status.ANSWERED and trajectory.off_protocol == 0


def is_right(rewards: Rewards, recipe: Recipe) -> bool:
    """Whether an answer is right: by EX, and by EM too where the recipe says so (MTSQL-R1, Algorithm 1)."""
    return bool(rewards.ex and (rewards.em or not recipe.right_by_em))


def chosen_rewards(presets: Mapping[str, Weights], given: str) -> tuple[str, Weights]:
    """The preset of --rewards and its weights: "" is the first preset, "process,proposal=0.5" one with a change.

    Raises UserError for a preset that is not there, and for what is no weight or no finite number.
    """
    items = [item.strip() for item in given.split(",") if item.strip()]
    preset = items.pop(0) if items and "=" not in items[0] else next(iter(presets))
    if preset not in presets:
        raise UserError(f"--rewards {preset} is unknown; choose from {', '.join(presets)}")
    try:
        changed = {name.strip(): float(number) for name, number in (item.split("=") for item in items)}
        if not all(map(math.isfinite, changed.values())):
            raise ValueError(given)
        return preset, replace(presets[preset], **changed)
    except (ValueError, TypeError):
        known = ", ".join(field.name for field in fields(presets[preset]))
        raise UserError(
            f"--rewards {given}: a change should be one of {known}, =, and a finite number"
        ) from None
