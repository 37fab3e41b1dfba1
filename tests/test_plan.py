"""The memory plan against hand-computed numbers, and against real models on the CPU."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import bitsandbytes
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtsql.agent.cache import CachedRow, RowCache, cache_bytes_per_token
from mtsql.agent.tokens import ChatTokens
from mtsql.config import EvaluateConfig, GrpoConfig, user_errors
from mtsql.data.datasets import examples
from mtsql.errors import UserError
from mtsql.learn import logprobs
from mtsql.learn.logprobs import token_batch, token_logprobs
from mtsql.learn.optimizer import make_optimizer, stepped_parameters
from mtsql.model_folder import load_tokenizer
from mtsql.planner import footprint, plan
from mtsql.planner.footprint import longest_trajectory
from mtsql.planner.plan import read_config
from mtsql.task import load_split, make_environment

ROOT = Path(__file__).parent.parent
VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 512, 64, 160, 3, 4, 2, 16
# Counted by hand: q, o, k, v, their two norms; gate, up, down; two norms.
LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 2 * 16 + 3 * 64 * 160 + 2 * 64
PARAMETERS = 512 * 64 + 3 * LAYER + 64  # tied embeddings, layers, last norm
# Of LoRA of rank 4, for each matrix rank x (inputs + outputs).
ADAPTERS = 3 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 160))


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_shape() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, tie_word_embeddings=True,
    )  # fmt: skip


def plan_config(**options) -> GrpoConfig:
    """The options of train_grpo.py."""
    return GrpoConfig(**{"data": "", "out": "", "model": ""} | options)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> GrpoConfig:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_shape().save_pretrained(folder)
    return plan_config(
        model=str(folder),
        lora_rank=4,
        micro_batch_positions=600,
        samples_per_prompt=4,
        rows=4,
        max_prompt_tokens=100,
        max_response_tokens=120,
        max_tool_tokens=50,
    )


def real_model(config: GrpoConfig) -> torch.nn.Module:
    """What `footprint.build_model` builds, with weights, on the CPU."""
    model = Qwen3ForCausalLM._from_config(tiny_shape(), attn_implementation="sdpa")
    model.to(getattr(torch, config.dtype))
    if config.lora_rank:
        lora = LoraConfig(r=config.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def test_counts_by_hand(tiny):
    lora = footprint.state_bytes(footprint.build_model(tiny), tiny)
    assert lora["weights"] == 4 * PARAMETERS
    assert lora["adapters"] == lora["gradients"] == 4 * ADAPTERS
    assert lora["optimizer"] == 8 * ADAPTERS
    half = replace(tiny, dtype="bfloat16", lora_rank=0, beta=0.1)
    full = footprint.state_bytes(footprint.build_model(half), half)
    assert full["weights"] == full["reference policy"] == 2 * PARAMETERS
    assert full["gradients"] == full["master copies"] == 4 * PARAMETERS and lora["master copies"] == 0
    assert (full["adapters"], full["optimizer"]) == (0, 8 * PARAMETERS)


def test_qwen3_has_its_published_size():
    config = plan_config(model="Qwen/Qwen3-1.7B", dtype="bfloat16", lora_rank=32)
    model = footprint.build_model(config)
    assert footprint.state_bytes(model, config)["weights"] == 2 * 1_720_574_976
    assert cache_bytes_per_token(model) == 28 * 2 * 8 * 128 * 2
    four = replace(config, model="Qwen/Qwen3-4B")
    assert footprint.state_bytes(footprint.build_model(four), four)["weights"] == 2 * 4_022_468_096


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 16])
def test_state_is_that_of_a_real_step(tiny, rank, dtype, kind):
    config = replace(tiny, lora_rank=rank, optimizer=kind, dtype=dtype)
    planned = footprint.state_bytes(footprint.build_model(config), config)
    model = real_model(config)
    optimizer = make_optimizer(model, 1e-4, kind=kind)
    model(torch.arange(9)[None]).logits.sum().backward()
    gradients = sum(p.grad.nbytes for p in stepped_parameters(optimizer) if p.grad is not None)
    optimizer.step()
    adapters = sum(p.nbytes for n, p in model.named_parameters() if "lora_" in n)
    moments = [
        value.nbytes
        for state in optimizer.state.values()
        for name, value in state.items()
        if name not in ("step", "qmap1", "qmap2")  # a number on the host, and tables of 1 KiB that all share
    ]
    assert planned["adapters"] == adapters
    assert planned["weights"] == sum(p.nbytes for p in model.parameters()) - adapters
    trained = {id(p) for p in model.parameters()}
    masters = [p.nbytes for p in stepped_parameters(optimizer) if id(p) not in trained]
    assert (planned["gradients"], planned["master copies"]) == (gradients, sum(masters))
    assert planned["optimizer"] == sum(moments)


@pytest.mark.parametrize("shape", [(64, 32), (160, 64), (256, 320)])
def test_nf4_is_what_bitsandbytes_stores(shape):
    weight = bitsandbytes.nn.Params4bit(
        torch.randn(shape), requires_grad=False, quant_type="nf4", compress_statistics=True
    ).to("cpu")
    state = weight.quant_state
    constants = (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
    assert footprint.nf4_bytes(shape[0] * shape[1]) == weight.nbytes + sum(c.nbytes for c in constants)


def test_nf4_leaves_embeddings_and_norms(tiny):
    config = replace(tiny, quantise="nf4")
    matrices = [64 * 64] * 2 + [64 * 32] * 2 + [64 * 160] * 3
    rest = PARAMETERS - LAYERS * sum(matrices)
    weights = footprint.state_bytes(footprint.build_model(config), config)["weights"]
    assert weights == 4 * rest + LAYERS * sum(map(footprint.nf4_bytes, matrices))


@pytest.mark.parametrize("layout", ["shared", "packed", "rows"])
@pytest.mark.parametrize("rank", [0, 4])
def test_saved_activations_are_those_of_a_real_forward_pass(tiny, rank, layout, monkeypatch):
    # a CPU's attention lets query heads share key heads, which CUDA's does not in float32
    monkeypatch.setattr(logprobs, "_takes_grouped_queries", lambda *_, **__: False)
    config = replace(tiny, lora_rank=rank, layout=layout)
    planned = footprint.training_bytes(footprint.build_model(config), config)["training, layers"][
        "kept for backward"
    ]
    model = real_model(config)
    saved: dict[int, torch.UntypedStorage | None] = {
        p.untyped_storage()._cdata: None for p in model.parameters()
    }

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved.setdefault(storage._cdata, storage)
        return tensor

    batch = token_batch(footprint.largest_micro_batch(config), layout, "cpu")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        values, _ = token_logprobs(model, batch)
    real = sum(storage.nbytes() for storage in saved.values() if storage is not None)
    assert len(values) > 0  # alive until here, and with it what it holds
    assert planned == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("rank", [0, 4])
def test_peak_is_that_of_a_real_step(tiny, rank, checkpointing, monkeypatch):
    monkeypatch.setattr(logprobs, "_takes_grouped_queries", lambda *_, **__: False)
    config = replace(tiny, lora_rank=rank, gradient_checkpointing=checkpointing)
    phases = footprint.training_bytes(footprint.build_model(config), config)
    planned = max(sum(phase.values()) for phase in phases.values())
    model = real_model(config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    groups = footprint.largest_micro_batch(config)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        batch = token_batch(groups, config.layout, "cpu")
        token_logprobs(model, batch)[0].sum().backward()
    events = sorted(
        (e.start_ns(), e.nbytes())
        for e in measured.profiler.kineto_results.events()
        if e.name() == "[memory]"
    )
    live = peak = 0
    for _, size in events:
        live += size
        peak = max(peak, live)
    assert planned == pytest.approx(peak, rel=0.05)


def test_checkpoints_keep_one_hidden_state_a_layer(tiny):
    config = replace(tiny, gradient_checkpointing=True)
    kept = []
    for layers in (1, LAYERS):
        model = footprint.build_model(config)
        model.config.num_hidden_layers = layers  # it runs so many of them
        kept.append(footprint.training_bytes(model, config)["training, head"]["kept for backward"])
    (group,) = footprint.largest_micro_batch(config)
    positions = len(group[0].segments[0].ids) + sum(len(t.segments[1].ids) - 1 for t in group)
    assert kept[1] - kept[0] == (LAYERS - 1) * positions * HIDDEN * 4


def test_largest_micro_batch_fills_the_positions(tiny):
    def lengths(**changes) -> list[list[int]]:
        return [[len(t.ids) for t in g] for g in footprint.largest_micro_batch(replace(tiny, **changes))]

    assert lengths() == [[100 + 125] * 4]  # 100 + 4 x 125 positions
    assert lengths(micro_batch_positions=400) == [[100 + 150] * 2]  # a group is cut
    assert lengths(micro_batch_positions=150) == [[220]]  # one trajectory, whatever it takes
    assert lengths(layout="rows") == [[300], [300]]


def test_the_cache_holds_rows_by_what_they_use(tiny):
    model = footprint.build_model(tiny)
    token = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
    sizes = {"max_prompt_tokens": 1000, "max_response_tokens": 2000, "rows": 16}
    config = replace(tiny, cache_gib=6000.5 * token / footprint.GIB, **sizes)
    assert footprint.planned_positions(model, config) == 6000
    assert footprint.rollout_bytes(model, config)["key/value cache"] == 6000 * token
    held = [footprint.rows_at_once(config, 6000, length) for length in (3000, 1500, 1000, 500)]
    assert held == [1, 2, 4, 8]  # a 16th of it stays free when another row comes in; tiers of 512 x 2^k
    assert footprint.planned_positions(model, replace(config, rows=1)) == 3000
    assert footprint.planned_positions(model, replace(config, cache_gib=0.0)) == 3000  # it takes what is free
    with pytest.raises(UserError, match="raise --cache-gib"):
        footprint.planned_positions(model, replace(config, cache_gib=0.4 * config.cache_gib))


def test_graphs_attention_sums_and_holes_are_in_the_plan(tiny):
    half = replace(tiny, dtype="bfloat16", lora_rank=4)
    planned = plan.make_plan(half)
    assert planned.phases["rollout"]["CUDA graphs"] == 32 * 25 * 2**20
    positions = sum(len(t.ids) for group in footprint.largest_micro_batch(half) for t in group)
    sums = planned.phases["training, layers"]["attention's sums"]
    of_a_position = 3 * 4 * HEADS * HEAD_DIM  # gradients of queries, keys and values in float32
    assert sums % of_a_position == 0 and 0 < sums <= positions * of_a_position
    assert plan.make_plan(replace(half, dtype="float32")).phases["training, layers"]["attention's sums"] == 0
    for items in planned.phases.values():
        held = [size for name, size in items.items() if name not in ("fragmentation", "key/value cache")]
        assert items["fragmentation"] == int(0.05 * sum(held))
    assert "expandable_segments:True" in os.environ["PYTORCH_CUDA_ALLOC_CONF"]


DATA = ROOT.parent / "shared" / "data"


@pytest.mark.skipif(not (DATA / "tokenizer_qwen3").is_dir(), reason="needs the real data beside the checkout")
def test_thirty_two_real_trajectories_are_let_in_at_once_on_24_gib():
    config = read_config(str(ROOT / "configs" / "sparc_qwen3_1.7b_lora_24gb.toml"), "grpo", {})
    held = footprint.planned_positions(footprint.build_model(config), config)
    tokens = ChatTokens(load_tokenizer(DATA / "tokenizer_qwen3"))
    paths = {"data": (str(DATA / "sparc" / "dev.json"),), "databases": (str(DATA / "database"),)}
    options = EvaluateConfig(**paths, out="", split="dev", wording="paper", result_characters=200)
    dataset = load_split(options, "dev")
    environment = make_environment(options, dataset, tokens, "both")
    asked = random.Random(0).sample(examples(dataset.dialogues), 64)
    prompts = [len(environment.episodes(question, [0])[0].trajectory.ids) for question in asked]
    assert 800 < sum(prompts) / len(prompts) < 1200
    cache = RowCache(longest_trajectory(config), held, static_shapes=True)
    played = list(takewhile(lambda length: cache.admit(CachedRow(), length), (p + 1000 for p in prompts)))
    assert len(played) >= 32


@pytest.mark.parametrize("name", ["sparc_qwen3_1.7b_lora_24gb", "sparc_qwen3_4b_qlora_24gb"])
def test_shipped_settings_fit_24_gib(name):
    path = str(ROOT / "configs" / f"{name}.toml")
    config = read_config(path, "grpo", {})
    assert (config.max_prompt_tokens, config.max_response_tokens, config.samples_per_prompt) == (
        4000,
        8000,
        5,
    )
    assert config.lora_rank == 32
    assert 8 < plan.make_plan(config).peak / footprint.GIB < 22
    warm_start = read_config(path, "sft", {})
    assert warm_start.layout == "packed"
    assert plan.make_plan(warm_start).peak / footprint.GIB < 22


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"])
@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_the_real_suites_settings_for_qwen3_fit_24_gib(model, stage):
    path = str(ROOT / "configs" / "real_qwen3.toml")
    config = read_config(path, stage, {"model": model, "lora_rank": 32})
    assert 6 < plan.make_plan(config).peak / footprint.GIB < 22  # its caches alone have 6


def test_advice_turns_knobs_until_it_fits(tiny, monkeypatch):
    monkeypatch.setattr(footprint, "CUDA_GRAPH", 0)  # more than all the rest of so small a model
    config = replace(tiny, lora_rank=0, micro_batch_positions=2000)
    first = plan.make_plan(config)
    easy, planned = plan.advise(config, first, first.peak - 1)
    assert easy == {"gradient_checkpointing": True}
    limit = footprint.CUDA_CONTEXT + (planned.peak - footprint.CUDA_CONTEXT) * 2 // 3
    turned, fitting = plan.advise(config, first, limit)
    assert fitting.peak <= limit
    assert plan.make_plan(replace(config, **turned)).peak == fitting.peak
    everything, least = plan.advise(config, first, footprint.CUDA_CONTEXT)
    assert least.peak > footprint.CUDA_CONTEXT
    assert everything["gradient_checkpointing"] and everything["micro_batch_positions"] == 220


def test_cache_is_advised_in_gib():
    config = plan_config(
        model="Qwen/Qwen3-0.6B", dtype="bfloat16", lora_rank=8, gradient_checkpointing=True, rows=64,
        cache_gib=50.0, max_prompt_tokens=200, max_response_tokens=800, micro_batch_positions=1000,
    )  # fmt: skip
    first = plan.make_plan(config)
    assert first.phases["rollout"]["key/value cache"] == 64 * 1000 * 114_688
    turned, fitting = plan.advise(config, first, 6 * footprint.GIB)
    assert list(turned) == ["cache_gib"]
    assert fitting.phases["rollout"]["key/value cache"] <= turned["cache_gib"] * footprint.GIB
    assert footprint.rows_at_once(config, fitting.positions, 1000) >= 16


def run(monkeypatch, *arguments: str) -> int:
    """The exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    try:
        user_errors(plan.main)
    except SystemExit as stop:
        return stop.code
    return 0


def test_the_recipes_own_settings_are_planned(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[common]\nrecipe = "mtir_sql"\n')
    assert read_config(str(path), "grpo", {}).max_sequence_tokens == 8192
    assert read_config(str(path), "grpo", {"max_sequence_tokens": 9000}).max_sequence_tokens == 9000
    assert read_config(str(path), "sft", {"recipe": "sql_trail"}).trajectories_per_step == 128
    path.write_text('[grpo]\nrecipe = "sql_trail"\nmicro_batch_positions = 5000\n')
    config = read_config(str(path), "grpo", {})
    assert (config.samples_per_prompt, config.micro_batch_positions) == (6, 5000)


def test_an_adapter_whose_base_is_beside_it_is_planned(tiny, tmp_path):
    tiny_shape().save_pretrained(tmp_path / "base")
    lora = LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", base_model_name_or_path="../base"
    )
    lora.save_pretrained(tmp_path / "adapter")  # as mtsql.extras.ship writes it
    config = replace(tiny, model=str(tmp_path / "adapter"))
    assert footprint.state_bytes(footprint.build_model(config), config)["adapters"] == 4 * ADAPTERS


def test_command_says_whether_it_fits(tiny, monkeypatch, capsys):
    options = ["--model", tiny.model, "--lora-rank", "4", "--rows", "4", "--micro-batch-positions", "600"]
    options += ["--max-prompt-tokens", "100", "--max-response-tokens", "120", "--typical", "50"]
    assert run(monkeypatch, *options, "--gpu-memory", "2") == 0
    assert "fits in 2 GiB" in capsys.readouterr().out
    assert run(monkeypatch, *options, "--gpu-memory", "0.5") == 1
    assert "does not fit in 0.5 GiB" in capsys.readouterr().out


def test_without_a_model_it_says_what_fits_where(monkeypatch, capsys):
    name = "Qwen/Qwen3-8B"  # its width, in few layers: each takes a second or two to trace
    for module in (plan, footprint):
        monkeypatch.setattr(module, "QWEN3", {name: (4096, 12288, 3, 32, 8, False)})
    assert run(monkeypatch) == 0
    header, row, *_ = capsys.readouterr().out.splitlines()
    sizes, ways = [float(size) for size in header.split()[4:]], row.split()[1:]
    assert sizes == list(plan.GPUS) and ways[-1] == "full"
    order = ["-", "QLoRA", "LoRA", "full"]
    assert [order.index(way) for way in ways] == sorted(order.index(way) for way in ways)
    peaks = plan.peaks_by_way(GrpoConfig(model=name, data=(), out="", dtype="bfloat16", rows=32))
    assert peaks["QLoRA"] < peaks["LoRA"] < peaks["full"]
    for size, way in zip(sizes, ways, strict=True):
        assert way == next((w for w in plan.WAYS if peaks[w] <= plan.USABLE * size * footprint.GIB), "-")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "nobody/knows"], "the shape of --model 'nobody/knows' is not known"),
        (["--lora-rank", "8"], "the shape of --model '' is not known"),
        (["--config", "missing.toml"], "missing.toml does not exist"),
        (["--model", "Qwen/Qwen3-4B", "--quantise", "nf4"], "give --lora-rank above 0"),
        (["--layout", "piled"], "layout piled is unknown; choose from shared, packed, rows"),
        (["--rows", "0"], "--rows should be at least 1, not 0"),
        (["--max-sequence-tokens", "4000"], "leaves no room for a response"),
        *((["--gpu-memory", memory], "should be positive") for memory in ("-1", "nan", "1e400")),
    ],
)
def test_wrong_input_is_one_sentence(options, sentence, monkeypatch, capsys):
    assert run(monkeypatch, *options) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert sentence in error


def test_types_in_the_file_are_checked(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[common]\nrows = "many"\n')
    with pytest.raises(UserError, match="rows should be int, not 'many'"):
        read_config(str(path), "grpo", {})
    path.write_text("[common]\nrows = \n")
    with pytest.raises(UserError, match="is not valid TOML"):
        read_config(str(path), "grpo", {})
