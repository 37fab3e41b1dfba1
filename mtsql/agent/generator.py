"""Batched generation with a live key/value cache.

Each trajectory owns one row of the cache from its prompt to its last message. Rows are left-aligned
with their own lengths, so that no row has padding inside. Between two operations the cache holds
all tokens of a row but the last, the *pending* one; a decode step feeds the pending tokens and
samples the next. So prompts and observations are only written into the cache, and sampling happens in
one place. On a CPU a few drafted tokens go along with a pending one; a sampled token counts if all drafted
ones before it are what was sampled there (Leviathan et al. 2023; the draft is Saxena's prompt lookup, 2023).

When the cache is full, the youngest rows give their places back. They keep their tokens, and are prefilled
again when others have ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mtsql.agent.cache import CachedRow, Piece, RowCache, cache_bytes_per_token, cache_positions
from mtsql.agent.decoder import Decoder
from mtsql.agent.pages import PAGE, DecodeGraphs, Pages, decode_kernel
from mtsql.agent.tokens import families
from mtsql.agent.trajectory import Stop
from mtsql.errors import UserError
from mtsql.model_folder import Policy

# Prompts and observations go through the model in chunks of rows with about so many tokens: many for a
# GPU; few for a CPU, where padding costs more than another call.
TOKENS_PER_FORWARD = {"cpu": 1024}
TOKENS_PER_FORWARD_ELSEWHERE = 8192
WIDEST = 1024  # tokens of one row in a forward pass,
MASK_ELEMENTS = 2**25  # and elements of one head's attention mask
UNIFORMS = 32  # drawn for a row at once; more than LONGEST_DRAFT
DRAFT_BY = 3  # tokens that a draft is found by
LONGEST_DRAFT = 8  # tokens
TOKENS_PER_STEP = {"cpu": 96}  # of all rows; with more drafts, checking costs more time than it saves
BLOCK = 256  # at most so many tokens' probabilities are added up before one of them is sampled
OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
TOO_SMALL = (
    "the device's memory does not hold one trajectory; lower --max-prompt-tokens or --max-response-tokens, "
    "or take a smaller model or --quantise nf4"
)


@dataclass(frozen=True)
class Sampling:
    """How messages are sampled; `temperature` 0 is greedy.

    With `top_p` below 1 only from the likeliest tokens that together hold so much. A message ends with an end
    of turn, with one of the `stop_strings`, or at `max_turn_tokens`.
    """

    temperature: float = 1.0
    max_turn_tokens: int = 512
    stop_strings: tuple[str, ...] = ()
    top_p: float = 1.0


@dataclass(eq=False)
class Row(CachedRow):
    """One trajectory and the message that is being sampled, or was just sampled."""

    history: list[int]  # all its tokens; the last is pending, not in the cache yet
    rng: np.random.Generator
    limit: int  # tokens of the message
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: Stop | None = None
    uniforms: list[float] = field(default_factory=list)  # drawn, and not used yet
    # DRAFT_BY tokens -> the place after their last occurrence in `history`, below `looked_up`.
    followed: dict[tuple[int, ...], int] = field(default_factory=dict)
    looked_up: int = 0

    def begin(self, limit: int) -> None:
        """Start a message of at most `limit` tokens."""
        self.limit, self.ids, self.logprobs, self.stop = limit, [], [], None

    def draft(self, most: int) -> list[int]:
        """At most `most` tokens: what followed the last earlier occurrence of the row's last three."""
        most = min(most, self.room - len(self.history), self.limit - len(self.ids) - 1)
        if most < 1:
            return []
        for end in range(max(DRAFT_BY, self.looked_up), len(self.history)):
            self.followed[tuple(self.history[end - DRAFT_BY : end])] = end
        self.looked_up = len(self.history)
        place = self.followed.get(tuple(self.history[-DRAFT_BY:]))
        return self.history[place : place + most] if place else []

    def uniform(self, place: int) -> float:
        """The random number of the next token (`place` 0) or of a later one."""
        if place >= len(self.uniforms):
            self.uniforms = self.rng.random(UNIFORMS).tolist()[::-1] + self.uniforms
        return self.uniforms[-1 - place]

    def take(self, token: int, logprob: float) -> None:
        """Append a sampled token, which is pending then: the one before it is in the cache."""
        self.uniforms.pop()
        self.length += 1
        self.history.append(token)
        self.ids.append(token)
        self.logprobs.append(logprob)

    @property
    def decoding(self) -> bool:
        """Whether its message is still being sampled."""
        return self.stop is None

    @property
    def unwritten(self) -> list[int]:
        """The tokens before the pending one that the cache lacks."""
        return self.history[self.length : -1]


@dataclass(frozen=True)
class Drawn:
    """What a step sampled for each of some rows (None is padding)."""

    rows: Sequence[Row | None]
    drafts: Sequence[Sequence[int]]  # of each row; [] without one
    pairs: Tensor  # (rows, 1 + longest draft, 2) float64, on the device: token, log-probability
    copied: Tensor  # the same on the CPU,
    ready: torch.cuda.Event | None  # from this moment


class Generator:
    """Samples model messages for many trajectories at once. Use as a context manager.

    Each row draws its random numbers from its own generator, one a token, so that a trajectory does not
    depend on the others in its batch (up to the rounding of other kernels for products of other sizes). At
    temperature 0 decoding is greedy. Log-probabilities are those of softmax(logits / temperature), of
    softmax(logits) when greedy; `top_p` (see `Sampling`) changes what is drawn and not them.

    `stops(ids)` says whether a message with the ids `ids` ends with a stop string. The weights are those of
    this moment, or of a `Decoder` that is ready. `make_cache`, else `new_cache`, makes the cache; if memory
    runs out, one of half its reserved positions, at least the longest row's, replaces it. Raises UserError if
    that is no less than before, for a cache that does not hold one row, for a model that `Decoder` does not
    know, and for NaN among the logits.
    On a GPU results are `late`: while the host looks at what one step sampled the next is under way.
    """

    def __init__(
        self,
        policy: Policy | Decoder,
        end_of_turn_ids: Sequence[int],
        sampling: Sampling,
        stops: Callable[[list[int]], bool] | None = None,
        make_cache: Callable[[Decoder], RowCache | Pages] | None = None,
    ) -> None:
        self.decoder = policy if isinstance(policy, Decoder) else Decoder(policy)
        self.end_of_turn_ids = frozenset(end_of_turn_ids)
        self.temperature, self.top_p = sampling.temperature, sampling.top_p
        self.stops = stops
        self.rows: list[Row] = []  # from the oldest to the youngest
        self.late = decode_kernel(self.decoder.device) is not None
        self.ahead: Drawn | None = None  # sampled and not looked at yet
        self.stopped: list[Row] = []  # complete and not returned yet
        self._begin_cache((make_cache or new_cache)(self.decoder))  # beside the decoder's copy of the weights

    def _begin_cache(self, empty: RowCache | Pages) -> None:
        self.cache = empty
        self.graphs = DecodeGraphs(self.decoder.device) if decode_kernel(self.decoder.device) else None
        self.room_again = True  # rows have left the cache since others were last let in

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.rows = []
        if self.graphs is not None:
            self.graphs.drop()
        del self.cache, self.graphs, self.decoder, self.ahead

    @property
    def in_cache(self) -> list[Row]:
        """The rows that a step extends."""
        return [row for row in self.rows if row.room]

    @torch.inference_mode()
    def start(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], limits: Sequence[int]
    ) -> list[Row]:
        """New rows for these prompts; what several of them begin with is computed once and copied.

        `limits` are the most tokens of each row's first message. Rows for which the cache has no room come
        in later.
        """
        given = zip(prompts, seeds, limits, strict=True)
        started = [Row(list(prompt), np.random.default_rng(seed), limit) for prompt, seed, limit in given]
        self._take_ahead()
        self.rows += started
        self._or_halve_the_cache(self._admit, started)
        return started

    @torch.inference_mode()
    def append(self, rows: Sequence[Row], ids: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        """Put the observations `ids` after the rows' last messages and begin messages of at most `limits`."""
        self._take_ahead()
        for row, new, limit in zip(rows, ids, limits, strict=True):
            row.history += new
            row.begin(limit)
        longer = set(rows)
        self._or_halve_the_cache(self._catch_up, [row for row in self.in_cache if row in longer])
        self.room_again |= not all(row.room for row in rows)

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Sample a token (with a draft, several) in each decoding row; return the rows that are complete."""
        self._or_halve_the_cache(self._step)
        stopped, self.stopped = self.stopped, []
        return stopped

    def _step(self) -> None:
        if self.ahead is None and self._make_room():
            self.ahead = self._begin_step([row for row in self.in_cache if row.decoding])
        following = None  # It has a token too many for rows that stop now: nobody takes it.
        if self.late and self.ahead is not None:
            going_on = [row for row in self.ahead.rows if row is not None and row.decoding]
            needs = [(row, len(row.history) + 1) for row in going_on]
            if needs and all(need <= row.room or self.cache.lift(row, need) for row, need in needs):
                following = self._begin_step(going_on, self.ahead)
        self._take_ahead()
        self.ahead = following

    def _begin_step(self, rows: Sequence[Row], before: Drawn | None = None) -> Drawn:
        """Sample after each of these rows and in its draft, or after those sampled `before` and not taken."""
        pieces = self.cache.decode_pieces(rows)
        placed = [row for piece in pieces for row in piece.rows]
        untaken = int(before is not None)
        # A late step does not know yet what its drafts would follow.
        budget = 0 if self.late else TOKENS_PER_STEP.get(self.decoder.device.type, 0)
        most = min(LONGEST_DRAFT, budget // len(placed) - 1)
        drafts = [row.draft(most) if row and row.decoding else [] for row in placed]
        width = 1 + max(map(len, drafts))
        if before is None:
            ends = [[row.history[-1] if row else 0, *own] for row, own in zip(placed, drafts, strict=True)]
            # A shorter line is padded with its last token, which is written to the same place again.
            pending = torch.tensor([own + own[-1:] * (width - len(own)) for own in ends])  # (rows, width)
        else:
            places = {row: place for place, row in enumerate(before.rows)}
            index = torch.tensor([places.get(row, 0) for row in placed])  # (rows,)
            if before.pairs.is_cuda:  # Else it would wait for the step under way.
                index = index.pin_memory().to(before.pairs.device, non_blocking=True)
            pending = before.pairs[index, 0, :1].long()  # (rows, 1)
        firsts = torch.tensor([[row.length + untaken if row else 0] for row in placed])  # (rows, 1)
        offsets = torch.arange(width).minimum(torch.tensor([[len(own)] for own in drafts]))  # (rows, width)
        uniforms = [[row.uniform(untaken + i) if row else 0.0] for row in placed for i in range(width)]
        numbers = torch.tensor(uniforms, dtype=torch.float64)  # (rows x width, 1)
        pairs = self._sample(pending, firsts + offsets, numbers, pieces).view(len(placed), width, 2)
        copied = pairs.to("cpu", non_blocking=True)
        ready = torch.cuda.Event() if pairs.is_cuda else None
        if ready is not None:
            ready.record()
        return Drawn(placed, drafts, pairs, copied, ready)

    def _take_ahead(self) -> None:
        """Look at what was sampled, and give it to the rows whose messages were not complete before."""
        drawn, self.ahead = self.ahead, None
        if drawn is None:
            return
        if drawn.ready is not None:
            drawn.ready.synchronize()
        for row, draft, sampled in zip(drawn.rows, drawn.drafts, drawn.copied.tolist(), strict=True):
            for (token, logprob), drafted in zip(sampled, [*draft, None], strict=False):
                if row is None or not row.decoding:
                    break
                if logprob != logprob:
                    raise UserError("the model's logits hold NaN; take --dtype bfloat16 or float32")
                row.take(int(token), logprob)
                row.stop = self._stop(row)
                if row.stop is not None:
                    self.stopped.append(row)
                if token != drafted:
                    break  # what was sampled after it followed another token

    def _make_room(self) -> bool:
        """Readmit rows, give those that outgrew their room more; whether a row in the cache is decoding."""
        stuck = not any(row.decoding for row in self.in_cache)
        if stuck and any(row.decoding for row in self.rows):
            self.cache.drop(self.rows)  # those that wait for an observation give way
        if self.room_again or stuck:
            self.room_again = False
            self._admit([row for row in self.rows if not row.room and row.decoding])
        self._catch_up([row for row in self.in_cache if len(row.history) > row.room])
        decoding = any(row.decoding for row in self.in_cache)
        if stuck and not decoding and any(row.decoding for row in self.rows):
            raise UserError(TOO_SMALL)
        return decoding

    def _stop(self, row: Row) -> Stop | None:
        """Why a row's message is complete, None if it is not."""
        if row.ids[-1] in self.end_of_turn_ids:
            return Stop.END_OF_TURN
        if self.stops is not None and self.stops(row.ids):
            return Stop.STOP_STRING
        return Stop.LIMIT if len(row.ids) == row.limit else None

    @torch.inference_mode()
    def release(self, rows: Sequence[Row]) -> None:
        """Forget finished rows."""
        self._take_ahead()
        gone = set(rows)
        self.rows = [row for row in self.rows if row not in gone]
        self.cache.drop(rows)
        self.room_again = True

    def _catch_up(self, rows: Sequence[Row]) -> None:
        """Write what the cache lacks of rows in it, given from the oldest on, as far as there is room."""
        for row in rows:
            need = len(row.history)
            while 0 < row.room < need and not self.cache.lift(row, need):
                self.cache.drop(self.in_cache[-1:])  # the youngest gives its place back, maybe this one
        self._admit([row for row in rows if not row.room])
        self._write([(row, row.unwritten) for row in rows if row.room])

    def _admit(self, rows: Sequence[Row]) -> None:
        """Write rows that the cache lacks, given from the oldest on, as far as there is room."""
        samples: dict[tuple[int, ...], list[Row]] = {}
        for row in rows:
            alike = samples.get(tuple(row.unwritten), [])
            if not self.cache.admit(row, len(row.history), *alike[:1]):
                break
            samples[tuple(row.unwritten)] = [*alike, row]
        self._prefill([group[0] for group in samples.values()])
        for head, *others in samples.values():
            self.cache.share(head, others, head.length)

    def _or_halve_the_cache(self, act: Callable[..., None], *given: object) -> None:
        """Do something; if memory runs out, empty the cache, whose rows come again into one half as large."""
        try:
            act(*given)
            return
        except OUT_OF_MEMORY:
            longest = self.cache.room(self.cache.longest or max(len(row.history) for row in self.rows))
            half = max(self.cache.reserved // 2, longest)
        if half >= self.cache.positions:
            raise UserError(TOO_SMALL)
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize()  # memory is not unmapped while a stream computes in it
        if self.graphs is not None:
            self.graphs.drop()
        self.ahead = None  # what was not taken yet is sampled again
        self.cache.drop(self.rows)
        self._begin_cache(type(self.cache)(self.cache.longest, half))
        if self.decoder.device.type == "cuda":
            torch.cuda.empty_cache()
        gib = half * cache_bytes_per_token(self.decoder) / 2**30
        tqdm.write(f"out of memory: the rollout goes on with {gib:.3g} GiB of key/value cache", sys.stderr)

    def _prefill(self, rows: list[Row]) -> None:
        """Write different prompts into new rows, what several begin with once, from the outermost on."""
        groups = [rows]
        while groups:
            alike: list[tuple[int, list[Row]]] = []
            for group in groups:
                found = families([row.unwritten for row in group])
                alike += [(shared, [group[place] for place in places]) for shared, places in found]
            self._write([(origin, origin.unwritten[:shared]) for shared, (origin, *_) in alike])
            for _, (origin, *others) in alike:
                self.cache.share(origin, others, origin.length)
            groups = [members for _, members in alike if len(members) > 1]

    def _write(self, new: Sequence[tuple[Row, Sequence[int]]]) -> None:
        """Extend rows by ids, at most WIDEST at once, in chunks of rows that get similarly many."""
        new = [(row, ids) for row, ids in new if ids]
        order = sorted(((row, ids[:WIDEST]) for row, ids in new), key=lambda pair: len(pair[1]))
        size = TOKENS_PER_FORWARD.get(self.decoder.device.type, TOKENS_PER_FORWARD_ELSEWHERE)
        while order:
            width, longest = len(order[-1][1]), max(row.room for row, _ in order)
            chunk = order[-max(min(size, MASK_ELEMENTS // longest) // width, 1) :]
            del order[-len(chunk) :]
            self._write_chunk(*zip(*sorted(chunk, key=lambda pair: pair[0].room), strict=True))
        if any(len(ids) > WIDEST for _, ids in new):
            self._write([(row, ids[WIDEST:]) for row, ids in new])

    def _write_chunk(self, rows: Sequence[Row], ids: Sequence[Sequence[int]]) -> None:
        """Padding is written to the cache after the end of its row, at most to the last position there, and
        nothing attends to it before it is overwritten.
        """
        width = max(map(len, ids))
        input_ids = torch.tensor([[*own, *[0] * (width - len(own))] for own in ids])  # (rows, width)
        lengths = torch.tensor([[row.length] for row in rows])  # (rows, 1)
        pieces = self.cache.writing_pieces(rows, width)
        last = torch.tensor([[piece.reach - 1] for piece in pieces for _ in piece.rows])  # (rows, 1)
        self._forward(input_ids, (lengths + torch.arange(width)).minimum(last), pieces)
        for row, own in zip(rows, ids, strict=True):
            row.length += len(own)

    def _sample(
        self, pending: Tensor, positions: Tensor, uniforms: Tensor, pieces: Sequence[Piece]
    ) -> Tensor:
        """What comes after each of the `pending` tokens, and its log-probability: (rows x tokens, 2) float64.

        `pending` and `positions` are (rows, tokens), `uniforms` (rows x tokens, 1).
        """
        if self.graphs is None:
            return self._draw(self._forward(pending, positions, pieces), uniforms)

        def compute(ids: Tensor, places: Tensor, numbers: Tensor, table: Tensor) -> Tensor:
            return self._draw(self._forward(ids, places, [replace(pieces[0], table=table)]), numbers)

        return self.graphs.run(compute, pending, positions, uniforms, pieces[0].table)

    def _forward(self, input_ids: Tensor, positions: Tensor, pieces: Sequence[Piece]) -> Tensor | None:
        """What `Decoder.forward` gives."""
        device = self.decoder.device
        return self.decoder.forward(input_ids.to(device), positions.to(device), pieces)

    def _draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """A token for each row of `logits` (rows, vocabulary) by a uniform number, (rows, 1) float64, and its
        log-probability: (rows, 2) float64.
        """
        scores = logits if self.temperature in (0, 1) else logits / self.temperature  # (rows, vocabulary)
        probabilities = scores.softmax(-1)  # (rows, vocabulary)
        if self.temperature > 0:
            nucleus = probabilities if self.top_p >= 1 else _nucleus(probabilities, self.top_p)
            chosen = _inverse_cdf(nucleus, uniforms.to(logits.device))  # (rows, 1)
        else:
            chosen = scores.argmax(-1, keepdim=True)  # (rows, 1)
        return torch.cat([chosen.double(), probabilities.gather(-1, chosen).log().double()], -1)


def new_cache(decoder: Decoder, longest: int | None = None, rows: int | None = None) -> RowCache | Pages:
    """A cache in most of what the device has free; on a GPU pages, at most what `rows` need.

    `longest` bounds the positions of a row. Raises UserError if the memory does not hold one such row.
    """
    positions = cache_positions(decoder, longest)
    if decoder.device.type != "cuda":
        return RowCache(longest, positions)
    return Pages(longest, min(positions, rows * (longest + PAGE)) if rows and longest else positions)


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """`probabilities` (rows, vocabulary), 0 but for the fewest tokens that hold `top_p` of a row."""
    ordered, tokens = probabilities.sort(-1, descending=True)  # (rows, vocabulary) both
    before = ordered.double().cumsum(-1) - ordered  # (rows, vocabulary), 0 for the likeliest
    return torch.zeros_like(probabilities).scatter(-1, tokens, ordered * (before < top_p))


def _inverse_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids (rows, 1) with `probabilities` (rows, vocabulary) by one uniform number each, (rows, 1).

    First the block of tokens that the number falls into, then the token in it: adding up the vocabulary one
    by one takes as long as a layer or two of the model.
    """
    size = max(n for n in range(1, BLOCK + 1) if probabilities.shape[1] % n == 0)
    blocks = probabilities.unflatten(1, (-1, size))  # (rows, blocks, size)
    masses = blocks.sum(-1).double()  # (rows, blocks)
    block, within = _fall_into(masses, uniforms)  # (rows, 1) both
    chosen = blocks.gather(1, block[..., None].expand(-1, 1, size))[:, 0]  # (rows, size)
    return block * size + _fall_into(chosen.double(), within)[0]


def _fall_into(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the `masses` (rows, count) float64 a share in [0, 1) of their sum falls into, (rows, 1) int64,
    and at which share of that, (rows, 1) in [0, 1). That mass is above 0, unless NaN.
    """
    cdf = masses.cumsum(-1)  # (rows, count)
    total = cdf[:, -1:]  # (rows, 1)
    share = (uniforms * total).minimum(total.nextafter(torch.zeros_like(total)))  # (rows, 1), below the total
    place = torch.searchsorted(cdf, share, right=True).clamp(max=masses.shape[1] - 1)  # (rows, 1)
    mass = masses.gather(1, place)  # (rows, 1)
    within = (share - (cdf.gather(1, place) - mass)) / mass  # (rows, 1), up to rounding
    return place, within.clamp(0, 1 - 2**-53)
