"""Every option of every script: the fields of a dataclass, from a TOML file and the command line.

A TOML file has a table [common] and one for each command. What [common] sets holds for every command that
has such an option; what neither the command nor any training knows is an error. An option's type says what is
allowed, a Literal its values, and a number may have a least value. The defaults are MTSQL-R1's; another
paper's are its file, configs/<paper>.toml. Of several files the later overrides the earlier.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import select
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from mtsql.errors import UserError, printable
from mtsql.files import file_errors, shipped, write_atomically
from mtsql.recipes import RECIPES

Config = TypeVar("Config")


def option(default: Any, text: str, least: float | None = None) -> Any:
    """A field with its help text, and the least value of a number; a default of `...` makes it required."""
    return field(default=MISSING if default is ... else default, metadata={"help": text, "least": least})


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A policy with its tools, and what an episode of it may use."""

    model: str = option(..., "local folder or hub name of a causal LM or a PEFT adapter")
    recipe: Literal[RECIPES] = option(RECIPES[0], "paper to follow")
    tools: Literal["both", "no_execution", "no_memory", "none"] = option(
        "both", "no_execution: without EXECUTE, no_memory: without MEMORY-VERIFY (Table 4)"
    )
    wording: Literal["paper", "compact"] = option("paper", "wording of the prompts")
    thinking: Literal["on", "native", "off"] = option(
        "on", "enable_thinking of the chat template; native: on, and prompts ask for no thoughts in tags"
    )
    result_characters: int = option(200, "characters that a result is cut to (mtsql_r1, or compact)", least=0)
    error_hints: bool = option(False, "an error of SQLite names the tables or columns that there are")
    max_interactions: int = option(4, "answered tool calls, after which comes the answer (paper: 4)", least=0)
    max_prompt_tokens: int = option(4000, "longest prompt (paper: 4000)", least=1)
    max_response_tokens: int = option(8000, "longest response, observations counted (paper: 8000)", least=1)
    max_turn_tokens: int = option(4000, "longest model message (paper: none)", least=1)
    dtype: Literal["float32", "bfloat16", "float16"] = option(
        "float32", "to compute in; float16: no training"
    )
    quantise: Literal["none", "nf4"] = option("none", "base weights in 4 bits (QLoRA)")
    sql_timeout: float = option(5.0, "seconds before a query is stopped", least=0.01)
    seed: int = option(0, "seed of every random choice", least=0)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which questions over which databases, and where the run goes."""

    data: tuple[str, ...] = option(..., "folders as of SParC, CoSQL, ..., or .json files of dialogues")
    out: str = option(..., "run folder to write")
    tables: str = option("", "tables.json of all --data, if not beside them")
    databases: str = option("", "folder of <db_id>/<db_id>.sqlite for all of them, likewise")
    allow_missing: bool = option(False, "skip dialogues whose database is missing")
    held_out: int = option(0, "databases of train that make the split held_out, not trained on", least=0)
    for_rl: int = option(0, "further databases of train that GRPO alone trains on", least=0)


@dataclass(frozen=True, kw_only=True)
class Common(Agent, Data):
    """The questions of some data, put to a policy: what evaluation and training have in common."""

    ex: Literal["official", "keep_distinct", "bird"] = option(
        "official", "what EX is in rewards, counts, votes and reports: Spider's, it with DISTINCT, BIRD's"
    )
    rows: int = option(256, "trajectories that are sampled at once", least=1)


@dataclass(frozen=True, kw_only=True)
class Sampled(Common):
    """The questions of training."""

    questions: int = option(0, "training questions in play, drawn at random; 0 is all of them", least=0)


@dataclass(frozen=True, kw_only=True)
class Rewarded:
    """What a trajectory earns."""

    rewards: str = option(
        "",
        "preset of the recipe's rewards (mtsql_r1: outcome, process, paper, formula), with changes: "
        "process,proposal=0.5",
    )


@dataclass(frozen=True, kw_only=True)
class Training(Sampled):
    """What warm start and GRPO have in common."""

    BETA2: ClassVar = 0.999  # of AdamW
    dtype: Literal["float32", "bfloat16"] = option("float32", "to compute in; steps are of float32 copies")
    micro_batch_positions: int = option(8192, "positions in one forward pass", least=1)
    lora_rank: int = option(0, "rank of LoRA on all linear layers; 0 trains all parameters", least=0)
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass")
    resume: bool = option(False, "go on from the newest checkpoint in --out; from the start if none is there")


@dataclass(frozen=True, kw_only=True)
class Served:
    """A policy behind an address (mtsql/extras/served.py)."""

    model: str = option("", "local folder or hub name of a causal LM or a PEFT adapter; or give --address")
    address: str = option("", "http(s)://host:port/v1 of a server that is the policy instead of --model")
    api_model: str = option("", "the policy's name at --address")
    protocol: Literal["auto", "tokens", "chat"] = option("auto", "token ids in and out, or chat messages")
    tokenizer: str = option("", "folder or hub name of its tokenizer; with chat any, to count tokens")
    own_temperature: bool = option(False, "ask --address without a temperature, which some models refuse")


USAGE = "%(prog)s [--config FILE ...] [--OPTION VALUE ...]   (--help lists the options)"
SECTIONS = (
    "common", "imitation", "sft", "curriculum", "grpo", "evaluate", "chat", "probe", "bridge", "selection",
)  # fmt: skip


def read_options(cls: type[Config], description: str | None, argv: list[str] | None = None) -> Config:
    """The dataclass `cls` from --config FILES and the command line (`argv`, by default the process's).

    Exits with code 2 and one sentence on an unknown, missing or ill-typed option.
    """
    early = argparse.ArgumentParser(usage=USAGE, add_help=False, allow_abbrev=False)
    about = "TOML files; later ones override, options too"
    early.add_argument("--config", nargs="+", action="extend", default=[], help=about)
    values: dict[str, Any] = {}
    try:
        for path in early.parse_known_args(argv)[0].config:
            values |= from_toml(shipped(path), cls)
    except UserError as error:
        early.error(str(error))
    parser = _parser(cls, description, values, parents=[early])
    values |= vars(parser.parse_args(argv))
    del values["config"]
    missing = [_flag(f.name) for f in fields(cls) if f.default is MISSING and not values.get(f.name)]
    if missing:
        parser.error(f"give {', '.join(missing)} (or name them in the --config file)")
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    config = cls(**values | lists)
    other_paper = isinstance(config, Agent) and config.recipe != RECIPES[0]
    if other_paper and config.tools in ("both", "no_execution"):
        parser.error(
            f"--tools {config.tools} needs a memory, which only --recipe {RECIPES[0]} has; "
            f"the settings of {config.recipe} are in configs/{config.recipe}.toml"
        )
    return config


def command_line(description: str | None, **how: Any) -> argparse.ArgumentParser:
    """A parser whose help shows the description as it is written."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=form, allow_abbrev=False, **how)


def _parser(
    cls: type, description: str | None, values: dict[str, Any], **how: Any
) -> argparse.ArgumentParser:
    """A parser with an option for each field; its help shows `values`, or else the defaults."""
    absent = argparse.SUPPRESS  # what is not given is not there
    parser = command_line(description, usage=USAGE, argument_default=absent, **how)
    hints = get_type_hints(cls)
    for item in fields(cls):
        kind, default = hints[item.name], values.get(item.name, item.default)
        choices = get_args(kind) if get_origin(kind) is Literal else None
        text = item.metadata["help"] + (f": {', '.join(choices)}" if choices else "")
        if default is not MISSING:
            text += f" [{' '.join(default) if get_origin(kind) is tuple else default}]"
        how: dict[str, Any] = {"metavar": "X", "type": reader_of(kind, item.metadata["least"])}
        if choices:
            how = {"metavar": "X", "choices": choices}
        elif kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif get_origin(kind) is tuple:
            how = {"metavar": "X", "nargs": "+", "action": "extend"}
        parser.add_argument(_flag(item.name), help=text.replace("%", "%%"), **how)
    return parser


def reader_of(kind: Any, least: float | None) -> Callable[[str], Any]:
    """What turns the text of an option into a value of its type, or refuses it: a number below `least`."""
    if least is None:
        return kind

    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:  # nor NaN
            finite = " and finite" if kind is float else ""
            raise argparse.ArgumentTypeError(f"should be at least {least}{finite}, not {value}")
        return value

    number.__name__ = kind.__name__  # for "invalid int value"
    return number


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def from_toml(path: Path, cls: type) -> dict[str, Any]:
    """What the tables [common] and that of the command `cls` set of its options.

    [common] may set all that `Training` has. Each field is read as if it stood on the command line. Raises
    UserError for a file that cannot be read and for unknown names; exits with code 2 on a wrong value.
    """
    with file_errors(path):
        content = path.read_bytes()
    try:
        tables = tomllib.loads(content.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML ({error})") from None
    unknown = set(tables) - set(SECTIONS)
    if unknown:
        raise UserError(f"{path}: unknown table [{min(unknown)}]; known are {', '.join(SECTIONS)}")
    if plain := [name for name, table in tables.items() if not isinstance(table, dict)]:
        raise UserError(f"{path}: {plain[0]} should be one table, [{plain[0]}]")
    own, of_training = ({item.name for item in fields(it)} for it in (cls, Training))
    parser, values = _parser(cls, None, {}), {}
    for table, known in (("common", own | of_training), (cls.SECTION, own)):
        words: list[str] = []
        for name, value in tables.get(table, {}).items():
            if name not in known:
                raise UserError(f"{path}: [{table}] has an unknown field {name!r}")
            words += _words(name, value) if name in own else []
        parser.usage, parser.prog = argparse.SUPPRESS, f"{path}: [{table}]"
        values |= vars(parser.parse_args(words))
    return values


def _words(name: str, value: Any) -> list[str]:
    """A field of a TOML file as the command line has it."""
    if isinstance(value, bool):
        return [_flag(name if value else f"no_{name}")]
    return [_flag(name), *map(str, value)] if isinstance(value, list) else [f"{_flag(name)}={value}"]


def save_config(config: Any, folder: Path) -> None:
    """Write run.json: the options, the command, the git commit, the versions and the hardware in use."""
    names = ("torch", "transformers", "peft", "sqlglot", "numpy")
    content = {
        "config": asdict(config),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        **git_state(),
        "python": platform.python_version(),
        "hardware": hardware(),
        "versions": {name: importlib.metadata.version(name) for name in names}
        | {"sqlite": sqlite3.sqlite_version},
    }
    write_atomically(folder / "run.json", json.dumps(content, indent=1))


def hardware() -> str:
    """The processor, the number of cores and the GPU, if any."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    named = re.findall("model name.*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else []
    name = named[0] if named else platform.processor() or platform.machine()
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{os.cpu_count()} cores of {name}{gpu}"


def git_state() -> dict[str, Any]:
    """The commit of this code, and whether files differ from it; None of both outside of a repository."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # a copy may lie in another's repository
        return {"commit": git("rev-parse", "HEAD"), "uncommitted_changes": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "uncommitted_changes": None}


def user_errors(main: Callable[..., int | None], *arguments: Any) -> None:
    """Run a command, which may return its exit code; wrong input becomes one sentence and exit code 2.

    So does what the system says of a file.
    """
    try:
        if code := main(*arguments):
            sys.exit(code)
    except BrokenPipeError:
        reader = select.poll()
        reader.register(sys.__stdout__, 0)
        if not reader.poll(0):
            raise  # another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
        sys.exit(1)  # `| head` has read enough
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except (UserError, OSError) as error:
        if isinstance(error, OSError) and not error.filename:
            raise
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
