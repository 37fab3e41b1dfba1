"""The samples of a GRPO step, and what is logged of them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.agent.trajectory import Status, Trajectory
from mtsql.data.datasets import Example
from mtsql.files import file_errors
from mtsql.recipes.rewards import Decode, Rewards
from mtsql.report.evaluation import thought_characters
from mtsql.report.records import question_record
from mtsql.sql.score import Scorer


@dataclass
class Sample:
    """One of the G trajectories of a question, with its rewards; the advantage is the trajectory's."""

    trajectory: Trajectory
    example: Example
    rewards: Rewards


def group_metrics(
    groups: Sequence[Sequence[Sample]], informative: Tensor, seconds: float, decode: Decode
) -> dict[str, float]:
    """Means over the samples of a step, the length of their thoughts among them (SQL-Trail, Figure 8).

    `informative` is (questions,) bool, `seconds` the time that the rollouts took.
    """
    samples = [sample for group in groups for sample in group]
    rewards, trajectories = [s.rewards for s in samples], [s.trajectory for s in samples]
    statuses = Counter(t.status for t in trajectories)
    calls = Counter(o.tool for t in trajectories for o in t.observations)
    return {
        "reward": fmean(r.total for r in rewards),
        "ex": fmean(r.ex for r in rewards),
        "em": fmean(r.em for r in rewards),
        **{f"reward_{part}": fmean(r.parts[part] for r in rewards) for part in rewards[0].parts},
        "response_tokens": fmean(t.response_length for t in trajectories),
        "sampled_tokens": fmean(t.sampled_length for t in trajectories),
        "interactions": fmean(t.interactions for t in trajectories),
        "off_protocol": fmean(t.off_protocol for t in trajectories),
        **{f"calls_{tool}": calls[tool] / len(samples) for tool in (EXEC_SQL, MEMORY_RETRIEVE)},
        **{f"status_{status}": statuses[status] / len(samples) for status in Status},
        "thought_characters": fmean(thought_characters(t, decode) for t in trajectories),
        "pass_at_group": fmean(any(s.rewards.ex for s in group) for group in groups),
        "informative_groups": informative.float().mean().item(),
        "left_out": fmean(not r.kept for r in rewards),
        "rollout_seconds": round(seconds, 2),
        "sampled_tokens_per_second": round(sum(t.sampled_length for t in trajectories) / seconds),
    }


def logprob_gaps(gaps: Sequence[Tensor]) -> dict[str, float]:
    """How far trainer and sampler are apart: mean, 99th percentile and maximum of `gaps`, (tokens,) each.

    A gap is |log-probability in the trainer - in the sampler| of one token; without any all three are 0.
    """
    ordered = torch.cat(list(gaps)).double().sort().values if gaps else torch.zeros(1)
    return {
        "logprob_gap_mean": ordered.mean().item(),
        "logprob_gap_p99": ordered[math.ceil(0.99 * len(ordered)) - 1].item(),
        "logprob_gap": ordered[-1].item(),
    }


def append_group(path: Path, step: int, group: Sequence[Sample], scorer: Scorer, decode: Decode) -> None:
    """Append a group to the run's trajectories.jsonl."""
    with file_errors(path), path.open("a", encoding="utf-8") as file:
        for sample in group:
            record = question_record(sample.trajectory, sample.example, scorer, decode)
            rewards = sample.rewards
            record["reward"] = rewards.total
            record["scores"] = {"ex": rewards.ex, "em": rewards.em, **rewards.parts}
            file.write(json.dumps({"step": step, **record}) + "\n")
