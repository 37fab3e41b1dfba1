"""Optimizers and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import bitsandbytes
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mtsql.errors import UserError


def make_optimizer(
    model: nn.Module, learning_rate: float, kind: str = "adamw", beta2: float = 0.999
) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, without weight decay.

    `kind` "adamw8bit" keeps the moments of tensors from 4,096 elements on in 8 bits (Dettmers et al. 2022).
    Raises UserError if nothing is trainable.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise UserError("nothing can be trained; a quantised model needs --lora-rank above 0 or an adapter")
    adamw = bitsandbytes.optim.AdamW8bit if kind == "adamw8bit" else torch.optim.AdamW
    return adamw(trainable, lr=learning_rate, betas=(0.9, beta2), weight_decay=0.0)


def cosine_rate(peak: float, progress: float, warmup: float = 0.03) -> float:
    """Learning rate at `progress` in [0, 1]: linear warm-up, then half a cosine down to zero."""
    if progress < warmup:
        return peak * (progress + 1e-3) / (warmup + 1e-3)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, (progress - warmup) / (1.0 - warmup))))


def warmup_rate(peak: float, step: int, steps: int = 3) -> float:
    """Learning rate of a step: linear warm-up over the first `steps`, then constant."""
    return peak * min(1.0, (step + 1) / steps)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_step(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], rate: float, largest: float = 1.0
) -> float:
    """One step on the gradients, clipped to the norm `largest`; returns the norm before clipping.

    The gradients are dropped after it, so that they take no memory during rollouts.
    """
    set_learning_rate(optimizer, rate)
    norm = nn.utils.clip_grad_norm_(parameters, largest)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
