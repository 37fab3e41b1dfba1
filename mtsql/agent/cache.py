"""The key/value cache of a generator, one row a trajectory, and the attention that reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from mtsql.errors import UserError

GROUPED = "sdpa_grouped_queries"
BUCKET = 64  # Attention sees a multiple of this many positions,
STATIC_BUCKET = 256  # or of this many where each multiple has a captured graph.
DECODE_ROWS = 64  # On a CPU each block of so many rows is read only as far as its longest row.


class RowCache:
    """Keys and values of every layer, (slots, kv_heads, capacity, head_dim) each; a row is kept in a slot.

    Passed to the model as `past_key_values`. `aim` says where the next forward pass writes and what it
    attends to. The capacity grows by half when more is needed, up to `longest` positions.
    """

    def __init__(self, longest: int | None = None, bucket: int = BUCKET) -> None:
        self.longest = longest
        self.bucket = bucket
        self.moves = 0  # times that the storage moved, which makes captured graphs worthless
        self.layers: list[list[Tensor]] = []
        self.all_slots: dict[int, Tensor] = {}  # kept, since captured graphs read them
        self.slots_reserved = 0
        self.capacity = 0

    def reserve(self, slots: int, reach: int) -> None:
        """Make room for `slots` slots of `reach` positions."""
        if slots > self.slots_reserved or reach > self.capacity:
            self.slots_reserved = max(slots, self.slots_reserved)
            self.moves += 1
            if reach > self.capacity:
                roomy = max(reach, min(reach * 3 // 2, self.longest or reach * 3 // 2))
                self.capacity = -(-roomy // self.bucket) * self.bucket
            for layer in self.layers:
                for i, old in enumerate(layer):
                    layer[i] = self._allocate(old)
                    layer[i][: len(old), :, : old.shape[2]] = old

    def aim(self, slots: Tensor | int, positions: Tensor, reach: int) -> int:
        """Prepare the next forward pass; returns `reach` rounded up to a bucket.

        Row i of its input is slot `slots[i]`, or slot i if `slots` is a number of slots. Its tokens are
        written at `positions` (rows, tokens), and it attends to the first `reach` positions, rounded up.
        """
        reach = -(-reach // self.bucket) * self.bucket
        self.reserve(0, reach)
        if isinstance(slots, int):
            if slots not in self.all_slots:
                self.all_slots[slots] = torch.arange(slots, device=positions.device)[:, None]  # (rows, 1)
            self._gather, self._slots = None, self.all_slots[slots]
        else:
            self._gather = slots.to(positions.device)  # (rows,)
            self._slots = self._gather[:, None]  # (rows, 1)
        self._positions, self._reach = positions, reach
        return reach

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Write keys and values, (rows, kv_heads, tokens, head_dim) both; return those to attend to."""
        if layer == len(self.layers):
            self.layers.append([self._allocate(keys), self._allocate(values)])
        seen = []
        for stored, new in zip(self.layers[layer], (keys, values), strict=True):
            stored[self._slots, :, self._positions] = new.transpose(1, 2)
            if self._gather is None:
                seen.append(stored[: len(new), :, : self._reach])
            else:
                seen.append(stored[self._gather, :, : self._reach])
        return seen[0], seen[1]  # (rows, kv_heads, reach, head_dim)

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of a slot into other slots.

        Neighbouring targets are one slice: indexing by a list of slots is several times slower on a CPU.
        """
        neighbours: list[list[int]] = []  # [first, end) of each run of slots
        for target in sorted(targets):
            if neighbours and target == neighbours[-1][1]:
                neighbours[-1][1] = target + 1
            else:
                neighbours.append([target, target + 1])
        for tensor in (t for layer in self.layers for t in layer):
            for first, end in neighbours:
                tensor[first:end, :, :length] = tensor[source : source + 1, :, :length]

    def _allocate(self, like: Tensor) -> Tensor:
        """Storage for tensors such as `like` (any, kv_heads, any, head_dim).

        It is zeros, since attention to a NaN would be NaN even behind an attention mask.
        """
        shape = (self.slots_reserved, like.shape[1], self.capacity, like.shape[3])
        if like.device.type != "cpu":
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        # numpy asks the system for huge pages, which are zero when first touched: attention reads them faster
        zeros = np.zeros(like.element_size() * math.prod(shape), dtype=np.uint8)
        return torch.from_numpy(zeros).view(like.dtype).view(shape)


def _grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    reaches: Sequence[int] | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention in the signature of transformers, for queries (rows, heads, tokens, head_dim) against
    the cache (rows, kv_heads, reach, head_dim); gives (rows, tokens, heads, head_dim).

    Query heads that share a key head are treated as more tokens of one head, so that the cache is not
    copied for each of them. `reaches` is for decoding on a CPU (`_decode_attention`).
    """
    rows, heads, tokens, head_dim = query.shape
    kv_heads, reach = key.shape[1:3]
    shared = heads // kv_heads
    grouped = query.reshape(rows, kv_heads, shared * tokens, head_dim)
    attention_mask = attention_mask.to(query.dtype)
    if reaches is not None:
        out = _decode_attention(grouped, key, value, attention_mask, scaling or head_dim**-0.5, reaches)
    else:
        visible = attention_mask.expand(rows, shared, tokens, reach).reshape(rows, 1, shared * tokens, reach)
        visible = visible.contiguous()
        out = nn.functional.scaled_dot_product_attention(grouped, key, value, visible, scale=scaling)
    # out: (rows, kv_heads, shared x tokens, head_dim)
    return out.reshape(rows, heads, tokens, head_dim).transpose(1, 2), None


def _decode_attention(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, reaches: Sequence[int]
) -> Tensor:
    """Attention of one token a row on a CPU: query and result (rows, kv_heads, shared, head_dim).

    The first DECODE_ROWS rows attend to `reaches[0]` positions, the next to `reaches[1]`, and so on, so
    that short rows cost little. Two batched matrix products read the cache about 1.6 times as fast as SDPA,
    whose kernel for CPUs is made for many queries.
    """
    out = torch.empty_like(query)
    query = query * scaling
    for i, reach in enumerate(reaches):
        part = slice(i * DECODE_ROWS, (i + 1) * DECODE_ROWS)
        keys = key[part, :, :reach].flatten(0, 1)  # (rows x kv_heads, reach, head_dim), a view
        values = value[part, :, :reach].flatten(0, 1)
        scores = torch.bmm(keys, query[part].flatten(0, 1).transpose(1, 2))  # (any, reach, shared)
        scores.unflatten(0, (-1, key.shape[1])).add_(attention_mask[part, :, 0, :reach, None])
        weights = scores.transpose(1, 2).softmax(-1, torch.float32).to(values.dtype)
        out[part] = torch.bmm(weights, values).view_as(out[part])
    return out


AttentionInterface.register(GROUPED, _grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def rows_within(model: PreTrainedModel, gib: float, longest: int) -> int:
    """How many rows of `longest` positions a cache of `gib` GiB holds.

    Raises UserError if it does not hold one.
    """
    on_gpu = model.device.type == "cuda"
    bucket = STATIC_BUCKET if on_gpu else BUCKET
    held = int(gib * 2**30 / cache_bytes_per_token(model))
    rows = held // (-(-longest // bucket) * bucket)
    if rows < 1:
        raise UserError(
            f"a cache of {gib:g} GiB holds {held} tokens, but a trajectory may take {longest}; "
            "raise --cache-gib or lower --max-response-tokens"
        )
    return 1 << (rows.bit_length() - 1) if on_gpu else rows


def cache_bytes_per_token(model: PreTrainedModel) -> int:
    """Memory of one position of one row in the cache, over all layers."""
    config = model.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize
