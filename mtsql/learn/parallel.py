"""One process a GPU, started by `torchrun --nproc-per-node N train_grpo.py ...`; alone without it.

Every process holds the whole policy, plays and trains on its share of the work, and gets the results of all
processes, so that all of them take the same decisions. Gradients are summed and not averaged, since each loss
is already divided by a denominator of the whole optimizer step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from mtsql.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The processes of a run as one of them, number `rank` of `count`, sees them."""

    rank: int
    count: int

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and shows progress."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's items: every `count`-th."""
        return list(items[self.rank :: self.count])

    def split(self, items: Sequence[T]) -> list[list[T]]:
        """The items in as many parts as there are processes, none of them empty."""
        parts = (list(items[rank :: self.count]) for rank in range(self.count))
        return [part for part in parts if part]

    def gather(self, items: Sequence[T]) -> list[T]:
        """All processes' results in the order of the items that `share` dealt, one each."""
        shares = self.all_gather(items)
        return [s[i] for i in range(max(map(len, shares))) for s in shares if i < len(s)]

    def all_gather(self, value: T) -> list[T]:
        """The value of every process, in the order of their ranks, in every process."""
        if self.count == 1:
            return [value]
        values: list[T] = [value] * self.count
        dist.all_gather_object(values, value)
        return values

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of all processes; one that a process lacks counts as zeros."""
        for p in parameters if self.count > 1 else ():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)


def join_processes() -> Processes:
    """The processes that torchrun started, or this one alone. Each takes the GPU of its local rank."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return Processes(0, 1)
    if torch.cuda.is_available():
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= gpus:
            raise UserError(f"there are {gpus} GPUs; start at most so many processes with --nproc-per-node")
        torch.cuda.set_device(local)
    # A process may wait for hours until the others have played their share.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(days=1))
    return Processes(dist.get_rank(), dist.get_world_size())


def leave_processes(processes: Processes) -> None:
    """Wait for all processes, then take them apart."""
    if processes.count > 1:
        dist.barrier()
        dist.destroy_process_group()
