"""Muon in float32: torch.optim.Muon iterates in bfloat16, which many processors multiply slowly."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """The orthogonalised momentum of matrices (Jordan 2024), with Nesterov's look-ahead.

    `parameters` are matrices; a matrix with more rows than columns takes longer steps, by the root of the
    ratio. Raises ValueError for a parameter that is no matrix.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        if any(p.ndim != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("Muon steps matrices only")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step on the gradients; matrices of one shape are orthogonalised together."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike.setdefault(parameter.shape, []).append(parameter)
            for (rows, columns), parameters in alike.items():
                ahead = []
                for p in parameters:
                    velocity = self.state[p].setdefault("momentum", torch.zeros_like(p))  # (rows, columns)
                    velocity.lerp_(p.grad, 1 - group["momentum"])
                    ahead.append(p.grad.lerp(velocity, group["momentum"]))
                updates = orthogonalised(torch.stack(ahead))  # (matrices, rows, columns)
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                for p, update in zip(parameters, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Nearly the nearest orthogonal matrices: five Newton-Schulz steps, singular values end in about
    0.7 to 1.2. Takes and gives (matrices, rows, columns) float32.
    """
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalised(matrices.mT).mT
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT  # (matrices, rows, rows)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x
