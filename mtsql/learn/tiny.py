"""The embedded model: a Qwen3 of about two million parameters with a tokenizer of its own.

The tokenizer has Qwen3's control tokens and a chat template that renders as Qwen3's does, so that the
code path is a 4B model's. It splits a word's case, and the blank before it, from its letters: "in Paris",
"'paris'" and ":Paris" share one token, and a value can be copied in whatever form is stored.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CAPITAL = "\ue0fe"  # stands before a letter that is a capital; private-use characters, both
GLUE = "\ue0ff"  # stands before a word without a blank before it
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
    "<exec_verify>", "</exec_verify>", "<memory_verify>", "</memory_verify>",
    "<answer_sql>", "</answer_sql>",
    '{"name": "exec_sql", "arguments": {"code": "', '"}}',
    '{"name": "memory_retrieve", "arguments": {"code": "',
)  # fmt: skip

# Aliases (t1.), all-capital words, words with their blank, parts after an underscore, digits, signs
# with the marks that follow them, white space.
_PIECES = (
    rf" ?t\d\.?{GLUE}?| ?(?:{CAPITAL} [a-z]){{2,}}| [a-z]+|_[a-z]+| ?[0-9]"
    rf"|[\n ]?[^\sa-z0-9]+|\s+|[a-z]+"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-pair encoding with byte fallback: any text survives encoding and decoding.

    `vocabulary` counts learned pieces; 256 byte tokens and the control tokens come on top.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(r"(?<![ A-Za-z_])(?=[a-z])"), f"{GLUE} ")]
        + [normalizers.Replace(c, f"{CAPITAL} {c.lower()}") for c in string.ascii_uppercase]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    alphabet = [c for c in string.printable if c not in string.ascii_uppercase] + [CAPITAL, GLUE]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocab = tokenizer.get_vocab()
    merges = [
        tuple(m) if isinstance(m, list) else tuple(m.split(" "))
        for m in json.loads(tokenizer.to_str())["model"]["merges"]
    ]
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    tokenizer.model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Replace(f"{GLUE} ", "")]
        + [decoders.Replace(f"{CAPITAL} {c.lower()}", c) for c in string.ascii_uppercase]
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in MARKUP_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (Path(__file__).parent / "tiny_chat_template.jinja").read_text()
    return fast


def tiny_qwen3(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int, seed: int) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 for `tokenizer`, in fp32."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 48,
        num_key_value_heads=hidden // 96,
        head_dim=48,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)
