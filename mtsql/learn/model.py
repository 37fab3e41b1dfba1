"""Policies, loaded from a folder or a hub, trained whole or through LoRA; the reference; the optimizer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import is_flash_attn_2_available
from transformers.utils import logging as transformers_logging

from mtsql.errors import UserError, loading
from mtsql.files import folder_atomically
from mtsql.model_folder import ADAPTER_FILE, WHAT_TO_GIVE, Policy, base_of_adapter, check_exists

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def has_adapter(policy: Policy) -> bool:
    """Whether the policy is a base model with a LoRA adapter on it."""
    return not isinstance(policy, PreTrainedModel)


def base_of(policy: Policy) -> PreTrainedModel:
    """The base model under an adapter, or the policy itself."""
    return policy.get_base_model() if has_adapter(policy) else policy


@contextmanager
def adapters_in_half(policy: Policy) -> Iterator[None]:
    """While the block runs on a CPU, float32 adapters over a bfloat16 base are multiplied in bfloat16.

    Their products would take as long as the base's. Their gradients are float32 all the same.
    """
    base = base_of(policy)
    if not has_adapter(policy) or base.dtype != torch.bfloat16 or base.device.type != "cpu":
        yield
        return
    from peft.helpers import disable_input_dtype_casting

    # Else PEFT copies the input of each layer to float32, and autocast back. What checkpointing computes
    # again in the backward pass would not know of it.
    casting_off = disable_input_dtype_casting(policy, active=not base.is_gradient_checkpointing)
    with torch.autocast("cpu", torch.bfloat16), casting_off:
        yield


def load_policy(
    name_or_path: str | Path,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    *,
    quantise: str = "none",
    lora_rank: int = 0,
    gradient_checkpointing: bool = False,
) -> Policy:
    """A causal language model in training mode.

    A folder with a PEFT adapter gives its base model with the adapter trainable. `lora_rank` > 0 puts new
    LoRA adapters on all linear layers but the head, with alpha twice the rank; base weights are `dtype`,
    adapter weights always float32. `quantise` "nf4" keeps the base's linear layers, but not the head, in
    4-bit NormalFloat with doubly quantised constants (QLoRA, Dettmers et al. 2023); only adapters can be
    trained then. Raises UserError if nothing can be loaded under that name and for a `lora_rank` that would
    stack an adapter on an adapter.
    """
    check_exists(name_or_path)
    adapter = (Path(name_or_path) / ADAPTER_FILE).is_file()
    if adapter and lora_rank > 0:
        raise UserError(f"{name_or_path} is a LoRA adapter already and goes on as it is: set lora_rank to 0")
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # of PEFT's own look-up
    source = base_of_adapter(Path(name_or_path)) if adapter else name_or_path
    with loading(f"no model could be loaded from {source}; {WHAT_TO_GIVE}"):
        attention = attention_for(dtype, device)
        how = {"dtype": dtype, "attn_implementation": attention, "trust_remote_code": False}
        if quantise == "nf4":
            how["quantization_config"] = BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=dtype)
            how["device_map"] = {"": device}
        model, info = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **how)
        if info["missing_keys"]:  # they would be random
            raise ValueError(f"its weights lack {min(info['missing_keys'])}")
    if quantise == "nf4":
        _keep_trainable_after_sampling(model.requires_grad_(False))
    else:
        model.to(device)
    if adapter:
        from peft import PeftModel

        with loading(f"the adapter in {name_or_path} does not go on its base {source}"):
            model = PeftModel.from_pretrained(model, name_or_path, is_trainable=True)
        model.peft_config["default"].base_model_name_or_path = source  # wherever it will be saved
    if lora_rank > 0:
        from peft import LoraConfig, get_peft_model

        kind = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        model = get_peft_model(model, LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, **kind))
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        # Else it would train another policy than the one that is sampled from.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model.train()


def attention_for(dtype: str, device: torch.device | str) -> str:
    """flash-attn where it is installed and can run, which is on CUDA and in half precision; else SDPA."""
    can_run = torch.device(device).type == "cuda" and dtype != "float32"
    return "flash_attention_2" if can_run and is_flash_attn_2_available() else "sdpa"


def _keep_trainable_after_sampling(model: PreTrainedModel) -> None:
    """Forbid bitsandbytes to repack 4-bit layers.

    On CPUs with bfloat16 instructions it does so at their first evaluation, and from then on they silently
    pass no gradient.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def save_policy(model: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write an ordinary Hugging Face folder, or a PEFT adapter folder; all of it or nothing."""
    with folder_atomically(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


class Reference:
    """The policy as it is now, kept frozen for a KL penalty: a copy of its trainable weights, a LoRA's alone.

    So after a LoRA warm start the reference is the warm-started model and not its base.
    """

    def __init__(self, model: Policy) -> None:
        """Copy the weights of `model`; to be called before training changes them, also on resume."""
        self._model = model
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self._weights = [p.detach().clone() for p in self._trainable]

    @contextmanager
    def policy(self) -> Iterator[Policy]:
        """The frozen policy; the trained one, the same object, must not be used while the block runs."""
        self._exchange()
        try:
            yield self._model
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for place, parameter in enumerate(self._trainable):
            parameter.data, self._weights[place] = self._weights[place], parameter.data


def make_optimizer(model: nn.Module, learning_rate: float, beta2: float = 0.999) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, without weight decay.

    A parameter in half precision is computed with as it is, but what the optimizer steps is a float32 master
    copy, since bfloat16 would round most updates away; gradients add up there in float32 too. Raises
    UserError if nothing is trainable.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise UserError("nothing can be trained; a quantised model needs --lora-rank above 0 or an adapter")
    stepped = [_master(p) for p in trainable]
    optimizer = torch.optim.AdamW(stepped, lr=learning_rate, betas=(0.9, beta2), weight_decay=0.0, fused=True)
    copies = [(p, master) for p, master in zip(trainable, stepped, strict=True) if master is not p]

    @torch.no_grad()
    def copy_back(*_: object) -> None:
        for parameter, master in copies:
            parameter.copy_(master)

    optimizer.register_step_post_hook(copy_back)
    return optimizer


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """The float32 copy that gets the gradients of a parameter in half precision; of another, itself."""
    if parameter.dtype == torch.float32:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def hand_over(parameter: nn.Parameter) -> None:
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(hand_over)
    return master


def stepped_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """What the optimizer steps: trainable parameters, or their float32 master copies."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict:
    """The optimizer's state and the weights that it steps."""
    weights = [parameter.detach() for parameter in stepped_parameters(optimizer)]
    return optimizer.state_dict() | {"weights": weights}


def restore_optimizer(policy: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Give a policy and its new optimizer what `optimizer_state` gave."""
    weights = state.pop("weights")
    optimizer.load_state_dict(state)
    trainable = [p for p in policy.parameters() if p.requires_grad]
    for parameter, stepped, weight in zip(trainable, stepped_parameters(optimizer), weights, strict=True):
        stepped.data.copy_(weight)
        parameter.data.copy_(weight)


def cosine_rate(peak: float, progress: float, warmup: float = 0.03) -> float:
    """Learning rate at `progress` in [0, 1]: linear warm-up, then half a cosine down to zero."""
    if progress < warmup:
        return peak * (progress + 1e-3) / (warmup + 1e-3)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, (progress - warmup) / (1.0 - warmup))))


def warmup_rate(peak: float, step: int) -> float:
    """Learning rate of a step: linear warm-up over the first three, then constant."""
    return peak * min(1.0, (step + 1) / 3)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_step(optimizer: torch.optim.Optimizer, rate: float) -> float:
    """One step on the gradients, clipped to the norm 1; returns the norm before clipping.

    The gradients are dropped after it, so that they take no memory during rollouts. Raises UserError for a
    gradient that is not finite, before it reaches the weights.
    """
    set_learning_rate(optimizer, rate)
    norm = float(nn.utils.clip_grad_norm_(stepped_parameters(optimizer), 1.0))  # before clipping
    if not math.isfinite(norm):
        raise UserError(
            f"the gradient's norm is {norm}; the weights are as before: lower --learning-rate, or compute in "
            "--dtype float32, and go on from the last checkpoint with --resume"
        )
    optimizer.step()
    optimizer.zero_grad()
    return norm
