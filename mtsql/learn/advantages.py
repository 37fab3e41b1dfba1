"""Group-normalised advantages (MTSQL-R1, section 3.3.3)."""

from __future__ import annotations

from torch import Tensor

DIVISORS = ("group", "batch", "none")
NO_VARIANCE = 1e-6  # Groups whose rewards spread less than this teach nothing.


def informative_groups(rewards: Tensor) -> Tensor:
    """Which questions' rewards (questions, samples) differ enough to teach something, (questions,) bool."""
    return rewards.double().std(dim=1) >= NO_VARIANCE


def group_advantages(rewards: Tensor, divide_by: str = "group", eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """A = (r - mean(r)) / (std(r) + eps) in each question's group of samples.

    `rewards` is (questions, samples); returns float32 advantages of the same shape, and which
    questions are informative, (questions,) bool. Standard deviations are the unbiased ones. A
    group without variance gets exactly 0. `divide_by` "batch" takes the standard deviation of all
    r - mean(r) of the informative groups (REINFORCE++), "none" leaves out the division (Dr. GRPO).
    Raises ValueError for another `divide_by`, a shape that is not (questions, samples >= 2), or a
    reward that is not finite.
    """
    if divide_by not in DIVISORS:
        raise ValueError(f"divide_by is one of {', '.join(DIVISORS)}, not {divide_by!r}")
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards should be (questions, samples >= 2), got shape {tuple(rewards.shape)}")
    if not rewards.isfinite().all():
        raise ValueError("a reward is not finite")
    exact = rewards.double()  # float32 would see a spread in a group of equal rewards like 0.1
    std = exact.std(dim=1, keepdim=True)  # (questions, 1)
    informative = informative_groups(rewards)[:, None]  # (questions, 1)
    advantages = (exact - exact.mean(dim=1, keepdim=True)) * informative  # (questions, samples)
    if divide_by == "group":
        advantages = advantages / (std + eps)
    elif divide_by == "batch" and informative.any():
        advantages = advantages / (advantages[informative[:, 0]].std() + eps)
    return advantages.float(), informative[:, 0]
