"""From options to a task: its questions, their environment and scorer, and the policy that plays."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import torch
from filelock import FileLock

from mtsql.agent.env import Environment, Episode, Limits
from mtsql.agent.rollout import Sampling, rollout, trajectory_seed
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import make_tools
from mtsql.agent.trajectory import Trajectory, trajectory_record
from mtsql.config import Agent, Common, Data, Sampled, Training
from mtsql.data.datasets import (
    Dataset,
    Dialogue,
    Example,
    beside,
    examples,
    join_datasets,
    load_dataset,
    split_names,
)  # fmt: skip
from mtsql.errors import UserError, loading
from mtsql.files import file_errors, hold_folder, load_json, write_atomically
from mtsql.learn.curriculum import SuccessCount
from mtsql.learn.model import load_policy, save_policy
from mtsql.learn.parallel import Processes, join_processes
from mtsql.model_folder import Policy, load_tokenizer
from mtsql.recipes import load_recipe
from mtsql.recipes.prompt_options import PromptOptions
from mtsql.recipes.rewards import RewardFunction
from mtsql.report.evaluation import answer_dialogues, score_records
from mtsql.report.metrics import HARDNESS, summarise
from mtsql.report.records import AnswerLog
from mtsql.sql.execute import Executor
from mtsql.sql.score import Scorer, print_left_out, scorable

DEV_DIALOGUES = 100  # asked in an evaluation during training
CHUNK = 16  # So many times --rows trajectories are sampled at a time, then handed to the caller.
# What answers do not depend on, so that an evaluation may go on with another value.
FREE_TO_CHANGE = ("out", "rows", "concurrency")

# Plays episodes to their ends: (episodes, sampling, title of the progress bar or "") to their trajectories.
Play: TypeAlias = Callable[..., list[Trajectory]]


@dataclass(frozen=True)
class Task:
    """The questions of a split, their environment, and the policy that is to answer them."""

    processes: Processes
    out: Path
    lock: FileLock | None  # of that folder, held by the main process
    tokens: ChatTokens
    dataset: Dataset
    environment: Environment
    scorer: Scorer  # over the environment's databases, sharing its executor and cache
    policy: Policy | None  # None for one behind an address
    play: Play
    about: dict[str, Any] = field(default_factory=dict)  # what else the answers depend on
    costs: Any = None  # what a policy behind an address took


def begin_task(config: Common, split: str, **how: Any) -> Task:
    """The questions of a split and the policy of --model, loaded as `how` says."""
    questions = begin_questions(config, split, config.model)
    tokens = questions["tokens"]
    torch.manual_seed(config.seed)  # new LoRA adapters start at random
    policy = chosen_policy(config, tokens, **how)

    def play(episodes: Sequence[Episode], sampling: Sampling, title: str = "") -> list[Trajectory]:
        return rollout(policy, tokens, episodes, sampling, config.rows, title)

    return Task(**questions, policy=policy, play=play)


def begin_training(config: Training, split: str) -> Task:
    """The training split and the policy to train. Raises UserError for options that do not go together."""
    if config.dtype == "float16":
        raise UserError("--dtype float16 is for evaluation; train in bfloat16 or float32")
    how = {"lora_rank": config.lora_rank, "gradient_checkpointing": config.gradient_checkpointing}
    return begin_task(config, split, **how)


def begin_questions(config: Common, split: str, tokenizer: str) -> dict[str, Any]:
    """All fields of a Task but the policy's, which has the tokenizer of this name."""
    processes = join_processes()
    tokens = ChatTokens(load_tokenizer(tokenizer), config.thinking != "off")
    out = Path(config.out)
    over = task_over(config, tokens, load_split(config, split))
    lock = hold_folder(out) if processes.is_main and config.out else None
    return {"processes": processes, "out": out, "lock": lock, "tokens": tokens, **over}


def task_over(config: Common, tokens: ChatTokens, dataset: Dataset) -> dict[str, Any]:
    """The fields of a Task that depend on its data."""
    environment = make_environment(config, dataset, tokens, config.tools)
    scorer = Scorer(environment.schemas, environment.executor, config.ex)
    return {"dataset": dataset, "environment": environment, "scorer": scorer}


def chosen_policy(config: Agent, tokens: ChatTokens, **how: Any) -> Policy:
    """The policy of --model, as the options and `how` say. Raises UserError if it lacks ids of its tokens."""
    options, device = {"dtype": config.dtype, "quantise": config.quantise, **how}, pick_device()
    can = torch.cpu.get_capabilities()
    slow = can["architecture"] == "x86_64" and not (can["avx512_bf16"] or can["amx_bf16"])
    if slow and device.type == "cpu" and config.dtype == "bfloat16":
        print("this processor has no bfloat16 arithmetic: --dtype float32 is faster, many times in training")
    policy = load_policy(config.model, device=device, **options)
    ids, rows = len(tokens.tokenizer), policy.get_input_embeddings().weight.shape[0]
    if ids > rows:
        raise UserError(f"the tokenizer in {config.model} has {ids} ids, and its model embeddings for {rows}")
    return policy


def pick_device() -> torch.device:
    """The GPU where there is one that CUDA_VISIBLE_DEVICES shows, of several that of `join_processes`."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.set_float32_matmul_precision("high")  # TF32 for what stays float32: LoRA, its gradients
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each shape, and ours are many
    return torch.device("cuda", torch.cuda.current_device())


def draw_questions(asked: Sequence[Example], count: int, seed: int) -> list[Example]:
    """--questions of the questions, drawn by the seed; 0 is all of them, in their order."""
    return random.Random(seed).sample(asked, min(count, len(asked))) if count else list(asked)


def find_split(data: str, split: str) -> Path:
    """The file of a split in an official folder layout (`mtsql.data.datasets`), or `data` if it is a file.

    Raises UserError if there is no such folder, or no such file in it, and where they may not be read.
    """
    root, names = Path(data), split_names(split)
    with file_errors(root):
        if root.is_file():
            return root
        if not root.exists():
            raise UserError(f"{root} is not there: --data takes a data set's folder or one .json file")
        for name in names:
            if (root / name).is_file():
                return root / name
    raise UserError(f"{root} has no {split} split: none of {', '.join(names)} is there")


def load_split(config: Data, split: str) -> Dataset:
    """The dialogues of a split from all sources of --data, with their schemas.

    Tables and databases are by default beside each source. A folder with Spider's train_spider.json gives
    its train_others.json too. With --held-out N and --for-rl M the dialogues over N and over further M
    databases of `train`, the same for every --seed, make the splits `held_out` and `rl` and leave `train`.
    Raises UserError if that leaves one empty, and where tables or databases are not there.
    """
    parts: list[Dataset] = []
    for source in config.data:
        path = find_split(source, "train" if split in ("held_out", "rl") else split)
        tables = Path(config.tables or beside(path, "tables.json"))
        databases = Path(config.databases or beside(path, "database", "databases"))
        if not tables.is_file():
            raise UserError(f"{tables} is not a file; give the file of schemas with --tables")
        if not databases.is_dir():
            raise UserError(f"{databases} is not a folder; give the folder of databases with --databases")
        others = path.with_name("train_others.json")
        further = [others] * (path.name == "train_spider.json" and others.is_file() and Path(source).is_dir())
        if further:
            print(f"{path.parent}: {path.name} and {others.name} together")
        first = sum(len(part.dialogues) + part.missing.total() for part in parts)
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


def _scrambled(name: str) -> str:
    """A sort key without any meaning, so that what stands first is no sort of database."""
    return hashlib.sha256(name.encode()).hexdigest()


def make_environment(config: Agent, dataset: Dataset, tokens: ChatTokens, tools: str) -> Environment:
    """The environment that all episodes of a run share."""
    limits = Limits(
        config.max_interactions, config.max_prompt_tokens, config.max_response_tokens, config.max_turn_tokens
    )
    recipe = load_recipe(config.recipe).make_recipe(prompt_options(config))
    executor = Executor(timeout_seconds=config.sql_timeout)
    return Environment(
        dataset.schemas, recipe, tokens, executor, limits, make_tools(tools), config.error_hints
    )


def prompt_options(config: Agent) -> PromptOptions:
    """How the recipe puts its questions."""
    compact, native = config.wording == "compact", config.thinking == "native"
    return PromptOptions(compact, config.result_characters, native)


def make_sampling(
    config: Agent, environment: Environment, temperature: float, top_p: float = 1.0
) -> Sampling:
    """How the policy's messages are sampled: until the recipe's stop strings or --max-turn-tokens."""
    stops = environment.recipe.stop_strings
    return Sampling(temperature, max_turn_tokens=config.max_turn_tokens, stop_strings=stops, top_p=top_p)


def reward_function(config: Agent, tokens: ChatTokens, scorer: Scorer, given: str = "") -> RewardFunction:
    """The rewards that --rewards (`given`) names: a preset of the recipe with its weights, "" for its first,
    or a module of one's own with such a `make_reward`, as mtsql.extras.authors_rewards.
    """
    name = given.partition(",")[0]
    try:
        module = import_module(name) if re.fullmatch(r"\w+(\.\w+)+", name) else load_recipe(config.recipe)
    except ModuleNotFoundError as error:
        raise UserError(f"--rewards {name} cannot be imported ({error}); give a preset or a module") from None
    turns = config.max_interactions + 1  # the answer is one more message
    return module.make_reward(given, scorer, tokens.tokenizer.decode, turns)


def training_questions(config: Sampled, task: Task, counted: Sequence[SuccessCount] = ()) -> list[Example]:
    """The training questions in play: --questions of all, or of those in `counted`, drawn by the seed
    (0: all), less those that cannot be scored. They are drawn first, since the check executes every gold SQL.

    Each process executes all of them, to fill its cache; a gold SQL near --sql-timeout may be in time in one
    alone, and what one leaves out, all leave out.
    """
    asked, ids = examples(task.dataset.dialogues), {count.example_id for count in counted}
    asked = [e for e in asked if e.id in ids] if counted else asked
    if not asked:
        raise UserError("no question of the curriculum is in the training data")
    drawn = draw_questions(asked, config.questions, config.seed)
    kept = scorable(drawn, task.scorer)
    everywhere = set.intersection(*map(set, task.processes.all_gather([e.id for e in kept])))
    return [e for e in kept if e.id in everywhere]


def fitting_questions(config: Sampled, task: Task, asked: Sequence[Example]) -> list[Example]:
    """The questions whose prompt is not too long; says how many others there are.

    Raises UserError if there is none.
    """
    fits = task.environment.fits(task.processes.share(asked))
    kept = [e for e, fit in zip(asked, task.processes.gather(fits), strict=True) if fit]
    longer = f"longer than --max-prompt-tokens {config.max_prompt_tokens}"
    if not kept:
        raise UserError(f"the prompt of every question is {longer}")
    if task.processes.is_main:
        print_left_out(asked, kept, f"their prompt is {longer}")
    return kept


def sample_questions(
    config: Sampled,
    task: Task,
    numbered: Sequence[tuple[int, Example]],
    seed: tuple[int, ...],
    title: str,
) -> Iterator[tuple[Example, list[Trajectory]]]:
    """Each question with --samples-per-question trajectories, none if its prompt is too long.

    A trajectory's seed comes from `seed`, the question's number and the sample's. Questions come a chunk at
    a time, so that only what the caller keeps stays in memory.
    """
    sampling = make_sampling(config, task.environment, config.temperature)
    size = max(1, CHUNK * config.rows // config.samples_per_question)
    for start in range(0, len(numbered), size):
        chunk, episodes = numbered[start : start + size], []
        for number, example in chunk:
            seeds = [trajectory_seed(*seed, number, i) for i in range(config.samples_per_question)]
            episodes += task.environment.episodes(example, seeds)
        episodes = [episode for episode in episodes if episode.trajectory.status is None]
        of_chunk = f"{title}, questions {start + 1} to {start + len(chunk)} of {len(numbered)}"
        task.play(episodes, sampling, of_chunk * task.processes.is_main)
        of_question = groupby((e.trajectory for e in episodes), key=lambda t: t.example_id)
        by_question = {name: list(group) for name, group in of_question}
        yield from ((example, by_question.get(example.id, [])) for _, example in chunk)


def answer_split(
    task: Task,
    dialogues: Sequence[Dialogue],
    sampling: Sampling,
    seed: int,
    history: str = "gold",
    title: str = "",
    log: AnswerLog | None = None,
) -> list[tuple[Example, Trajectory]]:
    """One trajectory for each question of some dialogues, ordered by dialogue and turn.

    Each process plays its share; all get the whole. What `log` holds is not played again.
    """

    def play(episodes: Sequence[Episode]) -> object:
        return task.play(episodes, sampling, title * task.processes.is_main)

    share = task.processes.share(dialogues)
    answered = answer_dialogues(play, task.environment, share, history, seed, log)
    everything = [pair for share in task.processes.all_gather(answered) for pair in share]
    return sorted(everything, key=lambda pair: (pair[0].dialogue_id, pair[0].turn_index))


def dev_task(config: Training, task: Task) -> Task:
    """The task with the first DEV_DIALOGUES of another split, for evaluations during training.

    With --held-out it is `held_out`, else `dev`. Raises UserError where that would be what is trained on.
    """
    files = [source for source in config.data if Path(source).is_file()]
    if files and not config.held_out:
        raise UserError(
            f"--evaluate-every needs other questions than those trained on, and {files[0]} has one split; "
            "give --held-out, or --evaluate-every 0"
        )
    dataset = load_split(config, "held_out" if config.held_out else "dev")
    dataset = replace(dataset, dialogues=dataset.dialogues[:DEV_DIALOGUES])
    return replace(task, **task_over(config, task.tokens, dataset))


def dev_scores(config: Training, dev: Task) -> dict[str, float]:
    """EX, EM, and EX by hardness of greedy answers."""
    greedy = make_sampling(config, dev.environment, 0.0)
    answered = answer_split(dev, dev.dataset.dialogues, greedy, config.seed)
    scores = summarise(score_records(answered, dev.scorer, dev.environment.recipe.verifies))
    by_hardness = {f"ex_{level}": scores["ex"]["by_hardness"][level] for level in HARDNESS}
    return {"ex": scores["ex"]["mean"], "em": scores["em"]["mean"], **by_hardness}


def answer_options(config: Common, task: Task) -> dict[str, Any]:
    """What answers depend on: options, questions, the files of policy and databases, how a server is asked.

    An interrupted evaluation goes on only if all of it is the same (`mtsql.report.records`).
    """
    options = {name: value for name, value in asdict(config).items() if name not in FREE_TO_CHANGE}
    dialogues, schemas = task.dataset.dialogues, task.dataset.schemas
    asked = [schemas[name] for name in sorted({dialogue.db_id for dialogue in dialogues})]
    files = sorted(Path(config.model).glob("*")) if config.model and Path(config.model).is_dir() else []
    files += [schema.path for schema in asked]
    versions = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    questions = hashlib.sha256(repr((dialogues, [schema.tables for schema in asked])).encode()).hexdigest()
    return options | task.about | {"files of --model and --data": versions, "questions": questions}


def refuse_other_run(config: Common, out: Path) -> None:
    """Raise UserError if `out` holds the run of another command, or one with other options."""
    path, now = out / "run.json", json.loads(json.dumps(asdict(config)))
    with loading(f"{path} is damaged; remove it, or give another --out"):
        before = dict(load_json(path)["config"]) if path.exists() else {}
    other = [name for name in before if name not in FREE_TO_CHANGE and before[name] != now.get(name)]
    if other:
        raise UserError(f"{out} holds a run that differs in {', '.join(other[:5])}; give another --out")


def save_result(task: Task, folder: Path) -> None:
    """Write the policy as an ordinary Hugging Face or adapter folder."""
    if task.processes.is_main:
        save_policy(task.policy, task.tokens.tokenizer, folder)


def raise_not_finite(task: Task, step: int, groups: Sequence[Sequence[Trajectory]]) -> None:
    """Save the trajectories of a micro-batch whose loss is NaN or infinite, and stop."""
    path, trajectories = task.out / "not_finite.jsonl", [t for group in groups for t in group]
    lines = [json.dumps(trajectory_record(t, task.tokens.tokenizer.decode)) + "\n" for t in trajectories]
    write_atomically(path, "".join(lines))
    raise UserError(f"step {step}: the loss is not finite; its trajectories are in {path}")
