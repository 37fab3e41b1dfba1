"""The decode step as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mtsql.agent.cache import RowCache


class DecodeGraphs:
    """The decode step as CUDA graphs, one for each number of slots and each reach, captured on first use.

    A graph reads and writes the same memory at every replay. Its inputs are copied there; it sees weights
    that are updated in place; and all graphs are dropped when the storage of the cache moves.
    """

    def __init__(self) -> None:
        self.captured: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self.logits: dict[int, Tensor] = {}  # by slots, outside the pool, so that nothing in it must last
        self.pool = torch.cuda.graph_pool_handle()
        self.moves = 0

    def run(
        self,
        compute: Callable[[Tensor, Tensor, int], Tensor],
        cache: RowCache,
        slots: int,
        input_ids: Tensor,
        positions: Tensor,
        reach: int,
    ) -> Tensor:
        """Replay `compute` on `input_ids` and `positions`, (slots, 1) both; logits (slots, 1, vocabulary)."""
        reach = cache.aim(slots, positions, reach)
        if cache.moves != self.moves:
            self.captured, self.moves = {}, cache.moves
        if (slots, reach) not in self.captured:
            own_ids, own_positions = input_ids.clone(), positions.clone()
            cache.aim(slots, own_positions, reach)
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # one run outside the graph, as capturing asks for
                logits = compute(own_ids, own_positions, reach)
            torch.cuda.current_stream().wait_stream(aside)
            if slots not in self.logits:
                self.logits[slots] = logits.clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                self.logits[slots].copy_(compute(own_ids, own_positions, reach))
            self.captured[slots, reach] = (graph, own_ids, own_positions)
        graph, own_ids, own_positions = self.captured[slots, reach]
        own_ids.copy_(input_ids)
        own_positions.copy_(positions)
        graph.replay()
        return self.logits[slots]
