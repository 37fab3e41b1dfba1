"""Losses, layouts, advantages, models and checkpoints against hand-computed numbers."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mtsql import files
from mtsql.agent.trajectory import Segment, Trajectory
from mtsql.config import Agent
from mtsql.errors import UserError
from mtsql.files import folder_atomically, recover_folder, write_atomically
from mtsql.learn import logprobs as attention
from mtsql.learn import loss as losses
from mtsql.learn import model as learned
from mtsql.learn.advantages import group_advantages, informative_groups
from mtsql.learn.logprobs import (
    TokenBatch,
    _chunks,
    _HeadLogprobs,
    packed_batch,
    row_batch,
    shared_prompt_batch,
    shares_prompts,
    token_logprobs,
)
from mtsql.learn.loss import loss_denominator, sft_loss, truncation_cap
from mtsql.learn.model import Reference, attention_for, load_policy, restore_policy, save_policy
from mtsql.learn.optimizer import cosine_rate, make_optimizer, optimizer_step, stepped_parameters
from mtsql.learn.samples import logprob_gaps
from mtsql.model_folder import PACKAGED, load_tokenizer
from mtsql.task import chosen_policy

DEFAULTS = {"aggregate": "trajectory", "clip_low": 0.2, "clip_high": 0.2, "beta": 0.0, "tis_cap": 0.0}
VOCABULARY = 61
LAYOUTS = {
    "shared": shared_prompt_batch,
    "rows": lambda groups: row_batch(flatten(groups)),
    "packed for flash-attn": lambda groups: packed_batch(flatten(groups)),
    "one by one": lambda groups: shared_prompt_batch([[t] for t in flatten(groups)]),
}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Matrices this small cost more in waiting for a second thread than in arithmetic."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def grpo_loss(logprobs, advantages, index, denominator, old=None, reference=None, sampling=None, **options):
    """The loss of a batch that has only what the loss needs."""
    batch = SimpleNamespace(advantages=advantages, trajectory_index=index, sampling_logprobs=sampling)
    return losses.grpo_loss(
        logprobs, batch, denominator, SimpleNamespace(**DEFAULTS | options), old, reference
    )


def make_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(1)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES))
    model = Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **SIZES))
    if kind == "lora":
        config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, config)
    return model


@pytest.fixture(scope="module", params=["qwen3", "llama", "lora"])
def model(request) -> torch.nn.Module:
    return make_model(request.param)


def make_trajectory(draw: np.random.Generator, prompt: list[int], spans: list[int]) -> Trajectory:
    """Segments of the given lengths, sampled and given in turn."""
    segments = [Segment.given("prompt", prompt)]
    for index, length in enumerate(spans):
        ids = draw.integers(1, VOCABULARY, length).tolist()
        if index % 2 == 0:
            segments.append(Segment.sampled(ids, [-1.0] * length))
        else:
            segments.append(Segment.given("environment", ids))
    return Trajectory("1/0", 0, segments)


def make_groups() -> list[list[Trajectory]]:
    """Unequal prompts and responses; one of a single sampled token, one of none."""
    draw = np.random.default_rng(0)
    spans = [[[5], [3, 4, 6], [1]], [[7, 2], [], [2, 3, 1, 2]], [[4, 1, 1]]]
    groups = []
    for length, group in zip([9, 4, 13], spans, strict=True):
        prompt = draw.integers(1, VOCABULARY, length).tolist()
        groups.append([make_trajectory(draw, prompt, s) for s in group])
    return groups


def flatten(groups: list[list[Trajectory]]) -> list[Trajectory]:
    return [t for group in groups for t in group]


def reference_logprobs(
    model: torch.nn.Module, trajectory: Trajectory, temperature: float
) -> tuple[Tensor, Tensor]:
    """Naive full logits of one trajectory: log-probabilities and entropies, (tokens,) each."""
    ids = torch.tensor([trajectory.ids])  # (1, positions)
    logprobs = (model(ids).logits[0, :-1].double() / temperature).log_softmax(-1)
    trained = torch.tensor(trajectory.loss_mask[1:], dtype=torch.bool)  # (positions - 1,)
    of_next = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
    return of_next[trained].float(), -(logprobs.exp() * logprobs).sum(-1)[trained].float()


def gradients(model: torch.nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


def difference(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference, in parts of each tensor's largest value or of 1; infinite for a NaN."""
    assert [(a.shape, a.dtype) for a in one] == [(b.shape, b.dtype) for b in other]
    apart = [(a - b).abs().max() / max(1.0, b.abs().max().item()) for a, b in zip(one, other, strict=True)]
    return torch.stack(apart).nan_to_num(nan=float("inf")).max().item()


def calls_of(batch: TokenBatch) -> list[int]:
    """How many responses attention takes together."""
    return [len(call.slots) for call in batch.layout.calls if call.attention_mask is not None]


def test_attention_takes_more_sequences_together_on_a_gpu_and_gives_the_same(model, monkeypatch):
    draw = np.random.default_rng(0)
    prompt = draw.integers(1, VOCABULARY, 9).tolist()
    group = [make_trajectory(draw, prompt, [length]) for length in (3, 5, 2, 8, 1, 4)]
    few = shared_prompt_batch([group])
    expected, _ = token_logprobs(model, few)
    monkeypatch.setattr(attention, "SEQUENCES_TOGETHER", 5)
    together = shared_prompt_batch([group])
    assert calls_of(few) == [4, 1]  # one predicts from the prompt alone
    assert calls_of(together) == [5]
    found, _ = token_logprobs(model, together)
    assert difference([found], [expected]) <= 1e-5
    assert difference(gradients(model, found.sum()), gradients(model, expected.sum())) <= 1e-5
    chunks = [[len(chunk) for chunk in _chunks([16] * 8, int, most)] for most in (0, 6 * 16)]
    assert chunks == [[5, 3], [6, 2]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_naive_full_logits(model, layout, temperature):
    groups = make_groups()
    expected = [reference_logprobs(model, t, temperature) for t in flatten(groups)]
    logprobs, entropies = (torch.cat(x) for x in zip(*expected, strict=True))
    expected_gradient = gradients(model, logprobs.square().mean())
    batch = LAYOUTS[layout](groups)
    for chunk in (1024, 7):
        got, entropy = token_logprobs(model, batch, temperature, chunk)
        assert difference([got, entropy], [logprobs, entropies]) <= 1e-5
        assert got.dtype == entropy.dtype == torch.float32 and not entropy.requires_grad
        assert difference(gradients(model, got.square().mean()), expected_gradient) <= 1e-5


def test_trajectories_that_share_nothing_take_plain_causal_attention(monkeypatch):
    model, calls = make_model("qwen3"), []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, attn_mask=None, is_causal=False, **options):
        calls.append((is_causal, attn_mask is None))
        return attend(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    token_logprobs(model, LAYOUTS["one by one"](make_groups()))
    assert calls and set(calls) == {(True, True)}
    token_logprobs(model, LAYOUTS["shared"](make_groups()))
    assert (False, False) in calls  # responses to one prompt see it and themselves alone


def test_flash_attention_gets_the_borders_of_the_sequences():
    groups, seen = make_groups(), []
    model, batch = make_model("qwen3"), LAYOUTS["packed for flash-attn"](groups)
    # All before the last trained token, which predicts nothing; of one without any its prompt.
    trained = [[i for i, bit in enumerate(t.loss_mask) if bit] for t in flatten(groups)]
    lengths = [max(of, default=t.prompt_length) for of, t in zip(trained, flatten(groups), strict=True)]
    expected = np.cumsum([0, *lengths]).tolist()
    assert batch.layout is None and batch.borders.tolist() == expected and batch.borders.dtype == torch.int32

    def look(module, args, kwargs):
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        seen.append([kwargs[name] for name in names])

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(look, with_kwargs=True)
    token_logprobs(model, batch)
    assert len(seen) == 2
    for starts, ends, longest, most in seen:
        assert starts.tolist() == ends.tolist() == expected and longest == most == max(lengths)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_name_the_trained_tokens_in_order(layout):
    groups = make_groups()
    batch = LAYOUTS[layout](groups)
    trained = [
        (index, token, logprob)
        for index, t in enumerate(flatten(groups))
        for token, bit, logprob in zip(t.ids, t.loss_mask, t.logprobs, strict=True)
        if bit
    ]
    got = zip(batch.trajectory_index, batch.targets, batch.sampling_logprobs, strict=True)
    assert [(int(i), int(t), float(p)) for i, t, p in got] == trained


def test_shared_prompt_positions_and_shift_by_hand():
    group = [
        Trajectory("1/0", 0, [Segment.given("prompt", [1, 2, 3]), Segment.sampled([4, 5], [-1, -2])]),
        Trajectory(
            "1/0",
            1,
            [
                Segment.given("prompt", [1, 2, 3]),
                Segment.sampled([6], [-3]),
                Segment.given("environment", [7, 8]),
                Segment.sampled([9], [-4]),
                Segment.given("environment", [10]),
            ],
        ),
    ]
    batch = shared_prompt_batch([group])
    assert batch.ids.tolist() == [[1, 2, 3, 4, 6, 7, 8]]  # what predicts nothing is left out
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 3, 4, 5]]
    assert batch.source.tolist() == [2, 3, 2, 6]  # the prompt's last position predicts 4 and 6
    assert batch.targets.tolist() == [4, 5, 6, 9]
    rows = row_batch(group)
    assert rows.ids.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [1, 2, 3, 6, 7, 8, 9, 10]]
    assert rows.source.tolist() == [2, 3, 10, 13]


def test_the_heads_gradient_adds_up_in_float32():
    """In bfloat16, a thousand small chunks would stop counting beside what has added up."""
    torch.manual_seed(0)
    hidden, weight = torch.rand(1024, 8), torch.zeros(4, 8)
    targets = torch.zeros(1024, dtype=torch.int64)

    def gradient(dtype: torch.dtype) -> Tensor:
        w = weight.to(dtype, copy=True).requires_grad_()
        logprobs, _ = _HeadLogprobs.apply(hidden.to(dtype), w, targets, 1.0, 1)
        logprobs.sum().backward()
        return w.grad.float()

    exact = gradient(torch.float32)
    assert (gradient(torch.bfloat16) - exact).abs().max() < 0.01 * exact.abs().max()


def test_the_gap_between_sampler_and_trainer_is_told_three_times():
    gaps = logprob_gaps([torch.arange(0, 100) / 100.0, torch.tensor([5.0])])
    assert gaps["logprob_gap"] == 5.0 and gaps["logprob_gap_p99"] == pytest.approx(0.99)
    assert gaps["logprob_gap_mean"] == pytest.approx((49.5 + 5.0) / 101)
    assert set(logprob_gaps([]).values()) == {0.0}


def test_prompts_that_only_begin_alike_share_what_they_have_in_common(model):
    draw = np.random.default_rng(3)
    prompts = [[4, 9, 2, 7, 7], [4, 9, 2], [4, 9, 2, 1, 5, 8]]
    group = [make_trajectory(draw, prompt, [3, 2, 4]) for prompt in prompts]
    expected = torch.cat([reference_logprobs(model, t, 1.0)[0] for t in group])
    assert difference([token_logprobs(model, shared_prompt_batch([group]))[0]], [expected]) <= 1e-5


def test_groups_that_do_not_share_a_prompt_are_refused():
    groups = make_groups()
    with pytest.raises(ValueError, match="share no prefix"):
        shared_prompt_batch([[groups[0][0], groups[1][0]]])
    with pytest.raises(ValueError, match="at least one token"):
        shared_prompt_batch([[Trajectory("1/0", 0, [Segment.given("prompt", [1, 2])])]])
    with pytest.raises(ValueError, match="has tokens of loss mask 1"):
        shared_prompt_batch([[Trajectory("1/0", 0, [Segment.sampled([1, 2], [0.0, 0.0])])]])


def test_shared_prompts_are_refused_where_they_would_be_wrong():
    groups = make_groups()
    model = make_model("qwen3")
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="needs SDPA attention, not eager"):
        token_logprobs(model, shared_prompt_batch(groups))
    config = Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ValueError, match="does not support sliding_window"):
        token_logprobs(Qwen3ForCausalLM(config), shared_prompt_batch(groups))


def test_attention_is_plain_sdpa_without_a_layout():
    model = make_model("qwen3").eval()
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]])
    attention_mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    expected = model(ids, attention_mask=attention_mask).logits
    token_logprobs(model, shared_prompt_batch(make_groups()))
    assert torch.equal(model(ids, attention_mask=attention_mask).logits, expected)


def test_gradient_checkpointing_changes_nothing():
    model, batch = make_model("qwen3").train(), shared_prompt_batch(make_groups())
    expected = gradients(model, token_logprobs(model, batch)[0].sum())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert difference(gradients(model, token_logprobs(model, batch)[0].sum()), expected) <= 1e-6


@pytest.mark.parametrize("aggregate", ["trajectory", "token"])
def test_gradients_do_not_depend_on_micro_batches(model, aggregate):
    groups = make_groups()
    advantages = [torch.randn(len(g), generator=torch.Generator().manual_seed(0)) for g in groups]
    tokens = sum(t.sampled_length for t in flatten(groups))
    denominator = {"trajectory": len(flatten(groups)), "token": tokens}[aggregate]

    def step(parts: list[tuple[TokenBatch, Tensor]]) -> tuple[list[Tensor], dict[str, float]]:
        total: list[Tensor] = []
        statistics: dict[str, float] = {}
        for batch, advantage in parts:
            logprobs, _ = token_logprobs(model, batch)
            loss, shares = grpo_loss(
                logprobs,
                advantage,
                batch.trajectory_index,
                denominator,
                aggregate=aggregate,
                old=logprobs.detach() - 0.1 * batch.targets / VOCABULARY,
                clip_high=0.05,
                reference=logprobs.detach() + 0.1,
                beta=0.1,
            )
            loss = loss + sft_loss(logprobs, tokens)
            part = gradients(model, loss)
            total = part if not total else [a + b for a, b in zip(total, part, strict=True)]
            for name, share in shares.items():
                statistics[name] = statistics.get(name, 0.0) + share
        return total, statistics

    whole, expected = step([(shared_prompt_batch(groups), torch.cat(advantages))])
    assert 0 < expected["clip_fraction"] < 1
    total, statistics = step([(shared_prompt_batch([g]), a) for g, a in zip(groups, advantages, strict=True)])
    assert difference(total, whole) <= 1e-5
    assert statistics == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (1.5, 1.0, 1.3, 0.0),  # too likely and good: clipped at 1 + 0.3
        (1.5, -1.0, -1.5, -1.5),  # too likely and bad: brought back
        (0.5, 1.0, 0.5, 0.5),  # too unlikely and good: brought back
        (0.5, -1.0, -0.8, 0.0),  # too unlikely and bad: clipped at 1 - 0.2
        (1.1, 1.0, 1.1, 1.1),  # inside the clip range
    ],
)
def test_corners_of_the_clip(ratio, advantage, objective, slope):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss, statistics = grpo_loss(
        logprobs,
        torch.tensor([advantage]),
        torch.tensor([0]),
        1,
        old=torch.tensor([-1.0 - np.log(ratio)], dtype=torch.float32),
        clip_low=0.2,
        clip_high=0.3,
    )
    loss.backward()
    assert loss.item() == pytest.approx(-objective)
    assert float(logprobs.grad) == pytest.approx(-slope)
    assert statistics["clip_fraction"] == float(slope == 0)


def test_denominators_by_hand():
    """Trajectory 0 has 1 token and advantage 1, trajectory 1 has 3 and advantage -2."""
    logprobs = torch.zeros(4, requires_grad=True)
    index, advantages = torch.tensor([0, 1, 1, 1]), torch.tensor([1.0, -2.0])
    loss, statistics = grpo_loss(logprobs, advantages, index, 2)
    assert loss.item() == pytest.approx(-(1 / 2 * 1 + 1 / 2 * -2))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, torch.tensor([-1 / 2, 1 / 3, 1 / 3, 1 / 3]))
    assert statistics == pytest.approx({"weight": 1.0, "clip_fraction": 0.0})
    _, half = grpo_loss(logprobs, advantages, index, 4, old=torch.tensor([-1.0, 0.0, 0.0, 0.0]))
    assert half == pytest.approx({"weight": 0.5, "clip_fraction": 0.25})  # of what was trained on, a half
    loss, _ = grpo_loss(logprobs, advantages, index, 4, aggregate="token")
    assert loss.item() == pytest.approx(-(1 - 2 - 2 - 2) / 4)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, torch.tensor([-1.0, 2.0, 2.0, 2.0]) / 4)
    nll = sft_loss(torch.tensor([-1.0, -2.0]), 8)
    assert float(nll) == pytest.approx(3 / 8)


def test_kl_is_k3_by_hand():
    logprobs = torch.tensor([-1.0], requires_grad=True)
    reference = torch.tensor([-1.0 + np.log(2.0)], dtype=torch.float32)
    loss, statistics = grpo_loss(
        logprobs,
        torch.zeros(1),
        torch.tensor([0]),
        1,
        reference=reference,
        beta=0.5,
    )
    k3 = 2 - np.log(2) - 1
    assert statistics["kl"] == pytest.approx(k3)
    assert loss.item() == pytest.approx(0.5 * k3)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert float(gradient) == pytest.approx(0.5 * (1 - 2))  # towards the reference
    with pytest.raises(ValueError, match="beta needs reference"):
        grpo_loss(logprobs, torch.zeros(1), torch.tensor([0]), 1, beta=0.5)


def test_denominators_of_a_step():
    sampled = [Trajectory("", 0, [Segment.sampled([1] * n, [0.0] * n)]) for n in (2, 3)]
    found = {name: loss_denominator(sampled, name, 100) for name in ("trajectory", "token", "constant")}
    assert found == {"trajectory": 2, "token": 5, "constant": 200}
    assert loss_denominator([], "token", 100) == loss_denominator([], "trajectory", 100) == 1
    with pytest.raises(ValueError, match="not 'batch'"):
        loss_denominator(sampled, "batch", 100)


def test_truncated_importance_sampling_by_hand():
    """The trainer finds the first token e times as likely as the sampler did, the second half as likely."""
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    sampling = torch.tensor([-2.0, -1.0 + np.log(2)], dtype=torch.float32)
    loss, statistics = grpo_loss(
        logprobs, torch.tensor([1.0]), torch.tensor([0, 0]), 1, sampling=sampling, tis_cap=2.0
    )
    assert loss.item() == pytest.approx(-(2.0 + 0.5) / 2)
    assert statistics["tis_weight"] == pytest.approx(1.25)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -torch.tensor([2.0, 0.5]) / 2)


def test_importance_is_truncated_where_sampler_and_trainer_round():
    exact, rounded = make_model("qwen3"), make_model("qwen3").bfloat16()
    in_4_bits = make_model("qwen3")
    in_4_bits.is_loaded_in_4bit = True
    assert [truncation_cap(-1.0, policy) for policy in (exact, rounded, in_4_bits)] == [0.0, 2.0, 2.0]
    assert truncation_cap(-1.0, make_model("qwen3").to("meta")) == 2.0  # not a CPU
    assert [truncation_cap(cap, rounded) for cap in (0.0, 3.0)] == [0.0, 3.0]


def test_weight_decay_and_beta2_are_the_optimizers():
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    optimizer = make_optimizer(layer, 0.1, beta2=0.95, weight_decay=0.01)
    for gradient in (0.5, 0.0):  # AdamW: decayed by lr x decay, then m / sqrt(v) = 1 in the first step
        layer.weight.grad = torch.full_like(layer.weight, gradient)
        optimizer_step(optimizer, stepped_parameters(optimizer), 0.1)
    first = 1 * (1 - 0.1 * 0.01) - 0.1
    m, v = 0.9 * 0.1 * 0.5 / (1 - 0.9**2), 0.95 * 0.05 * 0.5**2 / (1 - 0.95**2)
    assert layer.weight.item() == pytest.approx(first * (1 - 0.1 * 0.01) - 0.1 * m / v**0.5, rel=1e-6)
    assert [cosine_rate(1.0, at, 0.1) for at in (0.1, 0.55, 1)] == pytest.approx([1, 0.5, 0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(bad):
    layer = torch.nn.Linear(2, 2)
    before = [p.detach().clone() for p in layer.parameters()]
    optimizer = make_optimizer(layer, 0.1)
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, bad)
    with pytest.raises(UserError, match=r"the gradient's norm is (nan|inf); the weights are as before"):
        optimizer_step(optimizer, stepped_parameters(optimizer), 0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


def test_far_ratios_stay_finite():
    logprobs = torch.tensor([-1.0, -200.0], requires_grad=True)
    loss, _ = grpo_loss(
        logprobs,
        torch.tensor([-1.0, -1.0]),
        torch.tensor([0, 1]),
        2,
        old=torch.tensor([-300.0, -1.0]),
        reference=torch.tensor([-1.0, -1.0]),
        beta=1.0,
    )
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()


def test_group_advantages_by_hand():
    rewards = torch.tensor([[0.0, 1.0, 2.0], [0.1, 0.1, 0.1], [1.0, 1.0, 1.0 + 1e-7]])
    informative = informative_groups(rewards)
    assert informative.tolist() == [True, False, False]
    advantages = group_advantages(rewards, informative)
    torch.testing.assert_close(advantages[0], torch.tensor([-1.0, 0.0, 1.0]), atol=1e-5, rtol=0)
    assert not advantages[1:].any()
    pair, both = torch.tensor([[0.0, 4.0]]), torch.tensor([True])
    assert group_advantages(pair, both, divide_by="none").tolist() == [[-2.0, 2.0]]
    scaled = group_advantages(pair, both)
    assert scaled.tolist() == [[pytest.approx(-(0.5**0.5)), pytest.approx(0.5**0.5)]]
    with pytest.raises(ValueError, match="samples >= 2"):
        group_advantages(torch.zeros(3, 1), torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="not finite"):
        group_advantages(torch.tensor([[0.0, torch.nan]]), both)
    with pytest.raises(ValueError, match="not 'epoch'"):
        group_advantages(rewards, informative, divide_by="epoch")


def test_groups_without_signal_do_not_count_in_the_deviation_of_the_batch():
    """Deviations -1, 1, -2, 2 of the two informative groups; the third differs by its KL penalty alone."""
    rewards = torch.tensor([[0.0, 2.0], [5.0, 5.0], [0.0, 4.0]])
    informative = informative_groups(rewards)
    std = ((1 + 1 + 4 + 4) / 3) ** 0.5
    expected = torch.tensor([[-1.0, 1.0], [0.0, 0.0], [-2.0, 2.0]]) / std
    for penalty in (0.0, 0.5):
        penalised = rewards - penalty * torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        torch.testing.assert_close(group_advantages(penalised, informative, divide_by="batch"), expected)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w1"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w3", pad_token="w0")


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_flash_attention_and_its_layout_where_it_can_run_else_sdpa(monkeypatch):
    model, cases = make_model("qwen3"), [("bfloat16", "cuda"), ("float32", "cuda"), ("bfloat16", "cpu")]
    monkeypatch.setattr(learned, "is_flash_attn_2_available", lambda: True)
    assert [attention_for(*case) for case in cases] == ["flash_attention_2", "sdpa", "sdpa"]
    assert shares_prompts(model)
    model.config._attn_implementation = "flash_attention_2"
    assert not shares_prompts(model)
    monkeypatch.setattr(learned, "is_flash_attn_2_available", lambda: False)
    assert attention_for("bfloat16", "cuda") == "sdpa"


def test_policy_folders_round_trip(tmp_path, tokenizer):
    base = tmp_path / "base"
    save_policy(make_model("qwen3"), tokenizer, base)
    assert load_tokenizer(base).get_vocab() == tokenizer.get_vocab()
    policy = load_policy(base)
    assert_same_weights(weights(policy), weights(make_model("qwen3")))
    assert all(p.requires_grad for p in policy.parameters())

    lora = load_policy(base, "bfloat16", lora_rank=3)
    names = {name.split(".lora_")[0] for name in weights(lora) if ".lora_" in name}
    assert len(names) == 2 * 7  # every linear layer of both blocks, not the head
    for name, parameter in lora.named_parameters():
        is_adapter = ".lora_" in name
        assert parameter.requires_grad == is_adapter
        assert parameter.dtype == (torch.float32 if is_adapter else torch.bfloat16)
    assert lora.peft_config["default"].lora_alpha == 6
    with torch.no_grad():
        for parameter in (p for p in lora.parameters() if p.requires_grad):
            parameter.add_(0.1)
    adapter = tmp_path / "adapter"
    save_policy(lora, tokenizer, adapter)
    again = load_policy(adapter, "bfloat16")
    assert_same_weights(weights(again), weights(lora))
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in lora.parameters()]
    with pytest.raises(ValueError, match="LoRA adapter already"):
        load_policy(adapter, lora_rank=2)


@pytest.mark.parametrize("name", ["no/such/folder", "./nowhere", "models/nowhere", "empty/nowhere"])
def test_what_cannot_be_loaded_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # which has no models/
    (tmp_path / "empty").mkdir()
    for load in (load_policy, load_tokenizer):
        for packaged in PACKAGED:
            path = f"models/{packaged}-x"
            with pytest.raises(UserError, match=f"{path} is not a folder; make it: .* {packaged} {path}"):
                load(path)
        with pytest.raises(ValueError, match=f"{name} is not a folder; give"):
            load(name)
        with pytest.raises(ValueError, match=r"could be loaded from .*empty; give"):
            load(tmp_path / "empty")
    with pytest.raises(ValueError, match="dtype 'int4' is unknown; choose from float32"):
        load_policy(name, dtype="int4")


OWN_CODE = b"open('%s', 'w')\nclass Config: pass\nclass ModelForCausalLM: pass\n"


class Opens:
    """A pickle that leaves a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_what_a_library_cannot_load_is_one_sentence_and_runs_no_code(tmp_path, tokenizer, monkeypatch):
    """Cut, noise, a pointer of Git LFS, a pickle, other shapes, code of its own (with "y" typed)."""
    base, ran = tmp_path / "base", tmp_path / "ran"
    save_policy(make_model("qwen3"), tokenizer, base)
    whole = (base / "model.safetensors").read_bytes()
    config = json.loads((base / "config.json").read_text())
    code = {"model_type": "own", "auto_map": {f"Auto{n}": f"own.{n}" for n in ("Config", "ModelForCausalLM")}}
    lacking = load_file(base / "model.safetensors")
    del lacking["model.norm.weight"]
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    cases = {
        "pointer of Git LFS": {"model.safetensors": pointer},
        "incomplete metadata": {"model.safetensors": whole[:5000]},
        "header too small": {"model.safetensors": b""},
        "header too large": {"model.safetensors": bytes(range(256)) * 9},
        "lack model.norm.weight": {"model.safetensors": save(lacking, {"format": "pt"})},
        "UnpicklingError": {"model.safetensors": None, "pytorch_model.bin": pickle.dumps(Opens(ran))},
        "no model could be loaded": {"config.json": json.dumps(config | {"vocab_size": 3}).encode()},
        "custom code": {"config.json": json.dumps(config | code).encode(), "own.py": OWN_CODE % bytes(ran)},
        "RecursionError": {"config.json": b"[" * 100_000},
    }
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    for number, (problem, files_of) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        shutil.copytree(base, folder)
        for name, content in files_of.items():
            (folder / name).unlink(missing_ok=True)
            if content is not None:
                (folder / name).write_bytes(content)
        with pytest.raises(UserError, match=problem) as error:
            load_policy(folder)
        assert "\n" not in str(error.value) and str(folder) in str(error.value)
    for content in (pointer, b"", b"[]", b"\xff"):
        (base / "tokenizer.json").write_bytes(content)
        with pytest.raises(UserError, match=r"no tokenizer could be loaded|pointer of Git LFS"):
            load_tokenizer(base)
    assert not ran.exists()


def test_an_adapter_of_another_base_is_one_sentence(tmp_path, tokenizer):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_policy(make_model("qwen3"), tokenizer, base)
    save_policy(load_policy(base, lora_rank=2), tokenizer, adapter)
    path, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    content = json.loads(path.read_text())
    for change in ({"r": 3}, {"peft_type": "NEW"}, {"target_modules": ["other"]}):
        path.write_text(json.dumps(content | change))
        with pytest.raises(UserError, match="does not go on its base"):
            load_policy(adapter)
    path.write_text(json.dumps(content | {"base_model_name_or_path": 7}))
    with pytest.raises(UserError, match="no adapter's configuration"):
        load_policy(adapter)
    weights.write_bytes(b"cut")
    with pytest.raises(UserError, match="holds no weights for this model"):
        restore_policy(load_policy(base, lora_rank=2), adapter, "float32")


def test_a_tokenizer_with_more_ids_than_the_model_has_is_refused(tmp_path, tokenizer):
    save_policy(make_model("qwen3"), tokenizer, tmp_path)
    tokens = SimpleNamespace(tokenizer=load_tokenizer(tmp_path))
    config = Agent(model=str(tmp_path))
    assert chosen_policy(config, tokens) is not None
    tokens.tokenizer.add_tokens(["<new>"])
    with pytest.raises(
        UserError, match=f"has {VOCABULARY + 1} ids, and its model embeddings for {VOCABULARY}"
    ):
        chosen_policy(config, tokens)


def test_lora_warm_start_is_its_own_reference(tmp_path, tokenizer):
    """After a LoRA warm start the reference is the warm-started model, not its base."""
    save_policy(make_model("qwen3"), tokenizer, tmp_path / "base")
    warm = load_policy(tmp_path / "base", lora_rank=2)
    batch = shared_prompt_batch(make_groups())
    with torch.no_grad():
        base_logprobs = token_logprobs(warm, batch)[0]
        for parameter in (p for p in warm.parameters() if p.requires_grad):
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    save_policy(warm, tokenizer, tmp_path / "warm")
    for policy in (load_policy(tmp_path / "warm"), load_policy(tmp_path / "base")):
        reference = Reference(policy)
        trainable = [name for name, p in policy.named_parameters() if p.requires_grad]
        with torch.no_grad():
            start = token_logprobs(policy, batch)[0]
            for parameter in (p for p in policy.parameters() if p.requires_grad):
                parameter.mul_(1.1)
            moved = token_logprobs(policy, batch)[0]
            with reference.policy() as frozen:
                got = token_logprobs(frozen, batch)[0]
            assert torch.equal(token_logprobs(policy, batch)[0], moved)
        assert torch.equal(got, start) and not torch.allclose(got, moved)
        assert [name for name, p in policy.named_parameters() if p.requires_grad] == trainable
        save_policy(policy, tokenizer, tmp_path / "saved")
        assert_same_weights(
            {k: v for k, v in weights(policy).items() if ".reference." not in k},
            weights(load_policy(tmp_path / "saved")),
        )
    assert torch.allclose(start, base_logprobs)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_failed_writes_leave_the_old_content(tmp_path, monkeypatch, tokenizer, error):
    def fail(*_, **__):
        raise error

    file, folder = tmp_path / "file", tmp_path / "folder"
    write_atomically(file, "old")
    model = make_model("qwen3")
    save_policy(model, tokenizer, folder)
    before = sorted(p.name for p in folder.iterdir())
    with pytest.raises(error), folder_atomically(folder) as temporary:
        (temporary / "half").write_text("x")
        fail()
    monkeypatch.setattr(tokenizer, "save_pretrained", fail, raising=False)
    with pytest.raises(error):
        save_policy(model, tokenizer, folder)
    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(error):
        write_atomically(file, b"new")
    assert file.read_text() == "old"
    assert sorted(p.name for p in folder.iterdir()) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_links_and_devices_are_written_to_and_not_replaced(tmp_path):
    (tmp_path / "real").write_text("old")
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("real")
    write_atomically(link, "new")
    assert link.is_symlink() and (tmp_path / "real").read_text() == "new"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_text)
        write_atomically(pipe, "through")
        assert read.result() == "through" and pipe.is_fifo()


def test_folders_are_replaced_whole_and_recovered(tmp_path):
    folder = tmp_path / "run"
    for name in ("one", "two"):
        with folder_atomically(folder) as temporary:
            (temporary / name).write_text(name)
    assert [p.name for p in folder.iterdir()] == ["two"]
    folder.rename(tmp_path / ".run.old")  # as if killed between the two renames
    recover_folder(folder)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
