"""The decode step as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache

import torch
from torch import Tensor


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: each stream that ever computed keeps its own workspaces."""
    return torch.cuda.Stream(device)


class DecodeGraphs:
    """A function of tensors as CUDA graphs, one for each of their shapes, captured on first use.

    A graph reads and writes the same memory at every replay: its inputs are copied there, and what it gives
    lasts until the next replay, since all graphs have one memory pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Sequence[Tensor], Tensor]] = {}
        self.pool: tuple[int, int] | None = None

    def run(self, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """What `compute` gives for these inputs, which may be on the CPU."""
        key = tuple(part.shape for part in inputs)
        if key not in self.captured:
            self.captured[key] = self._capture(compute, [part.to(self.device) for part in inputs])
        graph, own, result = self.captured[key]
        for part, new in zip(own, inputs, strict=True):
            part.copy_(new, non_blocking=True)
        graph.replay()
        return result

    def _capture(
        self, compute: Callable[..., Tensor], own: Sequence[Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor], Tensor]:
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        stream = capture_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # one run outside the graph, as capturing asks for
            compute(*own)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=stream):
            result = compute(*own)
        return graph, own, result
