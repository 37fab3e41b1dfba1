"""Variants of GRPO, each from another paper; the plain step is train_grpo.py's.

All are off unless the recipe sets them (MTIR-SQL: GRPO-Filter), but for the last, which is on where
sampler and trainer round apart (`mtsql.learn.loss.truncation_cap`).

- dynamic sampling: DAPO (Yu et al. 2025), section 3.2
- truncated trajectories excluded or penalised: DAPO, section 3.4 (overlong reward
  shaping; here the penalty is flat, whatever token limit ended them)
- GRPO-Filter: MTIR-SQL, section 3.1, Equation 3
- KL in the reward: Schulman's k1, as PPO for language models has it (Ouyang et al. 2022)
- dual clip: Ye et al. 2020, Equation 5
- truncated importance sampling: Yao et al. 2025

Clip-higher, the token mean (DAPO), the constant denominator (Dr. GRPO), sequence ratios (GSPO) and the
divisors of the advantages are terms of the plain formulas: mtsql/learn/loss.py and advantages.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mtsql.agent.trajectory import Status
from mtsql.config import GrpoConfig, idle_options
from mtsql.errors import UserError
from mtsql.learn.advantages import informative_groups
from mtsql.learn.batches import micro_batches
from mtsql.learn.logprobs import token_batch, token_logprobs
from mtsql.learn.model import Reference
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


def apply_sample_rules(config: GrpoConfig, sample: Sample) -> None:
    """Apply --truncated and --filter-rollouts: a sample may lose reward, or be left out of the loss."""
    truncated = sample.trajectory.status is Status.OUT_OF_TOKENS
    if truncated and config.truncated == "penalise":
        sample.rewards = replace(sample.rewards, total=sample.rewards.total - config.truncation_penalty)
    excluded = truncated and config.truncated == "exclude"
    filtered = config.filter_rollouts and sample.rewards.quality <= config.filter_threshold
    sample.in_loss = not (excluded or filtered)


def add_divergences(config: GrpoConfig, samples: Sequence[Sample], reference: Reference) -> None:
    """--kl k1: set each sample's divergence from the reference, by the sampler's log-probabilities."""
    by_seed = {sample.trajectory.seed: sample for sample in samples}
    trajectories = [sample.trajectory for sample in samples]
    with torch.no_grad(), reference.policy() as frozen:
        for part in micro_batches([trajectories], "packed", config.micro_batch_positions):
            batch = token_batch(part, "packed", frozen.device, frozen.config._attn_implementation)
            logprobs, _ = token_logprobs(frozen, batch, config.temperature)
            k1 = batch.sampling_logprobs - logprobs  # (tokens,)
            for index, value in zip(batch.trajectory_index.tolist(), k1.tolist(), strict=True):
                by_seed[part[index][0].seed].divergence += value


def check_variants(config: GrpoConfig) -> None:
    """Raise UserError for what the types of the options cannot say."""
    if config.temperature <= 0:
        raise UserError("--temperature should be above 0: greedy samples of a question are all the same")
    if config.process_from_level > 1 and not (config.recipe == "mtsql_r1" and config.curriculum):
        raise UserError(
            "--process-from-level above 1 needs --recipe mtsql_r1 and the levels of a --curriculum"
        )
    if config.dual_clip <= 1 and config.dual_clip != 0:
        raise UserError(f"--dual-clip should be above 1, or 0 for none, not {config.dual_clip:g}")
    if config.tis_cap < 0 and config.tis_cap != -1:
        raise UserError(f"--tis-cap should be above 0, 0 for none, or -1, not {config.tis_cap:g}")


def idle_variants(config: GrpoConfig, cap: float) -> list[str]:
    """A sentence for each option that was set but does nothing, given the others and the `truncation_cap`."""
    ratio = config.updates_per_batch == 1 and "the importance ratio is 1 at one update a batch"
    idle = {
        "clip_low": ratio,
        "clip_high": ratio,
        "dual_clip": ratio,
        "ratio": cap == 0 and ratio,  # over a sequence it mixes its tokens' truncated weights
        "kl": config.beta == 0 and "there is no KL penalty (--beta 0)",
        "truncation_penalty": config.truncated != "penalise" and "--truncated is not penalise",
        "filter_threshold": not config.filter_rollouts and "--filter-rollouts is not set",
        "process_from_level": config.rewards in ("", "outcome")
        and not config.weights
        and "there are no process rewards",
        "level_size": not config.curriculum and "there is no --curriculum",
        "evaluate_dialogues": config.evaluate_every == 0 and "--evaluate-every is 0",
    }
    return idle_options(config, idle)


def dual_clip_bound(objective: Tensor, advantage: Tensor, bound: float) -> Tensor:
    """The objective with the ratio cut at `bound` > 1 where the advantage is negative; tensors (tokens,)."""
    return torch.where(advantage < 0, torch.maximum(objective, bound * advantage), objective)


def truncated_importance_weights(old: Tensor, sampling_logprobs: Tensor, cap: float) -> Tensor:
    """The trainer's probability of each token over the sampler's, cut at `cap`; all tensors (tokens,).

    The two differ by the rounding of their different computations.
    """
    return (old - sampling_logprobs).clamp(max=math.log(cap)).exp()
