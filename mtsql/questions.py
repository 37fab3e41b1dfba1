"""From options to questions, their environment, and what an answer earns: all but the policy."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from mtsql.agent.env import Environment, Limits
from mtsql.agent.rollout import Sampling
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import make_tools
from mtsql.config import AgentOptions, DataOptions, Paths, QuestionOptions, RewardOptions
from mtsql.data.datasets import Dataset, Example, beside, join_datasets, load_dataset, split_names
from mtsql.errors import UserError
from mtsql.files import reading_errors
from mtsql.recipes import load_recipe
from mtsql.recipes.prompt_options import PromptOptions
from mtsql.recipes.rewards import RewardFunction
from mtsql.sql.execute import Executor
from mtsql.sql.score import Scorer


def draw_questions(asked: Sequence[Example], count: int, seed: int) -> list[Example]:
    """--questions of the questions, drawn by the seed; 0 is all of them, in their order."""
    return random.Random(seed).sample(asked, min(count, len(asked))) if count else list(asked)


def find_split(data: str, split: str) -> Path:
    """The file of a split in an official folder layout (`mtsql.data.datasets`), or `data` if it is a file.

    Raises UserError if there is no such folder, or no such file in it, and where they may not be read.
    """
    root, names = Path(data), split_names(split)
    with reading_errors(root):
        if root.is_file():
            return root
        if not root.exists():
            raise UserError(f"{root} is not there: --data takes a data set's folder or one .json file")
        for name in names:
            if (root / name).is_file():
                return root / name
    raise UserError(f"{root} has no {split} split: none of {', '.join(names)} is there")


def split_files(config: DataOptions, split: str, index: int) -> tuple[list[Path], Path, Path]:
    """Of source `index`: the files of its dialogues, that of its tables, the folder of its databases.

    Raises UserError as `load_split` does for what is not there.
    """
    source = config.data[index]
    path = find_split(source, "train" if split in ("held_out", "rl") else split)
    tables = _of_source(config.tables, index, config, "--tables") or beside(path, "tables.json")
    databases = _of_source(config.databases, index, config, "--databases")
    databases = databases or beside(path, "database", "databases")
    if not tables.is_file():
        raise UserError(f"{tables} is not a file; give the file of schemas with --tables")
    if not databases.is_dir():
        raise UserError(f"{databases} is not a folder; give the folder of databases with --databases")
    others = path.with_name("train_others.json")
    joined = path.name == "train_spider.json" and others.is_file() and Path(source).is_dir()
    return [path, others] if joined else [path], tables, databases


def load_split(config: DataOptions, split: str) -> Dataset:
    """The dialogues of a split from all sources of --data, with their schemas.

    Tables and databases are by default beside each source. A folder with Spider's train_spider.json gives
    its train_others.json too. With --held-out N and --for-rl M the dialogues over N and over further M
    databases of `train`, the same for every --seed, make the splits `held_out` and `rl` and leave `train`.
    Raises UserError if that leaves one empty, and where tables or databases are not there.
    """
    parts: list[Dataset] = []
    for i in range(len(config.data)):
        (path, *further), tables, databases = split_files(config, split, i)
        if further:
            print(f"{path.parent}: {path.name} and {further[0].name} together")
        first = sum(len(part.dialogues) + part.skipped for part in parts)
        parts.append(load_dataset(path, tables, databases, config.allow_missing, further, first))
    dataset = join_datasets(parts)
    for source, count in dataset.missing.items():
        print(f"left out {count} dialogues of {source}: their database is missing")
    parted = {"held_out": config.held_out, "rl": config.for_rl}
    if split in parted or (split == "train" and any(parted.values())):
        names = sorted({d.db_id for d in dataset.dialogues}, key=_scrambled)
        if sum(parted.values()) >= len(names) or not parted.get(split, 1):
            raise UserError(
                "--held-out and --for-rl should be above 0 where they are asked for, and leave some of the "
                f"{len(names)} databases of train"
            )
        first, last = config.held_out, config.held_out + config.for_rl
        chosen = {"held_out": names[:first], "rl": names[first:last], "train": names[last:]}[split]
        dataset = replace(dataset, dialogues=tuple(d for d in dataset.dialogues if d.db_id in chosen))
    return dataset


def _of_source(given: Paths, index: int, config: DataOptions, flag: str) -> Path | None:
    """What the option `flag` says of source `index`, None if nothing; UserError for a wrong number."""
    if len(given) not in (0, 1, len(config.data)):
        raise UserError(f"{flag} should be one for all or one each of the {len(config.data)} --data")
    return Path(given[index % len(given)]) if given else None


def _scrambled(name: str) -> str:
    """A sort key without any meaning, so that what stands first is no sort of database."""
    return hashlib.sha256(name.encode()).hexdigest()


def make_environment(
    config: QuestionOptions, dataset: Dataset, tokens: ChatTokens, tools: str
) -> Environment:
    """The environment that all episodes of a run share."""
    limits = Limits(**{field.name: getattr(config, field.name) for field in fields(Limits)})
    recipe = load_recipe(config.recipe).make_recipe(prompt_options(config))
    executor = Executor(timeout_seconds=config.sql_timeout)
    return Environment(
        dataset.schemas, recipe, tokens, executor, limits, make_tools(tools), config.error_hints
    )


def prompt_options(config: QuestionOptions) -> PromptOptions:
    """How the recipe puts its questions; UserError for --native-thinking where no thoughts are asked for."""
    if config.native_thinking and config.recipe.startswith("mtsql_r1"):
        raise UserError(f"--native-thinking changes nothing with --recipe {config.recipe}; leave it out")
    of = {"none": config.recipe, "thoughts": "mtir_sql"}.get(config.without, "sql_trail")
    if config.recipe != of:
        raise UserError(f"--without {config.without} needs --recipe {of}")
    turns = config.max_interactions + 1  # the answer is one more message
    compact = config.wording == "compact"
    return PromptOptions(
        compact, config.result_characters, config.schema, turns, config.native_thinking, config.without
    )


def make_sampling(
    config: AgentOptions, environment: Environment, temperature: float, top_p: float = 1.0
) -> Sampling:
    """How the policy's messages are sampled: until the recipe's stop strings or --max-turn-tokens."""
    stops = environment.recipe.stop_strings
    return Sampling(temperature, max_turn_tokens=config.max_turn_tokens, stop_strings=stops, top_p=top_p)


def reward_function(
    config: RewardOptions, tokens: ChatTokens, scorer: Scorer, weights: str = ""
) -> RewardFunction:
    """The recipe's rewards in the preset of --rewards, with those `weights` changed that are given."""
    decode, options = tokens.tokenizer.decode, prompt_options(config)
    return load_recipe(config.recipe).make_reward(config.rewards, weights, scorer, decode, options)
