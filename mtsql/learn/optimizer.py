"""Optimizers and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from mtsql.errors import UserError


def make_optimizer(model: nn.Module, learning_rate: float, beta2: float = 0.999) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, without weight decay.

    A parameter in half precision is computed with as it is, but what the optimizer steps is a float32 master
    copy, since bfloat16 would round most updates away; gradients add up there in float32 too. Raises
    UserError if nothing is trainable.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise UserError("nothing can be trained; a quantised model needs --lora-rank above 0 or an adapter")
    stepped = [_master(p) for p in trainable]
    optimizer = torch.optim.AdamW(stepped, lr=learning_rate, betas=(0.9, beta2), weight_decay=0.0, fused=True)
    copies = [(p, master) for p, master in zip(trainable, stepped, strict=True) if master is not p]

    @torch.no_grad()
    def copy_back(*_: object) -> None:
        for parameter, master in copies:
            parameter.copy_(master)

    optimizer.register_step_post_hook(copy_back)
    return optimizer


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """The float32 copy that gets the gradients of a parameter in half precision; of another, itself."""
    if parameter.dtype == torch.float32:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def hand_over(parameter: nn.Parameter) -> None:
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(hand_over)
    return master


def stepped_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """What the optimizer steps: trainable parameters, or their float32 master copies."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizer_state(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """The optimizer's state and, by place, the master copies of parameters that are in half precision."""
    trainable = (p for p in policy.parameters() if p.requires_grad)
    pairs = zip(trainable, stepped_parameters(optimizer), strict=True)
    masters = {place: master.detach() for place, (p, master) in enumerate(pairs) if master is not p}
    return optimizer.state_dict() | {"masters": masters}


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Load what `optimizer_state` gave."""
    masters = state.pop("masters")
    optimizer.load_state_dict(state)
    for place, master in masters.items():
        stepped_parameters(optimizer)[place].data.copy_(master)


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

    The gradients are dropped after it, so that they take no memory during rollouts. Raises UserError for a
    gradient that is not finite, before it reaches the weights.
    """
    set_learning_rate(optimizer, rate)
    norm = float(nn.utils.clip_grad_norm_(parameters, largest))  # before clipping
    if not math.isfinite(norm):
        raise UserError(
            f"the gradient's norm is {norm}; the weights are as before: lower --learning-rate, or compute in "
            "--dtype float32, and go on from the last checkpoint with --resume"
        )
    optimizer.step()
    optimizer.zero_grad()
    return norm
