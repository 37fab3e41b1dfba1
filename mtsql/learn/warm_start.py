"""The state of Algorithm 1 between its rounds (MTSQL-R1, section 3.2.2)."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mtsql.agent.env import Recipe
from mtsql.agent.trajectory import Status, Trajectory
from mtsql.data.datasets import Example
from mtsql.recipes.rewards import Rewards, is_right


@dataclass(frozen=True)
class Collected:
    """One question in one round: how many rollouts it had, which were kept, and why the others were not.

    `right` counts those whose answer was right, kept or not;
    `rejected` counts by reason.
    """

    example_id: str
    sampled: int
    right: int
    kept: list[Trajectory]
    rejected: Counter[str] = field(default_factory=Counter)


def rejection(trajectory: Trajectory, rewards: Rewards, recipe: Recipe) -> str | None:
    """Why a rollout cannot be kept: no_answer, wrong_ex, wrong_em, off_protocol; None if it can be."""
    if trajectory.status is not Status.ANSWERED:
        return "no_answer"
    if not is_right(rewards, recipe):
        return "wrong_em" if rewards.ex else "wrong_ex"
    return "off_protocol" if trajectory.off_protocol else None


@dataclass
class Progress:
    """How far Algorithm 1 has come; `to_plain` gives what a checkpoint keeps of it."""

    remaining: list[Example]  # D_i
    kept: list[Trajectory] = field(default_factory=list)  # the cumulative set T
    coverage: list[dict] = field(default_factory=list)  # of each round: Table 7
    solved: set[str] = field(default_factory=set)  # ids of the questions solved in this round
    collected: bool = False  # whether this round's trajectories are in T
    round: int = 0
    index: int = 0  # optimizer steps that are done of this round,
    step: int = 0  # and of all
    rng_state: tuple = ()  # of the generator that draws the order of fine-tuning
    started: float = field(default_factory=time.perf_counter)

    def add(self, found: Sequence[Collected], rng: random.Random) -> None:
        """Put what a round collected into T."""
        self.kept += [t for question in found for t in question.kept]
        self.solved = {question.example_id for question in found if question.kept}
        self.collected, self.rng_state = True, rng.getstate()
        rejected = sum((question.rejected for question in found), Counter())
        self.coverage.append(
            {
                "round": self.round + 1,
                "sampled": sum(question.sampled for question in found),
                "right": sum(question.right for question in found),
                "rejected": dict(sorted(rejected.items())),
                "questions_asked": len(self.remaining),
                "questions_solved": len(self.solved),
                "questions_covered": len({t.example_id for t in self.kept}),
                "trajectories": len(self.kept),
            }
        )

    def drop_solved(self) -> None:
        """End a round: what is solved leaves the pool (S4)."""
        self.remaining = [example for example in self.remaining if example.id not in self.solved]
        self.collected, self.index = False, 0

    def to_plain(self) -> dict[str, Any]:
        """What a checkpoint needs, as plain Python values; T as a text, which is fast to write and read."""
        return {
            "round": self.round,
            "kept": json.dumps([t.to_plain() for t in self.kept]),
            "remaining": [example.id for example in self.remaining],
            "solved": sorted(self.solved),
            "coverage": self.coverage,
            "rng_state": self.rng_state,
            "index": self.index,
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any], pool: Sequence[Example], step: int) -> Progress:
        """What `to_plain` wrote after `step` steps; `pool` is D_0."""
        names = set(plain["remaining"])
        objects = {
            "remaining": [example for example in pool if example.id in names],
            "kept": [Trajectory.from_plain(t) for t in json.loads(plain["kept"])],
            "solved": set(plain["solved"]),
        }
        return cls(**plain | objects, collected=True, step=step)
