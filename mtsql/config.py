"""Every option of every script: the fields of a dataclass, from a TOML file and the command line.

A TOML file has a table [common] and one for each command. What [common] sets holds for every command that
has such an option; what neither training nor the command knows is an error. An option's type says what is
allowed: a Literal its values, an Annotated number its least one. The defaults are MTSQL-R1's; another paper's
are its file, configs/<paper>.toml. Of several files the later overrides the earlier.
"""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import json
import math
import os
import platform
import select
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from mtsql.errors import MissingDatabase, UserError, printable
from mtsql.files import write_atomically
from mtsql.recipes import RECIPES

Config = TypeVar("Config")


class AtLeast(NamedTuple):
    """The least value of a number."""

    least: float


Count = Annotated[int, AtLeast(0)]
Positive = Annotated[int, AtLeast(1)]
NotNegative = Annotated[float, AtLeast(0)]
Seconds = Annotated[float, AtLeast(0.01)]
Paths = tuple[str, ...]


def option(default: Any, text: str) -> Any:
    """A field with its help text; `...` makes it required."""
    return field(default=MISSING if default is ... else default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """What every command has."""

    seed: Count = option(0, "seed of every random choice")
    sql_timeout: Seconds = option(5.0, "seconds before a query is stopped")


@dataclass(frozen=True, kw_only=True)
class DataOptions(CommonOptions):
    """Which questions over which databases, and where the run goes."""

    data: Paths = option(..., "folders in the format of SParC, CoSQL, ..., or .json files of dialogues")
    out: str = option(..., "run folder to write")
    tables: Paths = option((), "tables.json, one for all --data or one each, if not beside them")
    databases: Paths = option((), "folders of <db_id>/<db_id>.sqlite, one for all or one each, likewise")
    allow_missing: bool = option(False, "skip dialogues whose database is missing")
    held_out: Count = option(0, "databases of train that make the split held_out and are not trained on")
    for_rl: Count = option(0, "further databases of train that GRPO alone trains on")


@dataclass(frozen=True, kw_only=True)
class QuestionOptions(CommonOptions):
    """How a question is put, and what an episode may use."""

    recipe: Literal[RECIPES] = option(RECIPES[0], "paper to follow")
    wording: Literal["paper", "compact"] = option("paper", "wording of the prompts")
    schema: Literal["full", "names"] = option("full", "the database in the prompt, or its tables' names")
    native_thinking: bool = option(
        False, "the model thinks by itself: prompts ask for no thoughts (not mtsql_r1)"
    )
    without: Literal["none", "guidance", "headers", "thoughts"] = option(
        "none",
        "left out of the prompt: SQL-Trail's selection guidance, it and its column headers (Table 4), "
        "MTIR-SQL's thoughts (Direct Output, Table 4)",
    )
    result_characters: Count = option(200, "a result is cut to so many characters (mtsql_r1, or compact)")
    error_hints: bool = option(False, "an error of SQLite names the tables or columns that there are")
    max_interactions: Count = option(4, "answered tool calls, after which comes the answer (paper: 4)")
    max_prompt_tokens: Positive = option(4000, "longest prompt (paper: 4000)")
    max_response_tokens: Positive = option(8000, "longest response, observations counted (paper: 8000)")
    max_turn_tokens: Positive = option(4000, "longest model message (paper: none)")
    max_tool_tokens: Positive = option(2000, "longest tool response (paper: none)")
    max_sequence_tokens: Positive = option(40960, "longest prompt and response together")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to compute")


@dataclass(frozen=True, kw_only=True)
class EpisodeOptions(QuestionOptions, DataOptions):
    """The questions of some data, put to an agent."""


@dataclass(frozen=True, kw_only=True)
class AgentOptions(QuestionOptions):
    """The policy and its tools."""

    model: str = option(..., "local folder or hub name of a causal LM or a PEFT adapter")
    tools: Literal["both", "no_execution", "no_memory", "none"] = option("both", "Table 4's ablations")
    thinking: bool = option(True, "enable_thinking of the chat template")
    dtype: Literal["float32", "bfloat16", "float16"] = option(
        "float32", "to compute in; training steps float32 copies; float16 without training"
    )
    quantise: Literal["none", "nf4"] = option("none", "base weights in 4 bits (QLoRA)")
    attention: Literal["auto", "sdpa", "flash_attention_2"] = option(
        "auto", "auto: flash-attn where it is installed and can run, else sdpa"
    )


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(AgentOptions, EpisodeOptions):
    """How many episodes of the policy are played."""

    history: Literal["gold", "questions"] = option("gold", "earlier turns: with gold SQL, or without SQL")
    ex: Literal["official", "keep_distinct", "bird"] = option(
        "official", "what EX is in rewards, counts, votes and reports: Spider's, it with DISTINCT, BIRD's"
    )
    rows: Positive = option(256, "trajectories that are sampled at once")


@dataclass(frozen=True, kw_only=True)
class RewardOptions(PolicyOptions):
    """The questions of training, and what counts as right."""

    questions: Count = option(0, "training questions in play, drawn at random; 0 is all of them")
    drop_empty: bool = option(False, "train on no question whose gold SQL returns nothing (MTIR-SQL)")
    rewards: str = option(
        "",
        "preset of the recipe's rewards and of its EM; mtsql_r1: outcome, process, paper, formula, authors",
    )


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(RewardOptions):
    """What warm start and GRPO have in common."""

    micro_batch_positions: Positive = option(8192, "positions in one forward pass")
    lora_rank: Count = option(0, "rank of LoRA on all linear layers; 0 trains all parameters")
    optimizer: Literal["adamw", "adamw8bit"] = option("adamw", "optimizer")
    weight_decay: NotNegative = option(0.0, "of AdamW")
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass")
    track: Literal["none", "tensorboard", "wandb"] = option("none", "where metrics go beside metrics.csv")
    resume: bool = option(False, "go on from the newest checkpoint in --out; from the start if none is there")


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig(RewardOptions):
    """Success counts (mtsql.extras.curriculum)."""

    SECTION: ClassVar = "curriculum"
    samples_per_question: Positive = option(20, "trajectories of each question (paper: 20)")
    temperature: NotNegative = option(1.0, "of these trajectories")
    correct: Literal["ex_em", "ex"] = option("ex_em", "an answer is right by")


@dataclass(frozen=True, kw_only=True)
class SftConfig(TrainingOptions):
    """The warm start (train_sft.py)."""

    SECTION: ClassVar = "sft"
    rounds: Positive = option(3, "N of Algorithm 1 (paper: 3)")
    targets: Literal["self", "gold", "teacher"] = option(
        "self", "own right trajectories, gold answers, a teacher's"
    )
    teacher: str = option("", "JSONL file of a teacher's chat messages, for --targets teacher")
    teacher_kept: Count = option(0, "its right trajectories kept, easy ones last (SQL-Trail: 1000); 0 is all")
    samples_per_question: Positive = option(20, "rollouts of each question in each round (paper: 20)")
    temperature: NotNegative = option(0.7, "of these rollouts (paper: 0.7)")
    correct: Literal["ex_em", "ex"] = option("ex_em", "a rollout is right by (paper: ex_em)")
    embedding: str = option("", "folder of Qwen3-Embedding for the clusters; else the policy's own states")
    epochs: NotNegative = option(
        2.0, "passes over the kept trajectories in each round; the last may be a part"
    )
    trajectories_per_step: Positive = option(16, "kept trajectories in each optimizer step (paper: 2 a GPU)")
    databases_per_step: Count = option(
        0, "databases they are over, so that with --layout shared they share its schema; 0: whatever comes"
    )
    learning_rate: NotNegative = option(5e-6, "peak of a cosine schedule (paper: 5e-6)")
    warmup: NotNegative = option(0.03, "share of a round's steps, below 1, in which it rises to that peak")
    beta2: NotNegative = option(0.999, "of AdamW, below 1")
    layout: Literal["packed", "rows", "shared"] = option("packed", "positions of a batch")
    save_every: Positive = option(200, "optimizer steps between checkpoints; also one after each collection")


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(TrainingOptions):
    """GRPO (train_grpo.py)."""

    SECTION: ClassVar = "grpo"
    steps: Positive = option(100, "batches of questions")
    prompts_per_step: Positive = option(256, "questions in each step (paper: 256)")
    samples_per_prompt: Annotated[int, AtLeast(2)] = option(5, "G, trajectories of each question (paper: 5)")
    temperature: NotNegative = option(1.0, "of the rollouts, and of the log-probabilities in the loss")
    learning_rate: NotNegative = option(1e-6, "constant after three steps of warm-up (paper: 1e-6)")
    beta2: NotNegative = option(0.99, "of AdamW, below 1")
    curriculum: str = option("", "counts.jsonl of mtsql.extras.curriculum; levels from easy to hard")
    level_size: Count = option(2000, "questions in a level (paper: 2000); 0: one level in random order")
    weights: str = option("", "weights that replace the preset's: ex=1,proposal=0.5")
    process_from_level: Positive = option(
        1, "process rewards from this level of the curriculum on (mtsql_r1; paper: medium difficulty)"
    )
    clip_low: NotNegative = option(0.2, "epsilon below 1")
    clip_high: NotNegative = option(0.2, "epsilon above 1 (DAPO's clip-higher: above --clip-low)")
    updates_per_batch: Positive = option(1, "optimizer steps on each batch of trajectories")
    aggregate: Literal["trajectory", "token", "constant"] = option(
        "trajectory", "1/|M_i| a trajectory (paper), DAPO's or Dr. GRPO's mean"
    )
    divide_by: Literal["group", "batch", "none"] = option(
        "group",
        "advantages over the deviation of their group, of the batch (REINFORCE++), or none (Dr. GRPO)",
    )
    beta: NotNegative = option(0.0, "weight of the KL penalty (k3)")
    tis_cap: float = option(
        -1.0, "cap of truncated importance sampling; 0 is off, -1: 2 where sampler and trainer round"
    )
    filter_rollouts: bool = option(False, "GRPO-Filter (MTIR-SQL): drop trajectories of low quality")
    resample_rounds: Count = option(0, "times that other questions replace groups without variance (DAPO)")
    layout: Literal["shared", "packed", "rows"] = option("shared", "positions of a batch")
    micro_batch_positions: Positive = option(16384, "positions in one forward pass")
    evaluate_every: Count = option(
        0, "steps between greedy evaluations on dev, or what --held-out holds; 0: never"
    )
    evaluate_dialogues: Count = option(100, "first dialogues in these evaluations; 0 is all")
    save_every: Positive = option(20, "steps between checkpoints")


@dataclass(frozen=True, kw_only=True)
class AddressOptions(CommonOptions):
    """A policy behind an address."""

    address: str = option("", "http(s)://host:port/v1 of a server that is the policy instead of --model")
    api_model: str = option("", "the policy's name at --address")
    protocol: Literal["auto", "tokens", "chat"] = option("auto", "token ids in and out, or chat messages")
    tokenizer: str = option("", "folder or hub name of its tokenizer; with chat any, to count tokens")
    own_temperature: bool = option(False, "ask --address without a temperature, which some models refuse")


@dataclass(frozen=True, kw_only=True)
class ServedOptions(AddressOptions, PolicyOptions):
    """A policy in this process or behind an address."""

    model: str = option("", "local folder or hub name of a causal LM or a PEFT adapter; or give --address")
    concurrency: Positive = option(8, "questions that --address is asked at once")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(ServedOptions):
    """Evaluation (evaluate.py)."""

    SECTION: ClassVar = "evaluate"
    history: Literal["gold", "predicted", "questions"] = option("gold", "earlier turns in memory")
    split: Literal["train", "dev", "test", "test_themes", "held_out", "rl"] = option(
        "dev", "part of the data (see --held-out)"
    )
    dialogues: Count = option(0, "first dialogues of the split only; 0 is all of them")
    temperature: NotNegative = option(0.0, "of the answers; 0 is greedy (SkyRL-SQL, Table 5: 0.6)")
    top_p: NotNegative = option(
        1.0, "where sampled: the likeliest tokens that hold so much, up to 1 (Qwen3: 0.95)"
    )
    sampled_runs: Count = option(
        0, "further runs, at --temperature or else 1: mean, majority vote, pass@k (SQL-Trail: 8)"
    )
    latency_questions: Count = option(0, "so many questions are also answered one at a time, for the latency")


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(PolicyOptions):
    """Whether a policy reads what its tool returned (mtsql.extras.probe)."""

    SECTION: ClassVar = "probe"
    split: Literal["train", "dev", "held_out", "rl"] = option("held_out", "part of the data")
    failures: str = option("", "predictions.jsonl of an evaluation over these questions")
    questions: Count = option(40, "questions with a mistake of each kind")


@dataclass(frozen=True, kw_only=True)
class ChatConfig(AddressOptions, AgentOptions):
    """A dialogue over one's own database (mtsql.extras.chat)."""

    SECTION: ClassVar = "chat"
    database: str = option(..., "SQLite file; it is only read")
    model: str = option("", "local folder or hub name; without it and --config: the agent in models/")
    port: Count = option(0, "serve a page at 127.0.0.1 on this port; 0: a dialogue in the terminal")
    temperature: NotNegative = option(0.0, "of the answers; 0 is greedy")


@dataclass(frozen=True, kw_only=True)
class CollectConfig(ServedOptions):
    """A teacher's trajectories (mtsql.extras.collect)."""

    SECTION: ClassVar = "collect"
    questions: Count = option(0, "training questions in play, drawn at random; 0 is all of them")
    samples_per_question: Positive = option(1, "trajectories of each question")
    temperature: NotNegative = option(0.7, "of these trajectories")


OF_THE_DISK = {  # full, read-only, another's; a name too long, links in a circle: no defect of the code
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip
SECTIONS = (
    "common", "imitation", "sft", "curriculum", "grpo", "evaluate", "chat", "collect",
    "probe", "bridge", "selection",
)  # fmt: skip


def read_options(cls: type[Config], description: str | None, argv: list[str] | None = None) -> Config:
    """The dataclass `cls` from --config FILES and the command line (`argv`, by default the process's).

    Exits with code 2 and one sentence on an unknown, missing or ill-typed option.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", nargs="+", default=())
    chosen, _ = early.parse_known_args(argv)
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--config FILE ...] [--OPTION VALUE ...]   (--help lists the options)",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", nargs="+", help="TOML files; later ones override, options too")
    try:
        hints = get_type_hints(cls, include_extras=True)
        values = {}
        for path in chosen.config:
            values |= from_toml(Path(path), cls)
        for item in fields(cls):
            add_option(parser, item, hints[item.name], values.get(item.name, item.default))
        given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
        given.pop("config", None)
        values |= {name: tuple(value) if type(value) is list else value for name, value in given.items()}
        missing = [_flag(f.name) for f in fields(cls) if f.default is MISSING and f.name not in values]
        if missing:
            raise UserError(f"give {', '.join(missing)} (or name them in the --config file)")
        for name, value in values.items():
            check(_flag(name), value, hints[name])
        recipe, tools = values.get("recipe", RECIPES[0]), values.get("tools", "both")
        if "tools" in hints and tools in ("both", "no_execution") and recipe != RECIPES[0]:
            raise UserError(
                f"--tools {tools} needs a memory, which only --recipe {RECIPES[0]} has; "
                f"the settings of {recipe} are in configs/{recipe}.toml"
            )
    except UserError as error:
        parser.error(str(error))
    return cls(**values)


def add_option(parser: argparse.ArgumentParser, item: Field, kind: Any, default: Any) -> None:
    """A command-line option for a field, with type and default in its help; None where it is not given."""
    text = item.metadata["help"] + (f": {', '.join(allowed(kind))}" if allowed(kind) else "")
    shown = " ".join(default) if kind == Paths and default is not MISSING else default
    text += "" if default is MISSING else f" [{shown}]"
    how: dict[str, Any] = {"type": _plain(kind), "metavar": "X"}
    if kind is bool:
        how = {"action": argparse.BooleanOptionalAction}
    if kind == Paths:
        how = {"nargs": "+", "metavar": "X"}
    parser.add_argument(_flag(item.name), default=None, help=text.replace("%", "%%"), **how)


def allowed(kind: Any) -> tuple[str, ...]:
    """The values of a Literal, none for another type."""
    return get_args(kind) if get_origin(kind) is Literal else ()


def check(name: str, value: Any, kind: Any) -> None:
    """Raise UserError, with the option's `name`, for a value that its type does not allow."""
    if allowed(kind) and value not in allowed(kind):
        raise UserError(f"{name} {value} is unknown; choose from {', '.join(allowed(kind))}")
    if get_origin(kind) is Annotated and not kind.__metadata__[0].least <= value < math.inf:  # nor NaN
        finite = " and finite" if isinstance(value, float) else ""
        raise UserError(f"{name} should be at least {kind.__metadata__[0].least}{finite}, not {value}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _plain(kind: Any) -> type:
    """The type of the value itself."""
    if get_origin(kind) is Annotated:
        return get_args(kind)[0]
    return str if allowed(kind) else tuple if kind == Paths else kind


def from_toml(path: Path, cls: type) -> dict[str, Any]:
    """What [common], which may set what `TrainingOptions` has, and the table of the command `cls` set.

    Raises UserError for whatever is wrong.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML ({error})") from None
    unknown = set(content) - set(SECTIONS)
    if unknown:
        raise UserError(f"{path}: unknown table [{min(unknown)}]; known are {', '.join(SECTIONS)}")
    own = get_type_hints(cls, include_extras=True)
    known = get_type_hints(TrainingOptions, include_extras=True) | own
    values = {}
    for table, hints in (("common", known), (cls.SECTION, own)):
        for name, value in content.get(table, {}).items():
            if name not in hints or name == "SECTION":
                raise UserError(f"{path}: [{table}] has an unknown field {name!r}")
            wanted = _plain(hints[name])
            if wanted is float and type(value) is int:
                value = float(value)
            if wanted is tuple:
                value = tuple(value) if type(value) is list else (value,)
            if type(value) is not wanted or (wanted is tuple and set(map(type, value)) - {str}):
                kind = "a text or a list of texts" if wanted is tuple else wanted.__name__
                raise UserError(f"{path}: [{table}] {name} should be {kind}, not {value!r}")
            check(f"{path}: [{table}] {name}", value, hints[name])
            if name in own:
                values[name] = value
    return values


def idle_options(config: Any, reasons: dict[str, str | bool]) -> list[str]:
    """A sentence for each option that is not its default and, for a reason, does nothing."""
    defaults = {item.name: item.default for item in fields(config)}
    return [
        f"{_flag(name)} (given here or in --config) does nothing: {reason}"
        for name, reason in reasons.items()
        if reason and getattr(config, name) != defaults[name]
    ]


def save_config(config: Any, folder: Path) -> None:
    """Write run.json: the options, the command, the git commit, the versions and the hardware in use."""
    names = ("torch", "transformers", "peft", "sqlglot", "numpy")
    content = {
        "config": asdict(config),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        **git_state(),
        "python": platform.python_version(),
        "hardware": hardware(),
        "versions": {name: importlib.metadata.version(name) for name in names},
    }
    write_atomically(folder / "run.json", json.dumps(content, indent=1))


def hardware() -> str:
    """The processor, the number of cores and the GPU, if any."""
    import torch

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{os.cpu_count()} cores of {name}{gpu}"


def git_state() -> dict[str, Any]:
    """The commit of this code, and whether files differ from it; None of both outside of a repository."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git(
            "ls-files", "--error-unmatch", Path(__file__).name
        )  # an installed copy may lie in another's repository
        return {"commit": git("rev-parse", "HEAD"), "uncommitted_changes": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "uncommitted_changes": None}


def user_errors(main: Callable[..., int | None], *arguments: Any) -> None:
    """Run a command, which may return its exit code; wrong input becomes one sentence and exit code 2."""
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
    except (UserError, OSError) as error:
        outside = isinstance(error, OSError) and error.errno in OF_THE_DISK
        if not (outside or isinstance(error, UserError | MissingDatabase)):
            raise
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
