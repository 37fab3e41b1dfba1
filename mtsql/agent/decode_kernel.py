"""Attention of one new token a row to the pages of its row, split over them: a Triton kernel.

Without the split one program would read a whole row, so that one row keeps as many of a GPU's processors busy
as it has key heads. A chunk has a fixed number of pages: what is added up in a row does not depend on its
batch. The results of chunks are weighted by their shares of the softmax's sum (flash-decoding, Dao et al.
2023), pages of a chunk by an online softmax. The slow way to the same numbers is `Attention` in cache.py.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

PAGES_A_CHUNK = 8
LEAST = 16  # the smallest side of a product of tensor cores


@triton.jit
def attend_chunk(
    queries, keys, values, table, lengths, partial, logsums, columns, chunks, scale,
    kv_heads: tl.constexpr, shared: tl.constexpr, head_dim: tl.constexpr, page: tl.constexpr,
    pages_a_chunk: tl.constexpr, wide: tl.constexpr, deep: tl.constexpr,
):  # fmt: skip
    """The query heads that share a key head of one row, (wide, deep), against one chunk of its pages."""
    row, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    q_at, d_at, p_at = tl.arange(0, wide), tl.arange(0, deep), tl.arange(0, page)
    there = (q_at < shared)[:, None] & (d_at < head_dim)[None, :]
    q_from = (row * kv_heads + head) * shared + q_at
    query = tl.load(queries + q_from[:, None] * head_dim + d_at[None, :], there, 0.0)  # (wide, deep)
    top = tl.full((wide,), -float("inf"), tl.float32)
    total = tl.zeros((wide,), tl.float32)
    sums = tl.zeros((wide, deep), tl.float32)
    first = chunk * pages_a_chunk
    for i in range(first, tl.minimum(first + pages_a_chunk, tl.cdiv(length, page))):
        place = tl.load(table + row * columns + i).to(tl.int64)
        at = ((place * kv_heads + head) * page + p_at)[:, None] * head_dim + d_at[None, :]
        seen = i * page + p_at < length
        whole = seen[:, None] & (d_at < head_dim)[None, :]
        key = tl.load(keys + at, whole, 0.0)  # (page, deep)
        value = tl.load(values + at, whole, 0.0)  # (page, deep)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # (wide, page) float32
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        kept, weights = tl.exp(top - higher), tl.exp(scores - higher[:, None])
        total = total * kept + tl.sum(weights, 1)
        sums = sums * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        top = higher
    # A chunk behind the end of its row has seen nothing: its share is exp(-inf).
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    to = q_from * chunks + chunk
    tl.store(partial + to[:, None] * head_dim + d_at[None, :], sums, there)
    tl.store(logsums + to, tl.where(total > 0, top + tl.log(total), -float("inf")), q_at < shared)


def attend_pages(queries: Tensor, stored: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Each row's queries against the first `lengths` (rows,) int64 positions of its pages.

    queries (rows, heads, head_dim); stored (2, pages, kv_heads, page, head_dim), keys and values; table
    (rows, columns) int64, a row's pages in order. Gives (rows, heads, head_dim).
    """
    rows, heads, head_dim = queries.shape
    _, _, kv_heads, page, _ = stored.shape
    columns, chunks = table.shape[1], triton.cdiv(table.shape[1], PAGES_A_CHUNK)
    partial = torch.empty(rows, heads, chunks, head_dim, dtype=torch.float32, device=queries.device)
    logsums = torch.empty(rows, heads, chunks, dtype=torch.float32, device=queries.device)
    given = (queries.contiguous(), *stored, table, lengths, partial, logsums, columns, chunks, head_dim**-0.5)
    attend_chunk[rows, kv_heads, chunks](*given, **sizes(heads, kv_heads, head_dim, page))
    shares = logsums.softmax(-1)  # (rows, heads, chunks)
    return (shares[..., None] * partial).sum(2).to(queries.dtype)


def sizes(heads: int, kv_heads: int, head_dim: int, page: int) -> dict[str, int]:
    """What the kernel is compiled for."""
    shared = heads // kv_heads
    wide, deep = (max(LEAST, triton.next_power_of_2(size)) for size in (shared, head_dim))
    names = ("kv_heads", "shared", "head_dim", "page", "pages_a_chunk", "wide", "deep")
    return dict(zip(names, (kv_heads, shared, head_dim, page, PAGES_A_CHUNK, wide, deep), strict=True))
