"""One process a GPU, started by `torchrun --nproc-per-node N train_grpo.py ...`; alone without it.

Every process holds the whole policy, plays and trains on its share of the work, and sees the gathered whole,
so that all of them take the same decisions. Gradients are summed, since losses are already divided by the
optimizer step's own denominators.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The processes of a run as one of them, number `rank` of `count`, sees them."""

    rank: int
    count: int

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and shows progress."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's items: every `count`-th."""
        return list(items[self.rank :: self.count])

    def gather(self, items: Sequence[T]) -> list[T]:
        """The shares of all processes, back in the order that `share` dealt from."""
        shares = self.of_each(list(items))
        return [s[i] for i in range(max(map(len, shares))) for s in shares if i < len(s)]

    def of_each(self, value: T) -> list[T]:
        """The value of every process, in the order of their ranks, in every process."""
        if self.count == 1:
            return [value]
        values: list[T] = [value] * self.count
        dist.all_gather_object(values, value)
        return values

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients of all processes; one that a process lacks counts as zeros."""
        if self.count == 1:
            return
        parameters = list(parameters)
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for dtype in sorted({p.grad.dtype for p in parameters}, key=str):
            gradients = [p.grad for p in parameters if p.grad.dtype == dtype]
            flat = torch.cat([g.flatten() for g in gradients])  # (trainable parameters,)
            dist.all_reduce(flat)
            for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(summed.view_as(gradient))


def join_processes() -> Processes:
    """The processes that torchrun started, or this one alone. Each takes the GPU of its local rank."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return Processes(0, 1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return Processes(dist.get_rank(), dist.get_world_size())


def leave_processes(processes: Processes) -> None:
    """Wait for all processes, then take them apart."""
    if processes.count > 1:
        dist.barrier()
        dist.destroy_process_group()
