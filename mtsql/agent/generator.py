"""Batched generation with a live key/value cache, for any Hugging Face causal language model.

Each trajectory owns one row of the cache from its prompt to its last message. Rows are left-aligned
with their own lengths, so there is no padding inside a row. Between two operations the cache holds
all tokens of a row but the last, the *pending* one; a decode step feeds the pending tokens and
samples the next. So prompts and observations are written into the cache without running the output
head on them, and sampling happens in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

GROUPED = "sdpa_grouped_queries"
BUCKET = 64  # Attention sees a multiple of this many positions.
# Prompts and observations go through the model in chunks of rows with about so many tokens: many for a
# GPU; few for a CPU, where padding costs more than another call.
TOKENS_PER_FORWARD = {"cpu": 1024}
TOKENS_PER_FORWARD_ELSEWHERE = 8192


def _grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention in the signature of transformers, for queries (rows, heads, tokens, head_dim) against
    the cache (rows, kv_heads, reach, head_dim); gives (rows, tokens, heads, head_dim).

    The queries that share a key head are laid behind each other as more tokens, so that the cache is
    read once and not repeated for each of them.
    """
    rows, heads, tokens, head_dim = query.shape
    kv_heads, reach = key.shape[1:3]
    shared = heads // kv_heads
    visible = attention_mask.expand(rows, shared, tokens, reach).reshape(rows, 1, shared * tokens, reach)
    out = nn.functional.scaled_dot_product_attention(
        query.reshape(rows, kv_heads, shared * tokens, head_dim), key, value, visible, scale=scaling
    )  # (rows, kv_heads, shared x tokens, head_dim)
    return out.reshape(rows, heads, tokens, head_dim).transpose(1, 2), None


AttentionInterface.register(GROUPED, _grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


@dataclass(eq=False)
class Row:
    """One trajectory in the cache and the message it is writing (or has just written)."""

    slot: int
    rng: np.random.Generator
    pending: int
    limit: int
    length: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    decoding: bool = True
    ended: bool = False

    def begin(self, limit: int) -> None:
        """Start a message of at most `limit` tokens."""
        if limit < 1:
            raise ValueError(f"A message needs room for at least one token, not {limit}.")
        self.limit, self.ids, self.logprobs = limit, [], []
        self.decoding, self.ended = True, False


class RowCache:
    """Keys and values of every layer, (slots, kv_heads, capacity, head_dim) each.

    Passed to the model as `past_key_values`. `aim` says where the next forward writes and what it
    attends to. Memory is touched only as far as it is used, which is what costs time on a CPU.
    """

    def __init__(self) -> None:
        self.layers: list[list[Tensor]] = []
        self.slots_reserved = 0
        self.capacity = 0
        self.used = 0

    def reserve(self, slots: int, reach: int) -> None:
        """Make room for `slots` slots of `reach` positions. What is not written yet holds zeros:
        masked attention to NaN would still be NaN."""
        if slots > self.slots_reserved or reach > self.capacity:
            self.slots_reserved = max(slots, self.slots_reserved)
            if reach > self.capacity:
                self.capacity = -(-reach * 3 // (2 * BUCKET)) * BUCKET
            for layer in self.layers:
                for i, old in enumerate(layer):
                    layer[i] = self._allocate(old)
                    layer[i][: len(old), :, : self.used] = old[:, :, : self.used]
        if reach > self.used:
            for tensor in (t for layer in self.layers for t in layer):
                tensor[:, :, self.used : reach] = 0
            self.used = reach

    def aim(self, slots: Tensor | int, positions: Tensor, reach: int) -> int:
        """Next forward: row i is slot `slots[i]` (or i, for a count of slots), its tokens are
        written at `positions` (rows, tokens), and it attends to the first `reach` positions,
        rounded up to a bucket. Returns the rounded number."""
        reach = -(-reach // BUCKET) * BUCKET
        self.reserve(0, reach)
        self._gather = None if isinstance(slots, int) else slots.to(positions.device)  # (rows,)
        everywhere = torch.arange(slots) if isinstance(slots, int) else slots  # (rows,)
        self._slots = everywhere.to(positions.device)[:, None]  # (rows, 1)
        self._positions, self._reach = positions, reach
        return reach

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Write (rows, kv_heads, tokens, head_dim); return all that the rows may attend to."""
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

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of the source slots into the target slots."""
        for tensor in (t for layer in self.layers for t in layer):
            tensor[list(targets), :, :length] = tensor[list(sources), :, :length]

    def _allocate(self, like: Tensor) -> Tensor:
        """Storage for tensors such as `like` (any, kv_heads, any, head_dim), zero where used."""
        shape = (self.slots_reserved, like.shape[1], self.capacity, like.shape[3])
        storage = torch.empty(shape, dtype=like.dtype, device=like.device)
        storage[:, :, : self.used] = 0
        return storage


class Generator:
    """Samples model messages for many trajectories at once. Use as a context manager.

    `rows[i]` lives in slot i of the cache. Each row draws its uniforms from its own generator, for
    its own tokens only, so a trajectory does not depend on the batch it is in (up to the rounding
    of matrix products of different sizes). At temperature 0 decoding is greedy. Log-probabilities
    are those of softmax(logits / temperature), at temperature 1 when greedy; top_p narrows the
    choice but not the log-probability.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        end_of_turn_ids: Sequence[int],
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> None:
        attention = model.config._attn_implementation
        layer_types = set(getattr(model.config, "layer_types", None) or ())
        if not attention.startswith("sdpa"):
            raise ValueError(f"The model uses {attention!r} attention; load it with 'sdpa'.")
        if layer_types - {"full_attention"}:
            raise ValueError(f"The model has {sorted(layer_types)}, only full attention is known.")
        self.model = model
        self.end_of_turn_ids = frozenset(end_of_turn_ids)
        self.temperature = temperature
        self.top_p = top_p
        self.rows: list[Row] = []
        self.cache = RowCache()

    def __enter__(self) -> Generator:
        self._training = [m for m in self.model.modules() if m.training]
        self._attention = self.model.config._attn_implementation
        self.model.set_attn_implementation(GROUPED)
        self.model.eval()
        return self

    def __exit__(self, *_: object) -> None:
        self.model.set_attn_implementation(self._attention)
        for module in self._training:
            module.training = True
        self.rows, self.cache = [], RowCache()

    @torch.inference_mode()
    def start(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], limits: Sequence[int]
    ) -> list[Row]:
        """New rows for these prompts; each distinct prompt is computed once and its cache copied.

        `limits` bounds the tokens of the first message. Raises ValueError for an empty prompt.
        """
        if not all(prompts):
            raise ValueError("A prompt needs at least one token.")
        started = []
        for prompt, seed, limit in zip(prompts, seeds, limits, strict=True):
            rng = np.random.Generator(np.random.PCG64(seed))
            row = Row(len(self.rows) + len(started), rng, prompt[-1], limit)
            row.begin(limit)
            started.append(row)
        self.rows += started
        self.cache.reserve(len(self.rows), max(map(len, prompts)))
        samples: dict[tuple[int, ...], list[Row]] = {}
        for row, prompt in zip(started, prompts, strict=True):
            samples.setdefault(tuple(prompt[:-1]), []).append(row)
        self._write([group[0] for group in samples.values()], list(samples))
        for prefix, (first, *others) in samples.items():
            if others and prefix:
                slots = [row.slot for row in others]
                self.cache.copy([first.slot] * len(slots), slots, len(prefix))
            for row in others:
                row.length = len(prefix)
        return started

    @torch.inference_mode()
    def append(self, rows: Sequence[Row], ids: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        """Put observations after the rows' last messages and begin new messages."""
        unwritten = [[row.pending, *new] for row, new in zip(rows, ids, strict=True)]
        self._write(rows, [new[:-1] for new in unwritten])
        for row, new, limit in zip(rows, unwritten, limits, strict=True):
            row.pending = new[-1]
            row.begin(limit)

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Sample one token in every decoding row; return the rows whose messages are complete."""
        decoding = [row for row in self.rows if row.decoding]
        if not decoding:
            return []
        # Rows that wait for an observation go along: this writes their pending token in place.
        logits = self._forward(
            len(self.rows), [[row.pending] for row in self.rows], [row.length for row in self.rows]
        )[:, -1]  # (slots, vocabulary)
        if len(decoding) < len(self.rows):
            logits = logits[[row.slot for row in decoding]]  # (decoding rows, vocabulary)
        ids, logprobs = self._sample(logits, [row.rng for row in decoding])
        complete = []
        for row, token, logprob in zip(decoding, ids, logprobs, strict=True):
            row.length += 1
            row.pending = token
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.ended = token in self.end_of_turn_ids
            if row.ended or len(row.ids) == row.limit:
                row.decoding = False
                complete.append(row)
        return complete

    @torch.inference_mode()
    def release(self, rows: Sequence[Row]) -> None:
        """Free the slots of finished rows and move the last rows into the gaps."""
        gone = {row.slot for row in rows}
        count = len(self.rows) - len(gone)
        gaps = sorted(slot for slot in gone if slot < count)
        movers = [row for row in self.rows[count:] if row.slot not in gone]
        if movers:
            used = max(row.length for row in movers)
            self.cache.copy([row.slot for row in movers], gaps, used)
        for row, slot in zip(movers, gaps, strict=True):
            row.slot = slot
            self.rows[slot] = row
        del self.rows[count:]

    def _write(self, rows: Sequence[Row], ids: Sequence[Sequence[int]]) -> None:
        """Extend the cache of `rows` by `ids`, in chunks of rows with similar lengths."""
        size = TOKENS_PER_FORWARD.get(self.model.device.type, TOKENS_PER_FORWARD_ELSEWHERE)
        order = sorted(range(len(rows)), key=lambda i: len(ids[i]))
        while order:
            longest = max(len(ids[order[-1]]), 1)
            chunk = order[-max(size // longest, 1) :]
            del order[-len(chunk) :]
            chunk = [i for i in chunk if ids[i]]
            if chunk:
                slots = torch.tensor([rows[i].slot for i in chunk])  # (rows,)
                self._forward(slots, [ids[i] for i in chunk], [rows[i].length for i in chunk])
            for i in chunk:
                rows[i].length += len(ids[i])

    def _forward(self, slots: Tensor | int, ids: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
        """Logits (rows, 1, vocabulary) of the last column of `ids`, right-padded to one width.

        Padding is written after the end of its row, where no row attends before it is overwritten.
        """
        width = max(map(len, ids))
        padded = [[*row, *[0] * (width - len(row))] for row in ids]
        device = self.model.device
        input_ids = torch.tensor(padded, device=device)  # (rows, width)
        start = torch.tensor(lengths, device=device)[:, None]  # (rows, 1)
        positions = start + torch.arange(width, device=device)  # (rows, width)
        reach = self.cache.aim(slots, positions, max(lengths) + width)
        visible = torch.arange(reach, device=device) <= positions[..., None]  # (rows, width, reach)
        return self.model(
            input_ids=input_ids,
            attention_mask=visible[:, None],  # (rows, 1, width, reach)
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits

    def _sample(self, logits: Tensor, rngs: Sequence[np.random.Generator]) -> tuple[list[int], list[float]]:
        """One token per row of `logits` (rows, vocabulary), with its log-probability."""
        scores = logits.float()  # (rows, vocabulary)
        if self.temperature > 0:
            scores = scores / self.temperature
        logprobs = scores.log_softmax(-1)  # (rows, vocabulary)
        if self.temperature > 0:
            uniforms = torch.tensor([[rng.random()] for rng in rngs], dtype=torch.float64)
            chosen = _inverse_cdf(logprobs.exp(), uniforms.to(logits.device), self.top_p)
        else:
            chosen = logprobs.argmax(-1, keepdim=True)  # (rows, 1)
        picked = logprobs.gather(-1, chosen)[:, 0].tolist()
        if any(p != p for p in picked):
            raise FloatingPointError("The model's logits hold NaN.")
        return chosen[:, 0].tolist(), picked


def _inverse_cdf(probs: Tensor, uniforms: Tensor, top_p: float) -> Tensor:
    """Sample ids (rows, 1) from `probs` (rows, vocabulary) with one uniform (rows, 1) each.

    With `top_p` below 1, only the most probable tokens that together reach `top_p` are drawn.
    """
    if top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)  # (rows, vocabulary)
        before = ordered.cumsum(-1) - ordered  # (rows, vocabulary)
        probs = probs.scatter(-1, order, ordered.masked_fill(before >= top_p, 0.0))
    cdf = probs.cumsum(-1, dtype=torch.float64)  # (rows, vocabulary)
    # Uniforms are below 1, so a token with mass is found; only NaN leads past the end.
    return torch.searchsorted(cdf, uniforms * cdf[:, -1:], right=True).clamp(max=cdf.shape[-1] - 1)
