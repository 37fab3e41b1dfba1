"""The forward pass of the Llama family over the cache, written out.

In each layer x += out(attention(qkv(norm(x)))), then x += down(silu(gate(y)) * up(y)) with y = norm(x).
Llama, Mistral, Qwen2 (biases) and Qwen3 (norms of queries and keys) differ in what is there. Weights are
taken from a policy at the start of a rollout: layers with one input become one matrix, LoRA is added in
float32 and rounded once, 4-bit weights are dequantised to the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from mtsql.agent.cache import Piece
from mtsql.agent.head import float32_logits, linear, packed, plain_head
from mtsql.errors import UserError
from mtsql.model_folder import Policy

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
ROTATIONS = ("default", "linear", "llama3", "yarn")  # with frequencies that do not depend on the length


class Decoder:
    """A policy's weights of this moment, made ready for sampling, and its forward pass.

    It does not keep the policy. Raises UserError for another architecture, and for layers that are neither
    linear nor linear with LoRA.
    """

    @torch.inference_mode()
    def __init__(self, policy: Policy) -> None:
        inner = policy if isinstance(policy, PreTrainedModel) else policy.get_base_model()
        config, body, head = inner.config, inner.base_model, plain_head(inner)
        rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
        known = config.model_type in FAMILY and rotation in ROTATIONS and config.hidden_act == "silu"
        windows = {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}
        if not known or head is None or windows or getattr(config, "sliding_window", None):
            raise UserError(
                "rollouts are for Llama, Mistral, Qwen2 and Qwen3 with only full attention; this model is "
                f"another kind of {config.model_type}"
            )
        self.config, self.device, self.dtype = config, inner.device, inner.dtype
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        self.frequencies = body.rotary_emb.inv_freq.float()  # (head_dim / 2,)
        self.stretch = body.rotary_emb.attention_scaling
        if hasattr(body.embed_tokens, "lora_embedding_A"):
            raise UserError("rollouts are for LoRA on linear layers, and this adapter has it on embed_tokens")
        self.embedding = body.embed_tokens.weight.data  # (vocabulary, hidden)
        self.layers = [Layer(layer, self) for layer in body.layers[: config.num_hidden_layers]]
        self.norm = body.norm.weight.data
        self.head = head.weight.data
        if self.head.device.type == "cpu":  # `float32_logits` would convert it in every step
            self.head = packed(self.head.float())

    def forward(self, ids: Tensor, positions: Tensor, pieces: Sequence[Piece]) -> Tensor | None:
        """Write the tokens `ids` at `positions`, (rows, tokens) int64 both, into the cache; `pieces` have
        these rows in order. In a decode step it gives the logits of what follows each token, (rows x tokens,
        vocabulary) float32, else None.
        """
        decoding, tokens = pieces[0].decoding, ids.shape[1]
        counts = [len(piece.rows) for piece in pieces]
        parts = [
            piece.attention(own, self.heads, self.kv_heads, self.embedding.dtype)
            for piece, own in zip(pieces, positions.split(counts), strict=True)
        ]
        sizes = [count * tokens for count in counts]
        angles = positions.reshape(-1, 1).float() * self.frequencies  # (rows x tokens, head_dim / 2)
        turns = torch.polar(torch.full_like(angles, self.stretch), angles)[:, None]
        x = F.embedding(ids.flatten(), self.embedding)  # (rows x tokens, hidden)
        for number, layer in enumerate(self.layers):
            # queries, keys and values are (rows x tokens, any heads, head_dim)
            qkv = layer.qkv(self._norm(x, layer.norm_1)).unflatten(-1, (-1, self.head_dim))
            both, values = qkv.split([self.heads + self.kv_heads, self.kv_heads], 1)
            if layer.head_norms is not None:
                both = F.rms_norm(both, both.shape[-1:], None, self.eps).mul_(layer.head_norms)
            turned = torch.view_as_complex(both.float().unflatten(-1, (-1, 2))) * turns
            both = torch.view_as_real(turned).flatten(-2).to(x.dtype)
            queries, keys = both.split([self.heads, self.kv_heads], 1)
            for part, k, v in zip(parts, keys.split(sizes), values.split(sizes), strict=True):
                part.write(number, k, v)
            if not decoding and number == len(self.layers) - 1:
                return None  # the rest would tell what comes next
            seen = [part.attend(number, q) for part, q in zip(parts, queries.split(sizes), strict=True)]
            x += layer.out(torch.cat(seen))
            gate, up = layer.gate_up(self._norm(x, layer.norm_2)).chunk(2, -1)
            x += layer.down(F.silu(gate).mul_(up))
        return float32_logits(self._norm(x, self.norm), self.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)


class Layer:
    """The weights of one layer."""

    def __init__(self, layer: nn.Module, of: Decoder) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        # The two numbers that a rotary position turns are half a head apart; they become neighbours.
        turned = (of.heads + of.kv_heads) * of.head_dim
        order = torch.arange(turned + of.kv_heads * of.head_dim, device=of.embedding.device)
        order[:turned] = order[:turned].view(-1, 2, of.head_dim // 2).transpose(1, 2).flatten()
        self.norm_1 = layer.input_layernorm.weight.data
        self.norm_2 = layer.post_attention_layernorm.weight.data
        self.qkv = product([attention.q_proj, attention.k_proj, attention.v_proj], order)
        self.head_norms = None
        if hasattr(attention, "q_norm"):
            norms = [attention.q_norm] * of.heads + [attention.k_norm] * of.kv_heads
            self.head_norms = torch.stack([norm.weight for norm in norms])[:, order[: of.head_dim]]
        self.out = product([attention.o_proj])
        self.gate_up = product([mlp.gate_proj, mlp.up_proj])
        self.down = product([mlp.down_proj])


def product(layers: Sequence[nn.Module], order: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """From x (tokens, in) to x @ weight.t() + bias, (tokens, out), of several linear layers with one input.

    `order` (out,) int64 is a new order of the outputs.
    """
    weights, biases = [full_weight(layer) for layer in layers], [layer.bias for layer in layers]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)  # (out, in)
    bias = None if biases[0] is None else torch.cat(biases)
    if order is not None:
        weight, bias = weight[order], None if bias is None else bias[order]
    return partial(linear, weight=packed(weight), bias=bias)


def full_weight(layer: nn.Module) -> Tensor:
    """The weight (out, in) of a linear layer, with its LoRA. Raises UserError for another kind of layer."""
    base = getattr(layer, "base_layer", layer)
    weight = base.weight.data
    if hasattr(base.weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        weight = dequantize_4bit(weight, base.weight.quant_state)
    other = getattr(layer, "lora_variant", None) or any(getattr(layer, "lora_bias", {}).values())
    if other or not isinstance(base, nn.Linear) or not weight.is_floating_point():
        raise UserError(f"rollouts are for linear layers and for LoRA on them, not for this {type(layer)}")
    if layer is base:
        return weight
    changes = [layer.get_delta_weight(name).float() for name in layer.active_adapters]
    return sum(changes, weight.float()).to(weight.dtype)
