"""Group-normalised advantages, and the losses of supervised fine-tuning and of GRPO with its variants.

The losses' tensors are (tokens,) unless said; trained tokens are ordered by trajectory, and
`trajectory_index` says whose a token is. Every loss and statistic is a micro-batch's share: their sum is
the optimizer step's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mtsql.agent.trajectory import Trajectory
from mtsql.learn.logprobs import TokenBatch
from mtsql.model_folder import Policy

NO_VARIANCE = 1e-6  # Groups whose rewards have a smaller standard deviation teach nothing.
CLIP_LOW = 0.2  # lower clip epsilon, verl's default; the paper gives none
MAX_LOG_RATIO = 20.0  # The logarithm of a ratio is cut here, so that exp() does not overflow.


def informative_groups(rewards: Tensor) -> Tensor:
    """Which questions have rewards that differ enough to teach something, (questions,) bool.

    `rewards` is (questions, samples).
    """
    return rewards.double().std(dim=1) >= NO_VARIANCE


def group_advantages(
    rewards: Tensor, informative: Tensor, divide_by: str = "group", eps: float = 1e-6
) -> Tensor:
    """A = (r - mean(r)) / (std(r) + eps) in each question's group of samples, float32.

    `rewards` and the result are (questions, samples), `informative` is (questions,) bool: all other groups
    get exactly 0. Standard deviations are unbiased. `divide_by` "batch" divides by that of r - mean(r) over
    all informative groups (REINFORCE++-baseline), "none" by nothing (Dr. GRPO). Raises ValueError for
    a reward that is not finite.
    """
    if not rewards.isfinite().all():
        raise ValueError("a reward is not finite")
    exact = rewards.double()  # float32 would see a spread in a group of equal rewards like 0.1
    advantages = (exact - exact.mean(dim=1, keepdim=True)) * informative[:, None]  # (questions, samples)
    if divide_by == "group":
        advantages = advantages / (exact.std(dim=1, keepdim=True) + eps)
    elif divide_by == "batch" and informative.any():
        advantages = advantages / (advantages[informative].std() + eps)
    return advantages.float()


def sft_loss(logprobs: Tensor, denominator: int) -> Tensor:
    """Negative log-likelihood of the trained tokens (MTSQL-R1, section 3.2.1) over `denominator`.

    That is the number of trained tokens of the whole optimizer step, so that the sum over micro-batches is
    the step's mean, however it was cut.
    """
    return -logprobs.sum() / denominator


class SurrogateOptions(Protocol):
    """The options of the clipped surrogate, as `train_grpo.Args` has them."""

    clip_high: float
    aggregate: str
    beta: float


def grpo_loss(
    logprobs: Tensor,
    batch: TokenBatch,
    denominator: float,
    options: SurrogateOptions,
    old_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    tis_cap: float = 0.0,
) -> tuple[Tensor, dict[str, float]]:
    """The clipped surrogate of MTSQL-R1, section 3.3.3, negated:

    L = - sum_i 1/N sum_{t in M_i} 1/|M_i| [ min(rho_t A_i, clip(rho_t, 1 - low, 1 + high) A_i) - beta k3_t ]

    over the trajectories i and their tokens t of loss mask 1 (a `TokenBatch` holds no others), for
    `aggregate` "trajectory". `batch` is a micro-batch; N, the `denominator` (`loss_denominator`), counts all
    trajectories of the optimizer step. rho_t divides by the policy at the step's first update. Truncated
    importance sampling multiplies the clipped term by that policy's probability over the sampler's.

    `logprobs` are the policy's, (tokens,), with a gradient. Without `old_logprobs` the ratio is 1, and
    dL / d logprob_t = -A_i / (N |M_i|), times that weight, plus the KL's gradient. `beta` is the weight of
    `kl_estimate` against `reference_logprobs`; `tis_cap`, 0 for none, cuts `importance_weights`.

    The second result is statistics: "weight", the sum of the tokens' weights, and weighted sums to divide by
    it: clip_fraction, and kl and tis_weight where they apply.
    """
    # All tensors are (tokens,). The statistics are sums, which `clipped_step` divides by "weight".
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    weights = token_weights(batch.trajectory_index, denominator, options.aggregate)
    advantage = batch.advantages.to(logprobs)[batch.trajectory_index]
    ratios = (logprobs - old).clamp(max=MAX_LOG_RATIO).exp()
    clipped = ratios.clamp(1 - CLIP_LOW, 1 + options.clip_high)
    objective = torch.minimum(ratios * advantage, clipped * advantage)
    bound = (objective != ratios * advantage).to(weights)
    statistics = {"weight": float(weights.sum()), "clip_fraction": float((weights * bound).sum())}
    if tis_cap > 0:
        tis = importance_weights(old, batch.sampling_logprobs, tis_cap)
        objective = objective * tis
        statistics["tis_weight"] = float((weights * tis).sum())
    if reference_logprobs is not None:
        divergence = kl_estimate(logprobs, reference_logprobs)
        objective = objective - options.beta * divergence
        statistics["kl"] = float((weights * divergence.detach()).sum())
    return -(weights * objective).sum(), statistics


def loss_denominator(counted: Sequence[Trajectory], aggregate: str, longest_response: int) -> int:
    """What the loss of an optimizer step on the trajectories `counted` is divided by, at least 1.

    By `aggregate`: "trajectory" gives their number, "token" the number of their trained tokens, "constant"
    their number times the longest response allowed.
    """
    if aggregate == "token":
        return max(1, sum(t.trained_length for t in counted))
    return max(1, len(counted)) * (longest_response if aggregate == "constant" else 1)


def token_weights(trajectory_index: Tensor, denominator: float, aggregate: str) -> Tensor:
    """The weight of each token in the loss, float32; `denominator` is that of `loss_denominator`.

    "trajectory": the mean over a trajectory's tokens, 1/|M_i|, then over trajectories (MTSQL-R1, section
    3.3.3). "token": the mean over all tokens (DAPO, equation 8). "constant": the sum over all tokens, over
    trajectories times the longest response allowed (Dr. GRPO, section 3.2).
    """
    weights = torch.full(trajectory_index.shape, 1 / denominator, device=trajectory_index.device)
    if aggregate == "trajectory":
        weights = weights / trajectory_index.bincount()[trajectory_index]
    return weights


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """KL(policy || reference) at each token: k3 of Schulman (2020), never negative (GRPO, equation 4)."""
    r = (logprobs - reference_logprobs).clamp(min=-MAX_LOG_RATIO)
    return (-r).exp() - 1 + r


def importance_weights(old: Tensor, sampling_logprobs: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling (Yao et al. 2025): the trainer's probability over the sampler's, at most
    `cap`. The two differ by the rounding of their different computations.
    """
    return (old - sampling_logprobs).clamp(max=math.log(cap)).exp()


def truncation_cap(policy: Policy) -> float:
    """The cap of `importance_weights`: 2 (Yao et al. 2025), or 0 for none where all is float32 on a CPU.

    In float32 on a CPU sampler and trainer agree within 1e-4. In half precision, in 4 bits and on a GPU,
    whose kernels differ between the two, single tokens are apart by tenths.
    """
    quantised = getattr(policy, "is_loaded_in_4bit", False)
    exact = policy.dtype == torch.float32 and not quantised and policy.device.type == "cpu"
    return 0.0 if exact else 2.0
