"""The output head in float32, the same for the sampler and the trainer.

Rounded to bfloat16, logits of 16 to 32 are multiples of 0.125, and two ways to compute one distribution
differ by that much.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def plain_head(model: PreTrainedModel) -> nn.Linear | None:
    """The head if logits are one product of its matrix and the last hidden state, else None."""
    head = model.get_output_embeddings()
    capped = getattr(model.config, "final_logit_softcapping", None) is not None
    return head if type(head) is nn.Linear and head.bias is None and not capped else None


def float32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden (tokens, hidden) @ weight (vocabulary, hidden) transposed: (tokens, vocabulary) float32.

    Products of half precision are added up in float32, and the sums are not rounded. On a CPU, where
    torch.mm has no `out_dtype`, the factors are float32 (`weight` may be already).
    """
    if hidden.dtype == torch.float32:
        return hidden @ weight.t()
    if hidden.device.type != "cpu":
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    if hidden.dtype == torch.bfloat16:
        with factors_in_bfloat16():
            return hidden.float() @ weight.t().float()
    return hidden.float() @ weight.t().float()


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
