"""Losses, layouts, micro-batches, advantages and optimizer steps against hand-computed numbers."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from decoders import VOCABULARY, make_decoder, random_model
from torch import Tensor, nn, tensor

import train_grpo
from mtsql.agent.trajectory import Segment, Trajectory
from mtsql.errors import UserError
from mtsql.learn import logprobs as attention
from mtsql.learn import loss as losses
from mtsql.learn import model as learned
from mtsql.learn.batches import micro_batches, order_by_database, shared_prefix
from mtsql.learn.logprobs import packed_batch, row_batch, shared_prompt_batch, shares_prompts, token_logprobs
from mtsql.learn.loss import group_advantages, informative_groups, loss_denominator, sft_loss, truncation_cap
from mtsql.learn.model import attention_for, cosine_rate, make_optimizer, optimizer_step, warmup_rate
from mtsql.learn.parallel import Processes
from mtsql.learn.samples import Sample, logprob_gaps
from mtsql.recipes.rewards import Rewards

DEFAULTS = {"aggregate": "trajectory", "clip_high": 0.2, "beta": 0.0}
LAYOUTS = {
    "shared": shared_prompt_batch,
    "rows": lambda groups: row_batch(flatten(groups)),
    "packed for flash-attn": lambda groups: packed_batch(flatten(groups)),
    "one by one": lambda groups: shared_prompt_batch([[t] for t in flatten(groups)]),
}


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen3 with LoRA", "llama in 4 bits with LoRA"])
def model(request, tmp_path_factory) -> torch.nn.Module:
    return make_decoder(request.param, tmp_path_factory.mktemp("model"))


def grpo_loss(logprobs, advantages, index, n, old=None, reference=None, sampling=None, cap=0.0, **options):
    """The loss of a batch that has only what the loss needs; `n` is its denominator."""
    given = {"advantages": tensor(advantages), "trajectory_index": tensor(index)}
    options = SimpleNamespace(**DEFAULTS | options)
    batch = SimpleNamespace(**given, sampling_logprobs=sampling)
    return losses.grpo_loss(logprobs, batch, n, options, old, reference, cap)


def make_trajectory(draw: np.random.Generator, prompt: list[int], spans: list[int]) -> Trajectory:
    """Segments of the given lengths, sampled and given in turn."""
    segments = [Segment.given("prompt", prompt)]
    for index, length in enumerate(spans):
        ids = draw.integers(1, VOCABULARY, length).tolist()
        if index % 2 == 0:
            segments.append(Segment.sampled(ids, draw.uniform(-3, 0, length).tolist()))
        else:
            segments.append(Segment.given("environment", ids))
    return Trajectory("1/0", 0, segments, advantage=draw.normal())


def make_groups() -> list[list[Trajectory]]:
    """Unequal prompts and responses, but for two; one of a single sampled token, one of none. The prompts of
    the last group only begin alike."""
    draw = np.random.default_rng(0)
    spans = [[[5], [3, 4, 6], [1]], [[7, 2], [], [2, 3, 1, 2]], [[4, 1, 1]]]
    groups = []
    for length, group in zip([9, 4, 13], spans, strict=True):
        prompt = draw.integers(1, VOCABULARY, length).tolist()
        groups.append([make_trajectory(draw, prompt, s) for s in group])
    groups[0].append(replace(groups[0][1], advantage=-1.0))
    prompts = [[4, 9, 2, 7, 7], [4, 9, 2], [4, 9, 2, 1, 5, 8]]
    return [*groups, [make_trajectory(draw, prompt, [3, 2, 4]) for prompt in prompts]]


def flatten(groups: list[list[Trajectory]]) -> list[Trajectory]:
    return [t for group in groups for t in group]


def reference_logprobs(model: nn.Module, trajectory: Trajectory, temperature: float) -> tuple[Tensor, Tensor]:
    """Naive full logits of one trajectory: log-probabilities and entropies, (tokens,) each."""
    ids = tensor([trajectory.ids])  # (1, positions)
    logprobs = (model(ids).logits[0, :-1].double() / temperature).log_softmax(-1)
    trained = tensor(trajectory.loss_mask[1:], dtype=torch.bool)  # (positions - 1,)
    of_next = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
    return of_next[trained].float(), -(logprobs.exp() * logprobs).sum(-1)[trained].float()


def gradients(model: torch.nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


def difference(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference, in parts of each tensor's largest value or of 1; infinite for a NaN."""
    assert [(a.shape, a.dtype) for a in one] == [(b.shape, b.dtype) for b in other]
    apart = [(a - b).abs().max() / max(1.0, b.abs().max().item()) for a, b in zip(one, other, strict=True)]
    return torch.stack(apart).nan_to_num(nan=float("inf")).max().item()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_equal_naive_full_logits(model, layout, monkeypatch):
    groups, temperature = make_groups(), 0.6
    expected = [reference_logprobs(model, t, temperature) for t in flatten(groups)]
    logprobs, entropies = (torch.cat(x) for x in zip(*expected, strict=True))
    expected_gradient = gradients(model, logprobs.square().mean())
    batch = LAYOUTS[layout](groups)
    for chunk in (1024, 7):
        monkeypatch.setattr(attention, "HEAD_CHUNK_BYTES", 4 * VOCABULARY * chunk)
        got, entropy = token_logprobs(model, batch, temperature)
        assert difference([got, entropy], [logprobs, entropies]) <= 1e-5
        assert got.dtype == entropy.dtype == torch.float32 and not entropy.requires_grad
        assert difference(gradients(model, got.square().mean()), expected_gradient) <= 1e-5


@pytest.mark.parametrize("aggregate", ["trajectory", "token"])
def test_gradients_do_not_depend_on_micro_batches(model, aggregate):
    groups = make_groups()
    tokens = sum(t.sampled_length for t in flatten(groups))
    denominator = {"trajectory": len(flatten(groups)), "token": tokens}[aggregate]
    options = SimpleNamespace(aggregate=aggregate, clip_high=0.05, beta=0.1)

    def step(max_positions: int, shared: bool) -> tuple[list[Tensor], dict[str, float]]:
        total: list[Tensor] = []
        statistics = {"weight": 0.0, "clip_fraction": 0.0, "kl": 0.0}
        for part in micro_batches(groups, max_positions, shared):
            if not any(t.sampled_length for t in flatten(part)):
                continue
            batch = shared_prompt_batch(part)
            logprobs, _ = token_logprobs(model, batch)
            now = logprobs.detach()
            old, reference = now - 0.1 * batch.targets / VOCABULARY, now + 0.1
            loss, shares = losses.grpo_loss(logprobs, batch, denominator, options, old, reference)
            new = gradients(model, loss + sft_loss(logprobs, tokens))
            total = [a + b for a, b in zip(total, new, strict=True)] if total else new
            statistics = {name: value + shares[name] for name, value in statistics.items()}
        return total, statistics

    whole, expected = step(10_000, shared=True)
    assert 0 < expected["clip_fraction"] < 1
    for max_positions, shared in ((40, True), (1, True), (40, False)):
        total, statistics = step(max_positions, shared)
        assert difference(total, whole) <= 1e-5
        assert statistics == pytest.approx(expected, abs=1e-6)


def test_attention_takes_more_sequences_together_on_a_gpu_and_gives_the_same(model, monkeypatch):
    draw = np.random.default_rng(0)
    prompt = draw.integers(1, VOCABULARY, 9).tolist()
    group = [make_trajectory(draw, prompt, [length]) for length in (3, 5, 2, 8, 1, 4)]

    def together(batch: attention.TokenBatch) -> list[int]:
        return [len(call.slots) for call in batch.layout.calls if call.attention_mask is not None]

    few = shared_prompt_batch([group])
    assert together(few) == [4, 1]  # one predicts from the prompt alone
    assert together(shared_prompt_batch([group], "meta")) == [5]  # not a CPU
    monkeypatch.setattr(attention, "KEYS_TOGETHER", 5 * (9 + 7) - 1)
    assert together(shared_prompt_batch([group], "meta")) == [4, 1]
    monkeypatch.setattr(attention, "SEQUENCES_TOGETHER", 5)
    many = shared_prompt_batch([group])
    assert together(many) == [5]
    (expected, _), (found, _) = (token_logprobs(model, batch) for batch in (few, many))
    assert difference([found], [expected]) <= 1e-5
    assert difference(gradients(model, found.sum()), gradients(model, expected.sum())) <= 1e-5


def test_trajectories_that_share_nothing_take_plain_causal_attention(monkeypatch):
    model, calls = make_decoder("qwen3"), []
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
    model, batch = make_decoder("qwen3"), LAYOUTS["packed for flash-attn"](groups)
    # All before the last trained token, which predicts nothing; of one without any its prompt.
    trained = [[i for i, bit in enumerate(t.loss_mask) if bit] for t in flatten(groups)]
    prompts = [len(t.segments[0].ids) for t in flatten(groups)]
    lengths = [max(of, default=prompt) for of, prompt in zip(trained, prompts, strict=True)]
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


def test_flash_attention_and_its_layout_where_it_can_run_else_sdpa(monkeypatch):
    model, cases = make_decoder("qwen3"), [("bfloat16", "cuda"), ("float32", "cuda"), ("bfloat16", "cpu")]
    monkeypatch.setattr(learned, "is_flash_attn_2_available", lambda: True)
    assert [attention_for(*case) for case in cases] == ["flash_attention_2", "sdpa", "sdpa"]
    assert shares_prompts(model)
    model.config._attn_implementation = "flash_attention_2"
    assert not shares_prompts(model)
    monkeypatch.setattr(learned, "is_flash_attn_2_available", lambda: False)
    assert attention_for("bfloat16", "cuda") == "sdpa"


def test_positions_and_shift_by_hand():
    prompt = Segment.given("prompt", [1, 2, 3])
    given, told = Segment.given("environment", [7, 8]), Segment.given("environment", [10])
    group = [
        Trajectory("1/0", 0, [prompt, Segment.sampled([4, 5], [-1, -2])]),
        Trajectory("1/0", 1, [prompt, Segment.sampled([6], [-3]), given, Segment.sampled([9], [-4]), told]),
        Trajectory("1/0", 2, [prompt, Segment.sampled([4, 9], [-5, -6])]),
    ]
    for trajectory, advantage in zip(group, (0.5, -0.5, 1), strict=True):
        trajectory.advantage = advantage
    batch, rows = shared_prompt_batch([group]), row_batch(group)
    assert batch.ids.tolist() == [[1, 2, 3, 4, 6, 7, 8]]  # what predicts nothing is left out
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 3, 4, 5]]
    # The prompt's last position predicts 4, 6 and 4; the one place of 4, behind it, 5 and 9.
    assert batch.source.tolist() == [2, 3, 2, 6, 2, 3]
    for of in (batch, rows, packed_batch(group)):
        assert (of.targets.tolist(), of.trajectory_index.tolist()) == ([4, 5, 6, 9, 4, 9], [0, 0, 1, 1, 2, 2])
        assert of.sampling_logprobs.tolist() == [-1, -2, -3, -4, -5, -6]
        assert of.advantages.tolist() == [0.5, -0.5, 1]
    padded = [[1, 2, 3, 4, 5, 0, 0, 0], [1, 2, 3, 6, 7, 8, 9, 10], [1, 2, 3, 4, 9, 0, 0, 0]]
    assert rows.ids.tolist() == padded and rows.source.tolist() == [2, 3, 10, 13, 18, 19]


def test_the_heads_gradient_adds_up_in_float32():
    """In bfloat16, a thousand small chunks would stop counting beside what has added up."""
    torch.manual_seed(0)
    hidden, weight = torch.rand(1024, 8), torch.zeros(4, 8)
    targets = torch.zeros(1024, dtype=torch.int64)

    def gradient(dtype: torch.dtype) -> Tensor:
        w = weight.to(dtype, copy=True).requires_grad_()
        logprobs, _ = attention._HeadLogprobs.apply(hidden.to(dtype), w, targets, 1.0, 1)
        logprobs.sum().backward()
        return w.grad.float()

    exact = gradient(torch.float32)
    assert (gradient(torch.bfloat16) - exact).abs().max() < 0.01 * exact.abs().max()


def test_shared_prompts_are_refused_where_they_would_be_wrong():
    groups, model = make_groups(), make_decoder("qwen3")
    with pytest.raises(ValueError, match="share no token"):
        shared_prompt_batch([[groups[0][0], groups[1][0]]])
    with pytest.raises(ValueError, match="have loss mask 1"):
        shared_prompt_batch([[Trajectory("1/0", 0, [Segment.sampled([1, 2], [0.0, 0.0])])]])
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="needs SDPA attention, not eager"):
        token_logprobs(model, shared_prompt_batch(groups))
    windows = random_model("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ValueError, match="does not support sliding_window"):
        token_logprobs(windows, shared_prompt_batch(groups))


def test_attention_is_plain_sdpa_without_a_layout():
    model = make_decoder("qwen3").eval()
    ids = tensor([[3, 4, 5, 6], [7, 8, 0, 0]])
    attention_mask = tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    expected = model(ids, attention_mask=attention_mask).logits
    token_logprobs(model, shared_prompt_batch(make_groups()))
    assert torch.equal(model(ids, attention_mask=attention_mask).logits, expected)


def test_groups_that_do_not_fit_are_cut_and_nothing_is_lost():
    draw = np.random.default_rng(3)
    groups = []
    for length in (30, 5, 90, 12):
        prompt = draw.integers(1, VOCABULARY, length).tolist()
        groups.append([make_trajectory(draw, prompt, [int(draw.integers(1, 60))]) for _ in range(8)])
    for max_positions in (1, 100, 200, 100_000):
        batches = micro_batches(groups, max_positions)
        seen = [id(t) for batch in batches for t in flatten(batch)]
        assert sorted(seen) == sorted(id(t) for t in flatten(groups))
        for batch in batches:
            prefixes = [shared_prefix(group) for group in batch]
            own = [len(t.ids) - p for group, p in zip(batch, prefixes, strict=True) for t in group]
            assert len(own) == 1 or sum(prefixes) + sum(own) <= max_positions
    assert len(micro_batches(groups, 100_000)) == 1


def test_equal_trajectories_take_the_positions_of_one():
    draw = np.random.default_rng(0)
    group = [make_trajectory(draw, list(range(1, 11)), [20]) for _ in range(2)] * 4
    assert len(micro_batches([group], 49)) == 2
    (batch,) = micro_batches([group], 50)
    assert shared_prompt_batch(batch).ids.shape == (1, 10 + 2 * 19)


def test_steps_by_database_hold_every_trajectory_once():
    trajectories = [Trajectory(f"{i:05d}/0", 0) for i in range(37)]
    databases = {t.example_id: "abc"[i % 3] for i, t in enumerate(trajectories)}  # 13, 12 and 12
    ordered = order_by_database(trajectories, databases, 5, random.Random(0))
    assert sorted(t.example_id for t in ordered) == [t.example_id for t in trajectories]
    names = [databases[t.example_id] for t in ordered]
    blocks = [names[i : i + 5] for i in range(0, 37, 5)]
    assert sum(len(set(block)) == 1 for block in blocks[:7]) == 6  # 3, 2 and 2 are left over: a block of 5
    assert len(blocks[7]) == 2
    assert ordered != order_by_database(trajectories, databases, 5, random.Random(1))
    # Without the last one over "a".
    fewer = order_by_database(trajectories[:-1], databases, 5, random.Random(0))
    for name in "bc":
        first, second = ([t for t in of if databases[t.example_id] == name] for of in (ordered, fewer))
        assert first == second and first


CORNERS = [
    (1.5, 1.0, 1.3, 0.0),  # too likely and good: clipped at 1 + 0.3
    (1.5, -1.0, -1.5, -1.5),  # too likely and bad: brought back
    (0.5, 1.0, 0.5, 0.5),  # too unlikely and good: brought back
    (0.5, -1.0, -0.8, 0.0),  # too unlikely and bad: clipped at 1 - 0.2
    (1.1, 1.0, 1.1, 1.1),  # inside the clip range
]


@pytest.mark.parametrize(("ratio", "advantage", "objective", "slope"), CORNERS)
def test_corners_of_the_clip(ratio, advantage, objective, slope):
    logprobs = tensor([-1.0], requires_grad=True)
    old = tensor([-1.0 - np.log(ratio)], dtype=torch.float32)
    loss, statistics = grpo_loss(logprobs, [advantage], [0], 1, old, clip_high=0.3)
    loss.backward()
    assert loss.item() == pytest.approx(-objective)
    assert float(logprobs.grad) == pytest.approx(-slope)
    assert statistics["clip_fraction"] == float(slope == 0)


def test_far_ratios_stay_finite():
    logprobs = tensor([-1.0, -200.0], requires_grad=True)
    old, reference = tensor([-300.0, -1.0]), tensor([-1.0, -1.0])
    loss, _ = grpo_loss(logprobs, [-1.0, -1.0], [0, 1], 2, old, reference, beta=1.0)
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()


def test_denominators_by_hand():
    """Trajectory 0 has 1 token and advantage 1, trajectory 1 has 3 and advantage -2."""
    logprobs, index, advantages = torch.zeros(4, requires_grad=True), [0, 1, 1, 1], [1.0, -2.0]
    loss, statistics = grpo_loss(logprobs, advantages, index, 2)
    assert loss.item() == pytest.approx(-(1 / 2 * 1 + 1 / 2 * -2))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, tensor([-1 / 2, 1 / 3, 1 / 3, 1 / 3]))
    assert statistics == pytest.approx({"weight": 1.0, "clip_fraction": 0.0})
    _, half = grpo_loss(logprobs, advantages, index, 4, old=tensor([-1.0, 0.0, 0.0, 0.0]))
    assert half == pytest.approx({"weight": 0.5, "clip_fraction": 0.25})  # of what was trained on, a half
    loss, _ = grpo_loss(logprobs, advantages, index, 4, aggregate="token")
    assert loss.item() == pytest.approx(-(1 - 2 - 2 - 2) / 4)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, tensor([-1.0, 2.0, 2.0, 2.0]) / 4)
    assert float(sft_loss(tensor([-1.0, -2.0]), 8)) == pytest.approx(3 / 8)


def test_denominators_of_a_step():
    sampled = [Trajectory("", 0, [Segment.sampled([1] * n, [0.0] * n)]) for n in (2, 3)]
    found = {name: loss_denominator(sampled, name, 100) for name in ("trajectory", "token", "constant")}
    assert found == {"trajectory": 2, "token": 5, "constant": 200}
    assert loss_denominator([], "token", 100) == loss_denominator([], "trajectory", 100) == 1


def test_kl_is_k3_by_hand():
    logprobs = tensor([-1.0], requires_grad=True)
    reference = tensor([-1.0 + np.log(2.0)], dtype=torch.float32)
    loss, statistics = grpo_loss(logprobs, [0.0], [0], 1, reference=reference, beta=0.5)
    k3 = 2 - np.log(2) - 1
    assert statistics["kl"] == pytest.approx(k3)
    assert loss.item() == pytest.approx(0.5 * k3)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert float(gradient) == pytest.approx(0.5 * (1 - 2))  # towards the reference


def test_truncated_importance_sampling_by_hand():
    """The trainer finds the first token e times as likely as the sampler did, the second half as likely."""
    logprobs = tensor([-1.0, -1.0], requires_grad=True)
    sampling = tensor([-2.0, -1.0 + np.log(2)], dtype=torch.float32)
    loss, statistics = grpo_loss(logprobs, [1.0], [0, 0], 1, sampling=sampling, cap=2.0)
    assert loss.item() == pytest.approx(-(2.0 + 0.5) / 2)
    assert statistics["tis_weight"] == pytest.approx(1.25)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -tensor([2.0, 0.5]) / 2)


def test_importance_is_truncated_where_sampler_and_trainer_round():
    exact, rounded, in_4_bits = (make_decoder("qwen3") for _ in range(3))
    rounded.bfloat16()
    in_4_bits.is_loaded_in_4bit = True
    assert [truncation_cap(policy) for policy in (exact, rounded, in_4_bits)] == [0.0, 2.0, 2.0]
    assert truncation_cap(exact.to("meta")) == 2.0  # not a CPU


def test_the_gap_between_sampler_and_trainer_is_told_three_times():
    gaps = logprob_gaps([torch.arange(0, 100) / 100.0, tensor([5.0])])
    assert gaps["logprob_gap"] == 5.0 and gaps["logprob_gap_p99"] == pytest.approx(0.99)
    assert gaps["logprob_gap_mean"] == pytest.approx((49.5 + 5.0) / 101)
    assert set(logprob_gaps([]).values()) == {0.0}


def test_beta2_is_the_optimizers():
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    optimizer = make_optimizer(layer, 0.1, beta2=0.95)
    for gradient in (0.5, 0.0):  # AdamW: m / sqrt(v) = 1 in the first step
        layer.weight.grad = torch.full_like(layer.weight, gradient)
        optimizer_step(optimizer, 0.1)
    m, v = 0.9 * 0.1 * 0.5 / (1 - 0.9**2), 0.95 * 0.05 * 0.5**2 / (1 - 0.95**2)
    assert layer.weight.item() == pytest.approx(1 - 0.1 - 0.1 * m / v**0.5, rel=1e-6)
    assert [cosine_rate(1.0, at, 0.1) for at in (0.1, 0.55, 1)] == pytest.approx([1, 0.5, 0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(bad):
    layer = torch.nn.Linear(2, 2, bias=False)
    before, optimizer = layer.weight.detach().clone(), make_optimizer(layer, 0.1)
    layer.weight.grad = torch.full_like(layer.weight, bad)
    with pytest.raises(UserError, match=r"the gradient's norm is (nan|inf); the weights are as before"):
        optimizer_step(optimizer, 0.1)
    assert torch.equal(before, layer.weight)


def test_group_advantages_by_hand():
    rewards = tensor([[0.0, 1.0, 2.0], [0.1, 0.1, 0.1], [1.0, 1.0, 1.0 + 1e-7]])
    informative = informative_groups(rewards)
    assert informative.tolist() == [True, False, False]
    advantages = group_advantages(rewards, informative)
    torch.testing.assert_close(advantages[0], tensor([-1.0, 0.0, 1.0]), atol=1e-5, rtol=0)
    assert not advantages[1:].any()
    pair, both = tensor([[0.0, 4.0]]), tensor([True])
    assert group_advantages(pair, both, divide_by="none").tolist() == [[-2.0, 2.0]]
    assert group_advantages(pair, both).tolist() == [[pytest.approx(-(0.5**0.5)), pytest.approx(0.5**0.5)]]
    with pytest.raises(ValueError, match="not finite"):
        group_advantages(tensor([[0.0, torch.nan]]), both)


def test_groups_without_signal_do_not_count_in_the_deviation_of_the_batch():
    """Deviations -1, 1, -2, 2 of the two informative groups; the third differs by its KL penalty alone."""
    rewards = tensor([[0.0, 2.0], [5.0, 5.0], [0.0, 4.0]])
    informative = informative_groups(rewards)
    std = ((1 + 1 + 4 + 4) / 3) ** 0.5
    expected = tensor([[-1.0, 1.0], [0.0, 0.0], [-2.0, 2.0]]) / std
    for penalty in (0.0, 0.5):
        penalised = rewards - penalty * tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        torch.testing.assert_close(group_advantages(penalised, informative, divide_by="batch"), expected)


@pytest.mark.parametrize("aggregate", ["trajectory", "token"])
def test_two_updates_of_a_step_are_the_clipped_surrogate_from_naive_logits(aggregate, monkeypatch):
    """The second group has no variance; one sample of the first is kept out (GRPO-Filter), and counts in its
    group's mean alone, the second group in N alone."""
    model, old = make_decoder("qwen3"), {}
    options = {"aggregate": aggregate, "divide_by": "none", "temperature": 0.6, "updates_per_batch": 2}
    options |= {"max_response_tokens": 99, "micro_batch_positions": 40, "learning_rate": 1.0}
    config = SimpleNamespace(**DEFAULTS | options)
    rewards = [[1.0, 0.0, 2.0], [1.0, 1.0, 1.0], [0.0, 0.0, 3.0]]
    held = [group[:3] for group in make_groups() if len(group) >= 3]
    groups = [
        [Sample(t, None, Rewards(0, 0, reward, {}, kept=reward != 2)) for t, reward in zip(*of, strict=True)]
        for of in zip(held, rewards, strict=True)
    ]
    kept = [s.trajectory for group in groups for s in group if s.rewards.kept]
    clipped = []

    def naive() -> Tensor:
        total = 0.0
        for group in (groups[0], groups[2]):
            for sample in filter(lambda s: s.rewards.kept, group):
                logprobs, _ = reference_logprobs(model, sample.trajectory, 0.6)  # (tokens,)
                ratios = (logprobs - old.setdefault(id(sample), logprobs.detach())).exp()
                advantage = sample.rewards.total - 1.0  # each group's mean is 1
                terms = torch.minimum(ratios * advantage, ratios.clamp(0.8, 1.2) * advantage)
                clipped.append((terms != ratios * advantage).any().item())
                total += terms.mean() / len(kept) if aggregate == "trajectory" else terms.sum()
        return -total if aggregate == "trajectory" else -total / sum(t.trained_length for t in kept)

    def compared(optimizer: torch.optim.Optimizer, rate: float) -> float:
        got = [p.grad for p in model.parameters()]
        assert rate == pytest.approx(1 / 3) and difference(got, gradients(model, naive())) <= 1e-5
        optimizer.step()
        optimizer.zero_grad()
        return 0.0

    monkeypatch.setattr(train_grpo, "optimizer_step", compared)
    task = SimpleNamespace(policy=model, processes=Processes(0, 1))
    informative = train_grpo.set_advantages(config, groups)
    assert informative.tolist() == [True, False, True]
    optimizer = torch.optim.SGD(model.parameters(), 2.0)
    statistics = train_grpo.clipped_step(config, task, None, optimizer, groups, informative, 0)
    assert len(clipped) == 10 and not any(clipped[:5]) and any(clipped[5:])
    assert 0 < statistics["clip_fraction"] < 1


def test_warm_up_and_clipping_of_a_step():
    assert [warmup_rate(3.0, step) for step in range(4)] == pytest.approx([1.0, 2.0, 3.0, 3.0])
    weight = torch.nn.Parameter(tensor([0.0, 0.0]))
    weight.grad = tensor([3.0, 4.0])
    assert optimizer_step(torch.optim.SGD([weight], 1.0), 0.5) == pytest.approx(5.0)
    assert weight.tolist() == pytest.approx([-0.3, -0.4])  # a gradient of the norm 1, times the rate
