"""Dynamic sampling (DAPO, Yu et al. 2025, section 3.2), and which options of GRPO do not go together."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mtsql.config import GrpoConfig, idle_options
from mtsql.errors import UserError
from mtsql.learn.advantages import informative_groups
from mtsql.learn.samples import Sample


def dynamic_sampling(
    play: Callable[[list[int], int], list[list[Sample]]],
    order: Callable[[int], list[int]],
    wanted: int,
    rounds: int,
) -> tuple[list[list[Sample]], int]:
    """The `wanted` groups of a step, and how many were replaced.

    `order(attempt)` gives the questions in the order in which they are drawn, `play(questions, asked)` a
    group of each, after so many that the step has asked. Up to `rounds` times, groups whose rewards are all
    equal are set aside and other questions played instead. If there are too few groups then, those set aside
    fill the step.
    """
    kept: list[list[Sample]] = []
    equal: list[list[Sample]] = []
    asked: list[int] = []
    for attempt in range(rounds + 1):
        fresh = [i for i in order(attempt) if i not in set(asked)][: wanted - len(kept)]
        for group in play(fresh, len(asked)):
            informative = informative_groups(torch.tensor([[s.rewards.total for s in group]])).item()
            (kept if informative else equal).append(group)
        asked += fresh
        if len(kept) >= wanted:
            break
    groups = kept + equal[: max(0, wanted - len(kept))]
    return groups, len(kept) + len(equal) - len(groups)


def check_variants(config: GrpoConfig) -> None:
    """Raise UserError for what the types of the options cannot say."""
    if config.temperature <= 0:
        raise UserError("--temperature should be above 0: greedy samples of a question are all the same")
    if config.tis_cap < 0 and config.tis_cap != -1:
        raise UserError(f"--tis-cap should be above 0, 0 for none, or -1, not {config.tis_cap:g}")


def idle_variants(config: GrpoConfig) -> list[str]:
    """A sentence for each option that was set but does nothing, given the others."""
    ratio = config.updates_per_batch == 1 and "the importance ratio is 1 at one update a batch"
    idle = {
        "clip_low": ratio,
        "clip_high": ratio,
        "level_size": not config.curriculum and "there is no --curriculum",
        "evaluate_dialogues": config.evaluate_every == 0 and "--evaluate-every is 0",
    }
    return idle_options(config, idle)
