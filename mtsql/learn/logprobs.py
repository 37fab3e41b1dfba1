"""Log-probabilities of the tokens that the model wrote: for SFT, GRPO and its reference policy.

A `TokenBatch` says which hidden state predicts which trained token, so that the output head runs
on tokens of loss mask 1 only, in chunks: no (rows, positions, vocabulary) tensor ever exists.
`shared_prompt_batch` puts sequences behind each other without padding, with one copy of the prompt for
all trajectories of a question, and one of equal responses; `packed_batch` does so with a prompt each, for
flash-attn; `row_batch`, one padded row a trajectory, is the plain form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mtsql.agent.head import float32_logits, plain_head
from mtsql.agent.trajectory import Trajectory
from mtsql.errors import UserError
from mtsql.learn.batches import shared_prefix
from mtsql.learn.model import adapters_in_half, base_of
from mtsql.model_folder import Policy

SHARED_PROMPT = "sdpa_shared_prompt"
# One attention call takes SEQUENCES_TOGETHER sequences of similar length, padded to the longest. On a GPU,
# where a call costs more than padding, it takes more, up to KEYS_TOGETHER padded keys.
SEQUENCES_TOGETHER = 4
KEYS_TOGETHER = 16_384
HEAD_CHUNK_BYTES = 160 * 2**20  # of float32 logits; there are two such tensors at a time

Span: TypeAlias = tuple[int, int]  # start and length among the packed positions
Spans: TypeAlias = list[tuple[Span, Span]]  # of what comes before a sequence, and its own
Device: TypeAlias = torch.device | str


@dataclass(frozen=True)
class AttentionCall:
    """A few prompts, or responses, of similar length, as indices of packed positions.

    The slots that pad a shorter one point at position 0; what is computed there is not read.
    """

    slots: Tensor  # (sequences, longest) int64: the queries
    seen: Tensor  # (sequences, keys) int64: a prompt itself; of a response its prompt, then itself
    attention_mask: Tensor | None  # (sequences, 1, longest, keys) bool; None is causal

    def to(self, device: Device) -> AttentionCall:
        """The same on a device."""
        tensors = (self.slots, self.seen, self.attention_mask)
        return AttentionCall(*(x if x is None else x.to(device) for x in tensors))


@dataclass(frozen=True)
class SharedPromptLayout:
    """Where prompts and responses lie among `positions` packed tokens, for the attention."""

    calls: tuple[AttentionCall, ...]
    unpad: Tensor  # (positions,) int64, into the flattened slots of all calls


@dataclass(frozen=True)
class TokenBatch:
    """Token ids to run a model on, and for each trained token the hidden state that predicts it.

    Trained tokens are those of loss mask 1, ordered by trajectory and position.
    """

    ids: Tensor  # (rows, positions) int64
    source: Tensor  # (tokens,) int64, into the flattened rows x positions
    targets: Tensor  # (tokens,) int64, the trained token ids
    trajectory_index: Tensor  # (tokens,) int64, in the order in which trajectories were given
    sampling_logprobs: Tensor  # (tokens,) float32, under the sampler
    advantages: Tensor  # (trajectories,) float32
    position_ids: Tensor | None = None  # (rows, positions) int64; None counts from 0
    layout: SharedPromptLayout | None = None  # None is ordinary causal attention in each row
    borders: Tensor | None = None  # (sequences + 1,) int32, flash-attn: starts of sequences, the end


def row_batch(trajectories: Sequence[Trajectory], device: Device = "cpu") -> TokenBatch:
    """One right-padded row a trajectory.

    Padding comes after everything that matters, so causal attention needs no attention mask.
    """
    width = max(len(t.ids) for t in trajectories)
    ids = torch.tensor([t.ids + [0] * (width - len(t.ids)) for t in trajectories])  # (rows, width)
    loss_mask = torch.tensor([t.loss_mask + [0] * (width - len(t.ids)) for t in trajectories])  # as ids
    source = loss_mask.flatten().nonzero()[:, 0] - 1  # (tokens,): position t - 1 predicts token t
    return _token_batch(trajectories, ids, source, device)


def shares_prompts(policy: Policy) -> bool:
    """Whether trajectories of a group go through a policy with one copy of their prompt.

    False with flash-attn, whose kernel for sequences of different lengths has no shared prompts.
    """
    return not policy.config._attn_implementation.startswith("flash")


def token_batch(policy: Policy, groups: Sequence[Sequence[Trajectory]]) -> TokenBatch:
    """A micro-batch on the policy's device, as its attention takes it."""
    if shares_prompts(policy):
        return shared_prompt_batch(groups, policy.device)
    return packed_batch([t for group in groups for t in group], policy.device)


def packed_batch(trajectories: Sequence[Trajectory], device: Device = "cpu") -> TokenBatch:
    """All trajectories in one row, with `borders` between them for flash-attn's variable-length kernel."""
    batch = shared_prompt_batch([[t] for t in trajectories], device)
    starts = (batch.position_ids[0] == 0).nonzero()[:, 0]  # (sequences,): positions start again from 0
    end = torch.tensor([batch.ids.shape[1]], device=starts.device)
    return replace(batch, layout=None, borders=torch.cat([starts, end]).int())


def shared_prompt_batch(groups: Sequence[Sequence[Trajectory]], device: Device = "cpu") -> TokenBatch:
    """All groups in one row, [prompt | response 1 | response 2 | ...] for each group, without padding.

    "Prompt" here means the tokens with which all prompts of a group begin, "response" all that follows
    them. Each response sees its group's prompt and itself, its positions go on from the prompt, and its
    first token is predicted by the prompt's last. A response's last trained token, and what follows it, is
    left out of the input, since it predicts nothing. Responses equal up to there, as a confident policy's
    often are, share one copy. In a group of one, all before its last trained token is the prompt. Raises
    ValueError if the prompts of a group share no first token, or if a prompt token has loss mask 1.

    Of the prompt p q with the responses a b and c d, where c alone has loss mask 0, the row is p q a c, the
    positions are 0 1 2 2, and `source` of a, b, d is 1, 2, 3.
    """
    ids: list[int] = []
    position_ids: list[int] = []
    sources: list[Tensor] = []
    prompts: Spans = []  # what comes before, which is nothing, and the prompt's span
    responses: Spans = []  # the prompt's span, its own
    for group in groups:
        trained = [torch.tensor(t.loss_mask).nonzero()[:, 0] for t in group]  # (tokens,) each
        prefix = shared_prefix(group)
        if prefix == 0 or any(len(at) and at[0] < prefix for at in trained):
            raise ValueError(f"prompts of {group[0].example_id} share no token, or have loss mask 1")
        if len(group) == 1 and len(trained[0]):  # plain causal attention up to its last trained token
            prefix = int(trained[0][-1])
        start = len(ids)
        prompts.append(((0, 0), (start, prefix)))
        ids += group[0].ids[:prefix]
        position_ids += range(prefix)
        places: dict[tuple[int, ...], int] = {}  # of the group's responses
        for trajectory, at in zip(group, trained, strict=True):
            if len(at) == 0:
                continue
            end = int(at[-1])  # the token there predicts nothing
            response = tuple(trajectory.ids[prefix:end])
            if response and response not in places:
                responses.append(((start, prefix), (len(ids), end - prefix)))
                places[response] = len(ids)
                ids += response
                position_ids += range(prefix, end)
            place = places.get(response, 0)
            sources.append(torch.where(at > prefix, place - prefix + at - 1, start + at - 1))  # (tokens,)
    flat = [t for group in groups for t in group]
    batch = _token_batch(flat, torch.tensor([ids]), torch.cat(sources), device)
    layout = _layout(prompts, responses, device)
    return replace(batch, position_ids=torch.tensor([position_ids], device=device), layout=layout)


def _token_batch(trajectories: list[Trajectory], ids: Tensor, source: Tensor, device: Device) -> TokenBatch:
    trained = [
        (token, index, logprob)
        for index, t in enumerate(trajectories)
        for token, bit, logprob in zip(t.ids, t.loss_mask, t.logprobs, strict=True)
        if bit
    ]
    targets, trajectory_index, logprobs = zip(*trained, strict=True)
    return TokenBatch(
        ids=ids.to(device),
        source=source.to(device),
        targets=torch.tensor(targets, device=device),
        trajectory_index=torch.tensor(trajectory_index, device=device),
        sampling_logprobs=torch.tensor(logprobs, dtype=torch.float32, device=device),
        advantages=torch.tensor([t.advantage for t in trajectories], dtype=torch.float32, device=device),
    )


def _slots(spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """The packed positions of some spans, (spans, longest) int64, and which are no padding, as bool."""
    start, length = torch.tensor(spans, dtype=torch.int64).unbind(1)  # (spans,) each
    offset = torch.arange(int(length.max()))  # (longest,)
    real = offset < length[:, None]
    return (start[:, None] + offset) * real, real


def _layout(prompts: Spans, responses: Spans, device: Device) -> SharedPromptLayout:
    calls: list[AttentionCall] = []  # on the CPU, which knows the shapes without waiting
    reals = []
    for pairs in (*_chunks(prompts, device), *_chunks(responses, device)):
        (before, of_before), (slots, real) = (_slots(spans) for spans in zip(*pairs, strict=True))
        count, longest = slots.shape
        attention_mask = None
        if before.numel():
            sees_before = of_before[:, None].expand(-1, longest, -1)
            causal = torch.ones(longest, longest, dtype=torch.bool).tril().expand(count, -1, -1)
            attention_mask = torch.cat([sees_before, causal], dim=2)[:, None]
        calls.append(AttentionCall(slots, torch.cat([before, slots], dim=1), attention_mask))
        reals.append(real)
    slots = torch.cat([call.slots.flatten() for call in calls])  # (slots,), as `real`
    real = torch.cat([real.flatten() for real in reals])
    unpad = real.nonzero()[:, 0][slots[real].argsort()]  # (positions,): each is in exactly one span
    return SharedPromptLayout(tuple(call.to(device) for call in calls), unpad.to(device))


def _chunks(pairs: Spans, device: Device) -> Iterator[Spans]:
    """Pairs of what comes before a sequence and its own span, of similar lengths, that attention takes
    together: a few, and on a GPU more while they have KEYS_TOGETHER keys or less, padded.
    """
    most = 0 if torch.device(device).type == "cpu" else KEYS_TOGETHER
    chunk: Spans = []
    longest = 0
    for before, own in sorted(pairs, key=lambda pair: (pair[0][1], pair[1][1])):
        keys = before[1] + own[1]
        longest = max(longest, keys)
        if len(chunk) >= SEQUENCES_TOGETHER and (len(chunk) + 1) * longest > most:
            yield chunk
            chunk, longest = [], keys
        chunk.append((before, own))
    if chunk:
        yield chunk


def _take(x: Tensor, slots: Tensor) -> Tensor:
    """x[slots] along the first dimension, as a look-up whose backward pass is faster.

    It also adds up in a fixed order, where indexing adds atomically from several threads.
    """
    return nn.functional.embedding(slots, x.flatten(1)).unflatten(-1, x.shape[1:])


def _shared_prompt_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    layout: SharedPromptLayout | None = None,
    scaling: float | None = None,
    **options,
) -> tuple[Tensor, None]:
    """Attention in the signature of transformers: query (1, heads, positions, head_dim), and out
    (1, positions, heads, head_dim). Without a layout it is transformers' own SDPA attention.

    Prompts attend to themselves, responses to their prompt and themselves, so that the cost is that of
    separate rows and not that of one row as long as the packed one. Raises ValueError for sliding windows
    and capped scores.
    """
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    for unsupported in ("sliding_window", "softcap"):
        if options.get(unsupported) is not None:
            raise ValueError(f"the shared-prompt layout does not support {unsupported}, which this model has")
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (positions, any heads, dim)
    repeats = query.shape[1] // key.shape[1]

    outs = []
    for call in layout.calls:
        q = _take(query, call.slots).transpose(1, 2)  # (sequences, heads, longest, dim)
        k, v = (_take(x, call.seen).transpose(1, 2) for x in (key, value))  # key heads instead
        causal = call.attention_mask is None
        grouped = repeats > 1 and _takes_grouped_queries(q, causal)
        if not grouped:
            k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        how = {"attn_mask": call.attention_mask, "is_causal": causal, "enable_gqa": grouped}
        out = nn.functional.scaled_dot_product_attention(q, k, v, scale=scaling, **how)
        outs.append(out.transpose(1, 2).flatten(0, 1))  # (sequences x longest, heads, dim)
    return _take(torch.cat(outs), layout.unpad)[None], None


def _takes_grouped_queries(query: Tensor, is_causal: bool) -> bool:
    """Whether SDPA has a fused kernel in which query heads share key heads: for CUDA it is flash's alone."""
    return query.device.type == "cpu" or (is_causal and query.dtype != torch.float32)


AttentionInterface.register(SHARED_PROMPT, _shared_prompt_attention)
AttentionMaskInterface.register(SHARED_PROMPT, sdpa_mask)


def _head_factor(weight: Tensor) -> Tensor:
    """What `float32_logits` multiplies with; on a CPU it would convert the weight for each chunk again."""
    return weight.float() if weight.device.type == "cpu" else weight


class _HeadLogprobs(torch.autograd.Function):
    """The output head on trained tokens only, a chunk of them at a time, forward and backward.

    The logits of a chunk are not kept. With p = softmax(logits), d logprob / d logits is onehot(target) - p.
    So the forward pass knows d logprob / d hidden, and keeps that; only a head that is trained needs its
    logits again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """`hidden` (tokens, hidden), `weight` (vocabulary, hidden), `targets` (tokens,) int64 give
        log-probabilities and entropies, (tokens,) float32."""
        factor, normalisers, logprobs, entropies = _head_factor(weight), [], [], []
        slopes = torch.empty_like(hidden)  # (tokens, hidden): d logprob / d hidden
        for h, t, slope in zip(*(x.split(chunk) for x in (hidden, targets[:, None], slopes)), strict=True):
            logits = float32_logits(h, factor).div_(temperature)  # (chunk, vocabulary)
            normaliser = logits.logsumexp(-1, keepdim=True)  # (chunk, 1)
            probabilities = logits.sub_(normaliser).exp()  # (chunk, vocabulary); the logits are log p now
            logprobs.append(logits.gather(-1, t)[:, 0])
            entropies.append(-torch.linalg.vecdot(probabilities, logits))
            normalisers.append(normaliser)
            if ctx.needs_input_grad[0]:
                torch.mm(_onehot_less(probabilities, t).to(weight.dtype), weight, out=slope)
        ctx.save_for_backward(slopes.div_(temperature), hidden, weight, targets, torch.cat(normalisers))
        ctx.temperature, ctx.chunk = temperature, chunk
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """`grad_logprobs` (tokens,) is d loss / d logprob. The weight's gradient adds up in float32."""
        slopes, hidden, weight, targets, normalisers = ctx.saved_tensors
        grad_logprobs, grad_weight = grad_logprobs[:, None], None  # (tokens, 1)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)  # (vocabulary, hidden)
            factor, chunks = _head_factor(weight), (hidden, targets[:, None], normalisers, grad_logprobs)
            for h, t, normaliser, grad in zip(*(x.split(ctx.chunk) for x in chunks), strict=True):
                logits = float32_logits(h, factor).div_(ctx.temperature)  # (chunk, vocabulary)
                grad_logits = _onehot_less(logits.sub_(normaliser).exp_(), t).mul_(grad / ctx.temperature)
                if weight.dtype == torch.float32:
                    grad_weight.addmm_(grad_logits.t(), h)
                else:
                    grad_weight += grad_logits.to(weight.dtype).t() @ h
            grad_weight = grad_weight.to(weight.dtype)
        return (slopes * grad_logprobs).to(hidden.dtype), grad_weight, None, None, None


def _onehot_less(probabilities: Tensor, targets: Tensor) -> Tensor:
    """onehot(target) - p in the place of p (tokens, vocabulary); `targets` (tokens, 1) int64."""
    return probabilities.neg_().scatter_add_(1, targets, torch.ones_like(targets, dtype=probabilities.dtype))


def token_logprobs(model: Policy, batch: TokenBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each trained token and entropy of its distribution, both (tokens,) float32.

    Logits are divided by `temperature`, as the sampler does. The head runs on as many hidden states at a
    time as give HEAD_CHUNK_BYTES of float32 logits. Entropies carry no gradient. On a
    CPU float32 adapters over a bfloat16 base are multiplied in bfloat16; their gradients are float32. A
    shared-prompt batch switches the model from "sdpa" to an attention that can do both. Raises UserError if
    that batch meets another attention, and for heads that are more than one matrix.
    """
    inner = base_of(model)
    head = plain_head(inner)
    if head is None:
        raise UserError(f"the head of {type(inner).__name__} is more than one matrix; that is not supported")
    options = {}
    if batch.layout is not None:
        attention = inner.config._attn_implementation
        if attention == "sdpa":
            inner.set_attn_implementation(SHARED_PROMPT)
        elif attention != SHARED_PROMPT:
            raise UserError(f"the shared-prompt layout needs SDPA attention, not {attention}")
        # A model that ignored the layout would use this attention mask and return NaN everywhere.
        poison = torch.full((1, 1, 1, 1), torch.nan, dtype=inner.dtype, device=batch.ids.device)
        options = {"layout": batch.layout, "attention_mask": poison}
    if batch.borders is not None:  # else every layer would look for them
        longest = int(batch.borders.diff().max())
        options = {"cu_seq_lens_q": batch.borders, "cu_seq_lens_k": batch.borders}
        options |= {"max_length_q": longest, "max_length_k": longest}
    inputs = {"input_ids": batch.ids, "position_ids": batch.position_ids, "use_cache": False, **options}
    with adapters_in_half(model):
        hidden = inner.base_model(**inputs).last_hidden_state  # (rows, positions, hidden)
    hidden = _take(hidden.flatten(0, 1), batch.source)  # (tokens, hidden)
    chunk = max(1, HEAD_CHUNK_BYTES // (4 * head.weight.shape[0]))
    return _HeadLogprobs.apply(hidden.to(head.weight.dtype), head.weight, batch.targets, temperature, chunk)
