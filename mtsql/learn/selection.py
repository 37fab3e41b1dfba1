"""Which of the policy's own trajectories become training data (MTSQL-R1, Algorithm 1, S1 and S2)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mtsql.agent.trajectory import Trajectory


def select_trajectories(valid: Sequence[Trajectory], keep: int, rng: random.Random) -> list[Trajectory]:
    """Up to `keep` trajectories of one question, all different in what the model wrote.

    The basic form of S2: a random choice. `valid` are those whose answer is right by EX and EM.
    """
    distinct = list({tuple(t.ids): t for t in valid}.values())
    return rng.sample(distinct, min(keep, len(distinct)))
