"""Batched generation with a live key/value cache, for any Hugging Face causal language model.

Each trajectory owns one row of the cache from its prompt to its last message. Rows are left-aligned
with their own lengths, so that no row has padding inside. Between two operations the cache holds
all tokens of a row but the last, the *pending* one; a decode step feeds the pending tokens and
samples the next. So prompts and observations are written into the cache without running the output
head on them, and sampling happens in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from mtsql.agent.cache import BUCKET, DECODE_ROWS, GROUPED, STATIC_BUCKET, RowCache
from mtsql.agent.graphs import DecodeGraphs
from mtsql.agent.prefix import families
from mtsql.agent.trajectory import Stop
from mtsql.errors import UserError

# Prompts and observations go through the model in chunks of rows with about so many tokens: many for a
# GPU; few for a CPU, where padding costs more than another call.
TOKENS_PER_FORWARD = {"cpu": 1024}
TOKENS_PER_FORWARD_ELSEWHERE = 8192


@dataclass(eq=False)
class Row:
    """One trajectory in the cache and the message that is being sampled, or was just sampled."""

    slot: int
    rng: np.random.Generator
    pending: int  # its last token, which is not in the cache yet
    limit: int  # tokens of the message
    length: int = 0  # tokens in the cache
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: Stop | None = None

    def begin(self, limit: int) -> None:
        """Start a message of at most `limit` tokens."""
        if limit < 1:
            raise ValueError(f"A message needs room for at least one token, not {limit}.")
        self.limit, self.ids, self.logprobs, self.stop = limit, [], [], None

    @property
    def decoding(self) -> bool:
        """Whether its message is still being sampled."""
        return self.stop is None


class Generator:
    """Samples model messages for many trajectories at once. Use as a context manager.

    `rows[i]` is in slot i of the cache. Each row draws its random numbers from its own generator, one a
    token, so that a trajectory does not depend on the others in its batch (up to the rounding of matrix
    products of different sizes). At temperature 0 decoding is greedy. Log-probabilities are those of
    softmax(logits / temperature), of softmax(logits) when greedy.

    `stops(ids)` says whether a message with the ids `ids` ends with a stop string. With `static_shapes` (the
    default on a GPU) the decode step has one of few shapes, and on a GPU each of them is captured as a CUDA
    graph. `longest` bounds the positions of a row in the cache. Raises UserError for a model whose attention
    is neither SDPA nor flash-attn, or not full attention in every layer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        end_of_turn_ids: Sequence[int],
        temperature: float = 1.0,
        stops: Callable[[list[int]], bool] | None = None,
        longest: int | None = None,
        static_shapes: bool | None = None,
    ) -> None:
        attention = model.config._attn_implementation
        layer_types = set(getattr(model.config, "layer_types", None) or ())
        if not attention.startswith(("sdpa", "flash_attention_2")):
            raise UserError(f"The model uses {attention!r} attention; load it with 'sdpa'.")
        if layer_types - {"full_attention"}:
            raise UserError(f"The model has {sorted(layer_types)}, only full attention is known.")
        self.model = model
        self.end_of_turn_ids = frozenset(end_of_turn_ids)
        self.temperature = temperature
        self.stops = stops
        on_gpu = model.device.type == "cuda"
        self.static_shapes = on_gpu if static_shapes is None else static_shapes
        capture = on_gpu and self.static_shapes and not isinstance(model, FSDPModule)
        self.graphs = DecodeGraphs() if capture else None
        self.longest = longest
        self.rows: list[Row] = []
        self.cache = self._new_cache()

    def _new_cache(self) -> RowCache:
        return RowCache(self.longest, STATIC_BUCKET if self.static_shapes else BUCKET)

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
        self.rows, self.cache = [], self._new_cache()
        self.graphs = DecodeGraphs() if self.graphs else None

    @torch.inference_mode()
    def start(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], limits: Sequence[int]
    ) -> list[Row]:
        """New rows for these prompts; what several of them begin with is computed once and copied.

        `limits` are the most tokens of each row's first message. Raises ValueError for an empty prompt.
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
        self._prefill([group[0] for group in samples.values()], list(samples))
        for prefix, (head, *others) in samples.items():
            self._share(head, others, len(prefix))
        return started

    @torch.inference_mode()
    def append(self, rows: Sequence[Row], ids: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        """Put the observations `ids` after the rows' last messages and begin messages of at most `limits`."""
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
        spare = _power_of_two(len(self.rows)) - len(self.rows) if self.static_shapes else 0
        pending = [[row.pending] for row in self.rows] + [[0]] * spare
        lengths = [row.length for row in self.rows] + [0] * spare
        self.cache.reserve(len(pending), 0)
        logits = self._forward(len(pending), pending, lengths)[:, -1]  # (slots, vocabulary)
        if len(decoding) < len(pending):
            logits = logits[[row.slot for row in decoding]]  # (decoding rows, vocabulary)
        ids, logprobs = self._sample(logits, [row.rng for row in decoding])
        complete = []
        for row, token, logprob in zip(decoding, ids, logprobs, strict=True):
            row.length += 1
            row.pending = token
            row.ids.append(token)
            row.logprobs.append(logprob)
            if token in self.end_of_turn_ids:
                row.stop = Stop.END_OF_TURN
            elif self.stops is not None and self.stops(row.ids):
                row.stop = Stop.STOP_STRING
            elif len(row.ids) == row.limit:
                row.stop = Stop.LIMIT
            if row.stop is not None:
                complete.append(row)
        return complete

    @torch.inference_mode()
    def release(self, rows: Sequence[Row]) -> None:
        """Free the slots of finished rows, and move the last rows into the gaps that they leave."""
        gone = {row.slot for row in rows}
        count = len(self.rows) - len(gone)
        gaps = sorted(slot for slot in gone if slot < count)
        movers = [row for row in self.rows[count:] if row.slot not in gone]
        for row, slot in zip(movers, gaps, strict=True):
            self.cache.copy(row.slot, [slot], row.length)
            row.slot = slot
            self.rows[slot] = row
        del self.rows[count:]

    def _prefill(self, rows: Sequence[Row], prompts: Sequence[tuple[int, ...]]) -> None:
        """Write different prompts into new rows, what several begin with once, from the outermost on."""
        groups = [list(range(len(rows)))]
        while groups:
            alike = []
            for group in groups:
                rest = [prompts[i][rows[i].length :] for i in group]
                alike += [(shared, [group[place] for place in places]) for shared, places in families(rest)]
            starts = [(places[0], shared) for shared, places in alike]
            parts = [prompts[i][rows[i].length : rows[i].length + shared] for i, shared in starts]
            self._write([rows[i] for i, _ in starts], parts)
            for _, (origin, *others) in alike:
                self._share(rows[origin], [rows[i] for i in others], rows[origin].length)
            groups = [places for _, places in alike if len(places) > 1]

    def _share(self, origin: Row, rows: Sequence[Row], length: int) -> None:
        """Copy the first `length` tokens in the cache of `origin` to new rows."""
        if rows and length:
            self.cache.copy(origin.slot, [row.slot for row in rows], length)
        for row in rows:
            row.length = length

    def _write(self, rows: Sequence[Row], ids: Sequence[Sequence[int]]) -> None:
        """Extend the cache of `rows` by `ids`, in chunks of rows with similar lengths."""
        size = TOKENS_PER_FORWARD.get(self.model.device.type, TOKENS_PER_FORWARD_ELSEWHERE)
        order = sorted(range(len(rows)), key=lambda i: len(ids[i]))
        while order:
            longest = max(len(ids[order[-1]]), 1)
            chunk = order[-max(size // longest, 1) :]
            if self.longest and max(rows[i].length for i in chunk) + longest > self.longest:
                chunk = order[-1:]  # the padding of shorter rows would grow the cache beyond its plan
            del order[-len(chunk) :]
            chunk = [i for i in chunk if ids[i]]
            if chunk:
                slots = torch.tensor([rows[i].slot for i in chunk])  # (rows,)
                self._forward(slots, [ids[i] for i in chunk], [rows[i].length for i in chunk])
            for i in chunk:
                rows[i].length += len(ids[i])

    def _forward(self, slots: Tensor | int, ids: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
        """Logits (rows, 1, vocabulary) of the last column of `ids`, right-padded to one width.

        Padding is written to the cache after the end of its row; nothing attends to it before it is
        overwritten.
        """
        width = max(map(len, ids))
        padded = [[*row, *[0] * (width - len(row))] for row in ids]
        device = self.model.device
        input_ids = torch.tensor(padded, device=device)  # (rows, width)
        start = torch.tensor(lengths, device=device)[:, None]  # (rows, 1)
        positions = start + torch.arange(width, device=device)  # (rows, width)
        reach = max(lengths) + width
        if self.graphs is not None and isinstance(slots, int):
            return self.graphs.run(self._compute, self.cache, slots, input_ids, positions, reach)
        reaches = None
        if isinstance(slots, int) and device.type == "cpu":
            reaches = [max(lengths[i : i + DECODE_ROWS]) + 1 for i in range(0, slots, DECODE_ROWS)]
        return self._compute(input_ids, positions, self.cache.aim(slots, positions, reach), reaches)

    def _compute(
        self, input_ids: Tensor, positions: Tensor, reach: int, reaches: Sequence[int] | None = None
    ) -> Tensor:
        """Logits (rows, 1, vocabulary) of the last column of `input_ids` (rows, tokens).

        The cache was aimed before.
        """
        hidden = torch.arange(reach, device=positions.device) > positions[..., None]  # (rows, tokens, reach)
        attention_mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=hidden.device)
        attention_mask.masked_fill_(hidden, -torch.inf)
        return self.model(
            input_ids=input_ids,
            attention_mask=attention_mask[:, None],  # (rows, 1, tokens, reach)
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            reaches=reaches,
        ).logits

    def _sample(self, logits: Tensor, rngs: Sequence[np.random.Generator]) -> tuple[list[int], list[float]]:
        """One token per row of `logits` (rows, vocabulary), with its log-probability."""
        scores = logits.float()  # (rows, vocabulary)
        if self.temperature > 0:
            scores = scores / self.temperature
        logprobs = scores.log_softmax(-1)  # (rows, vocabulary)
        if self.temperature > 0:
            uniforms = torch.tensor([[rng.random()] for rng in rngs], dtype=torch.float64)
            chosen = _inverse_cdf(logprobs.exp(), uniforms.to(logits.device))
        else:
            chosen = logprobs.argmax(-1, keepdim=True)  # (rows, 1)
        picked = logprobs.gather(-1, chosen)[:, 0].tolist()
        if any(p != p for p in picked):
            raise FloatingPointError("The model's logits hold NaN.")
        return chosen[:, 0].tolist(), picked


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Sample ids (rows, 1) from `probs` (rows, vocabulary), by one uniform number for each row, (rows, 1)."""
    cdf = probs.cumsum(-1, dtype=torch.float64)  # (rows, vocabulary)
    # Uniforms are below 1, so a token with mass is found; only NaN leads past the end.
    return torch.searchsorted(cdf, uniforms * cdf[:, -1:], right=True).clamp(max=cdf.shape[-1] - 1)
