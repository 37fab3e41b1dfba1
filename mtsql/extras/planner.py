"""Will it fit? The memory that a run takes on a GPU, from shapes alone, and the largest sizes that do fit.

    python -m mtsql plan --config configs/qwen3_1.7b_lora.toml --gpu-memory 24

--gpu-memory is in GiB [24]. Other options are those of train_grpo.py, with --stage sft of train_sft.py. Of
--model it needs the configuration and no weights: the model stands on PyTorch's meta device, which knows
shapes alone. Weights, gradients and optimizer are counted on its parameters. For activations the training
code itself runs there on the largest micro-batch, and the rollout's prefill, in one or two layers (others
keep as much), while `LiveBytes` adds up what they allocate and free.

Planned is the worst case: prompts and responses as long as the limits allow, all of the response trained,
attention by CUDA's fused kernels. A context, captured graphs and fragmentation are assumed. Exit code: 0 if
the run fits, 1 if not, 2 for wrong input.
"""

from __future__ import annotations

import argparse
import sys
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before torch is imported
    print(__doc__)
    sys.exit()

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from mtsql.agent import cache
from mtsql.agent.decoder import Decoder
from mtsql.agent.generator import TOKENS_PER_FORWARD_ELSEWHERE, WIDEST, Generator, Sampling
from mtsql.agent.pages import PAGE, Pages, few_shapes
from mtsql.agent.trajectory import Segment, Trajectory
from mtsql.config import Training, from_toml, read_options, reader_of, user_errors
from mtsql.errors import UserError, loading
from mtsql.files import shipped
from mtsql.learn.logprobs import shared_prompt_batch, token_logprobs
from mtsql.model_folder import ADAPTER_FILE, WHAT_TO_GIVE, base_of_adapter, check_exists
from train_grpo import Args as GrpoArgs
from train_sft import Args as SftArgs

GIB = 2**30
USABLE = 0.98  # of a card's memory; driver and display have the rest
CUDA = int(1.5 * GIB)  # kernels and cuBLAS workspaces some 0.75, 32 captured decode steps of 25 MiB each
FRAGMENTATION = 1.05  # of what comes and goes: holes of the allocator, with expandable segments


def read_plan(argv: list[str]) -> tuple[Training, float]:
    """The options of the planned run, and the GPU's GiB. GRPO has [sft]'s model and LoRA rank where [grpo]
    names none.

    Raises UserError, or exits with code 2, for what is wrong.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--stage", choices=("grpo", "sft"), default="grpo")
    early.add_argument("--gpu-memory", type=reader_of(float, 0.01), default=24.0)
    early.add_argument("--config", nargs="+", action="extend", default=[])
    chosen, given = early.parse_known_args(argv)
    files = ["--config", *chosen.config] if chosen.config else []
    given = [*files, "--data", "none", "--out", "none", *given]
    if chosen.stage == "sft":
        return read_options(SftArgs, __doc__, given), chosen.gpu_memory
    warm, own = {}, {}
    for path in map(shipped, chosen.config):
        warm, own = warm | from_toml(path, SftArgs), own | from_toml(path, GrpoArgs)
    for name in {"model", "lora_rank"} & warm.keys() - own.keys():
        given = [f"--{name.replace('_', '-')}", str(warm[name]), *given]
    return read_options(GrpoArgs, __doc__, given), chosen.gpu_memory


def longest_trajectory(config: Training) -> int:
    """Its positions: prompt and response as long as the limits allow."""
    return config.max_prompt_tokens + config.max_response_tokens


def build_model(config: Training) -> nn.Module:
    """The policy of `load_policy` on the meta device, with gradients; linear layers are not quantised.

    Raises UserError if the shape of the model cannot be had, or if a quantised model has no adapter.
    """
    lora, name = None, config.model
    if config.quantise == "nf4" and not (config.lora_rank or (Path(name) / ADAPTER_FILE).is_file()):
        raise UserError("a quantised model can only train an adapter; give --lora-rank above 0")
    check_exists(name)
    with loading(f"no model's shape could be read from {name}; {WHAT_TO_GIVE}"):
        if (Path(name) / ADAPTER_FILE).is_file():
            lora = PeftConfig.from_pretrained(name)
            lora.inference_mode, name = False, base_of_adapter(Path(name))
        elif config.lora_rank:
            lora = LoraConfig(r=config.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
        shape = AutoConfig.from_pretrained(name, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape, dtype=config.dtype)
            model = get_peft_model(model, lora) if lora else model
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    return model.train()


def state_bytes(model: nn.Module, config: Training) -> dict[str, int]:
    """Bytes of what is there all the time, by item.

    What is stepped is float32: trained weights in half precision have copies. In 4 bits (QLoRA, section 3) a
    block of 64 weights has a constant of one byte, 256 of these one of four.
    """
    parameters = dict(model.named_parameters())
    adapters = sum(p.nbytes for name, p in parameters.items() if "lora_" in name)
    weights = sum(p.nbytes for p in parameters.values()) - adapters
    for matrix in quantised_weights(model, config):
        weights += int(matrix.numel() * (1 / 2 + 1 / 64 + 4 / 64 / 256)) - matrix.nbytes
    trained = [p for p in parameters.values() if p.requires_grad]
    number = sum(p.numel() for p in trained)
    return {
        "weights": weights,
        "adapters": adapters,
        "gradients": 4 * number,
        "optimizer": 8 * number + sum(4 * p.numel() for p in trained if p.dtype != torch.float32),
        "reference policy": (adapters or weights) if getattr(config, "beta", 0.0) else 0,
        "CUDA context and graphs": CUDA,
    }


def quantised_weights(model: nn.Module, config: Training) -> list[nn.Parameter]:
    """The matrices that become 4-bit: of all linear layers but the head and the adapters."""
    head = model.get_output_embeddings().weight
    linear = {n: m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear) and "lora_" not in n}
    return [w for w in linear.values() if w is not head] if config.quantise == "nf4" else []


class LiveBytes(TorchDispatchMode):
    """Bytes of the meta tensors that were made inside the block and are still alive, now and at the peak."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        given = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
        self.given = {t.untyped_storage() for t in given if t is not None}
        self.made: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.peak = 0

    def live(self) -> int:
        """Bytes that are alive now."""
        return sum(storage.nbytes() for storage in self.made)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_meta and tensor.untyped_storage() not in self.given:
                self.made.add(tensor.untyped_storage())
        self.peak = max(self.peak, self.live())
        return out


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any,
    is_causal: bool = False, scale: float | None = None, **__: Any,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` as CUDA runs it, in shapes: flash without a mask, else the memory-
    efficient kernel, for which a boolean mask becomes one of the query's dtype, padded to 16 columns.
    """
    fused = torch.ops.aten
    if attn_mask is None:
        return fused._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]
    keys = key.shape[2]
    bias = nn.functional.pad(attn_mask.to(query.dtype), (0, -keys % 16))[..., :keys]
    bias = bias.expand(*query.shape[:3], keys)
    return fused._scaled_dot_product_efficient_attention(query, key, value, bias, True, scale=scale)[0]


@contextmanager
def in_shapes(model: nn.Module, layers: int) -> Iterator[LiveBytes]:
    """Count what is allocated inside the block, where meta tensors take the path that CUDA tensors take
    through so many layers of the model.
    """
    # The first looks into position_ids for borders of packed sequences; where it is called there are none.
    borders = mock.patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None)
    attention = mock.patch.object(nn.functional, "scaled_dot_product_attention", fused_attention)
    few = mock.patch.object(model.config, "num_hidden_layers", layers)
    with borders, attention, few, LiveBytes(model) as live:
        yield live


def largest_micro_batch(config: Training, limit: int) -> list[list[Trajectory]]:
    """The groups of a micro-batch that fills `limit` positions: trajectories as long as they may be, or
    longer where some positions would stay free, since shorter ones would fill them.
    """
    prompt = config.max_prompt_tokens
    samples = getattr(config, "samples_per_prompt", 1)
    response = longest_trajectory(config) - prompt
    sizes = [samples] * (limit // (prompt + samples * response)) or [max(1, (limit - prompt) // response)]
    length = max(response, (limit - len(sizes) * prompt) // sum(sizes))
    first = Segment.given("prompt", [0] * prompt)
    others = [Segment.sampled([i] * length, [0.0] * length) for i in range(max(sizes))]  # no two are equal
    return [[Trajectory("", 0, [first, others[i]]) for i in range(size)] for size in sizes]


def step_bytes(model: nn.Module, config: Training, positions: int) -> int:
    """Bytes that forward and backward passes over the largest micro-batch add at their peak."""
    kept = []
    for layers in (1, 2):
        with in_shapes(model, layers) as live:
            batch = shared_prompt_batch(largest_micro_batch(config, positions), "meta")
            logprobs, _ = token_logprobs(model, batch)
            kept.append(live.live())
            torch.autograd.backward([logprobs.sum()])
    shape = model.config
    peak = live.peak + (shape.num_hidden_layers - 2) * (kept[1] - kept[0])
    if model.dtype != torch.float32:  # gradients of queries, keys and values add up in float32
        dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        peak += 3 * 4 * batch.ids.numel() * shape.num_attention_heads * dim
    peak += max((w.nbytes for w in quantised_weights(model, config)), default=0)  # as a matrix, one at a time
    return int(FRAGMENTATION * peak)


def prefill_bytes(model: nn.Module, config: Training) -> int:
    """Bytes that a forward pass of the rollout adds to its cache, or the sampling if that takes more."""
    prompt, rows, longest = config.max_prompt_tokens, config.rows, longest_trajectory(config)
    together = min(rows, max(1, TOKENS_PER_FORWARD_ELSEWHERE // min(WIDEST, prompt)))
    size = together * (longest + PAGE)
    with (
        in_shapes(model, 1) as live,
        Generator(model, [0], Sampling(), None, lambda _: Pages(longest, size)) as generator,
    ):
        kept = live.peak = live.live()
        generator.start([[i] * prompt for i in range(together)], range(together), [1] * together)
        kept += generator.cache.reserved * cache.cache_bytes_per_token(model)
    # Logits, scores and probabilities in float32; what is added up in float64 are blocks of tokens.
    return max(live.peak - kept, few_shapes(rows) * model.config.vocab_size * 3 * 4)


def make_plan(model: nn.Module, config: Training, limit: int) -> dict[str, dict[str, int]]:
    """Bytes by item: what is there all the time, and what rollout and training add, one after the other.

    The cache has room for no more than all rows.
    """
    always, longest = state_bytes(model, config), longest_trajectory(config)
    with in_shapes(model, model.config.num_hidden_layers) as live:
        decoder = Decoder(model)
        copied = live.live()
    del decoder
    per_position, free = cache.cache_bytes_per_token(model), limit - sum(always.values()) - copied
    held = max(longest, int(cache.SHARE_OF_FREE * free) // per_position)
    rollout = {
        "weights ready for sampling": copied,
        "key/value cache": min(held, config.rows * longest) * per_position,
        "prefill or sampling": int(FRAGMENTATION * prefill_bytes(model, config)),
    }
    training = {"activations": step_bytes(model, config, config.micro_batch_positions)}
    return {"always": always, "rollout": rollout, "training": training}


def largest_positions(model: nn.Module, config: Training, room: int) -> int:
    """The largest micro_batch_positions, in steps of 1,024 above one trajectory, whose step adds at most
    `room` bytes; 0 if one trajectory adds more.
    """
    sizes = range(longest_trajectory(config), 2**18, 1024)
    fits = bisect_right(sizes, room, key=lambda n: step_bytes(model, config, n))
    return sizes[fits - 1] if fits else 0


def main() -> int:
    """Print the plan, the verdict and the largest sizes; 1 if the run does not fit."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
    config, memory = read_plan(sys.argv[1:])
    model, limit, longest = build_model(config), int(USABLE * memory * GIB), longest_trajectory(config)
    plan = make_plan(model, config, limit)
    always, rollout, training = (sum(items.values()) for items in plan.values())
    for part, items in plan.items():
        print(f"{part}, GiB:", *(f"{size / GIB:6.2f}  {name}" for name, size in items.items()), sep="\n")
    spare = (limit - always - max(rollout, training)) / GIB
    verdict = f"fits in {memory:g} GiB, with" if spare >= 0 else f"does not fit in {memory:g} GiB, by"
    print(f"{config.model}, {config.dtype}, up to {longest:,} positions: {verdict} {abs(spare):.2f}")
    print(f"largest --micro-batch-positions: {largest_positions(model, config, limit - always)}")
    held = plan["rollout"]["key/value cache"] // cache.cache_bytes_per_token(model)
    print(f"--rows at once: {held // longest} of {longest:,} positions, more of shorter ones")
    return 0 if spare >= 0 else 1


if __name__ == "__main__":
    user_errors(main)
