"""Configuration: one dataclass a script, read from a TOML file and overridden on the command line.

A TOML file has a table [common] and one table a script ([imitation], [sft], [curriculum], [grpo],
[evaluate]). Every
field of a script's dataclass is an option of its command line. What is unknown is an error.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from mtsql.errors import UserError
from mtsql.recipes import RECIPES, load_recipe

SECTIONS = ("common", "imitation", "sft", "curriculum", "grpo", "evaluate")


def option(default: Any, text: str) -> Any:
    """A dataclass field with its help text; `...` makes it required."""
    if default is ...:
        return field(metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every script needs to know."""

    data: str = option(..., "SParC- or CoSQL-format folder, or one .json file of dialogues")
    out: str = option(..., "run folder to write")
    tables: str = option("", "tables.json, if not beside the data")
    databases: str = option("", "folder of <db_id>/<db_id>.sqlite, if not beside the data")
    allow_missing: bool = option(False, "skip dialogues whose database is missing")
    held_out: int = option(0, "last dialogues of train that make the split held_out and are not trained on")
    drop_empty: bool = option(False, "train on no question whose gold SQL returns nothing (MTIR-SQL)")
    seed: int = option(0, "seed of every random choice")
    recipe: str = option(
        "mtsql_r1", "mtsql_r1, skyrl_sql, sql_trail, mtir_sql; a paper's own settings replace defaults below"
    )
    wording: str = option("paper", "wording of the prompts: paper, compact")
    schema: str = option("full", "the database in the prompt: full, names (of its tables)")
    native_thinking: bool = option(False, "the model thinks by itself: the prompt asks for no thoughts")
    tools: str = option("both", "both, no_execution, no_memory, none (Table 4's ablations)")
    history: str = option("gold", "earlier turns in memory: gold, predicted (evaluation only), questions")
    thinking: bool = option(True, "enable_thinking of the chat template")
    result_characters: int = option(200, "a result is cut to so many characters (mtsql_r1, or compact)")
    max_interactions: int = option(4, "answered tool calls in an episode, then comes the answer (paper: 4)")
    max_prompt_tokens: int = option(4000, "longest prompt (paper: 4000)")
    max_response_tokens: int = option(8000, "longest response, observations counted (paper: 8000)")
    max_turn_tokens: int = option(4000, "longest model message")
    max_tool_tokens: int = option(2000, "longest tool response")
    max_sequence_tokens: int = option(40960, "longest prompt and response together")
    rows: int = option(256, "trajectories that are sampled at once")
    cache_gib: float = option(
        0.0, "memory of the key/value cache in GiB, beyond which rows wait; 0: no limit"
    )
    sql_timeout: float = option(5.0, "seconds before a query is stopped")
    dtype: str = option("float32", "weights: float32, bfloat16")
    quantise: str = option("none", "base weights: none, nf4 (QLoRA)")
    attention: str = option("sdpa", "sdpa, flash_attention_2 (where installed, else sdpa)")
    device: str = option("auto", "auto, cpu, cuda")


def load_config(cls: type, section: str, description: str, argv: list[str] | None = None) -> Any:
    """The dataclass `cls` from --config FILE and the command line.

    Exits with code 2 and one sentence on an unknown, missing or ill-typed option.
    """
    hints = get_type_hints(cls)
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="TOML file; the options below override it")
    for item in fields(cls):
        flag = "--" + item.name.replace("_", "-")
        shown = "" if item.default is MISSING else f" [{item.default}]"
        text = (item.metadata["help"] + shown).replace("%", "%%")
        if hints[item.name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(flag, type=hints[item.name], default=None, help=text, metavar="X")
    arguments = vars(parser.parse_args(argv))
    try:
        values = _from_toml(arguments.pop("config"), section, cls, hints)
        values |= {name: value for name, value in arguments.items() if value is not None}
        recipe = values.get("recipe", RECIPES[0])
        if "recipe" in hints and recipe in RECIPES:  # the paper's own settings are the defaults
            settings = load_recipe(recipe).SETTINGS
            values = {name: value for name, value in settings.items() if name in hints} | values
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]
        if missing:
            names = ", ".join("--" + name.replace("_", "-") for name in missing)
            raise UserError(f"give {names} (or name them in the --config file)")
        config = cls(**values)
        _check_choices(config)
        if getattr(config, "tools", "") == "no_execution" and config.recipe != RECIPES[0]:
            raise UserError(f"--tools no_execution needs a memory, which only --recipe {RECIPES[0]} has")
    except UserError as error:
        parser.error(str(error))
    return config


CHOICES = {
    "recipe": RECIPES,
    "schema": ("full", "names"),
    "correct": ("ex_em", "ex"),
    "wording": ("paper", "compact"),
    "tools": ("both", "no_execution", "no_memory", "none"),
    "history": ("gold", "predicted", "questions"),
    "dtype": ("float32", "bfloat16"),
    "device": ("auto", "cpu", "cuda"),
    "quantise": ("none", "nf4"),
    "attention": ("sdpa", "flash_attention_2"),
    "optimizer": ("adamw", "adamw8bit"),
    "layout": ("shared", "packed", "rows"),
    "aggregate": ("trajectory", "token", "constant"),
    "ratio": ("token", "sequence"),
    "kl": ("k1", "k2", "k3"),
    "truncated": ("keep", "exclude", "penalise"),
    "divide_by": ("group", "batch", "none"),
    "targets": ("self", "gold", "teacher"),
}


MINIMA = {
    "save_every": 1,
    "keep_checkpoints": 1,
    "rounds": 1,
    "samples_per_prompt": 2,
    "samples_per_question": 1,
    "micro_batch_positions": 1,
    "updates_per_batch": 1,
    "prompts_per_step": 1,
    "trajectories_per_step": 1,
    "rows": 1,
    "held_out": 0,
    "level_size": 0,
    "latency_questions": 0,
    "sampled_runs": 0,
}


def _check_choices(config: Any) -> None:
    for name, least in MINIMA.items():
        value = getattr(config, name, least)
        if value < least:
            raise UserError(f"--{name.replace('_', '-')} should be at least {least}, not {value}")
    for name, choices in CHOICES.items():
        value = getattr(config, name, choices[0])
        if value not in choices:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} {value} is unknown; choose from {', '.join(choices)}")


def _from_toml(path: str | None, section: str, cls: type, hints: dict[str, type]) -> dict:
    if path is None:
        return {}
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML ({error})") from None
    unknown = set(content) - set(SECTIONS)
    if unknown:
        raise UserError(f"{path}: unknown table [{min(unknown)}]; known are {', '.join(SECTIONS)}")
    values = {}
    own = {f.name for f in fields(cls)}
    for table in ("common", section):
        for name, value in content.get(table, {}).items():
            if name not in own:
                raise UserError(f"{path}: [{table}] has an unknown field {name!r}")
            wanted = hints[name]
            if wanted is float and type(value) is int:
                value = float(value)
            if type(value) is not wanted:
                raise UserError(f"{path}: [{table}] {name} should be {wanted.__name__}, not {value!r}")
            values[name] = value
    return values


def save_config(config: Any, folder: Path) -> None:
    """Write run.json: the configuration, the command, and the versions in use."""
    names = ("torch", "transformers", "peft", "sqlglot", "numpy")
    content = {
        "config": asdict(config),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in names},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(content, indent=1))


def user_errors(main: Callable[[], None]) -> None:
    """Run a script's main; wrong input becomes one sentence on stderr and exit code 2."""
    try:
        main()
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        if "\n" in str(error) and not isinstance(error, UserError):
            raise  # many lines: a library's error, not one of our sentences
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
