"""Small random models of every kind of decoder that the project is for."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mtsql.learn.model import load_policy

VOCABULARY, END = 97, 3
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
    "eos_token_id": END, "pad_token_id": 0,
}  # fmt: skip
WIDER = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # for blocks of 4-bit numbers
KINDS = ["qwen3", "qwen2", "mistral", "llama", "smollm", "qwen3 with LoRA", "llama in 4 bits with LoRA"]


def random_model(architecture: str, **sizes: object) -> PreTrainedModel:
    """A model of one of transformers' architectures with random weights; `sizes` go over SIZES."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **SIZES | sizes))


def make_decoder(kind: str, folder: Path | None = None) -> PreTrainedModel:
    """A model of one of KINDS, the same at each call; that in 4 bits is loaded from `folder`."""
    torch.manual_seed(1)
    if kind == "qwen3":
        return random_model("qwen3", tie_word_embeddings=True)
    if kind == "qwen2":
        return with_random(random_model("qwen2"), "bias")
    if kind == "mistral":
        return random_model("mistral", sliding_window=None)
    if kind == "llama":  # every bias, and frequencies that are not the plain ones
        scaled = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
        scaled |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10_000.0}
        biases = {"attention_bias": True, "mlp_bias": True}
        return with_random(random_model("llama", **biases, rope_parameters=scaled), "bias")
    if kind == "smollm":  # three query heads for one key head, tied, as SmolLM2-135M
        sizes = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4}
        return random_model("llama", tie_word_embeddings=True, rope_theta=100_000.0, **sizes)
    if kind == "qwen3 with LoRA":
        adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        return with_random(get_peft_model(random_model("qwen3"), adapters), "lora_B")
    random_model("llama", **WIDER).save_pretrained(folder)
    return with_random(load_policy(folder, quantise="nf4", lora_rank=4), "lora_B").eval()


def with_random(model: PreTrainedModel, which: str, std: float = 0.3) -> PreTrainedModel:
    """The model with random numbers where a new one has zeros."""
    for name, parameter in model.named_parameters():
        if which in name:
            torch.nn.init.normal_(parameter, std=std)
    return model
