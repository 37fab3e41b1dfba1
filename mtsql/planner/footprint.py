"""The GPU memory of what a run holds, from shapes alone, on PyTorch's meta device.

Weights, adapters, gradients and optimizer are counted on the parameters of a model without data. For
activations the training code itself runs there on the largest micro-batch, and the rollout's prefill, while
`LiveBytes` adds up what they allocate and free.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from mtsql.agent.cache import (
    CachedRow,
    RowCache,
    cache_bytes_per_token,
    cache_positions,
    few_shapes,
)
from mtsql.agent.generator import TOKENS_PER_FORWARD_ELSEWHERE, WIDEST, Generator
from mtsql.agent.graphs import MOST_GRAPHS
from mtsql.agent.trajectory import Segment, Trajectory
from mtsql.config import TrainingOptions
from mtsql.errors import UserError, loading
from mtsql.learn.batches import micro_batches
from mtsql.learn.logprobs import token_batch, token_logprobs
from mtsql.learn.model import DTYPES
from mtsql.model_folder import ADAPTER_FILE, base_of_adapter

GIB = 2**30
CUDA_CONTEXT = int(0.75 * GIB)  # kernels and cuBLAS workspaces, about as much on an RTX 3090 and 4090
CUDA_GRAPH = 25 * 2**20  # what CUDA keeps of a captured decode step
# Published configurations: hidden, intermediate, layers, heads, kv_heads, tied embeddings.
QWEN3 = {
    "Qwen/Qwen3-0.6B": (1024, 3072, 28, 16, 8, True),
    "Qwen/Qwen3-1.7B": (2048, 6144, 28, 16, 8, True),
    "Qwen/Qwen3-4B": (2560, 9728, 36, 32, 8, True),
    "Qwen/Qwen3-8B": (4096, 12288, 36, 32, 8, False),
    "Qwen/Qwen3-14B": (5120, 17408, 40, 40, 8, False),
}


def longest_trajectory(config: TrainingOptions) -> int:
    """Its positions: prompt and response as long as the limits allow."""
    return min(config.max_prompt_tokens + config.max_response_tokens, config.max_sequence_tokens)


def _beta(config: TrainingOptions) -> float:
    """The warm start has no KL penalty."""
    return getattr(config, "beta", 0.0)


def build_model(config: TrainingOptions) -> PreTrainedModel | PeftModel:
    """The policy of `load_policy` on the meta device, with gradients; linear layers are not quantised.

    Raises UserError if the shape of the model is not known here, or if a quantised model has no adapter.
    """
    peft, name = None, config.model
    if (Path(name) / ADAPTER_FILE).is_file():
        with loading(f"no adapter's configuration could be read from {name}"):
            peft = PeftConfig.from_pretrained(name)
        peft.inference_mode = False
        name = peft.base_model_name_or_path = base_of_adapter(Path(name))
    elif config.lora_rank:
        peft = LoraConfig(
            r=config.lora_rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    if config.quantise == "nf4" and peft is None:
        raise UserError("a quantised model can only train an adapter; give --lora-rank above 0")
    if (Path(name) / "config.json").is_file():
        with loading(f"no model's configuration could be read from {name}"):
            shape = AutoConfig.from_pretrained(name, trust_remote_code=False)
    elif name in QWEN3:
        hidden, intermediate, layers, heads, kv_heads, tied = QWEN3[name]
        shape = Qwen3Config(
            vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=128, tie_word_embeddings=tied,
        )  # fmt: skip
    else:
        raise UserError(
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


def state_bytes(model: PreTrainedModel | PeftModel, config: TrainingOptions) -> dict[str, int]:
    """Bytes of weights, adapters, gradients, optimizer and reference policy: what is there all the time.

    Trained weights in half precision have float32 master copies, with float32 gradients and moments.
    """
    weights = adapters = 0
    quantised = quantised_weights(model) if config.quantise == "nf4" else {}
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            adapters += parameter.nbytes
        else:
            weights += nf4_bytes(parameter.numel()) if id(parameter) in quantised else parameter.nbytes
    trainable = [p for p in model.parameters() if p.requires_grad]
    exact = [4 * p.numel() for p in trainable]  # what is stepped is float32
    moments = 2 * sum(exact)
    if config.optimizer == "adamw8bit":
        moments = sum(map(adamw8bit_bytes, trainable))
    return {
        "weights": weights,
        "adapters": adapters,
        "gradients": sum(exact),
        "master copies": sum(e for e, p in zip(exact, trainable, strict=True) if e != p.nbytes),
        "optimizer": moments,
        "reference policy": (adapters or weights) if _beta(config) else 0,
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


def largest_micro_batch(config: TrainingOptions) -> list[list[Trajectory]]:
    """The groups of the micro-batch with the most positions, all trajectories as long as they may be.

    Where whole trajectories leave some of micro_batch_positions free, they are made longer to fill them,
    since shorter ones would.
    """
    prompt, limit = config.max_prompt_tokens, config.micro_batch_positions
    samples, response = getattr(config, "samples_per_prompt", 1), longest_trajectory(config) - prompt

    def group(count: int, length: int) -> list[Trajectory]:
        given, sampled = Segment.given("prompt", [0] * prompt), Segment.sampled([0] * length, [0.0] * length)
        return [Trajectory("", 0, [given, sampled]) for _ in range(count)]

    groups = [group(samples, response) for _ in range(limit // (prompt + samples * response) + 1)]
    sizes = [list(map(len, b)) for b in micro_batches(groups, config.layout, limit)]
    chosen = max(sizes, key=lambda counts: len(counts) * prompt + sum(counts) * response)
    length = max(response, (limit - len(chosen) * prompt) // sum(chosen))
    return [group(count, length) for count in chosen]


def training_bytes(model: PreTrainedModel | PeftModel, config: TrainingOptions) -> dict[str, dict[str, int]]:
    """Bytes that the largest micro-batch adds at the peaks of its head and of its layers."""
    groups = largest_micro_batch(config)
    with live_bytes(model) as live:
        batch = token_batch(groups, config.layout, "meta")
        logprobs, _ = token_logprobs(model, batch)
        kept = live.live
        if _beta(config):
            with torch.no_grad():
                token_logprobs(model, batch)
        torch.autograd.backward([logprobs.sum()])
    quantised = quantised_weights(model).values() if config.quantise == "nf4" else ()
    layers = {"one layer at work": max(0, live.peak - kept)}
    layers["attention's sums"] = attention_sums(model, batch.ids.numel())
    layers["dequantised matrix"] = max((w.nbytes for w in quantised), default=0)
    return {
        "training, head": {"kept for backward": kept, "chunk of logits": max(0, live.peak_of_head - kept)},
        "training, layers": {"kept for backward": kept, **layers},
    }


def attention_sums(model: PreTrainedModel | PeftModel, positions: int) -> int:
    """Bytes in which the backward pass of half-precision attention adds up in float32, at most: the gradients
    of queries, keys and values of all heads.
    """
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 0 if model.dtype == torch.float32 else 3 * 4 * positions * config.num_attention_heads * head_dim


def planned_positions(model: PreTrainedModel | PeftModel, config: TrainingOptions) -> int:
    """Positions of the rollout's cache: of --cache-gib; without it of one row, for it takes what is free.

    More than all rows can fill are not taken. Raises UserError if it does not hold a row.
    """
    longest = longest_trajectory(config)
    held = cache_positions(model, config.cache_gib, longest)
    return longest if held is None else min(held, config.rows * longest)


def rows_at_once(config: TrainingOptions, positions: int, length: int) -> int:
    """How many rows of `length` positions a cache of so many positions lets in."""
    cache = RowCache(longest_trajectory(config), positions, static_shapes=True)
    rows = [CachedRow() for _ in range(config.rows)]
    return len(list(takewhile(lambda row: cache.admit(row, length), rows)))


def rollout_bytes(model: PreTrainedModel | PeftModel, config: TrainingOptions) -> dict[str, int]:
    """Bytes that the rollout adds: the cache, and its largest forward pass or the sampling.

    A longer row that gave its place back is prefilled with fewer others: its attention mask is no larger.
    """
    cache = planned_positions(model, config) * cache_bytes_per_token(model)
    prompt, longest = config.max_prompt_tokens, longest_trajectory(config)
    rows = min(config.rows, max(1, TOKENS_PER_FORWARD_ELSEWHERE // min(WIDEST, prompt)))
    with (
        Generator(model, [0], longest=longest, static_shapes=True) as generator,
        live_bytes(model) as live,
    ):
        generator.start([[i] * prompt for i in range(rows)], range(rows), [1] * rows)
        kept = generator.cache.reserved * cache_bytes_per_token(model)
    # Logits three times (the graph's, all, those of rows that decode), log-probabilities and probabilities
    # in float32, their cumulative sum in float64.
    sampling = few_shapes(config.rows) * model.config.vocab_size * (3 * 4 + 2 * 4 + 8)
    at_work = max(live.peak - kept, live.peak_of_head - kept, sampling)
    bases = [layer.base_layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    merged = sum(base.weight.nbytes for base in bases) if config.merge_adapter else 0
    return {
        "key/value cache": cache,
        "prefill or sampling": at_work,
        "CUDA graphs": MOST_GRAPHS * CUDA_GRAPH,
        "base kept beside the merged": merged,
    }
