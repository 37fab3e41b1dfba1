"""What the plan needs to know of a run, from its TOML file and the command line."""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from mtsql.config import CHOICES
from mtsql.errors import UserError


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The options of train_grpo.py and train_sft.py that decide about memory, as they are named there."""

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


def add_options(parser: argparse.ArgumentParser) -> None:
    """An option for each field of PlanConfig, None where it is not given."""
    for name, kind in get_type_hints(PlanConfig).items():
        how: dict[str, Any] = {"type": kind, "metavar": "X"}
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        parser.add_argument("--" + name.replace("_", "-"), help=f"[{getattr(PlanConfig, name)}]", **how)


def read_config(path: str | None, stage: str, options: dict[str, Any]) -> PlanConfig:
    """[common] and [stage] of a TOML file, then the given options.

    [grpo] goes on from what [sft] made, so it has [sft]'s model and LoRA rank where it names none; [sft]
    trains on trajectories one by one, packed by default. Raises UserError for what is wrong.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML ({error})") from None
    warm = {name: value for name, value in content.get("sft", {}).items() if name in ("model", "lora_rank")}
    merged = warm | content.get("common", {}) | content.get(stage, {})
    if stage == "sft":
        merged = {"layout": "packed"} | merged | {"samples_per_prompt": 1}
    hints = get_type_hints(PlanConfig)
    values = {name: value for name, value in (merged | options).items() if name in hints}
    for name, value in values.items():
        if type(value) is not hints[name] and not (hints[name] is float and type(value) is int):
            raise UserError(f"{name} should be {hints[name].__name__}, not {value!r}")
        if name in CHOICES and value not in CHOICES[name]:
            raise UserError(f"{name} {value} is unknown; choose from {', '.join(CHOICES[name])}")
        if type(value) is int and value < (name != "lora_rank"):
            raise UserError(f"{name} should be positive, not {value}")
    return PlanConfig(**values)
