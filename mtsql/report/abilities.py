"""The five long-horizon abilities of MTSQL-R1, section 4.3, measured on answered questions."""

from __future__ import annotations

from mtsql.agent.env import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.agent.trajectory import Trajectory
from mtsql.data.datasets import Example
from mtsql.recipes.mtsql_r1_rewards import RewardWeights, reward
from mtsql.sql.score import Scorer

ABILITIES = {
    "call_execution": "calls EXECUTE",
    "call_memory": "calls MEMORY-VERIFY",
    "e_verify": "execution verification",
    "m_verify": "memory verification",
    "generation": "generation, self-correction",
}


def abilities(
    trajectory: Trajectory, example: Example, scorer: Scorer, verifies: bool = True
) -> dict[str, float | None]:
    """Each ability from 0 to 1: a prescribed tool was called or not; the process rewards for the others.

    The memory's two are None for a first question, which has nothing to check against. Of recipes that
    do not verify only the first is measured.
    """
    if not verifies:
        called = any(o.tool == EXEC_SQL for o in trajectory.observations)
        return dict.fromkeys(ABILITIES) | {"call_execution": float(called)}
    called = {observation.tool for observation in trajectory.observations}
    parts = reward(trajectory, example, scorer, RewardWeights(1, 1, 1, 1)).parts
    later = bool(example.history)
    return {
        "call_execution": float(EXEC_SQL in called),
        "call_memory": float(MEMORY_RETRIEVE in called) if later else None,
        "e_verify": parts["e_verify"],
        "m_verify": parts["m_verify"] if later else None,
        "generation": parts["proposal"],
    }
