"""Attention of the tokens of a forward pass to their rows in the cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mtsql.agent.cache import Piece


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
        hidden = torch.arange(piece.reach, device=positions.device) > positions[..., None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        # A CPU's kernel of SDPA is made for many queries: two products read the cache faster.
        self.as_products = positions.shape[1] == 1 and positions.device.type == "cpu"
        if self.as_products:
            self.mask = mask.repeat_interleave(kv_heads, 0)  # (rows x kv_heads, 1, reach)
        else:
            shared = mask[:, None].expand(-1, heads // kv_heads, -1, -1)
            self.mask = shared.flatten(1, 2)[:, None]  # (rows, 1, shared x tokens, reach)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put the tokens' keys and values of a layer, (rows x tokens, kv_heads, head_dim), into the cache."""
        stored = self.piece.tier.store(layer, keys[:, :, None])
        for part, new in zip(stored, (keys, values), strict=True):
            part.view(-1, new.shape[-1]).index_copy_(0, self.places, new.flatten(0, 1))

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """(rows x tokens, heads, head_dim) to (rows x tokens, heads x head_dim)."""
        rows, tokens, kv_heads, shared = self.shape
        keys, values = self.piece.read(self.piece.tier.layers[layer])  # (rows, kv_heads, reach, head_dim)
        queries = queries.reshape(*self.shape, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        if self.as_products:
            seen = self._products(queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1))
        else:
            seen = F.scaled_dot_product_attention(queries, keys, values, self.mask)
        seen = seen.view(rows, kv_heads, shared, tokens, -1).permute(0, 3, 1, 2, 4)
        return seen.reshape(rows * tokens, -1)

    def _products(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Queries (rows x kv_heads, shared, head_dim) against (rows x kv_heads, reach, head_dim)."""
        scale = queries.shape[-1] ** -0.5
        if queries.dtype == torch.float32 and queries.shape[-1] > 64:  # measured: faster this way round
            mask = self.mask.transpose(1, 2)
            scores = torch.baddbmm(mask, keys, queries.transpose(1, 2), alpha=scale).transpose(1, 2)
        else:
            scores = torch.baddbmm(self.mask, queries, keys.transpose(1, 2), alpha=scale)
        return torch.bmm(scores.softmax(-1, dtype=torch.float32).to(values.dtype), values)
