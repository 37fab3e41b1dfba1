"""From a configuration to the objects of a run: dataset, environment, scorer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel
from tqdm import tqdm
from transformers import PreTrainedModel

from mtsql.agent.env import Environment, Limits
from mtsql.agent.rollout import Sampling
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import make_tools
from mtsql.agent.trajectory import Trajectory, trajectory_record
from mtsql.config import Common
from mtsql.data.datasets import Dataset, beside, load_dataset, split_names
from mtsql.errors import UserError
from mtsql.files import write_atomically
from mtsql.learn.checkpoint import newest_checkpoint
from mtsql.learn.model import load_policy, load_tokenizer
from mtsql.learn.parallel import Processes, join_processes
from mtsql.recipes import load_recipe
from mtsql.recipes.wording import Wording
from mtsql.sql.execute import Executor
from mtsql.sql.score import Scorer


def find_split(data: str, split: str) -> Path:
    """The file of a split in an official folder layout (`mtsql.data.datasets`), or `data` if it is a file.

    Raises UserError if there is none.
    """
    root = Path(data)
    if root.is_file():
        return root
    names = split_names(split)
    for name in names:
        if (root / name).is_file():
            return root / name
    raise UserError(f"{root} has no {split} split: none of {', '.join(names)} is there")


def load_split(config: Common, split: str) -> Dataset:
    """The dialogues of a split with their schemas; tables and databases beside the data by default.

    A folder with Spider's train_spider.json gives its train_others.json too. With --held-out N the last N
    dialogues of `train` are the split `held_out`, and not in `train`. Raises UserError if that leaves one of
    the two empty.
    """
    path = find_split(config.data, "train" if split == "held_out" else split)
    tables = Path(config.tables) if config.tables else beside(path, "tables.json")
    databases = Path(config.databases) if config.databases else beside(path, "database", "databases")
    if not tables.is_file():
        raise UserError(f"{tables} is not a file; give the file of schemas with --tables")
    if not databases.is_dir():
        raise UserError(f"{databases} is not a folder; give the folder of databases with --databases")
    others = path.with_name("train_others.json")
    further = []
    if path.name == "train_spider.json" and others.is_file() and Path(config.data).is_dir():
        further = [others]
        print(f"{path.parent}: {path.name} and {others.name} together")
    dataset = load_dataset(path, tables, databases, config.allow_missing, further)
    if split == "held_out" or (split == "train" and config.held_out):
        count = len(dataset.dialogues)
        if not 0 < config.held_out < count:
            raise UserError(f"--held-out should be 1 to {count - 1} of the {count} dialogues of {path}")
        cut = count - config.held_out
        shown = dataset.dialogues[cut:] if split == "held_out" else dataset.dialogues[:cut]
        dataset = replace(dataset, dialogues=shown)
    return dataset


def make_environment(config: Common, dataset: Dataset, tokens: ChatTokens, tools: str) -> Environment:
    """The environment that all episodes of a run share."""
    limits = Limits(
        config.max_interactions,
        config.max_prompt_tokens,
        config.max_response_tokens,
        config.max_turn_tokens,
        config.max_tool_tokens,
        config.max_sequence_tokens,
    )
    recipe = load_recipe(config.recipe).make_recipe(wording_of(config))
    executor = Executor(timeout_seconds=config.sql_timeout)
    return Environment(dataset.schemas, recipe, tokens, executor, limits, make_tools(tools))


def wording_of(config: Common) -> Wording:
    """How the recipe puts its questions."""
    return Wording(
        config.wording == "compact",
        config.result_characters,
        config.schema,
        config.max_interactions + 1,  # messages: the answer is one more
        config.native_thinking,
    )


def make_sampling(config: Common, environment: Environment, temperature: float) -> Sampling:
    """How the policy's messages are sampled: until the recipe's stop strings or --max-turn-tokens."""
    stops = environment.recipe.stop_strings
    return Sampling(temperature, max_turn_tokens=config.max_turn_tokens, stop_strings=stops)


def make_scorer(environment: Environment) -> Scorer:
    """The scorer over the environment's databases, sharing its executor and cache."""
    return Scorer(environment.schemas, environment.executor)


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a GPU: of several the one that `join_processes` took."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no usable GPU; choose --device cpu")
    return torch.device(name, torch.cuda.current_device() if name == "cuda" else None)


class Training(NamedTuple):
    """What a training script begins with; `attention` is the one in use."""

    processes: Processes
    out: Path
    device: torch.device
    checkpoint: Path | None
    tokens: ChatTokens
    dataset: Dataset
    environment: Environment
    scorer: Scorer
    policy: PreTrainedModel | PeftModel
    attention: str


def begin_training(config: Common) -> Training:
    """The training split, and the policy of --model, not yet that of the checkpoint.

    Raises ValueError for options that training cannot follow, FileExistsError as `find_checkpoint` does.
    """
    if config.history == "predicted":
        raise ValueError("--history predicted is for evaluation; train with gold or questions")
    if config.shard and config.optimizer == "adamw8bit":
        raise ValueError("--shard needs --optimizer adamw; 8-bit moments cannot be sharded")
    processes = join_processes()
    out, device = Path(config.out), pick_device(config.device)
    checkpoint = processes.of_each(find_checkpoint(out, config.resume) if processes.first else None)[0]
    torch.manual_seed(config.seed)  # new LoRA adapters start at random
    tokens = ChatTokens(load_tokenizer(config.model), config.thinking)
    dataset = load_split(config, "train")
    environment = make_environment(config, dataset, tokens, config.tools)
    policy = load_policy(
        config.model,
        config.dtype,
        device,
        attention=config.attention,
        quantise=config.quantise,
        lora_rank=config.lora_rank,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    attention = attention_in_use(policy, config.layout)
    scorer = make_scorer(environment)
    return Training(
        processes, out, device, checkpoint, tokens, dataset, environment, scorer, policy, attention
    )


def find_checkpoint(out: Path, resume: bool) -> Path | None:
    """The newest whole checkpoint of a run to go on from, None to start.

    Raises FileExistsError if there is one but nobody asked to go on.
    """
    newest = newest_checkpoint(out)
    if newest is not None and not resume:
        raise FileExistsError(
            f"{out} holds checkpoints of an earlier run; go on with --resume, or choose another --out"
        )
    if newest is None and resume:
        print(f"{out} holds no checkpoint; starting at the beginning")
    return newest


def attention_in_use(policy: torch.nn.Module, layout: str) -> str:
    """The attention that the policy was loaded with, which may be another than was asked for.

    Raises ValueError if it cannot run `layout`.
    """
    attention = policy.config._attn_implementation
    if layout == "shared" and attention.startswith("flash"):
        raise ValueError("--layout shared needs --attention sdpa; with flash-attn choose packed or rows")
    return attention


def show(bar: tqdm) -> Callable[[int, int, dict[str, float]], None]:
    """A rollout's `progress` that shows trajectories, tokens/s, use of the slots and interactions."""

    def progress(done: int, total: int, stats: dict[str, float]) -> None:
        bar.total, bar.n = total, done
        bar.set_postfix_str(
            f"{stats['tokens_per_second']:.0f} tokens/s, {stats['slots_in_use']:.0%} of slots in use, "
            f"{stats['interactions']:.1f} interactions"
        )

    return progress


def raise_not_finite(out: Path, step: int, flat: Sequence[Trajectory], tokens: ChatTokens) -> None:
    """Save the trajectories of a micro-batch whose loss is NaN or infinite, and stop."""
    path = out / "not_finite.jsonl"
    lines = [json.dumps(trajectory_record(t, tokens.tokenizer.decode)) + "\n" for t in flat]
    write_atomically(path, "".join(lines))
    raise ValueError(f"step {step}: the loss is not finite; its trajectories are in {path}")
