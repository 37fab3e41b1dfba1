"""Rows of a file of trajectories: what the agent did, the question, its gold SQL, and what both return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtsql.agent.trajectory import Trajectory, trajectory_record
from mtsql.data.datasets import Example
from mtsql.recipes.prompt_options import compact_result
from mtsql.recipes.rewards import Decode
from mtsql.sql.execute import as_executed
from mtsql.sql.score import Scorer

RESULT_CHARACTERS = 300


def question_record(
    trajectory: Trajectory,
    example: Example,
    scorer: Scorer,
    decode: Decode,
    reward: float | None = None,
    scores: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """A JSON row for mtsql.report.viewer; `scores` are EX, EM and the parts of the reward, as far as known.

    Results are cut to RESULT_CHARACTERS characters.
    """

    def result(sql: str | None) -> str | None:
        if sql is None:
            return None
        ran = scorer.executor.execute(scorer.paths[example.db_id], as_executed(sql, keep_distinct=True))
        return compact_result(ran, RESULT_CHARACTERS)

    return trajectory_record(trajectory, decode, reward) | {
        "db_id": example.db_id,
        "turn_index": example.turn_index,
        "question": example.question,
        "hardness": scorer.hardness(example.db_id, example.gold_sql),
        "gold_sql": example.gold_sql,
        "gold_result": result(example.gold_sql),
        "answer_result": result(trajectory.answer_sql),
        "scores": dict(scores or {}),
    }
