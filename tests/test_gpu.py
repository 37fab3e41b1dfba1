"""What a GPU has to compute, on small models with random weights; what makes sense on a CPU runs there too.

On a new GPU, first: python -m pytest tests/test_gpu.py
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import is_flash_attn_2_available

from mtsql.agent import cache, generator, pages
from mtsql.agent.cache import cache_bytes_per_token
from mtsql.agent.generator import Generator, Sampling, new_cache
from mtsql.agent.head import float32_logits
from mtsql.agent.pages import Pages
from mtsql.agent.trajectory import Segment, Trajectory
from mtsql.extras import planner
from mtsql.learn.logprobs import row_batch, shared_prompt_batch, token_batch, token_logprobs
from mtsql.learn.model import load_policy, make_optimizer, optimizer_step
from mtsql.task import pick_device
from train_grpo import Args as GrpoArgs

SHAPE = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.08,
}  # fmt: skip
ON_CPU = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
PROMPTS = (3, 40, 70, 130, 300, 520)  # tokens
# 99th percentile of the log-probability gap; TF32 has the mantissa of float16
GAP = {"float32": 2e-3, "TF32": 0.02, "bfloat16": 0.1, "float16": 0.02}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here (torch.cuda.is_available())")


GPU = pytest.param("cuda", marks=on_gpu)


@pytest.fixture(params=["cpu", GPU])
def device(request) -> str:
    """Where ids and log-probabilities have to agree TF32 is off: it rounds by the shape of a product."""
    pick_device()
    torch.set_float32_matmul_precision("highest")
    return request.param


def random_model(device: str, dtype: str = "float32", attention: str = "sdpa", **shape: object):
    """A Qwen3 with random weights, a smaller one on a CPU; `shape` goes over SHAPE."""
    torch.manual_seed(0)
    smaller = ON_CPU if device == "cpu" else {}
    config = Qwen3Config(**(SHAPE | smaller | shape), attn_implementation=attention)
    return Qwen3ForCausalLM(config).to(getattr(torch, dtype)).to(device).train()


def with_lora(model: PreTrainedModel) -> PreTrainedModel:
    """The model with adapters that do something."""
    return get_peft_model(model, LoraConfig(r=16, init_lora_weights=False, target_modules="all-linear"))


def sample(
    model: PreTrainedModel, temperature: float = 1.0, watch: Callable = lambda _: None, **options: object
) -> list[Trajectory]:
    """Two messages a prompt with an observation after each; `watch` sees the generator before each step."""
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 1000, (n,), generator=draw).tolist() for n in PROMPTS]
    prompts[-1][: len(prompts[-2])] = prompts[-2]
    played = [Trajectory(str(i), i, [Segment.given("prompt", p)]) for i, p in enumerate(prompts)]
    if model.device.type == "cuda":  # not most of the card, which is mapped anew after each capture
        options = {"make_cache": lambda _: Pages(None, 4096), **options}
    with Generator(model, (0,), Sampling(temperature), **options) as sampler:
        rows = sampler.start(prompts, range(len(prompts)), [48] * len(prompts))
        for _ in range(2):
            while any(row.decoding for row in rows):
                watch(sampler)
                sampler.step()
            for row, trajectory in zip(rows, played, strict=True):
                trajectory.segments.append(Segment.sampled(row.ids, row.logprobs))
                trajectory.segments.append(Segment.given("environment", [7, 8, 9]))
            sampler.append(rows, [[7, 8, 9]] * len(rows), [48] * len(rows))
    return played


def ids(played: Sequence[Trajectory]) -> list[list[int]]:
    return [trajectory.ids for trajectory in played]


@torch.no_grad()
def gaps(model: PreTrainedModel) -> Tensor:
    """|log-probability in the trainer - in the sampler| of each sampled token, (tokens,)."""
    batch = token_batch(model, [[t] for t in sample(model)])
    return (token_logprobs(model, batch)[0] - batch.sampling_logprobs).abs()


def gradient(model: PreTrainedModel, played: Sequence[Trajectory], layout: str) -> Tensor:
    """The gradient of a weighted mean of the log-probabilities, as one vector; two prompts begin alike."""
    groups = [[t] for t in played[:-2]] + [played[-2:]] if layout == "shared" else [[t] for t in played]
    model.zero_grad()
    batch = row_batch(played, model.device) if layout == "rows" else token_batch(model, groups)
    (token_logprobs(model, batch)[0] * (1.0 - batch.trajectory_index % 3)).mean().backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def test_greedy_ids_are_those_of_generate(device):
    model, how = random_model(device), {"do_sample": False, "max_new_tokens": 48, "eos_token_id": 0}
    for trajectory in sample(model, temperature=0.0, make_cache=lambda _: Pages(None, 4096)):
        prompt = torch.tensor([trajectory.segments[0].ids], device=device)
        full = model.eval().generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **how)
        assert full[0, prompt.shape[1] :].tolist() == list(trajectory.segments[1].ids)


@pytest.mark.parametrize("device", [GPU], indirect=True)
def test_graphs_change_no_id(device):
    model, captures = random_model(device), []
    with_graphs = sample(model, watch=lambda g: captures.append(len(g.graphs.captured)))
    without = sample(model, watch=lambda g: setattr(g, "graphs", None))
    assert ids(with_graphs) == ids(without) and max(captures) > 0


@pytest.mark.parametrize("device", [GPU], indirect=True)
def test_the_next_step_does_not_wait_for_the_last_one(device):
    with Generator(random_model(device), (0,), Sampling(), make_cache=lambda _: Pages(None, 4096)) as sampler:
        sampler.start([[5] * 40] * 3, range(3), [48] * 3)
        for _ in range(3):
            sampler.step()
        rows, before = [row for row in sampler.rows if row.decoding], sampler.ahead
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.inference_mode():
                sampler._begin_step(rows, before)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", [GPU], indirect=True)
def test_the_kernel_changes_no_id(device, monkeypatch):
    model = random_model(device)
    with_kernel = ids(sample(model))
    monkeypatch.setattr(pages, "decode_kernel", lambda _: None)
    monkeypatch.setattr(generator, "decode_kernel", lambda _: None)
    assert ids(sample(model)) == with_kernel


def test_a_cache_that_is_too_small_changes_no_id(device, monkeypatch):
    model, waiting, need = random_model(device), set(), max(PROMPTS) + 120
    plenty, room = ids(sample(model)), 1.3 * need * cache_bytes_per_token(model) / cache.SHARE_OF_FREE
    monkeypatch.setattr(cache, "free_memory", lambda device: room)
    watch = lambda g: waiting.update(r for r in g.rows if not r.room and r.ids)  # noqa: E731
    found = sample(model, watch=watch, make_cache=lambda model: new_cache(model, need))
    assert ids(found) == plenty and waiting


@pytest.mark.parametrize("dtype", GAP)
def test_sampler_and_trainer_agree(device, dtype):
    torch.set_float32_matmul_precision("high" if dtype == "TF32" else "highest")
    assert gaps(random_model(device, dtype.replace("TF32", "float32"))).quantile(0.99) <= GAP[dtype]


def test_an_adapter_apart_in_the_trainer_and_merged_in_the_sampler_agrees(device):
    assert gaps(with_lora(random_model(device))).quantile(0.99) <= GAP["float32"]


def test_in_4_bits_sampler_and_trainer_agree_and_all_adapters_learn(device, tmp_path):
    random_model("cpu").save_pretrained(tmp_path)
    model = load_policy(tmp_path, "float32", device, quantise="nf4", lora_rank=8)
    assert gaps(model).quantile(0.99) <= GAP["float32"]
    gradient(model, sample(model), "packed")
    learning = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert len(learning) == 28 and all(grad is not None and grad.any() for grad in learning)


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_layouts_have_the_gradient_of_padded_rows(device, layout):
    model = random_model(device)
    played = sample(model)
    rows = gradient(model, played, "rows")
    assert (gradient(model, played, layout) - rows).norm() < 1e-4 * rows.norm()


@pytest.mark.skipif(not is_flash_attn_2_available(), reason="flash-attn is not installed")
@on_gpu
def test_flash_attention_has_the_gradient_of_sdpa():
    plain, flash = (random_model("cuda", "bfloat16", a) for a in ("sdpa", "flash_attention_2"))
    expected = gradient(plain, played := sample(plain), "packed")
    assert (gradient(flash, played, "packed") - expected).norm() < 0.05 * expected.norm()


@on_gpu
def test_a_training_step_peaks_within_the_plan(tmp_path):
    shape = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12}
    Qwen3Config(**SHAPE | shape).save_pretrained(tmp_path)
    config = GrpoArgs(
        model=str(tmp_path), data=(), out="", dtype="bfloat16", lora_rank=16, gradient_checkpointing=True,
        max_prompt_tokens=1000, max_response_tokens=1000, micro_batch_positions=8000, samples_per_prompt=7,
    )  # fmt: skip
    plan = planner.make_plan(planner.build_model(config), config, 2**35)
    planned = sum(plan["always"].values()) - planner.CUDA + sum(plan["training"].values())
    model = with_lora(random_model("cuda", "bfloat16", **shape))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = make_optimizer(model, 1e-5)
    torch.cuda.reset_peak_memory_stats()
    batch = shared_prompt_batch(planner.largest_micro_batch(config, 8000), "cuda")
    token_logprobs(model, batch)[0].mean().backward()
    optimizer_step(optimizer, 1e-5)
    cublas = 4 * 2**25  # workspaces of each thread and stream, which planner.CUDA holds too
    assert 0.7 * planned < torch.cuda.max_memory_allocated() <= planned + cublas


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sampler_and_trainer_have_the_heads_logits_in_float32(dtype, monkeypatch):
    """Rounded to half precision on both sides, the two would be several times as far apart."""
    model = random_model("cpu", dtype, **SHAPE | {"initializer_range": 0.2})
    exact = gaps(model).mean()
    rounded = lambda hidden, weight: (hidden @ weight.t().to(hidden.dtype)).float()  # noqa: E731
    head = model.lm_head.weight.detach()
    monkeypatch.setattr("mtsql.learn.logprobs.float32_logits", rounded)
    monkeypatch.setattr("mtsql.agent.decoder.float32_logits", lambda hidden, _: rounded(hidden, head))
    assert exact < gaps(model).mean()
    hidden, weight = torch.randn(64, 256).to(model.dtype), torch.randn(512, 256).to(model.dtype)
    sums = hidden.double() @ weight.double().t()
    torch.testing.assert_close(float32_logits(hidden, weight).double(), sums, atol=1e-4, rtol=0)
