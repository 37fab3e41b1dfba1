"""Group-normalised advantages (MTSQL-R1, section 3.3.3)."""

from __future__ import annotations

from torch import Tensor

NO_VARIANCE = 1e-6  # Groups whose rewards have a smaller standard deviation teach nothing.


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
    all informative groups (REINFORCE++), "none" by nothing (Dr. GRPO). Raises ValueError for another
    `divide_by`, a shape that is not (questions, samples >= 2), or a reward that is not finite.
    """
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards should be (questions, samples >= 2), got shape {tuple(rewards.shape)}")
    if not rewards.isfinite().all():
        raise ValueError("a reward is not finite")
    exact = rewards.double()  # float32 would see a spread in a group of equal rewards like 0.1
    advantages = (exact - exact.mean(dim=1, keepdim=True)) * informative[:, None]  # (questions, samples)
    if divide_by == "group":
        advantages = advantages / (exact.std(dim=1, keepdim=True) + eps)
    elif divide_by == "batch" and informative.any():
        advantages = advantages / (advantages[informative].std() + eps)
    elif divide_by not in ("batch", "none"):
        raise ValueError(f"divide_by is group, batch or none, not {divide_by!r}")
    return advantages.float()
