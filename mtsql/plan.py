"""Will it fit? The GPU memory of a run, from shapes alone, and the knob to turn if it is too much.

    python -m mtsql.plan --config configs/sparc_qwen3_1.7b_lora_24gb.toml --gpu-memory 24

The model stands on PyTorch's meta device, which knows shapes but holds no data. Weights, adapters, gradients
and optimizer are counted on its parameters. For activations the training code itself runs there on the
largest micro-batch, and the rollout's prefill, while `LiveBytes` adds up what they allocate and free. Exit
code: 0 if the run fits, 1 if not, 2 for wrong input.

Planned is the worst case: prompts and responses as long as the limits allow, all of the response trained,
SDPA attention with CUDA's fused kernels. A second column has shorter responses. 4-bit layers run as layers of
`dtype` and one dequantised matrix: slightly too much, since PEFT's 4-bit layers add adapters in `dtype`.
"""

from __future__ import annotations

import argparse
import math
import sys
import tomllib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from mtsql.agent.cache import STATIC_BUCKET, cache_bytes_per_token
from mtsql.agent.generator import TOKENS_PER_FORWARD_ELSEWHERE, Generator
from mtsql.agent.trajectory import Segment, Trajectory
from mtsql.config import CHOICES, ConfigError, user_errors
from mtsql.learn.batches import micro_batches
from mtsql.learn.logprobs import token_batch, token_logprobs
from mtsql.learn.model import ADAPTER_FILE, DTYPES

GIB = 2**30
CUDA_CONTEXT = int(0.75 * GIB)  # kernels and cuBLAS workspaces, about as much on an RTX 3090 and 4090
FRAGMENTATION = 0.05  # of what comes and goes: holes of the caching allocator
# Published configurations: hidden, intermediate, layers, heads, kv_heads, tied embeddings.
QWEN3 = {
    "Qwen/Qwen3-0.6B": (1024, 3072, 28, 16, 8, True),
    "Qwen/Qwen3-1.7B": (2048, 6144, 28, 16, 8, True),
    "Qwen/Qwen3-4B": (2560, 9728, 36, 32, 8, True),
    "Qwen/Qwen3-8B": (4096, 12288, 36, 32, 8, False),
    "Qwen/Qwen3-14B": (5120, 17408, 40, 40, 8, False),
}


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The fields of a stage's configuration that decide about memory, with GrpoConfig's defaults."""

    model: str = ""
    dtype: str = "float32"
    quantise: str = "none"
    optimizer: str = "adamw"
    layout: str = "shared"
    lora_rank: int = 0
    gradient_checkpointing: bool = False
    micro_batch_positions: int = 16384
    samples_per_prompt: int = 5
    beta: float = 0.0
    rows: int = 256
    cache_gib: float = 0.0
    max_prompt_tokens: int = 4000
    max_response_tokens: int = 8000
    max_tool_tokens: int = 2000
    max_sequence_tokens: int = 40960

    @property
    def longest(self) -> int:
        """Positions of the longest trajectory."""
        return min(self.max_prompt_tokens + self.max_response_tokens, self.max_sequence_tokens)


def read_config(path: str | None, stage: str, options: dict[str, Any]) -> PlanConfig:
    """[common] and [stage] of a TOML file, then the given options.

    [grpo] goes on from what [sft] made, so it has [sft]'s model and LoRA rank where it names none; [sft]
    trains on trajectories one by one, in rows by default. Raises ConfigError for what is wrong.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML ({error})") from None
    warm, common, own = (content.get(table, {}) for table in ("sft", "common", stage))
    merged = {k: v for k, v in warm.items() if k in ("model", "lora_rank")} | common | own
    if stage == "sft":
        merged = {"layout": "rows"} | merged | {"samples_per_prompt": 1}
    hints = get_type_hints(PlanConfig)
    values = {name: value for name, value in (merged | options).items() if name in hints}
    for name, value in values.items():
        if type(value) is not hints[name] and not (hints[name] is float and type(value) is int):
            raise ConfigError(f"{name} should be {hints[name].__name__}, not {value!r}")
        if name in CHOICES and value not in CHOICES[name]:
            raise ConfigError(f"{name} {value} is unknown; choose from {', '.join(CHOICES[name])}")
        if type(value) is int and value < (name != "lora_rank"):
            raise ConfigError(f"{name} should be positive, not {value}")
    config = PlanConfig(**values)
    if config.longest <= config.max_prompt_tokens:
        raise ConfigError("max_sequence_tokens leaves no room for a response; raise it")
    return config


def build_model(config: PlanConfig) -> PreTrainedModel | PeftModel:
    """The policy of `load_policy` on the meta device, with gradients; linear layers are not quantised.

    Raises ConfigError if the shape of the model is not known here, or if a quantised model has no adapter.
    """
    peft, name = None, config.model
    if (Path(name) / ADAPTER_FILE).is_file():
        peft = PeftConfig.from_pretrained(name)
        peft.inference_mode = False
        name = peft.base_model_name_or_path
    elif config.lora_rank:
        peft = LoraConfig(
            r=config.lora_rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    if config.quantise == "nf4" and peft is None:
        raise ConfigError("a quantised model can only train an adapter; give --lora-rank above 0")
    if (Path(name) / "config.json").is_file():
        shape = AutoConfig.from_pretrained(name)
    elif name in QWEN3:
        hidden, intermediate, layers, heads, kv_heads, tied = QWEN3[name]
        shape = Qwen3Config(
            vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=128, tie_word_embeddings=tied,
        )  # fmt: skip
    else:
        raise ConfigError(
            f"the shape of --model {name!r} is not known; give a local folder with config.json, an adapter "
            f"of one, or one of {', '.join(QWEN3)}"
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            shape, dtype=DTYPES[config.dtype], attn_implementation="sdpa"
        )
        if peft is not None:
            model = get_peft_model(model, peft)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    return model.train()


def state_bytes(model: PreTrainedModel | PeftModel, config: PlanConfig) -> dict[str, int]:
    """Bytes of weights, adapters, gradients, optimizer and reference policy: what is there all the time."""
    weights = adapters = 0
    quantised = quantised_weights(model) if config.quantise == "nf4" else {}
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            adapters += parameter.nbytes
        else:
            weights += nf4_bytes(parameter.numel()) if id(parameter) in quantised else parameter.nbytes
    trainable = [p for p in model.parameters() if p.requires_grad]
    moments = adamw8bit_bytes if config.optimizer == "adamw8bit" else lambda p: 2 * p.nbytes
    return {
        "weights": weights,
        "adapters": adapters,
        "gradients": sum(p.nbytes for p in trainable),
        "optimizer": sum(map(moments, trainable)),
        "reference policy": (adapters or weights) if config.beta else 0,
        "CUDA context": CUDA_CONTEXT,
    }


def quantised_weights(model: PreTrainedModel | PeftModel) -> dict[int, nn.Parameter]:
    """The matrices that become 4-bit, by id: of all linear layers but the head and the adapters."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    linear = {n: m for n, m in inner.named_modules() if isinstance(m, nn.Linear) and "lora_" not in n}
    return {id(m.weight): m.weight for m in linear.values() if m is not inner.get_output_embeddings()}


def nf4_bytes(elements: int) -> int:
    """A matrix in 4-bit NormalFloat with double quantisation (QLoRA, section 3), as bitsandbytes stores it:
    a byte for each block of 64, a float32 for each 256 blocks, code books of 16 and 256, one offset.
    """
    blocks = math.ceil(elements / 64)
    return math.ceil(elements / 2) + blocks + 4 * (math.ceil(blocks / 256) + 16 + 256 + 1)


def adamw8bit_bytes(parameter: Tensor) -> int:
    """Both moments in bitsandbytes' AdamW8bit: 8 bits and a float32 a block of 256; small tensors float32."""
    if parameter.numel() < 4096:
        return 8 * parameter.numel()
    return 2 * (parameter.numel() + 4 * math.ceil(parameter.numel() / 256))


class LiveBytes(TorchDispatchMode):
    """Bytes of the meta tensors that were made inside the block and are still alive, now and at the peak.

    `peak_of_head` is the peak while a tensor as wide as the vocabulary was alive, `peak` at other times.
    """

    def __init__(self, model: nn.Module, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.live = self.of_head = self.peak = self.peak_of_head = 0
        given = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
        self._seen = {t.untyped_storage()._cdata for t in [*given, *model.buffers()]}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    size = storage.nbytes()
                    of_head = size if self.vocabulary in tensor.shape else 0
                    self._count(size, of_head)
                    weakref.finalize(storage, self._forget, storage._cdata, size, of_head)
        return out

    def _forget(self, storage: int, size: int, of_head: int) -> None:
        self._seen.discard(storage)
        self._count(-size, -of_head)

    def _count(self, size: int, of_head: int) -> None:
        self.live += size
        self.of_head += of_head
        if self.of_head:
            self.peak_of_head = max(self.peak_of_head, self.live)
        else:
            self.peak = max(self.peak, self.live)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any,
    is_causal: bool = False, scale: float | None = None, **__: Any,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` as CUDA runs it, in shapes: flash without a mask, else the memory-
    efficient kernel, for which a boolean mask becomes one of the query's dtype, padded to 16 columns.
    """
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=scale
        )[0]
    bias = attn_mask.to(query.dtype)
    padding = -bias.shape[-1] % 16
    padded = nn.functional.pad(bias, (0, padding))[..., : bias.shape[-1]] if padding else bias
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, padded.expand(shape), True, scale=scale
    )[0]


@contextmanager
def live_bytes(model: PreTrainedModel | PeftModel) -> Iterator[LiveBytes]:
    """Count what is allocated inside the block, where meta tensors take the path that CUDA tensors take."""
    # This looks into position_ids for borders of packed sequences; where it is called there are none.
    borders = mock.patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None)
    attention = mock.patch.object(nn.functional, "scaled_dot_product_attention", fused_attention)
    with borders, attention, LiveBytes(model, model.config.vocab_size) as live:
        yield live


def largest_micro_batch(config: PlanConfig) -> list[list[Trajectory]]:
    """The groups of the micro-batch with the most positions, all trajectories as long as they may be.

    Where whole trajectories leave some of micro_batch_positions free, they are made longer to fill them,
    since shorter ones would.
    """
    prompt, limit = config.max_prompt_tokens, config.micro_batch_positions
    samples, response = config.samples_per_prompt, config.longest - config.max_prompt_tokens

    def group(count: int, length: int) -> list[Trajectory]:
        given, sampled = Segment.given("prompt", [0] * prompt), Segment.sampled([0] * length, [0.0] * length)
        return [Trajectory("", 0, [given, sampled]) for _ in range(count)]

    groups = [group(samples, response) for _ in range(limit // (prompt + samples * response) + 1)]
    sizes = [list(map(len, b)) for b in micro_batches(groups, config.layout, limit)]
    chosen = max(sizes, key=lambda counts: len(counts) * prompt + sum(counts) * response)
    length = max(response, (limit - len(chosen) * prompt) // sum(chosen))
    return [group(count, length) for count in chosen]


def training_bytes(model: PreTrainedModel | PeftModel, config: PlanConfig) -> dict[str, dict[str, int]]:
    """Bytes that the largest micro-batch adds at the peaks of its head and of its layers."""
    groups = largest_micro_batch(config)
    with live_bytes(model) as live:
        batch = token_batch(groups, config.layout, "meta")
        logprobs, _ = token_logprobs(model, batch)
        kept = live.live
        if config.beta:
            with torch.no_grad():
                token_logprobs(model, batch)
        torch.autograd.backward([logprobs.sum()])
    quantised = quantised_weights(model).values() if config.quantise == "nf4" else ()
    layers = {"one layer at work": max(0, live.peak - kept)}
    layers["dequantised matrix"] = max((w.nbytes for w in quantised), default=0)
    return {
        "training, head": {"kept for backward": kept, "chunk of logits": max(0, live.peak_of_head - kept)},
        "training, layers": {"kept for backward": kept, **layers},
    }


def sampling_rows(model: PreTrainedModel | PeftModel, config: PlanConfig) -> tuple[int, int]:
    """(slots, positions) of the cache that the rollout reserves on a GPU; ConfigError if it holds no row."""
    positions = -(-config.longest // STATIC_BUCKET) * STATIC_BUCKET
    held = int(config.cache_gib * GIB / cache_bytes_per_token(model)) // positions
    if config.cache_gib == 0 or config.rows <= held:
        return 1 << (config.rows - 1).bit_length(), positions
    if held < 1:
        raise ConfigError(f"cache_gib {config.cache_gib:g} does not hold one row of {positions} positions")
    return 1 << (held.bit_length() - 1), positions


def rollout_bytes(model: PreTrainedModel | PeftModel, config: PlanConfig) -> dict[str, int]:
    """Bytes that the rollout adds: the cache, and its largest forward pass or the sampling."""
    slots, positions = sampling_rows(model, config)
    cache = slots * positions * cache_bytes_per_token(model)
    prompt = config.max_prompt_tokens
    new = min(config.max_tool_tokens, config.longest - prompt)  # tokens of an observation
    rows = min(slots, max(1, TOKENS_PER_FORWARD_ELSEWHERE // min(new, prompt)))
    with (
        Generator(model, [0], longest=config.longest, static_shapes=True) as generator,
        live_bytes(model) as live,
    ):
        generator.cache.reserve(slots, config.longest)
        started = generator.start([[i] * prompt for i in range(rows)], [0] * rows, [1] * rows)
        for row in started:
            row.length = config.longest - new
        generator.append(started, [[0] * new] * rows, [1] * rows)
    # Logits three times (the graph's, all, those of rows that decode), scores, log-probabilities and
    # probabilities in float32, their cumulative sum in float64.
    sampling = slots * model.config.vocab_size * (3 * model.dtype.itemsize + 3 * 4 + 8)
    at_work = max(live.peak - cache, live.peak_of_head - cache, sampling)
    return {"key/value cache": cache, "prefill or sampling": at_work}


@dataclass(frozen=True)
class Plan:
    """Bytes by item: what is there all the time, and what each phase adds to it at its peak."""

    always: dict[str, int]
    phases: dict[str, dict[str, int]]
    slots: int  # rows of the key/value cache

    def total(self, phase: str) -> int:
        """Bytes at the peak of a phase."""
        return sum(self.always.values()) + sum(self.phases[phase].values())

    @property
    def peak(self) -> int:
        """Bytes at the peak of the run."""
        return max(map(self.total, self.phases))


def make_plan(config: PlanConfig) -> Plan:
    """The plan of a run. The cache is freed before the training step; what it held is used again."""
    model = build_model(config)
    always = state_bytes(model, config)
    # torch's AdamW works on all tensors at once (foreach), with one more copy of them.
    copy = always["gradients"] if config.optimizer == "adamw" else 0
    phases = {"rollout": rollout_bytes(model, config), **training_bytes(model, config)}
    phases["update"] = {"optimizer's copy": copy}
    for items in phases.values():
        items["fragmentation"] = int(FRAGMENTATION * (sum(items.values()) - items.get("key/value cache", 0)))
    return Plan(always, phases, sampling_rows(model, config)[0])


def knobs(config: PlanConfig, plan: Plan, limit: int) -> Iterator[dict[str, Any]]:
    """What may be changed to need less, least harm first: time, then precision, then what is trained."""
    if not config.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    cache = plan.phases["rollout"]["key/value cache"]
    room = math.floor((cache + limit - plan.total("rollout")) / GIB * 10) / 10
    if cache / plan.slots <= room * GIB < cache:
        yield {"cache_gib": room}
    if config.micro_batch_positions > config.longest:
        yield {"micro_batch_positions": max(config.longest, config.micro_batch_positions // 2)}
    if config.layout != "rows":
        yield {"layout": "rows"}
    if config.optimizer == "adamw":
        yield {"optimizer": "adamw8bit"}
    adapter = (Path(config.model) / ADAPTER_FILE).is_file()
    if config.lora_rank == 0 and not adapter:
        yield {"lora_rank": 32}
    elif config.quantise == "none":
        yield {"quantise": "nf4"}
    if config.lora_rank > 8 and not adapter:
        yield {"lora_rank": 8}


def advise(config: PlanConfig, plan: Plan, limit: int) -> tuple[dict[str, Any], Plan]:
    """The first knobs found with which a run fits in `limit` bytes, and the plan with them.

    Each turn takes the least harmful knob that brings the phases nearer to the limit. If none does any
    more, the plan returned is still too large.
    """

    def excess(plan: Plan) -> int:
        return sum(max(0, plan.total(phase) - limit) for phase in plan.phases)

    turned: dict[str, Any] = {}
    while excess(plan):
        for change in knobs(replace(config, **turned), plan, limit):
            trial = make_plan(replace(config, **(turned | change)))
            if excess(trial) < excess(plan):
                turned, plan = turned | change, trial
                break
        else:
            break
    return turned, plan


def show_plan(worst: Plan, typical: Plan) -> None:
    """Print both plans, an item a line, in GiB."""

    def line(text: str, *values: int) -> None:
        print(f"{text:28}" + "".join(f"{value / GIB:10.2f}" for value in values))

    for name, value in worst.always.items():
        line(name, value, typical.always[name])
    for phase, items in worst.phases.items():
        print(f"{phase}: all of the above and")
        for name, value in items.items():
            line("  " + name, value, typical.phases[phase][name])
        line("  =", worst.total(phase), typical.total(phase))
    line("peak", worst.peak, typical.peak)
    print(f"{'rows sampled at once':28}{worst.slots:10}{typical.slots:10}")


def main() -> None:
    """Print the plan and the verdict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", help="TOML file; the options below override it")
    parser.add_argument("--stage", choices=("grpo", "sft"), default="grpo", help="table of the file [grpo]")
    parser.add_argument("--gpu-memory", type=float, default=24.0, help="GiB [24]", metavar="X")
    parser.add_argument("--typical", type=int, default=2000, help="response of column 2 [2000]", metavar="X")
    hints = get_type_hints(PlanConfig)
    for item in fields(PlanConfig):
        kind: dict[str, Any] = {"type": hints[item.name], "metavar": "X"}
        if hints[item.name] is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        parser.add_argument("--" + item.name.replace("_", "-"), help=f"[{item.default}]", **kind)
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    memory, shorter = given.pop("gpu_memory"), given.pop("typical")
    if memory <= 0 or shorter < 1:
        parser.error("--gpu-memory and --typical should be positive")
    config = read_config(given.pop("config", None), given.pop("stage"), given)
    response = config.longest - config.max_prompt_tokens
    worst = make_plan(config)
    shorter = min(shorter, response)
    show_plan(worst, make_plan(replace(config, max_response_tokens=shorter)))
    print(f"{config.model}, {config.dtype}; responses of {response:,} tokens, and of {shorter:,}")
    limit = int(memory * GIB)
    if worst.peak <= limit:
        print(f"fits in {memory:g} GiB, with {(limit - worst.peak) / GIB:.2f} to spare")
        return
    print(f"does not fit in {memory:g} GiB: {(worst.peak - limit) / GIB:.2f} too much")
    turned, plan = advise(config, worst, limit)
    setting = ", ".join(f"{name} = {str(value).lower()}" for name, value in turned.items())
    if plan.peak <= limit:
        print(f"set {setting}: {plan.peak / GIB:.2f} GiB")
    else:
        print(
            f"no knob brings it there; the least is {plan.peak / GIB:.2f} GiB ({setting or 'as it is'}). "
            "Lower max_response_tokens or max_prompt_tokens, or choose a smaller model"
        )
    sys.exit(1)


if __name__ == "__main__":
    user_errors(main)
