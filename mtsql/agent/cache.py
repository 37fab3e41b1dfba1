"""The key/value cache of a generator, one row a trajectory, and attention to it; on a GPU: pages.py.

Rows live in tiers by their length: one of 300 tokens takes 320 positions, whatever its limits would allow.
A row that outgrows its tier moves to a wider one. So memory goes by what rows use, short rows are never read
as far as long ones, and every tensor stays dense. A decode step reads rows to their tier's capacity: in
half precision a CPU's matrix products would first copy a shorter slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from mtsql.errors import UserError

if TYPE_CHECKING:  # it imports this module
    from mtsql.agent.decoder import Decoder

TIER_STEP = 64  # Tiers have multiples of so many positions.
SHARE_OF_FREE = 0.7  # of the device's free memory, for the cache; the rest is for activations
WATERMARK = 16  # A row comes in only if a 16th of the cache stays free for those inside to grow.


@dataclass(eq=False)
class CachedRow:
    """Where a row is kept, a slot in a tier or pages: `room` positions (0: it is not in the cache), of which
    `length` hold its tokens.
    """

    room: int = field(default=0, init=False)
    length: int = field(default=0, init=False)
    tier: Tier | None = field(default=None, init=False)
    slot: int = field(default=0, init=False)
    pages: list[int] = field(default_factory=list, init=False)


@dataclass(eq=False)
class Slots:
    """Keys and values of every layer in slots of `capacity` positions: rows of a tier, or pages."""

    capacity: int
    slots: int = 0
    layers: list[Tensor] = field(default_factory=list)  # of each, see `store`

    def store(self, layer: int, like: Tensor) -> Tensor:
        """Keys and values of a layer, (2, slots, kv_heads, capacity, head_dim); `like` (tokens, kv_heads,
        head_dim) gives two sizes.
        """
        if layer == len(self.layers):
            self.layers.append(zeros((2, self.slots, like.shape[1], self.capacity, like.shape[2]), like))
        return self.layers[layer]


@dataclass(eq=False)
class Tier(Slots):
    """Rows of at most `capacity` positions; `rows[i]` is in slot i."""

    rows: list[CachedRow] = field(default_factory=list)

    def resize(self, slots: int) -> None:
        """Reallocate to `slots` slots, no fewer than there are rows."""
        self.slots = slots
        self.layers = self.layers if slots else []
        for i, old in enumerate(self.layers):
            self.layers[i] = zeros((2, slots, *old.shape[2:]), old)
            self.layers[i][:, : len(self.rows)] = old[:, : len(self.rows)]


def zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros of the dtype and on the device of `like`.

    Attention to a NaN would be NaN even behind an attention mask.
    """
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    # numpy asks the system for huge pages, which are zero when first touched: attention reads them faster
    content = np.zeros(like.element_size() * math.prod(shape), dtype=np.uint8)
    return torch.from_numpy(content).view(like.dtype).view(shape)


@dataclass(frozen=True)
class Piece:
    """Rows in a forward pass, read to `reach`; `table` (rows, columns) int64 has the slots of each, in order.

    `decoding`: a decode step, which gives logits; of a tier it takes all rows.
    """

    home: Slots
    rows: Sequence[CachedRow | None]
    table: Tensor
    reach: int
    decoding: bool

    def places(self, positions: Tensor, kv_heads: int) -> Tensor:
        """Where keys of tokens at `positions` (rows, tokens) are, (rows x tokens x kv_heads,) int64, in a
        layer's keys as (slots x kv_heads x capacity, head_dim).
        """
        capacity = self.home.capacity
        slots = self.table.gather(1, positions // capacity)[..., None]  # (rows, tokens, 1)
        heads = slots * kv_heads + torch.arange(kv_heads, device=slots.device)
        return (heads * capacity + positions[..., None] % capacity).flatten()

    def read(self, layer: int) -> Tensor:
        """The rows' keys and values of a layer, (2, rows, kv_heads, reach, head_dim)."""
        slots = slice(len(self.rows)) if self.decoding else self.table[:, 0]
        return self.home.layers[layer][:, slots, :, : self.reach]

    def attention(self, positions: Tensor, heads: int, kv_heads: int, dtype: torch.dtype) -> Attention:
        """Attention of tokens at `positions` (rows, tokens) to these rows."""
        return Attention(self, positions, heads, kv_heads, dtype)


class RowCache:
    """Keys and values of every layer, of at most `positions` positions in all tiers.

    `longest` bounds the positions of a row.
    """

    def __init__(self, longest: int | None, positions: int) -> None:
        self.longest, self.positions = longest, positions
        self.tiers: dict[int, Tier] = {}  # by capacity, ascending

    @property
    def reserved(self) -> int:
        """Positions of all slots."""
        return sum(tier.slots * tier.capacity for tier in self.tiers.values())

    def room(self, need: int) -> int:
        """Positions that a row of `need` positions takes."""
        wide = TIER_STEP * max(1, -(-need // TIER_STEP))
        return max(need, min(wide, self.longest or wide))

    def admit(self, row: CachedRow, need: int, like: CachedRow | None = None) -> bool:
        """Give a row a slot of at least `need` positions; False if there is no room. `like`: see pages.py."""
        tier = self._tier(need)
        empty = not any(other.rows for other in self.tiers.values())
        if not self._widen(tier, 0 if empty else self.positions // WATERMARK):
            return False
        self._enter(row, tier)
        return True

    def lift(self, row: CachedRow, need: int) -> bool:
        """Move a row to a tier of at least `need` positions; False if there is no room."""
        tier = self._tier(need)
        if not self._widen(tier, 0):
            return False
        old, slot, length = row.tier, row.slot, row.length
        self._enter(row, tier)
        row.length = length
        self._copy(old, slot, tier, [row.slot], length)
        self._close_gaps(old, {slot})
        return True

    def drop(self, rows: Sequence[CachedRow]) -> None:
        """Free the slots of rows, and move the last rows of a tier into the gaps that they leave."""
        gone: dict[Tier, set[int]] = {}
        for row in rows:
            if row.room:
                gone.setdefault(row.tier, set()).add(row.slot)
                row.room, row.length, row.tier, row.slot = 0, 0, None, 0
        for tier, slots in gone.items():
            self._close_gaps(tier, slots)

    def share(self, origin: CachedRow, rows: Sequence[CachedRow], length: int) -> None:
        """Copy the first `length` tokens of `origin` to rows that have none."""
        targets: dict[Tier, list[int]] = {}
        for row in rows:
            targets.setdefault(row.tier, []).append(row.slot)
            row.length = length
        for tier, slots in targets.items():
            self._copy(origin.tier, origin.slot, tier, slots, length)

    def decode_pieces(self, decoding: Sequence[CachedRow]) -> list[Piece]:
        """The pieces of a decode step of these rows, tier by tier.

        Rows that wait for an observation go along: this writes their last token in place.
        """
        going_on = set(decoding)
        return [
            Piece(tier, tier.rows, torch.arange(len(tier.rows))[:, None], tier.capacity, decoding=True)
            for tier in self.tiers.values()
            if not going_on.isdisjoint(tier.rows)
        ]

    def writing_pieces(self, rows: Sequence[CachedRow], width: int) -> list[Piece]:
        """The pieces of a forward pass that writes at most `width` tokens of each row, given tier by tier."""
        pieces = []
        for tier, held in groupby(rows, attrgetter("tier")):
            own = list(held)
            reach = min(max(row.length for row in own) + width, tier.capacity)
            table = torch.tensor([[row.slot] for row in own])
            pieces.append(Piece(tier, own, table, reach, decoding=False))
        return pieces

    def _tier(self, need: int) -> Tier:
        capacity = self.room(need)
        if capacity not in self.tiers:
            self.tiers[capacity] = Tier(capacity)
            self.tiers = dict(sorted(self.tiers.items()))
        return self.tiers[capacity]

    def _widen(self, tier: Tier, spare: int) -> bool:
        """See to it that `tier` has a free slot and `spare` positions stay free; False if they cannot."""
        least = len(tier.rows) + 1
        others = [other for other in self.tiers.values() if other is not tier]
        taken = sum(len(other.rows) * other.capacity for other in others)
        if taken + least * tier.capacity + spare > self.positions:
            return False
        if least <= tier.slots:
            return True
        slots = least * 5 // 4
        if self.reserved + (slots - tier.slots) * tier.capacity + spare > self.positions:
            slots = least
            for other in others:
                if len(other.rows) < other.slots:  # It gives back what it does not use.
                    other.resize(len(other.rows))
        tier.resize(slots)
        return True

    def _enter(self, row: CachedRow, tier: Tier) -> None:
        row.room, row.length, row.tier, row.slot = tier.capacity, 0, tier, len(tier.rows)
        tier.rows.append(row)

    def _close_gaps(self, tier: Tier, gone: set[int]) -> None:
        count = len(tier.rows) - len(gone)
        gaps = sorted(slot for slot in gone if slot < count)
        movers = [row for slot, row in enumerate(tier.rows) if slot >= count and slot not in gone]
        for row, slot in zip(movers, gaps, strict=True):
            self._copy(tier, row.slot, tier, [slot], row.length)
            row.slot, tier.rows[slot] = slot, row
        del tier.rows[count:]

    def _copy(self, origin: Tier, source: int, tier: Tier, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of a slot into slots of a tier."""
        for i, old in enumerate(origin.layers if length else ()):
            new = tier.store(i, old[0, 0].transpose(0, 1))
            for target in targets:
                new[:, target, :, :length] = old[:, source, :, :length]


def cache_positions(model: PreTrainedModel | Decoder, longest: int | None) -> int:
    """How many positions a cache of most of the device's free memory has.

    Raises UserError if it does not hold a row of `longest` positions.
    """
    size = SHARE_OF_FREE * free_memory(model.device)
    held = int(size / cache_bytes_per_token(model))
    if longest and longest > held:
        raise UserError(
            f"a cache of {size / 2**30:.3g} GiB holds {held} tokens, but a trajectory may take {longest}; "
            "lower --max-response-tokens, or take a smaller model"
        )
    return held


def free_memory(device: torch.device) -> int:
    """Bytes of the device's memory that this process may still take."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def cache_bytes_per_token(model: PreTrainedModel | Decoder) -> int:
    """Memory of one position of one row in the cache, over all layers."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize


class Attention:
    """The tokens of a piece in a forward pass, each of which sees its row up to itself.

    Query heads that share a key head are treated as more tokens of one head, so that the cache is not copied
    for each of them.
    """

    def __init__(
        self, piece: Piece, positions: Tensor, heads: int, kv_heads: int, dtype: torch.dtype
    ) -> None:
        """`positions` (rows, tokens) of the piece's rows."""
        self.piece, self.shape = piece, (*positions.shape, kv_heads, heads // kv_heads)
        self.places = piece.places(positions, kv_heads)
        places = torch.arange(piece.reach, device=positions.device)
        hidden = places > positions[..., None]  # (rows, tokens, reach)
        attention_mask = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
        # A CPU's kernel of SDPA is made for many queries: two products read the cache faster.
        self.as_products = positions.shape[1] == 1 and positions.device.type == "cpu"
        if self.as_products:
            self.attention_mask = attention_mask.repeat_interleave(kv_heads, 0)  # (rows x kv_heads, 1, reach)
        else:
            grouped = attention_mask[:, None].expand(-1, heads // kv_heads, -1, -1)
            self.attention_mask = grouped.flatten(1, 2)[:, None]  # (rows, 1, shared x tokens, reach)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put the tokens' keys and values of a layer, (rows x tokens, kv_heads, head_dim), into the cache."""
        stored = self.piece.home.store(layer, keys)
        for part, new in zip(stored, (keys, values), strict=True):
            part.view(-1, new.shape[-1]).index_copy_(0, self.places, new.flatten(0, 1))

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """(rows x tokens, heads, head_dim) to (rows x tokens, heads x head_dim)."""
        rows, tokens, kv_heads, shared = self.shape
        keys, values = self.piece.read(layer)  # (rows, kv_heads, reach, head_dim)
        # (rows, kv_heads, shared x tokens, head_dim)
        queries = queries.reshape(*self.shape, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        if self.as_products:
            seen = self._products(queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1))
        else:
            seen = F.scaled_dot_product_attention(queries, keys, values, self.attention_mask)
        seen = seen.view(rows, kv_heads, shared, tokens, -1).permute(0, 3, 1, 2, 4)
        return seen.reshape(rows * tokens, -1)

    def _products(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Queries (rows x kv_heads, shared, head_dim) to the same over (rows x kv_heads, reach, head_dim)."""
        scale = queries.shape[-1] ** -0.5
        if queries.dtype == torch.float32 and queries.shape[-1] > 64:  # measured: faster this way round
            attention_mask = self.attention_mask.transpose(1, 2)
            scores = torch.baddbmm(attention_mask, keys, queries.transpose(1, 2), alpha=scale).transpose(1, 2)
        else:
            scores = torch.baddbmm(self.attention_mask, queries, keys.transpose(1, 2), alpha=scale)
        return torch.bmm(scores.softmax(-1, dtype=torch.float32).to(values.dtype), values)
