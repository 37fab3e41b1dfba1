"""The key/value cache on a GPU, pages of 64 positions from one pool, and the decode step as CUDA graphs.

A row has a list of pages. Samples of one prompt have its full pages in common; a page that no row has is free
for others. Nothing ever moves, so a decode step has few shapes, each of which is captured once.
Attention of a decode step is split over the pages (decode_kernel.py, where Triton is installed).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from shutil import which

import numpy as np
import torch
from torch import Tensor

from mtsql.agent.cache import WATERMARK, Attention, CachedRow, Piece, Slots

PAGE = 64
FEWEST_COLUMNS = 16  # fewest pages of a row that a decode step reads; more by factors of 4
NOWHERE = 0  # the page of padding, which no real token sees


class PagedPiece(Piece):
    """Rows (None is padding) and their pages."""

    def read(self, layer: int) -> Tensor:
        """A copy of the rows' keys and values of a layer, (2, rows, kv_heads, reach, head_dim)."""
        of_heads = self.home.layers[layer].transpose(1, 2)  # (2, kv_heads, pages, PAGE, head_dim)
        copied = of_heads[:, :, self.table]  # (2, kv_heads, rows, columns, PAGE, head_dim)
        return copied.flatten(3, 4).transpose(1, 2)

    def attention(self, positions: Tensor, heads: int, kv_heads: int, dtype: torch.dtype) -> Attention:
        """Attention of tokens at `positions` (rows, tokens) to these rows."""
        here = replace(self, table=self.table.to(positions.device))
        kernel = decode_kernel(positions.device) if self.decoding else None
        if kernel is None:
            return Attention(here, positions, heads, kv_heads, dtype)
        return SplitAttention(here, positions, kv_heads, kernel)


class SplitAttention(Attention):
    """Attention of one token a row, read from the pages where they are."""

    def __init__(self, piece: PagedPiece, positions: Tensor, kv_heads: int, kernel: Callable[..., Tensor]):
        """`positions` (rows, 1) of the tokens."""
        self.piece, self.kernel = piece, kernel
        self.places, self.lengths = piece.places(positions, kv_heads), positions[:, 0] + 1

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """(rows, heads, head_dim) to (rows, heads x head_dim)."""
        return self.kernel(queries, self.piece.home.layers[layer], self.piece.table, self.lengths).flatten(1)


@cache
def decode_kernel(device: torch.device) -> Callable[..., Tensor] | None:
    """`attend_pages` on a GPU with Triton."""
    compiler = os.environ.get("CC") or which("gcc") or which("clang")  # which Triton asks for
    if device.type != "cuda" or find_spec("triton") is None or not compiler:
        return None
    from mtsql.agent.decode_kernel import attend_pages

    return attend_pages


class Pages(Slots):
    """Keys and values of every layer, of `positions` positions; `longest` bounds those of a row.

    The methods are those of `RowCache`.
    """

    def __init__(self, longest: int | None, positions: int) -> None:
        super().__init__(PAGE, self.room(positions) // PAGE + 1)
        self.longest, self.positions = longest, positions
        self.owners = [0] * self.slots  # how many rows have each page
        self.free = list(range(len(self.owners) - 1, NOWHERE, -1))

    @property
    def reserved(self) -> int:
        """Positions of all pages."""
        return (len(self.owners) - 1) * PAGE

    def room(self, need: int) -> int:
        """Positions that a row of `need` positions takes."""
        return -(-need // PAGE) * PAGE

    def admit(self, row: CachedRow, need: int, like: CachedRow | None = None) -> bool:
        """Give a row pages for `need` positions; False if there is no room.

        `like` is a row that has, or will have, all its tokens but the last: they have full pages in common.
        """
        taken = len(self.owners) - 1 - len(self.free)
        spare = self.reserved // WATERMARK if taken else 0
        common = like.pages[: (need - 1) // PAGE] if like else []
        if len(self.free) < self.room(need + spare) // PAGE - len(common):
            return False
        for page in common:
            self.owners[page] += 1
        row.pages = [*common]
        return self.lift(row, need)

    def lift(self, row: CachedRow, need: int) -> bool:
        """Give a row further pages, for `need` positions together; False if there is no room."""
        more = self.room(need) // PAGE - len(row.pages)
        if more > len(self.free):
            return False
        row.pages += [self.free.pop() for _ in range(more)]
        for page in row.pages[len(row.pages) - more :]:
            self.owners[page] = 1
        row.room = len(row.pages) * PAGE
        return True

    def drop(self, rows: Sequence[CachedRow]) -> None:
        """Take the pages of rows back."""
        for row in rows:
            self._give_back(row.pages)
            row.room, row.length, row.pages = 0, 0, []

    def share(self, origin: CachedRow, rows: Sequence[CachedRow], length: int) -> None:
        """Let rows have the first `length` tokens of `origin`: its full pages, and a copy of the last one."""
        full = length // PAGE
        for row in rows:
            for page in origin.pages[:full]:
                self.owners[page] += 1
            self._give_back(row.pages[:full])
            row.pages[:full] = origin.pages[:full]
            row.length = length
        if rows and length % PAGE:
            copies = [row.pages[full] for row in rows]
            for stored in self.layers:
                stored[:, copies] = stored[:, origin.pages[full], None]

    def decode_pieces(self, decoding: Sequence[CachedRow]) -> list[PagedPiece]:
        """The piece of a forward pass of one token for each `decoding` row, padded to one of few numbers of
        rows and of pages, so that few graphs are captured.
        """
        padding = [None] * (few_shapes(len(decoding)) - len(decoding))
        columns = most = max(len(row.pages) for row in decoding)
        if decode_kernel(self.layers[0].device):  # else whatever is read is copied
            columns = FEWEST_COLUMNS
        while columns < most:
            columns *= 4
        return [self._piece([*decoding, *padding], columns, decoding=True)]

    def writing_pieces(self, rows: Sequence[CachedRow], width: int) -> list[PagedPiece]:
        """The piece of a forward pass that writes at most `width` tokens of each row."""
        reach = max(row.length for row in rows) + width
        return [self._piece(rows, self.room(reach) // PAGE, decoding=False)]

    def _piece(self, rows: Sequence[CachedRow | None], columns: int, decoding: bool) -> PagedPiece:
        table = np.full((len(rows), columns), NOWHERE)
        for own, row in zip(table, rows, strict=True):
            if row is not None:
                own[: len(row.pages)] = row.pages[:columns]
        return PagedPiece(self, rows, torch.from_numpy(table), columns * PAGE, decoding)

    def _give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.owners[page] -= 1
            if not self.owners[page]:
                self.free.append(page)


def few_shapes(number: int) -> int:
    """The next power of two, or three quarters of it."""
    power = 1 << (number - 1).bit_length()
    return power * 3 // 4 if number <= power * 3 // 4 else power


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: each stream that ever computed keeps its own workspaces."""
    return torch.cuda.Stream(device)


class DecodeGraphs:
    """One fixed function of tensors as CUDA graphs, one a shape, captured on first use.

    A graph reads and writes the same memory at every replay: its inputs are copied there, and what it gives
    lasts until the next replay, since all graphs have one memory pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Sequence[Tensor], Tensor]] = {}
        self.pool: tuple[int, int] | None = None

    def drop(self) -> None:
        """End all graphs at once: to end one takes the workspace of the others (pytorch/pytorch#193402)."""
        for graph, *_ in self.captured.values():
            graph.reset()
        self.captured.clear()

    def run(self, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """What `compute` gives for these inputs, which may be on the CPU."""
        key = tuple(part.shape for part in inputs)
        if key not in self.captured:
            self.captured[key] = self._capture(compute, [part.to(self.device) for part in inputs])
        graph, own, result = self.captured[key]
        for part, new in zip(own, inputs, strict=True):
            part.copy_(new if new.is_cuda else new.pin_memory(), non_blocking=True)
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
