"""The embedded model: a Qwen3 of about two million parameters with a tokenizer of its own.

The tokenizer has Qwen3's control tokens and a chat template that renders as Qwen3's does, so that the
code path is a 4B model's. It splits a word's case, and the blank before it, from its letters: "in Paris",
"'paris'" and ":Paris" share one token, and a value can be copied in whatever form is stored.

A pre-trained model copies from its context; learning that from nothing would take longer than all else.
So the model starts with the circuit for it: `start_with_copying_heads`.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MODELS = Path("models/toy")  # below the project's root: seed0, seed1, ..., as imitation left them
CAPITAL = "\ue0fe"  # stands before a letter that is a capital; private-use characters, both
GLUE = "\ue0ff"  # stands before a word without a blank before it
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
    "<exec_verify>", "</exec_verify>", "<memory_verify>", "</memory_verify>", "<answer_sql>", "</answer_sql>",
    '{"name": "exec_sql", "arguments": {"code": "', '"}}',
    '{"name": "memory_retrieve", "arguments": {"code": "',
    # What always stands together, and each verdict, is one token.
    "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_start|>user\n<tool_response>\n",
    "\n</tool_response>", '<tool_call>\n{"name": "exec_sql", "arguments": {"code": "', '"}}\n</tool_call>',
    '<tool_call>\n{"name": "memory_retrieve", "arguments": {"code": "',
    "<exec_verify>pass</exec_verify>\n", "<exec_verify>no_pass</exec_verify>\n",
    "<memory_verify>pass</memory_verify>\n", "<memory_verify>no_pass</memory_verify>\n",
)  # fmt: skip

# Aliases (t1.), all-capital words, words with their blank, what follows an underscore, digits, signs
# with the marks that follow them, white space.
_PIECES = (
    rf" ?t\d\.?{GLUE}?| ?(?:{CAPITAL} [a-z]){{2,}}| [a-z]+|_[a-z]+| ?[0-9]{{1,2}}"
    rf"|[\n ]?[^\sa-z0-9]+|\s+|[a-z]+"
)


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, markup: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Byte-pair encoding with byte fallback: any text survives encoding and decoding.

    `vocabulary` counts learned pieces; 256 byte tokens and the control tokens come on top, and `markup`,
    the tags of further recipes.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(r"(?<![ A-Za-z_])(?=[a-z])"), f"{GLUE} ")]
        + [normalizers.Replace(c, f"{CAPITAL} {c.lower()}") for c in string.ascii_uppercase]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    alphabet = [c for c in string.printable if c not in string.ascii_uppercase] + [CAPITAL, GLUE]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocab = tokenizer.get_vocab()
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    tokenizer.model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Replace(f"{GLUE} ", "")]
        + [decoders.Replace(f"{CAPITAL} {c.lower()}", c) for c in string.ascii_uppercase]
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in (*MARKUP_TOKENS, *markup)])
    template = (Path(__file__).parent / "tiny_chat_template.jinja").read_text()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, chat_template=template,
        eos_token="<|im_end|>", pad_token="<|endoftext|>",
    )  # fmt: skip


def tiny_qwen3(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 for `tokenizer` in fp32, random but for its copying heads."""
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=layers, num_attention_heads=hidden // 48,
        num_key_value_heads=hidden // 96,
        head_dim=48, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    start_with_copying_heads(model)
    return model


@torch.no_grad()
def start_with_copying_heads(model: Qwen3ForCausalLM) -> None:
    """Set the initial weights so that the model tends to go on as its context went on before.

    This is the induction circuit (Olsson et al., "In-context learning and induction heads") in three steps:
    what a head attends to becomes likelier as output, in every layer (its output matrix is the transpose
    of its value matrix); head 0 of layer 0 attends to the previous token; head 0 of layer 1 attends to
    positions whose previous token is the current one. Everything stays trainable.
    """
    config, layers = model.config, model.model.layers
    size, half = config.head_dim, config.head_dim // 2
    hidden, scale, constant = config.hidden_size, 0.05, 4.0
    heads_per_value = config.num_attention_heads // config.num_key_value_heads

    def projection() -> torch.Tensor:
        """(size, hidden): random orthonormal rows, blind to dimension 0."""
        rows = torch.empty(size, hidden)
        torch.nn.init.orthogonal_(rows)
        rows[:, 0] = 0
        return rows

    # Dimension 0 of every embedding is the same: queries and keys can read a constant from it.
    model.model.embed_tokens.weight.normal_(0, scale)
    model.model.embed_tokens.weight[:, 0] = constant * scale
    for layer in layers:
        # (values, size, hidden), then (heads, size, hidden)
        values = torch.stack([projection() for _ in range(config.num_key_value_heads)])
        layer.self_attn.v_proj.weight.copy_(values.flatten(0, 1))
        shared = values.repeat_interleave(heads_per_value, 0)
        layer.self_attn.o_proj.weight.copy_(scale * shared.flatten(0, 1).T)

    # Layer 0: queries lag keys by one position in the fastest rotations, whatever the tokens are.
    frequency = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    fast, slow = torch.arange(4), torch.arange(half)[frequency < 0.004]
    attention, previous = layers[0].self_attn, projection()
    attention.q_proj.weight[:size] = attention.k_proj.weight[:size] = 0
    attention.k_proj.weight[fast, 0] = 1.0
    attention.q_proj.weight[fast, 0] = torch.cos(frequency[fast])
    attention.q_proj.weight[half + fast, 0] = -torch.sin(frequency[fast])
    _sharpen(attention, torch.cat([fast, half + fast]))
    identity = attention.v_proj.weight[:size].clone()
    attention.o_proj.weight[:, :size] = 1.5 * scale * previous.T

    # Layer 1: queries read the current token, keys the previous one, in the slowest rotations.
    matched = torch.cat([slow, half + slow])
    attention = layers[1].self_attn
    attention.q_proj.weight[:size] = attention.k_proj.weight[:size] = 0
    attention.q_proj.weight[matched] = identity[: len(matched)]
    attention.k_proj.weight[matched] = previous[: len(matched)]
    _sharpen(attention, matched)
    attention.o_proj.weight[:, :size] *= 3


def _sharpen(attention: torch.nn.Module, dimensions: torch.Tensor) -> None:
    """Double queries and keys in some dimensions: attention scores of up to 28 instead of 7."""
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight[dimensions] = 2.0
