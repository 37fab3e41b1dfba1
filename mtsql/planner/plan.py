"""Will it fit? The GPU memory of a run, from shapes alone, and the knob to turn if it is too much.

    python -m mtsql.planner.plan --config configs/sparc_qwen3_1.7b_lora_24gb.toml --gpu-memory 24
    python -m mtsql.planner.plan                    which model, trained how, for 8 to 80 GiB

The model stands on PyTorch's meta device, which knows shapes but holds no data. Weights, adapters, gradients
and optimizer are counted on its parameters. For activations the training code itself runs there on the
largest micro-batch, and the rollout's prefill, while `LiveBytes` adds up what they allocate and free. Exit
code: 0 if the run fits, 1 if not, 2 for wrong input.

Planned is the worst case: prompts and responses as long as the limits allow, all of the response trained,
SDPA attention with CUDA's fused kernels. A second column has shorter responses. 4-bit layers run as layers of
`dtype` and one dequantised matrix: slightly too much, since PEFT's 4-bit layers add adapters in `dtype`.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from mtsql.config import (
    GrpoConfig,
    SftConfig,
    TrainingOptions,
    add_option,
    check,
    from_toml,
    recipe_settings,
    user_errors,
)
from mtsql.errors import UserError
from mtsql.model_folder import ADAPTER_FILE
from mtsql.planner.footprint import (
    GIB,
    QWEN3,
    build_model,
    longest_trajectory,
    planned_positions,
    rollout_bytes,
    rows_at_once,
    state_bytes,
    training_bytes,
)
from mtsql.recipes import RECIPES

GPUS = (8.0, 16.0, 24.0, 48.0, 80.0)  # GiB
USABLE = 0.98  # of a card's memory; driver and display have the rest
REAL_TRAJECTORY = 2048  # positions: prompts of SParC and CoSQL have 1,000 to 1,200 in the mean, at most 3,000
WAYS = {  # most to least that is trained
    "full": {"lora_rank": 0},
    "LoRA": {"lora_rank": 32},
    "QLoRA": {"lora_rank": 32, "quantise": "nf4"},
}
FRAGMENTATION = 0.05  # of what comes and goes: holes of the allocator, with expandable segments


# The options that decide about memory.
DECISIVE = (
    "model", "recipe", "dtype", "quantise", "optimizer", "layout", "lora_rank", "gradient_checkpointing",
    "micro_batch_positions", "samples_per_prompt", "beta", "rows", "cache_gib", "max_prompt_tokens",
    "max_response_tokens", "max_tool_tokens", "max_sequence_tokens", "merge_adapter",
)  # fmt: skip


def read_config(path: str | None, stage: str, options: dict[str, Any]) -> TrainingOptions:
    """The recipe's settings, options of train_grpo.py or train_sft.py in a TOML file, then the given ones.

    [grpo] goes on from what [sft] made, so it has [sft]'s model and LoRA rank where it names none. Raises
    UserError for what is wrong.
    """
    cls = {"grpo": GrpoConfig, "sft": SftConfig}[stage]
    values = from_toml(Path(path), cls) if path else {}
    if path and stage == "grpo":
        warm = from_toml(Path(path), SftConfig)
        values = {name: warm[name] for name in ("model", "lora_rank") if name in warm} | values
    hints = get_type_hints(cls, include_extras=True)
    for name, value in options.items():
        if name not in hints:
            raise UserError(f"--{name.replace('_', '-')} is no option of --stage {stage}")
        check(f"--{name.replace('_', '-')}", value, hints[name])
    values |= options
    settings = recipe_settings(values.get("recipe", RECIPES[0]), hints, stage)
    return cls(**{"model": "", "data": "", "out": ""} | settings | values)


@dataclass(frozen=True)
class Plan:
    """Bytes by item: what is there all the time, and what each phase adds to it at its peak."""

    always: dict[str, int]
    phases: dict[str, dict[str, int]]
    positions: int  # of the key/value cache

    def total(self, phase: str) -> int:
        """Bytes at the peak of a phase."""
        return sum(self.always.values()) + sum(self.phases[phase].values())

    @property
    def peak(self) -> int:
        """Bytes at the peak of the run."""
        return max(map(self.total, self.phases))


def make_plan(config: TrainingOptions) -> Plan:
    """The plan of a run. The cache is freed before the training step; what it held is used again."""
    model = build_model(config)
    always = state_bytes(model, config)
    # torch's AdamW works on all tensors at once (foreach), with one more copy of them.
    copy = always["gradients"] if config.optimizer == "adamw" else 0
    phases = {"rollout": rollout_bytes(model, config), **training_bytes(model, config)}
    phases["update"] = {"optimizer's copy": copy}
    for items in phases.values():
        items["fragmentation"] = int(FRAGMENTATION * (sum(items.values()) - items.get("key/value cache", 0)))
    return Plan(always, phases, planned_positions(model, config))


def knobs(config: TrainingOptions, plan: Plan, limit: int) -> Iterator[dict[str, Any]]:
    """What may be changed to need less, least harm first: time, then precision, then what is trained."""
    if not config.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    cache = plan.phases["rollout"]["key/value cache"]
    room = math.floor((cache + limit - plan.total("rollout")) / GIB * 10) / 10
    if cache / plan.positions * longest_trajectory(config) <= room * GIB < cache:
        yield {"cache_gib": room}
    longest = longest_trajectory(config)
    if config.micro_batch_positions > longest:
        yield {"micro_batch_positions": max(longest, config.micro_batch_positions // 2)}
    if config.layout != "rows":
        yield {"layout": "rows"}
    if config.optimizer == "adamw":
        yield {"optimizer": "adamw8bit"}
    adapter = (Path(config.model) / ADAPTER_FILE).is_file()
    if config.lora_rank == 0 and not adapter:
        yield {"lora_rank": 32}
    elif config.quantise == "none":
        yield {"quantise": "nf4"}
    if config.lora_rank > 8 and not adapter:
        yield {"lora_rank": 8}


def advise(config: TrainingOptions, plan: Plan, limit: int) -> tuple[dict[str, Any], Plan]:
    """The first knobs found with which a run fits in `limit` bytes, and the plan with them.

    Each turn takes the least harmful knob that brings the phases nearer to the limit. If none does any
    more, the plan returned is still too large.
    """

    def excess(plan: Plan) -> int:
        return sum(max(0, plan.total(phase) - limit) for phase in plan.phases)

    turned: dict[str, Any] = {}
    while excess(plan):
        for change in knobs(replace(config, **turned), plan, limit):
            trial = make_plan(replace(config, **(turned | change)))
            if excess(trial) < excess(plan):
                turned, plan = turned | change, trial
                break
        else:
            break
    return turned, plan


def peaks_by_way(config: GrpoConfig) -> dict[str, int]:
    """Bytes at the peak of each of WAYS with as little memory as time can buy, by its name."""
    thrifty = replace(config, gradient_checkpointing=True, micro_batch_positions=longest_trajectory(config))
    return {name: make_plan(replace(thrifty, **way)).peak for name, way in WAYS.items()}


def show_overview(sizes: Sequence[float]) -> None:
    """Print for each model and size of GPU the first of WAYS that fits, with one long trajectory at once."""
    print(f"{'GiB of GPU memory':20}" + "".join(f"{size:>9g}" for size in sizes))
    for name in QWEN3:
        config = GrpoConfig(model=name, data=(), out="", dtype="bfloat16", rows=32)
        peaks = peaks_by_way(config)
        limits = [USABLE * size * GIB for size in sizes]
        fitting = [next((w for w, peak in peaks.items() if peak <= limit), "-") for limit in limits]
        print(f"{name:20}" + "".join(f"{way:>9}" for way in fitting), flush=True)
    print(
        "GRPO, the paper's limits, --dtype bfloat16 --gradient-checkpointing "
        f"--micro-batch-positions {longest_trajectory(config)}; "
        "LoRA: --lora-rank 32, QLoRA: --quantise nf4 too.\n"
        "What is left makes room for more rows at once; --model NAME --gpu-memory X says what takes how much."
    )


def show_plan(config: TrainingOptions, worst: Plan, typical: Plan) -> None:
    """Print both plans, an item a line, in GiB, and how many rows of a length the cache holds."""

    def line(text: str, *values: int) -> None:
        print(f"{text:28}" + "".join(f"{value / GIB:10.2f}" for value in values))

    for name, value in worst.always.items():
        line(name, value, typical.always[name])
    for phase, items in worst.phases.items():
        print(f"{phase}: all of the above and")
        for name, value in items.items():
            line("  " + name, value, typical.phases[phase][name])
        line("  =", worst.total(phase), typical.total(phase))
    line("peak", worst.peak, typical.peak)
    for length in sorted({longest_trajectory(config), REAL_TRAJECTORY}, reverse=True):
        held = rows_at_once(config, worst.positions, length)
        print(f"{f'rows of {length:,} at once':28}{'at least' if not config.cache_gib else '':>10}{held:10}")


def main() -> None:
    """Print the plan and the verdict."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", help="TOML file; the options below override it")
    parser.add_argument("--stage", choices=("grpo", "sft"), default="grpo", help="table of the file [grpo]")
    parser.add_argument("--gpu-memory", type=float, help="GiB [24]", metavar="X")
    parser.add_argument("--typical", type=int, default=2000, help="response of column 2 [2000]", metavar="X")
    by_name, hints = {f.name: f for f in fields(GrpoConfig)}, get_type_hints(GrpoConfig, include_extras=True)
    for name in DECISIVE:
        default = "" if name == "model" else by_name[name].default
        add_option(parser, by_name[name], hints[name], default)
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    memory, shorter = given.pop("gpu_memory", None), given.pop("typical")
    if (memory is not None and not 0 < memory < math.inf) or shorter < 1:
        raise UserError("--gpu-memory and --typical should be positive numbers")
    if given == {"stage": "grpo"}:
        show_overview(GPUS if memory is None else (memory,))
        return
    memory = 24.0 if memory is None else memory
    config = read_config(given.pop("config", None), given.pop("stage"), given)
    response = longest_trajectory(config) - config.max_prompt_tokens
    if response <= 0:
        raise UserError("max_sequence_tokens leaves no room for a response; raise it")
    shorter, worst = min(shorter, response), make_plan(config)
    show_plan(config, worst, make_plan(replace(config, max_response_tokens=shorter)))
    print(f"{config.model}, {config.dtype}; responses of {response:,} tokens, and of {shorter:,}")
    limit = int(USABLE * memory * GIB)
    spare = (limit - worst.peak) / GIB
    if spare >= 0:
        print(f"fits in {memory:g} GiB, with {spare:.2f} to spare")
        return
    print(f"does not fit in {memory:g} GiB: {-spare:.2f} too much")
    turned, plan = advise(config, worst, limit)
    setting = ", ".join(f"{name} = {str(value).lower()}" for name, value in turned.items())
    if plan.peak <= limit:
        print(f"set {setting}: {plan.peak / GIB:.2f} GiB")
    else:
        print(
            f"no knob brings it there; the least is {plan.peak / GIB:.2f} GiB ({setting or 'as it is'}). "
            "Lower max_response_tokens or max_prompt_tokens, or choose a smaller model"
        )
    sys.exit(1)


if __name__ == "__main__":
    user_errors(main)
