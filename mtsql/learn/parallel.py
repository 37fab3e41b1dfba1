"""One process a GPU, started by `torchrun --nproc-per-node N train_grpo.py ...`; alone without it.

Every process holds the whole policy, plays and trains on its share of the work, and gets the results of all
processes, so that all of them take the same decisions. Gradients are summed and not averaged, since each loss
is already divided by a denominator of the whole optimizer step.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from mtsql.errors import UserError
from mtsql.learn.optimizer import stepped_parameters

T = TypeVar("T")
SILENCE = 180.0  # seconds after which a process that says nothing is dead or stopped


@dataclass(frozen=True)
class Processes:
    """The processes of a run as one of them, number `rank` of `count`, sees them."""

    rank: int
    count: int
    left: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)

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
        """The shares of all processes as `share` dealt them: one item for each that it dealt."""
        shares = self.all_gather(items)
        return [s[i] for i in range(max(map(len, shares))) for s in shares if i < len(s)]

    def all_gather(self, value: T) -> list[T]:
        """The value of every process, in the order of their ranks, in every process."""
        if self.count == 1:
            return [value]
        values: list[T] = [value] * self.count
        dist.all_gather_object(values, value)
        return values

    def pad(self, items: list[T], filler: T) -> list[tuple[T, float]]:
        """The items, then the filler until all processes have equally many; each with its weight.

        FSDP2 needs the same number of forward and backward passes in every process. It averages gradients
        over the processes, where we want their sum; so an item's weight is the number of processes. The
        filler's is 0.
        """
        most = max(self.all_gather(len(items)))
        return [(item, float(self.count)) for item in items] + [(filler, 0.0)] * (most - len(items))

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients of all processes; one that a process lacks counts as zeros."""
        parameters = list(parameters)
        if self.count == 1 or any(isinstance(p, DTensor) for p in parameters):
            return  # FSDP2 has reduced them
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
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= gpus:
            raise UserError(f"there are {gpus} GPUs; start at most so many processes with --nproc-per-node")
        torch.cuda.set_device(local)
    # A process may wait for hours until the others have played their share.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(days=1))
    processes = Processes(dist.get_rank(), dist.get_world_size())
    watch_others(processes)
    return processes


def watch_others(processes: Processes) -> None:
    """Start a thread that ends this process with a sentence, exit code 3, if another is silent for SILENCE.

    A process that died is ended by torchrun; one that is stopped, or whose machine is, would let the others
    wait for a day. One that lives is not silent, however long a rollout of it takes: nothing tells a slow
    one from one that hangs inside an operation.
    """
    store = dist.distributed_c10d._get_default_store()
    heard = {rank: (b"", time.monotonic()) for rank in range(processes.count)}

    def watch() -> None:
        beat = 0
        while not processes.left.wait(SILENCE / 10):
            try:
                store.set(f"beat {processes.rank}", str(beat := beat + 1))
                said_by = {r: store.get(f"beat {r}") for r in heard if store.check([f"beat {r}"])}
            except dist.DistError:
                sentence = "the first process, which keeps the processes' signs of life, does not answer"
                print(f"process {processes.rank}: {sentence}; torchrun ends the others", file=sys.stderr)
                return
            for rank, (last, since) in heard.items():
                said = said_by.get(rank, last)
                if said != last:
                    heard[rank] = (said, time.monotonic())
                elif time.monotonic() - since > SILENCE and not processes.left.is_set():
                    sentence = (
                        f"process {rank} has been silent for {SILENCE:.0f} seconds: it is dead or stopped"
                    )
                    print(f"error: {sentence}; go on with --resume", file=sys.stderr, flush=True)
                    os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def shard_policy(policy: PreTrainedModel, processes: Processes, dtype: torch.dtype) -> None:
    """Shard float32 weights, gradients and optimizer over the processes with torch's FSDP2, layer by layer.

    Computed is in `dtype`, to which layers are cast when they are gathered. Raises UserError for a model
    with adapters or quantised weights, and for a single process.
    """
    if processes.count == 1:
        raise UserError("--shard is for several processes; start them with torchrun")
    if not all(p.requires_grad for p in policy.parameters()):
        raise UserError("--shard is for full fine-tuning; leave out --lora-rank and --quantise")
    mesh = init_device_mesh(policy.device.type, (processes.count,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for part in (*policy.base_model.layers, policy):
        fully_shard(part, mesh=mesh, mp_policy=precision)


@contextmanager
def whole_weights(policy: nn.Module) -> Iterator[None]:
    """All weights in every process while the block runs.

    Rollouts need it: the processes make different numbers of forward passes.
    """
    sharded = [m for m in policy.modules() if isinstance(m, FSDPModule)]
    try:
        for module in sharded:
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)
        yield
    finally:
        for module in sharded:
            module.reshard()
            module.set_reshard_after_forward(module is not policy, recurse=False)


def whole_state(
    policy: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> tuple[dict | None, dict]:
    """The weights (None if they are not sharded) and the optimizer state, as a checkpoint holds them.

    All processes must call it; those of a sharded run get theirs on the first process only.
    """
    if not isinstance(policy, FSDPModule):
        return None, _with_masters(policy, optimizer) if optimizer else {}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(policy, options=options)
    # Asked for the state of an optimizer that has none, torch would take a step to make one.
    stepped = optimizer is not None and optimizer.state
    state = get_optimizer_state_dict(policy, optimizer, options=options) if stepped else {}
    once, every = (dict(policy.named_parameters(remove_duplicate=single)) for single in (True, False))
    tied = every.keys() - once.keys()  # to weights under another name, which are saved
    return {name: weight for name, weight in weights.items() if name not in tied}, state


def _with_masters(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """The optimizer's state and, by place, the master copies of parameters that are in half precision."""
    trainable = (p for p in policy.parameters() if p.requires_grad)
    pairs = zip(trainable, stepped_parameters(optimizer), strict=True)
    masters = {place: master.detach() for place, (p, master) in enumerate(pairs) if master is not p}
    return optimizer.state_dict() | {"masters": masters}


def restore_optimizer(policy: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Load the optimizer state that `whole_state` gave."""
    if not isinstance(policy, FSDPModule):
        masters = state.pop("masters", {})  # older checkpoints have no such entry
        optimizer.load_state_dict(state)
        for place, master in masters.items():
            stepped_parameters(optimizer)[place].data.copy_(master)
    elif state:  # empty before the first step
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(policy, optimizer, state, options=options)


def leave_processes(processes: Processes) -> None:
    """Wait for all processes, then take them apart."""
    if processes.count > 1:
        dist.barrier()
        processes.left.set()  # until here the others want signs of life: the first may have files to write
        dist.destroy_process_group()
