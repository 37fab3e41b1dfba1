"""The memory plan against hand-computed numbers, and against real models on the CPU."""

import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, refusal
from peft import LoraConfig
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM, T5Config

from mtsql.config import user_errors
from mtsql.extras import planner
from mtsql.learn import logprobs
from mtsql.learn.batches import micro_batches
from mtsql.learn.logprobs import shared_prompt_batch, token_logprobs
from mtsql.learn.model import load_policy, make_optimizer, stepped_parameters
from train_grpo import Args as GrpoArgs

NAMES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads".split()
TINY = dict(zip(NAMES, (64, 160, 4, 4, 2), strict=True)) | {"vocab_size": 512, "head_dim": 16}
MATRICES = [64 * 64] * 2 + [64 * 32] * 2 + [64 * 160] * 3  # q, o; k, v; gate, up, down
PARAMETERS = 512 * 64 + 4 * (sum(MATRICES) + 2 * 16 + 2 * 64) + 64  # tied embeddings, layers, last norm
ADAPTERS = 4 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 160))  # rank 4 x (inputs + outputs)
PUBLISHED = {"1.7B": (2048, 6144, 28, 16, 8), "4B": (2560, 9728, 36, 32, 8)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> GrpoArgs:
    folder = tmp_path_factory.mktemp("tiny")
    Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=True)).save_pretrained(folder)
    sizes = dict(lora_rank=4, micro_batch_positions=600, samples_per_prompt=4, rows=4, max_prompt_tokens=100)
    return GrpoArgs(data=(), out="", model=str(folder), max_response_tokens=120, **sizes)


def real_model(config: GrpoArgs) -> torch.nn.Module:
    """What `build_model` builds, with weights, on the CPU."""
    names = ("quantise", "lora_rank", "gradient_checkpointing")
    return load_policy(config.model, config.dtype, **{name: getattr(config, name) for name in names})


def bytes_of(weight: torch.nn.Parameter) -> int:
    """Those of a weight, in 4 bits with its constants and theirs."""
    state = getattr(weight, "quant_state", None)
    return weight.nbytes + (state.absmax.nbytes + state.state2.absmax.nbytes if state else 0)


def test_counts_by_hand(tiny):
    lora = planner.state_bytes(planner.build_model(tiny), tiny)
    assert lora["weights"] == 4 * PARAMETERS
    assert lora["adapters"] == lora["gradients"] == 4 * ADAPTERS and lora["optimizer"] == 8 * ADAPTERS
    half = replace(tiny, dtype="bfloat16", lora_rank=0, beta=0.1)
    full = planner.state_bytes(planner.build_model(half), half)
    assert full["weights"] == full["reference policy"] == 2 * PARAMETERS
    assert full["gradients"] == 4 * PARAMETERS and full["optimizer"] == (8 + 4) * PARAMETERS  # with copies


@pytest.mark.parametrize(("rank", "quantise"), [(0, "none"), (4, "none"), (4, "nf4")])
def test_state_is_that_of_a_real_step(tiny, rank, quantise):
    config = replace(tiny, lora_rank=rank, quantise=quantise, dtype="bfloat16")
    planned = planner.state_bytes(planner.build_model(config), config)
    model = real_model(config)
    optimizer = make_optimizer(model, 1e-4)
    model(torch.arange(9)[None]).logits.sum().backward()
    gradients = sum(p.grad.nbytes for p in stepped_parameters(optimizer))
    optimizer.step()
    held = [v for state in optimizer.state.values() for v in state.values()]
    own = {id(p) for p in model.parameters()}
    held += [p for p in stepped_parameters(optimizer) if id(p) not in own]  # float32 copies
    weights, apart = sum(map(bytes_of, model.parameters())), 0 if quantise == "none" else 0.01
    assert planned["weights"] + planned["adapters"] == pytest.approx(weights, rel=apart)
    assert planned["gradients"] == gradients
    assert planned["optimizer"] == pytest.approx(sum(v.nbytes for v in held if torch.is_tensor(v)), rel=0.01)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("rank", [0, 4])
def test_activations_are_those_of_a_real_step(tiny, rank, checkpointing, monkeypatch):
    # a CPU's attention lets query heads share key heads, which CUDA's does not in float32
    monkeypatch.setattr(logprobs, "_takes_grouped_queries", lambda *_, **__: False)
    config = replace(tiny, lora_rank=rank, gradient_checkpointing=checkpointing)
    planned = planner.step_bytes(planner.build_model(config), config, 600)
    model = real_model(config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        batch = shared_prompt_batch(planner.largest_micro_batch(config, 600))
        token_logprobs(model, batch)[0].sum().backward()
    events = [e for e in measured.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert planned == pytest.approx(planner.FRAGMENTATION * peak, rel=0.05)


@pytest.mark.parametrize("limit", [600, 400, 230])
def test_the_largest_micro_batch_is_one_and_fills_the_positions(tiny, limit):
    groups = planner.largest_micro_batch(tiny, limit)
    assert len(micro_batches(groups, limit)) == 1
    assert limit - 4 < 100 * len(groups) + sum(len(t.segments[1].ids) for g in groups for t in g) <= limit


def test_the_cache_takes_what_the_rows_need_not_all_that_is_free(tiny):
    model, position = planner.build_model(tiny), 2 * 4 * 2 * 16 * 4  # bytes
    for rows in (1, 2):
        config = replace(tiny, max_prompt_tokens=1000, max_response_tokens=2000, rows=rows)
        assert planner.make_plan(model, config, 2**32)["rollout"]["key/value cache"] == rows * 3000 * position


def test_the_largest_micro_batch_positions_are_the_largest_that_fit(tiny):
    room = planner.step_bytes(model := planner.build_model(tiny), tiny, 5000)
    assert 5000 - 1024 < planner.largest_positions(model, tiny, room) <= 5000


FITS = "qwen3_1.7b_lora 1.7B grpo", "qwen3_4b_qlora 4B grpo", "qwen3_4b_qlora 4B sft", "real_qwen3 1.7B grpo"


@pytest.mark.parametrize(("name", "size", "stage"), map(str.split, FITS))
def test_shipped_settings_fit_24_gib(name, size, stage, tmp_path):
    shape = dict(zip(NAMES, PUBLISHED[size], strict=True)) | {"vocab_size": 151936, "head_dim": 128}
    Qwen3Config(**shape, tie_word_embeddings=True).save_pretrained(tmp_path)
    given = ["--config", str(ROOT / "configs" / f"{name}.toml"), "--model", str(tmp_path)]
    config, memory = planner.read_plan([*given, "--lora-rank", "32", "--stage", stage])
    plan = planner.make_plan(planner.build_model(config), config, int(memory * 2**30))
    always, rollout, training = (sum(items.values()) for items in plan.values())
    assert 6 < (always + max(rollout, training)) / 2**30 < 22


def test_command_says_whether_it_fits(tiny, monkeypatch, capsys, tmp_path):
    """With [sft]'s model and rank, of the second file."""
    file = tmp_path / "plan.toml"
    file.write_text(f'[sft]\nmodel = "{tiny.model}"\nlora_rank = 4\n')
    files = [str(ROOT / "configs" / "mtir_sql.toml"), str(file)]
    options = ["--config", *files, "--max-prompt-tokens", "100", "--max-response-tokens", "120"]
    config, _ = planner.read_plan(options)
    assert (config.model, config.lora_rank, config.tools) == (tiny.model, 4, "no_memory")
    monkeypatch.setattr(planner, "largest_positions", lambda model, config, room: int(room > 0))
    for memory, code, verdict in (("2.5", 0, "fits"), ("0.5", 1, "does not fit")):
        monkeypatch.setattr(sys, "argv", ["planner", *options, "--gpu-memory", memory])
        assert planner.main() == code
        said = capsys.readouterr().out
        assert f"positions: {verdict} in {memory} GiB" in said
        assert f"largest --micro-batch-positions: {1 - code}" in said


def test_an_adapter_whose_base_is_beside_it_is_planned(tiny, tmp_path):
    Qwen3Config(**TINY).save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=4, target_modules="all-linear", base_model_name_or_path="../base")
    lora.save_pretrained(tmp_path / "adapter")  # as mtsql.extras.merge --base writes it
    config = replace(tiny, lora_rank=0, model=str(tmp_path / "adapter"))
    assert planner.state_bytes(planner.build_model(config), config)["adapters"] == 4 * ADAPTERS


WRONG = {
    "--model no/such/folder": "no/such/folder is not a folder", "--lora-rank 8": "give --model",
    "--config missing.toml": "missing.toml: No such file", "--model x --quantise nf4": "--lora-rank above 0",
    "--gpu-memory nan": "should be at least 0.01 and finite", "--model t5": "no model's shape could be read",
}  # fmt: skip


@pytest.mark.parametrize("options", WRONG)
def test_wrong_input_is_one_sentence(options, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    T5Config().save_pretrained("t5")
    monkeypatch.setattr(sys, "argv", ["planner", *options.split()])
    assert WRONG[options] in refusal(capsys, user_errors, planner.main).splitlines()[-1]
