"""Training in little memory: quantised bases, adapters, bfloat16 weights."""

import copy
from pathlib import Path

import pytest
import torch
from conftest import data_of, run
from decoders import SIZES, with_random
from test_learn import difference, gradients, make_groups

from mtsql.agent.generator import Generator, Sampling
from mtsql.agent.trajectory import Segment, Trajectory
from mtsql.learn import model as learned
from mtsql.learn.logprobs import shared_prompt_batch, token_logprobs
from mtsql.learn.model import load_policy, make_optimizer, optimizer_state, optimizer_step


def randomised(base: Path, **options: object) -> torch.nn.Module:
    """The base with adapters that do something."""
    return with_random(load_policy(base, **options, lora_rank=4), "lora_B", 0.1)


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


def test_sampling_changes_nothing_in_the_training_of_a_quantised_policy(base):
    """bitsandbytes repacks 4-bit layers when they are evaluated; then they would pass no gradient."""
    policy = randomised(base, quantise="nf4")
    batch = shared_prompt_batch(make_groups())
    before, _ = token_logprobs(policy, batch)
    expected = gradients(policy, before.sum())
    with Generator(policy, (), Sampling()) as generator:
        generator.start([[5, 6, 7]], [0], [10])
        for _ in range(10):
            generator.step()
        (row,) = generator.rows
        sampled = Segment.sampled(row.ids, row.logprobs)
    after, _ = token_logprobs(policy, batch)
    assert torch.equal(after, before)
    assert difference(gradients(policy, after.sum()), expected) == 0
    trajectory = Trajectory("1/0", 0, [Segment.given("prompt", [5, 6, 7]), sampled])
    logprobs, _ = token_logprobs(policy, shared_prompt_batch([[trajectory]]))
    torch.testing.assert_close(logprobs, torch.tensor(sampled.logprobs), atol=1e-4, rtol=0)


def test_small_steps_in_bfloat16_move_the_weights_as_in_float32(base):
    """At 1e-6 a step is less than half the spacing of bfloat16; forty of them move the master copies."""
    rate, moved = 1e-6, {}
    exact, half = load_policy(base), load_policy(base, "bfloat16")
    exact.load_state_dict(half.state_dict())

    def flat(parameters) -> torch.Tensor:
        return torch.cat([p.detach().float().flatten() for p in parameters])

    start = flat(half.parameters())
    for policy in (exact, half):
        optimizer = make_optimizer(policy, rate)
        gradients = torch.Generator().manual_seed(0)
        for _ in range(40):
            for p in policy.parameters():  # the same gradients for both, in two parts
                drawn = torch.randn(p.shape, generator=gradients).to(torch.bfloat16).to(p.dtype)
                for _ in range(2):
                    (p * drawn).sum().backward()
            optimizer_step(optimizer, rate)
        masters = learned.stepped_parameters(optimizer)
        moved[policy] = flat(masters) - start
        assert torch.equal(flat(policy.parameters()), flat(p.to(policy.dtype) for p in masters))
    assert moved[exact].abs().mean() > 1.5e-6
    assert (moved[half] - moved[exact]).abs().max() < 1e-7


def test_master_copies_go_on_where_they_were(base):
    rate, policies = 1e-6, [load_policy(base, "bfloat16") for _ in range(2)]
    optimizers = [make_optimizer(policy, rate) for policy in policies]

    def step(policy, optimizer):
        for p in policy.parameters():
            p.sum().backward()
        optimizer_step(optimizer, rate)

    step(policies[0], optimizers[0])
    learned.restore_optimizer(policies[1], optimizers[1], copy.deepcopy(optimizer_state(optimizers[0])))
    for policy, optimizer in zip(policies, optimizers, strict=True):
        step(policy, optimizer)
    for one, other in zip(*map(learned.stepped_parameters, optimizers), strict=True):
        assert torch.equal(one, other)


def test_qlora_recipe_with_merge(work, tmp_path):
    options = "--quantise nf4 --lora-rank 4 --steps 2 --prompts-per-step 3 --samples-per-prompt 4 --beta 0.1 "
    options += "--aggregate constant --divide-by batch --updates-per-batch 2"
    run("train_grpo.py", *data_of(work), *options.split(), "--out", tmp_path / "grpo")
    merged = tmp_path / "merged"
    run("-m", "mtsql.extras.merge", tmp_path / "grpo" / "policy", merged)
    assert (merged / "model.safetensors").is_file() and not (merged / "adapter_config.json").exists()
    evaluation = ["--model", merged, "--out", tmp_path / "evaluation", "--dialogues", 2]
    assert "EX %" in run("evaluate.py", *data_of(work), *evaluation)


def test_adapters_over_a_bfloat16_base_learn_what_those_over_float32_do(base):
    """Their products are bfloat16 on a CPU: float32 ones would take as long as the base's."""
    found, factors = {}, []
    for dtype in ("float32", "bfloat16"):
        torch.manual_seed(3)
        policy = randomised(base, dtype=dtype)
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
