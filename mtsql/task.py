"""From options to a task: its questions, their environment and scorer, and the policy that plays."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from mtsql.agent.env import Answered, Environment, Episode, Limits
from mtsql.agent.rollout import Sampling, rollout, trajectory_seed
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import make_tools
from mtsql.agent.trajectory import Trajectory, trajectory_record
from mtsql.config import Agent, Common, Data, Sampled, Training
from mtsql.data.datasets import (
    FURTHER_NAMES,
    Dataset,
    Dialogue,
    Example,
    beside,
    example_after,
    examples,
    load_dataset,
)  # fmt: skip
from mtsql.errors import UserError
from mtsql.files import hold_folder, json_lines, write_atomically
from mtsql.learn.curriculum import SuccessCount
from mtsql.learn.model import load_policy, save_policy
from mtsql.learn.parallel import Processes, join_processes
from mtsql.model_folder import ADAPTER_FILE, Policy, base_of_adapter, load_tokenizer
from mtsql.recipes import load_recipe
from mtsql.recipes.prompt_options import PromptOptions
from mtsql.recipes.rewards import RewardFunction
from mtsql.report.evaluation import score_records
from mtsql.report.metrics import HARDNESS, summarise
from mtsql.report.records import AnswerLog
from mtsql.sql.execute import Executor
from mtsql.sql.score import Scorer, print_left_out, scorable

DEV_DIALOGUES = 100  # asked in an evaluation during training
CHUNK = 4096  # so many trajectories are sampled at a time, then handed to the caller
# What answers do not depend on, so that an evaluation may go on with another value.
FREE_TO_CHANGE = ("out", "rows", "concurrency")


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
    # From (episodes, sampling, title of the progress bar or "") to their trajectories, played to their ends.
    play: Callable[..., list[Trajectory]]
    costs: Any = None  # what a policy behind an address took

    def sample(
        self,
        numbered: Sequence[tuple[int, Example]],
        count: int,
        temperature: float,
        seed: tuple[int, ...],
        title: str = "",
    ) -> Iterator[tuple[Example, list[Trajectory]]]:
        """Each question with `count` trajectories, whose seeds come from `seed`, its number and theirs.

        Questions come a chunk at a time, so that only what the caller keeps stays in memory.
        """
        sampling, size = make_sampling(self.environment, temperature), max(1, CHUNK // count)
        for start in range(0, len(numbered), size):
            chunk, episodes = numbered[start : start + size], []
            for number, example in chunk:
                seeds = [trajectory_seed(*seed, number, i) for i in range(count)]
                episodes += self.environment.episodes(example, seeds)
            of_chunk = f"{title}, questions {start + 1} to {start + len(chunk)} of {len(numbered)}"
            played = self.play(episodes, sampling, title and of_chunk)
            for place, (_, example) in enumerate(chunk):
                yield example, played[place * count : (place + 1) * count]

    def answer(
        self,
        dialogues: Sequence[Dialogue],
        sampling: Sampling,
        seeds: Sequence[int],
        history: str = "gold",
        title: str = "",
        log: AnswerLog | None = None,
        only: Collection[str] | None = None,
    ) -> list[Answered]:
        """For each seed a run: one trajectory for each question of some dialogues, by dialogue and turn.

        Runs are played together, so that answers to one question share their prompt. With gold or
        question-only history all questions are independent; with predicted history all first turns are
        answered together, then all second turns with the run's own first answers in memory. Each process
        plays its share; all get the whole. What `log` holds is not played again. With `only`, ids of
        independent questions, others are left out.
        """
        share, runs = self.processes.share(dialogues), range(len(seeds))
        said: dict[tuple[str, int], list[str | None]] = {(d.id, run): [] for d in share for run in runs}
        batches: Iterable[list[tuple[Example, Sequence[int]]]]  # of questions, each with the runs that ask it
        batches = [[(e, runs) for e in examples(share, history) if only is None or e.id in only]]
        if history == "predicted":  # each is made after the answers to the one before
            turns = range(max((len(d.turns) for d in share), default=0))
            asked = ([(d, run) for d in share if turn < len(d.turns) for run in runs] for turn in turns)
            batches = ([(example_after(d, said[d.id, run]), [run]) for d, run in pairs] for pairs in asked)
        known = log.answers if log else {}
        answered = []
        for batch in batches:
            episodes: list[tuple[int, Episode]] = []
            for example, own in batch:
                place = [int(number) for number in example.id.split("/")]
                numbers = [trajectory_seed(seeds[run], *place) for run in own]
                episodes += zip(own, self.environment.episodes(example, numbers), strict=True)
            unknown = [e for _, e in episodes if e.trajectory.seed not in known]
            waiting = [e for e in unknown if e.trajectory.status is None]
            for episode in waiting if log else ():
                episode.told = log.add
            if waiting:  # else a decoder would be made for nothing
                self.play(waiting, sampling, title)
            for run, episode in episodes:
                trajectory = known.get(episode.trajectory.seed, episode.trajectory)
                said[episode.example.dialogue_id, run].append(trajectory.answer_sql)
                answered.append((run, episode.example, trajectory))
        everything = [answer for share in self.processes.all_gather(answered) for answer in share]
        everything.sort(key=lambda answer: (answer[1].dialogue_id, answer[1].turn_index))
        return [[(e, t) for of_run, e, t in everything if of_run == run] for run in runs]

    def save(self, folder: Path) -> None:
        """Write the policy as an ordinary Hugging Face or adapter folder."""
        if self.processes.is_main:
            save_policy(self.policy, self.tokens.tokenizer, folder)

    def raise_not_finite(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Save the trajectories of a micro-batch whose loss is NaN or infinite, and stop."""
        path, decode = self.out / "not_finite.jsonl", self.tokens.tokenizer.decode
        write_atomically(path, json_lines(trajectory_record(t, decode) for group in groups for t in group))
        raise UserError(f"step {step}: the loss is not finite; its trajectories are in {path}")


def begin_task(config: Common, split: str) -> Task:
    """The questions of a split and the policy of --model, to be trained if the options are a training's."""
    questions = begin_questions(config, split, config.model)
    processes, tokens = questions["processes"], questions["tokens"]
    torch.manual_seed(config.seed % 2**64)  # new LoRA adapters start at random
    policy = chosen_policy(config, tokens)

    def play(episodes: Sequence[Episode], sampling: Sampling, title: str = "") -> list[Trajectory]:
        return rollout(policy, tokens, episodes, sampling, config.rows, title * processes.is_main)

    return Task(**questions, policy=policy, play=play)


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


def chosen_policy(config: Agent, tokens: ChatTokens) -> Policy:
    """The policy of --model, as the options say. Raises UserError if it lacks ids of its tokens."""
    options, device = {"dtype": config.dtype, "quantise": config.quantise}, pick_device()
    if isinstance(config, Training):
        options |= {"lora_rank": config.lora_rank, "gradient_checkpointing": config.gradient_checkpointing}
    if config.dtype == "bfloat16" and without_bfloat16(device):
        print("this processor has no bfloat16 arithmetic: --dtype float32 is faster, many times in training")
    policy = load_policy(config.model, device=device, **options)
    ids, rows = len(tokens.tokenizer), policy.get_input_embeddings().weight.shape[0]
    if ids > rows:
        raise UserError(f"the tokenizer in {config.model} has {ids} ids, and its model embeddings for {rows}")
    return policy


def without_bfloat16(device: torch.device) -> bool:
    """Whether it is a processor that has no bfloat16 arithmetic, as far as torch says."""
    can = torch.cpu.get_capabilities()
    known = device.type == "cpu" and can["architecture"] == "x86_64"
    return known and not (can["avx512_bf16"] or can["amx_bf16"])


def pick_device() -> torch.device:
    """The GPU where there is one that CUDA_VISIBLE_DEVICES shows, of several that of `join_processes`."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.set_float32_matmul_precision("high")  # TF32 for what stays float32: LoRA, its gradients
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each shape, and ours are many
    return torch.device("cuda", torch.cuda.current_device())


def draw_questions(asked: Sequence[Example], count: int, seed: int) -> list[Example]:
    """`count` of the questions, drawn by the seed; 0 is all of them, in their order."""
    return random.Random(seed).sample(asked, min(count, len(asked))) if count else list(asked)


def find_split(data: str, split: str) -> Path:
    """The file of a split in an official folder layout (`mtsql.data.datasets`), or `data` if it is a file.

    Raises UserError if there is no such file.
    """
    root = Path(data)
    if root.is_file():
        return root
    names = f"{split}.json cosql_{split}.json sql_state_tracking/cosql_{split}.json {split}/{split}.json"
    names = (*names.split(), *FURTHER_NAMES.get(split, ()))
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
    sources: list[tuple[Path, Path, Path]] = []
    for source in config.data:
        path = find_split(source, "train" if split in ("held_out", "rl") else split)
        tables = Path(config.tables or beside(path, "tables.json"))
        databases = Path(config.databases or beside(path, "database", "databases"))
        sources.append((path, tables, databases))
        others = path.with_name("train_others.json")
        if path.name == "train_spider.json" and others.is_file() and Path(source).is_dir():
            print(f"{path.parent}: {path.name} and {others.name} together")
            sources.append((others, tables, databases))
    dataset = load_dataset(sources, config.allow_missing)
    for source, count in dataset.missing.items():
        print(f"left out {count} dialogues of {source}: their database is missing")
    parted = {"held_out": config.held_out, "rl": config.for_rl}
    if split in parted or (split == "train" and any(parted.values())):
        # In an order without any meaning, so that what stands first is no sort of database.
        names = sorted({d.db_id for d in dataset.dialogues}, key=lambda n: sha256(n.encode()).hexdigest())
        if sum(parted.values()) >= len(names) or not parted.get(split, 1):
            raise UserError(
                "--held-out and --for-rl should be above 0 where they are asked for, and leave some of the "
                f"{len(names)} databases of train"
            )
        first, last = config.held_out, config.held_out + config.for_rl
        chosen = {"held_out": names[:first], "rl": names[first:last], "train": names[last:]}[split]
        dataset = replace(dataset, dialogues=tuple(d for d in dataset.dialogues if d.db_id in chosen))
    return dataset


def make_environment(config: Agent, dataset: Dataset, tokens: ChatTokens, tools: str) -> Environment:
    """The environment that all episodes of a run share."""
    limits = Limits(
        config.max_interactions, config.max_prompt_tokens, config.max_response_tokens, config.max_turn_tokens
    )
    recipe = load_recipe(config.recipe).make_recipe(prompt_options(config))
    executor, own = Executor(timeout_seconds=config.sql_timeout), make_tools(tools)
    return Environment(dataset.schemas, recipe, tokens, executor, limits, own, config.error_hints)


def prompt_options(config: Agent) -> PromptOptions:
    """How the recipe puts its questions."""
    compact, native = config.wording == "compact", config.thinking == "native"
    return PromptOptions(compact, config.result_characters, native)


def make_sampling(environment: Environment, temperature: float, top_p: float = 1.0) -> Sampling:
    """How the policy's messages are sampled: until the recipe's stop strings or --max-turn-tokens."""
    longest, stops = environment.limits.max_turn_tokens, environment.recipe.stop_strings
    return Sampling(temperature, max_turn_tokens=longest, stop_strings=stops, top_p=top_p)


def reward_function(config: Agent, tokens: ChatTokens, scorer: Scorer, given: str = "") -> RewardFunction:
    """The rewards that --rewards (`given`) names: a preset of the recipe with its weights, "" for its first,
    or a module of one's own with such a `make_reward`, as mtsql.extras.authors_rewards.
    """
    name = given.partition(",")[0]
    try:
        own = "." in name and "=" not in name
        module = import_module(name) if own else load_recipe(config.recipe)
    except ModuleNotFoundError as error:
        raise UserError(f"--rewards {name} cannot be imported ({error}); give a preset or a module") from None
    turns = config.max_interactions + 1  # the answer is one more message
    return module.make_reward(given, scorer, tokens.tokenizer.decode, turns)


def training_questions(
    config: Sampled, task: Task, counted: Sequence[SuccessCount] = (), known: Collection[str] = ()
) -> list[Example]:
    """The training questions in play: --questions of all, or of those in `counted`, drawn by the seed
    (0: all), less those that cannot be scored and those whose prompt is too long, which is said. They are
    drawn first, since the check executes every gold SQL.

    Each process executes all of them, to fill its cache; a gold SQL near --sql-timeout may be in time in one
    alone, and what one leaves out, all leave out. With `known`, the ids of a run that goes on, none is left
    out, and each may take ten times as long: the machine may be busier now. Raises UserError if none is left.
    """
    asked, ids = examples(task.dataset.dialogues), {count.example_id for count in counted}
    asked = [e for e in asked if e.id in ids] if counted else asked
    if not asked:
        raise UserError("no question of the curriculum is in the training data")
    asked = draw_questions(asked, config.questions, config.seed)
    if known:
        known, executor = set(known), task.scorer.executor
        asked, limit = [e for e in asked if e.id in known], executor.timeout_seconds
        executor.timeout_seconds = 10 * limit
        scorable(asked, task.scorer)
        executor.timeout_seconds = limit
        return asked
    return playable(asked, task.environment, task.scorer, task.processes)


def playable(
    asked: Sequence[Example], environment: Environment, scorer: Scorer, processes: Processes
) -> list[Example]:
    """The questions whose gold SQL runs, in every process, and whose prompt is within its limit.

    Says how many are left out. Raises UserError if none is left.
    """
    run = scorable(asked, scorer)
    everywhere = set.intersection(*map(set, processes.all_gather([e.id for e in run])))
    run = [e for e in run if e.id in everywhere]
    if processes.is_main:
        print_left_out(asked, run, "their gold SQL does not run")
    fits = environment.fits(processes.share(run))
    kept = [e for e, fit in zip(run, processes.gather(fits), strict=True) if fit]
    longer = f"longer than --max-prompt-tokens {environment.limits.max_prompt_tokens}"
    if not kept:
        raise UserError(f"the prompt of every question is {longer}")
    if processes.is_main:
        print_left_out(run, kept, f"their prompt is {longer}")
    return kept


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
    (answered,) = dev.answer(dev.dataset.dialogues, make_sampling(dev.environment, 0.0), [config.seed])
    reward = reward_function(config, dev.tokens, dev.scorer)
    scores = summarise(score_records(answered, dev.scorer, dev.environment, reward))
    by_hardness = {f"ex_{level}": scores["ex"]["by_hardness"][level] for level in HARDNESS}
    return {"ex": scores["ex"]["mean"], "em": scores["em"]["mean"], **by_hardness}


def answer_options(config: Common, dataset: Dataset) -> dict[str, Any]:
    """What answers depend on: options, questions, the files of policy and databases.

    An interrupted evaluation goes on only if all of it is the same (`mtsql.report.records`).
    """
    options = {name: value for name, value in asdict(config).items() if name not in FREE_TO_CHANGE}
    asked = [dataset.schemas[name] for name in sorted({dialogue.db_id for dialogue in dataset.dialogues})]
    folders = [Path(config.model)] if config.model else []
    if folders and (folders[0] / ADAPTER_FILE).is_file():
        folders.append(Path(base_of_adapter(folders[0])))
    files = [path for folder in folders for path in sorted(folder.glob("[!.]*")) if path.is_file()]
    files += [schema.path for schema in asked]
    versions = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    shown = repr((dataset.dialogues, [schema.tables for schema in asked]))
    questions = sha256(shown.encode()).hexdigest()
    return options | {"files of --model and --data": versions, "questions": questions}


def refuse_finished(out: Path) -> None:
    """Raise UserError if `out` holds a run, which an evaluation must not replace."""
    if (out / "run.json").exists():
        raise UserError(f"{out} holds a run already; remove it, or give another --out")
