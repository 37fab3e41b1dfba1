"""Quantised bases, adapters, 8-bit optimizer states, merging, and how micro-batches are cut."""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TOY, run
from peft import PeftModel
from test_learn import SIZES, VOCABULARY, difference, flatten, gradients, make_groups, make_trajectory
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtsql.agent.generator import Generator
from mtsql.agent.trajectory import Segment, Trajectory
from mtsql.errors import UserError
from mtsql.learn.batches import micro_batches, order_by_database, shared_prefix
from mtsql.learn.logprobs import row_batch, shared_prompt_batch, token_logprobs
from mtsql.learn.model import load_policy, merge_adapter, save_policy
from mtsql.learn.optimizer import (
    make_optimizer,
    optimizer_state,
    optimizer_step,
    restore_optimizer,
    stepped_parameters,
)
from mtsql.model_folder import load_tokenizer

WIDER = SIZES | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny) -> Path:
    """An ordinary folder of a random model."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("base")
    config = Qwen3Config(tie_word_embeddings=True, **WIDER)
    save_policy(Qwen3ForCausalLM(config), tiny.tokens.tokenizer, folder)
    return folder


def randomise_adapters(policy: PeftModel) -> PeftModel:
    for name, parameter in policy.named_parameters():
        if "lora_B.default" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return policy


def test_only_adapters_of_a_quantised_model_are_trained(base):
    policy = load_policy(base, quantise="nf4", lora_rank=4)
    trainable = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    assert trainable and all("lora_" in n and p.dtype == torch.float32 for n, p in trainable.items())
    in_layers = [p for n, p in policy.named_parameters() if "layers" in n and "base_layer.weight" in n]
    assert len(in_layers) == 7 * SIZES["num_hidden_layers"]
    assert {p.dtype for p in in_layers} == {torch.uint8}  # two 4-bit numbers a byte
    assert policy.get_output_embeddings().weight.dtype == torch.float32
    with pytest.raises(ValueError, match="nothing can be trained"):
        make_optimizer(load_policy(base, quantise="nf4"), 1e-3)


@pytest.mark.parametrize("quantise", ["none", "nf4"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_every_layout_gives_the_gradient_of_row_by_row_training(base, quantise, lora_rank):
    if quantise == "nf4" and not lora_rank:
        pytest.skip("a quantised base has no gradient without adapters")
    policy = load_policy(base, quantise=quantise, lora_rank=lora_rank)
    if lora_rank:
        randomise_adapters(policy)
    groups = make_groups()

    def step(layout: str, max_positions: int) -> list[torch.Tensor]:
        total: list[torch.Tensor] = []
        for part in micro_batches(groups, max_positions, layout == "shared"):
            if any(t.sampled_length for group in part for t in group):
                batch = row_batch(flatten(part)) if layout == "rows" else shared_prompt_batch(part)
                logprobs, _ = token_logprobs(policy, batch, chunk=7)
                new = gradients(policy, logprobs.sum() / 40)
                total = new if not total else [a + b for a, b in zip(total, new, strict=True)]
        return total

    expected = step("rows", 1)  # each trajectory alone
    for layout in ("shared", "packed", "rows"):
        for max_positions in (40, 10_000):
            assert difference(step(layout, max_positions), expected) <= 1e-5


def test_sampling_changes_nothing_in_the_training_of_a_quantised_policy(base):
    """bitsandbytes repacks 4-bit layers when they are evaluated; then they would pass no gradient."""
    policy = randomise_adapters(load_policy(base, quantise="nf4", lora_rank=4))
    batch = shared_prompt_batch(make_groups())
    before, _ = token_logprobs(policy, batch)
    expected = gradients(policy, before.sum())
    with Generator(policy, (), temperature=1.0) as generator:
        generator.start([[5, 6, 7]], [0], [10])
        for _ in range(10):
            generator.step()
        row = generator.rows[0]
        trajectory = make_trajectory(np.random.default_rng(0), [5, 6, 7], [10])
        sampled = Segment.sampled(row.ids, row.logprobs)
    trajectory.segments[1:] = [sampled]
    after, _ = token_logprobs(policy, batch)
    assert torch.equal(after, before)
    assert difference(gradients(policy, after.sum()), expected) == 0
    logprobs, _ = token_logprobs(policy, shared_prompt_batch([[trajectory]]))
    torch.testing.assert_close(logprobs, torch.tensor(sampled.logprobs), atol=1e-4, rtol=0)


def test_eight_bit_moments_take_nearly_the_same_step(base):
    steps = {}
    for kind in ("adamw", "adamw8bit"):
        policy = load_policy(base)
        before = policy.model.embed_tokens.weight.detach().clone()
        optimizer = make_optimizer(policy, 1e-3, kind=kind)
        for _ in range(3):
            logprobs, _ = token_logprobs(policy, shared_prompt_batch(make_groups()))
            (-logprobs.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        steps[kind] = policy.model.layers[0].mlp.up_proj.weight.detach().clone()
        assert not torch.equal(policy.model.embed_tokens.weight, before)
        if kind == "adamw8bit":
            moments = {s["state1"].dtype for s in optimizer.state.values()}
            assert torch.uint8 in moments
    assert (steps["adamw"] - steps["adamw8bit"]).abs().mean() < 3e-4  # of at most 3e-3


@pytest.mark.parametrize("quantise", ["none", "nf4"])
def test_merged_copy_is_an_ordinary_folder_with_the_same_policy(base, tmp_path, tiny, quantise):
    policy = randomise_adapters(load_policy(base, quantise=quantise, lora_rank=4))
    save_policy(policy, tiny.tokens.tokenizer, tmp_path / "adapter")
    merged = merge_adapter(tmp_path / "adapter", "float32")
    assert not isinstance(merged, PeftModel)
    batch = shared_prompt_batch(make_groups())
    unquantised = load_policy(tmp_path / "adapter")  # the merged copy stands on the unquantised base
    with torch.no_grad():
        torch.testing.assert_close(
            token_logprobs(merged, batch)[0], token_logprobs(unquantised, batch)[0], atol=1e-4, rtol=0
        )
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_adapter(base, "float32")


def test_an_adapter_on_a_base_that_was_saved_in_nf4_is_not_merged(base, tmp_path):
    load_policy(base, quantise="nf4").save_pretrained(tmp_path / "base")
    load_policy(tmp_path / "base", lora_rank=2).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match="a base that is not quantised"):
        merge_adapter(tmp_path / "adapter", "float32")


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
def test_small_steps_in_bfloat16_move_the_weights_as_in_float32(base, kind):
    """At 1e-6 a step is less than half the spacing of bfloat16; a hundred of them move the master copies."""
    rate = 1e-6
    exact, half = load_policy(base), load_policy(base, "bfloat16")
    exact.load_state_dict(half.state_dict())

    def flat(parameters) -> torch.Tensor:
        return torch.cat([p.detach().float().flatten() for p in parameters])

    start = flat(half.parameters())
    moved = {}
    for policy in (exact, half):
        optimizer = make_optimizer(policy, rate, kind)
        gradients = torch.Generator().manual_seed(0)
        for _ in range(100):
            for p in policy.parameters():  # the same gradients for both, in two parts
                drawn = torch.randn(p.shape, generator=gradients).to(torch.bfloat16).to(p.dtype)
                for _ in range(2):
                    (p * drawn).sum().backward()
            optimizer_step(optimizer, stepped_parameters(optimizer), rate)
        moved[policy] = flat(stepped_parameters(optimizer)) - start
        assert torch.equal(
            flat(policy.parameters()), flat(p.to(policy.dtype) for p in stepped_parameters(optimizer))
        )
    assert moved[exact].abs().mean() > 2e-6
    assert (moved[half] - moved[exact]).abs().max() < 1e-7


def test_master_copies_go_on_where_they_were(base):
    rate, policies = 1e-6, [load_policy(base, "bfloat16") for _ in range(2)]
    optimizers = [make_optimizer(policy, rate) for policy in policies]

    def step(policy, optimizer):
        for p in policy.parameters():
            p.sum().backward()
        optimizer_step(optimizer, stepped_parameters(optimizer), rate)

    step(policies[0], optimizers[0])
    state = optimizer_state(policies[0], optimizers[0])
    policies[1].load_state_dict(policies[0].state_dict())
    restore_optimizer(optimizers[1], copy.deepcopy(state))
    for policy, optimizer in zip(policies, optimizers, strict=True):
        step(policy, optimizer)
    pairs = zip(*map(stepped_parameters, optimizers), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


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


def test_groups_that_do_not_fit_are_cut_and_nothing_is_lost():
    draw = np.random.default_rng(3)
    groups = []
    for length in (30, 5, 90, 12):
        prompt = draw.integers(1, VOCABULARY, length).tolist()
        group = [make_trajectory(draw, prompt, [int(draw.integers(1, 60))]) for _ in range(8)]
        groups.append(group)
    for max_positions in (1, 100, 200, 100_000):
        batches = micro_batches(groups, max_positions)
        seen = [id(t) for batch in batches for group in batch for t in group]
        assert sorted(seen) == sorted(id(t) for t in flatten(groups))
        for batch in batches:
            prefixes = [shared_prefix(group) for group in batch]
            own = [len(t.ids) - p for group, p in zip(batch, prefixes, strict=True) for t in group]
            alone = len(batch) == 1 and len(own) == 1
            assert alone or sum(prefixes) + sum(own) <= max_positions
    assert len(micro_batches(groups, 100_000)) == 1


def test_qlora_recipe_with_merge_and_eight_bits(work, tmp_path):
    options = ["--quantise", "nf4", "--lora-rank", 4, "--optimizer", "adamw8bit"]
    base = [*TOY, "--data", work / "benchmark", "--model", work / "imitation"]
    run(
        "train_grpo.py", *base, *options, "--steps", 2, "--prompts-per-step", 3, "--samples-per-prompt", 4,
        "--beta", 0.1, "--aggregate", "constant", "--tis-cap", 2.0, "--divide-by", "batch",
        "--updates-per-batch", 2,
        "--out", tmp_path / "grpo",
    )  # fmt: skip
    merged = tmp_path / "merged"
    run("-m", "mtsql.extras.merge", tmp_path / "grpo" / "policy", merged)
    assert (merged / "model.safetensors").is_file() and not (merged / "adapter_config.json").exists()
    out = run(
        "evaluate.py", *TOY, "--data", work / "benchmark", "--model", merged,
        "--out", tmp_path / "evaluation", "--dialogues", 2,
    )  # fmt: skip
    assert "EX %" in out
    out = run("train_grpo.py", *base, "--steps", 1, "--out", tmp_path / "full", "--quantise", "nf4", expect=2)
    assert "needs --lora-rank above 0" in out
    out = run("-m", "mtsql.extras.merge", merged, tmp_path / "again", expect=2)
    assert "holds no LoRA adapter" in out and not (tmp_path / "again").exists()


def test_merge_replaces_no_folder(tmp_path):
    (tmp_path / "kept").touch()
    out = run("-m", "mtsql.extras.merge", tmp_path / "policy", tmp_path, expect=2)
    assert f"error: {tmp_path} exists already; remove it or name another folder" in out
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_shipped_adapter_is_half_as_large_and_finds_its_base_beside_it(base, tmp_path, tiny, monkeypatch):
    policy = randomise_adapters(load_policy(base, lora_rank=4)).eval()
    save_policy(policy, tiny.tokens.tokenizer, tmp_path / "policy")
    out = tmp_path / "models" / "agent"
    run("-m", "mtsql.extras.merge", tmp_path / "policy", out, "--base", "../base")
    assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    sizes = [(folder / "adapter_model.safetensors").stat().st_size for folder in (tmp_path / "policy", out)]
    assert sizes[1] < 0.6 * sizes[0]
    for load in (load_policy, load_tokenizer):
        with pytest.raises(UserError, match=r"agent is an adapter of .*base, which is not there; its README"):
            load(out)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "adapter_config.json").write_text('{"base_model')
    for load in (load_policy, load_tokenizer):
        with pytest.raises(UserError, match="is no adapter's configuration"):
            load(tmp_path / "cut")
    shutil.copytree(base, tmp_path / "models" / "base")
    monkeypatch.chdir(tmp_path)
    shipped = load_policy(Path("models/agent")).eval()
    assert load_tokenizer("models/agent").get_vocab() == tiny.tokens.tokenizer.get_vocab()
    assert all(p.dtype == torch.float32 for p in shipped.parameters())
    ids = torch.arange(4, 40)[None]
    with torch.no_grad():
        assert (shipped(ids).logits - policy(ids).logits).abs().max() < 0.1
    save_policy(shipped, tiny.tokens.tokenizer, tmp_path / "elsewhere" / "policy")
    load_policy(tmp_path / "elsewhere" / "policy")  # trained on, it still finds its base
    assert "holds no LoRA adapter" in run(
        "-m", "mtsql.extras.merge", base, tmp_path / "no", "--base", "x", expect=2
    )


def test_adapters_over_a_bfloat16_base_learn_what_those_over_float32_do(base):
    """Their products are bfloat16 on a CPU: float32 ones would take as long as the base's."""
    found, factors = {}, []
    for dtype in ("float32", "bfloat16"):
        torch.manual_seed(3)
        policy = randomise_adapters(load_policy(base, dtype, lora_rank=4))
        for name, module in policy.named_modules():
            if name.endswith("lora_B.default"):
                module.register_forward_hook(lambda module, given, out: factors.append(out.dtype))
        logprobs, _ = token_logprobs(policy, shared_prompt_batch(make_groups()))
        assert set(factors) == {policy.get_base_model().dtype}
        factors.clear()
        found[dtype] = gradients(policy, logprobs.sum() / 40)
        assert {gradient.dtype for gradient in found[dtype]} == {torch.float32}
    whole = [torch.cat([g.flatten() for g in of]) for of in found.values()]
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    logprobs, _ = token_logprobs(policy, shared_prompt_batch(make_groups()))
    assert difference(gradients(policy, logprobs.sum() / 40), found["bfloat16"]) <= 1e-2
    assert torch.nn.functional.cosine_similarity(*whole, dim=0) > 0.995
