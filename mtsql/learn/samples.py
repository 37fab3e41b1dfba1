"""The samples of a GRPO step, and what is logged of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from torch import Tensor

from mtsql.agent.tokens import ChatTokens
from mtsql.agent.trajectory import Trajectory, trajectory_record
from mtsql.recipes.rewards import Rewards
from mtsql.report.metrics import step_metrics


@dataclass
class Sample:
    """One of the G trajectories of a question, with its rewards. Its advantage stands in the trajectory.

    `divergence` is the sum over its tokens of log policy - log reference, where that is taken off the reward.
    """

    trajectory: Trajectory
    rewards: Rewards
    divergence: float = 0.0
    in_loss: bool = True


def group_metrics(
    groups: Sequence[Sequence[Sample]], informative: Tensor, replaced: int, seconds: float
) -> dict[str, float]:
    """Means over the samples of a step, which took `seconds`; `informative` is (questions,) bool.

    `replaced` is the number of groups that dynamic sampling replaced.
    """
    samples = [sample for group in groups for sample in group]
    return {
        **step_metrics([s.trajectory for s in samples], [s.rewards for s in samples]),
        "informative_groups": informative.float().mean().item(),
        "left_out": fmean(not s.in_loss for s in samples),
        "dropped_groups": replaced / (replaced + len(groups)),
        "rollout_seconds": round(seconds, 2),
        "sampled_tokens_per_second": round(sum(s.trajectory.sampled_length for s in samples) / seconds),
    }


def mean_divergence(groups: Sequence[Sequence[Sample]]) -> float:
    """The divergence from the reference that was taken off the rewards, a token: mean over the samples."""
    return fmean(s.divergence / max(1, s.trajectory.sampled_length) for group in groups for s in group)


def append_trajectories(path: Path, step: int, group: Sequence[Sample], tokens: ChatTokens) -> None:
    """Write a group to the run's trajectories.jsonl."""
    with path.open("a", encoding="utf-8") as file:
        for sample in group:
            record = trajectory_record(sample.trajectory, tokens.tokenizer.decode, sample.rewards.total)
            file.write(json.dumps({"step": step, **record}) + "\n")
