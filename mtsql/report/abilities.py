"""The five long-horizon abilities of MTSQL-R1, section 4.3, measured on answered questions."""

from __future__ import annotations

from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.agent.trajectory import Trajectory
from mtsql.data.datasets import Example
from mtsql.recipes.mtsql_r1_rewards import RewardWeights, reward
from mtsql.sql.score import Scorer

ABILITIES = {
    "call_execution": "calls EXECUTE",
    "call_memory": "calls MEMORY-VERIFY",
    "e_verify": "execution verification",
    "e_verify_called": "E-VERIFY where called",
    "m_verify": "memory verification",
    "m_verify_called": "M-VERIFY where called",
    "generation": "generation, self-correction",
}


def abilities(
    trajectory: Trajectory, example: Example, scorer: Scorer, verifies: bool = True
) -> dict[str, float | None]:
    """Each ability from 0 to 1: a prescribed tool was called or not; the process rewards for the others.

    A verification is 0 where its tool was not called, and so says as much about calling as about judging:
    "..._called" leaves such answers out (None). The memory's abilities are None for a first question, which
    has nothing to check against. Of recipes that do not verify only the first is measured.
    """
    called = {observation.tool for observation in trajectory.observations}
    measured: dict[str, float | None] = dict.fromkeys(ABILITIES)
    measured["call_execution"] = float(EXEC_SQL in called)
    if not verifies:
        return measured
    parts = reward(trajectory, example, scorer, RewardWeights(1, 1, 1, 1)).parts
    measured["generation"] = parts["proposal"]
    measured["e_verify"] = parts["e_verify"]
    measured["e_verify_called"] = parts["e_verify"] if EXEC_SQL in called else None
    if example.history:
        measured["call_memory"] = float(MEMORY_RETRIEVE in called)
        measured["m_verify"] = parts["m_verify"]
        measured["m_verify_called"] = parts["m_verify"] if MEMORY_RETRIEVE in called else None
    return measured
