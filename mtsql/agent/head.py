"""The output head in float32, the same for the sampler and the trainer; products with packed weights.

Rounded to bfloat16, logits of 16 to 32 are multiples of 0.125, and two ways to compute one distribution
differ by that much.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel


def plain_head(model: PreTrainedModel) -> nn.Linear | None:
    """The head if logits are one product of its matrix and the last hidden state, else None."""
    head = model.get_output_embeddings()
    capped = getattr(model.config, "final_logit_softcapping", None) is not None
    return head if type(head) is nn.Linear and head.bias is None and not capped else None


def float32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden (tokens, hidden) @ weight (vocabulary, hidden) transposed: (tokens, vocabulary) float32.

    Products of half precision are added up in float32, and the sums are not rounded. On a CPU, where
    torch.mm has no `out_dtype`, the factors are float32 (`weight` may be already, and packed).
    """
    if hidden.device.type != "cpu" and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    with factors_in_bfloat16() if hidden.dtype == torch.bfloat16 else nullcontext():
        return linear(hidden.float(), weight.float())


@contextmanager
def factors_in_bfloat16() -> Iterator[None]:
    """oneDNN may round the factors of float32 products to bfloat16, where the processor is faster so.

    Factors that were bfloat16 before lose nothing, and the sums stay float32.
    """
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def packed(weight: Tensor) -> Tensor:
    """On a CPU float32, or bfloat16 it supports, in oneDNN's layout, faster for few rows; else itself."""
    half = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if weight.device.type != "cpu" or not (half or weight.dtype == torch.float32):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (tokens, in) @ weight (out, in) transposed + bias (out,); the weight may be packed."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
