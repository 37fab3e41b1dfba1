"""The decode step as CUDA graphs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cache

import torch
from torch import Tensor

from mtsql.agent.cache import Piece

MOST_GRAPHS = 32  # The one that was used the longest time ago is dropped for another.


@cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """The stream of all captures on a device: each stream that ever computed keeps its own workspaces."""
    return torch.cuda.Stream(device)


class DecodeGraphs:
    """The decode step as CUDA graphs, one for each shape of its pieces, captured on first use.

    A graph reads and writes the same memory at every replay. Its inputs are copied there; it sees weights
    that are updated in place; and it is dropped when the storage of a tier that it reads has moved. Graphs
    share one memory pool; when none is left, the next gets a new one, as CUDA asks for.
    """

    def __init__(self) -> None:
        self.captured: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = OrderedDict()
        self.logits: dict[int, Tensor] = {}  # by rows, outside the pool, so that nothing in it must last
        self.pool: tuple[int, int] | None = None
        self.captures = 0  # so far

    def run(
        self,
        compute: Callable[[Tensor, Tensor, Sequence[Piece]], Tensor],
        input_ids: Tensor,
        positions: Tensor,
        pieces: Sequence[Piece],
    ) -> Tensor:
        """Replay `compute` on `input_ids` and `positions`, (rows, 1) both; logits (rows, vocabulary)."""
        key = tuple((piece.tier, piece.count, piece.reach, piece.tier.moves) for piece in pieces)
        if key not in self.captured:
            self._capture(key, compute, input_ids, positions, pieces)
        self.captured.move_to_end(key)
        graph, own_ids, own_positions = self.captured[key]
        own_ids.copy_(input_ids)
        own_positions.copy_(positions)
        graph.replay()
        return self.logits[len(input_ids)]

    def _capture(
        self,
        key: tuple,
        compute: Callable[[Tensor, Tensor, Sequence[Piece]], Tensor],
        input_ids: Tensor,
        positions: Tensor,
        pieces: Sequence[Piece],
    ) -> None:
        stale = [old for old in self.captured if any(tier.moves != moves for tier, _, _, moves in old)]
        for old in stale or list(self.captured)[: len(self.captured) + 1 - MOST_GRAPHS]:
            del self.captured[old]
        if not self.captured:
            self.pool = torch.cuda.graph_pool_handle()
        stream = capture_stream(torch.cuda.current_device())
        own_ids, own_positions = input_ids.clone(), positions.clone()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # one run outside the graph, as capturing asks for
            logits = compute(own_ids, own_positions, pieces)
        torch.cuda.current_stream().wait_stream(stream)
        if len(input_ids) not in self.logits:
            self.logits[len(input_ids)] = logits.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=stream):
            self.logits[len(input_ids)].copy_(compute(own_ids, own_positions, pieces))
        self.captured[key] = (graph, own_ids, own_positions)
        self.captures += 1
