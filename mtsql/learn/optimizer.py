"""Optimizers and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import bitsandbytes
import torch
from torch import nn
from torch.distributed.tensor import DTensor


def make_optimizer(
    model: nn.Module,
    learning_rate: float,
    beta2: float = 0.999,
    weight_decay: float = 0.0,
    kind: str = "adamw",
) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; vectors (norms, biases) are not decayed.

    `kind` "adamw8bit" keeps the moments of tensors from 4,096 elements on in 8 bits (Dettmers et al. 2022).
    Raises ValueError if nothing is trainable.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("nothing can be trained; a quantised model needs --lora-rank above 0 or an adapter")
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = bitsandbytes.optim.AdamW8bit if kind == "adamw8bit" else torch.optim.AdamW
    return adamw([g for g in groups if g["params"]], lr=learning_rate, betas=(0.9, beta2))


def cosine_rate(peak: float, progress: float, warmup: float = 0.03) -> float:
    """Learning rate at `progress` in [0, 1]: linear warm-up, then half a cosine down to zero."""
    if progress < warmup:
        return peak * (progress + 1e-3) / (warmup + 1e-3)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, (progress - warmup) / (1.0 - warmup))))


def clip_gradients(parameters: Sequence[nn.Parameter], largest: float) -> float:
    """Scale all gradients so that their norm is at most `largest`; returns the norm that they had."""
    norm = nn.utils.clip_grad_norm_(parameters, largest)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
