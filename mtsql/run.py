"""From options to the objects of a run: dataset, environment, scorer, policy."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from tqdm import tqdm
from transformers import PreTrainedModel

from mtsql.agent.env import Environment, Limits
from mtsql.agent.rollout import Sampling, rollout, trajectory_seed
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import make_tools
from mtsql.agent.trajectory import Trajectory, trajectory_record
from mtsql.config import (
    CurriculumConfig,
    DataOptions,
    DemonstrationsConfig,
    EpisodeOptions,
    GrpoConfig,
    Paths,
    PolicyOptions,
    RewardOptions,
    SftConfig,
    TrainingOptions,
)
from mtsql.data.datasets import (
    Dataset,
    Dialogue,
    Example,
    beside,
    examples,
    join_datasets,
    load_dataset,
    split_names,
)
from mtsql.errors import UserError
from mtsql.files import write_atomically
from mtsql.learn.checkpoint import load_training_state, new_checkpoint, newest_checkpoint, save_training_state
from mtsql.learn.model import (
    Reference,
    load_policy,
    load_tokenizer,
    merged_adapter,
    restore_policy,
    save_policy,
)
from mtsql.learn.optimizer import make_optimizer, stepped_parameters
from mtsql.learn.parallel import (
    Processes,
    join_processes,
    restore_optimizer,
    shard_policy,
    whole_state,
    whole_weights,
)
from mtsql.recipes import load_recipe
from mtsql.recipes.prompt_options import PromptOptions
from mtsql.recipes.rewards import RewardFunction
from mtsql.report.evaluation import answer_dialogues, score_records
from mtsql.report.metrics import summarise
from mtsql.sql.execute import Executor
from mtsql.sql.score import Scorer, scorable

KEPT_CHECKPOINTS = 2
CHUNK = 16  # So many times --rows trajectories are sampled at a time, then handed to the caller.


def find_split(data: str, split: str) -> Path:
    """The file of a split in an official folder layout (`mtsql.data.datasets`), or `data` if it is a file.

    Raises UserError if the folder has no such file.
    """
    root = Path(data)
    if root.is_file():
        return root
    names = split_names(split)
    for name in names:
        if (root / name).is_file():
            return root / name
    raise UserError(f"{root} has no {split} split: none of {', '.join(names)} is there")


def load_split(config: DataOptions, split: str) -> Dataset:
    """The dialogues of a split from all sources of --data, with their schemas.

    Tables and databases are by default beside each source. A folder with Spider's train_spider.json gives its
    train_others.json too. With --held-out N the dialogues over N databases of `train`, the same for every
    --seed, make the split `held_out` and leave `train`. Raises UserError if that leaves one of the two empty,
    and where tables or databases are not there.
    """
    parts: list[Dataset] = []
    for i, source in enumerate(config.data):
        path = find_split(source, "train" if split == "held_out" else split)
        tables = _of_source(config.tables, i, config, "--tables") or beside(path, "tables.json")
        databases = _of_source(config.databases, i, config, "--databases")
        databases = databases or beside(path, "database", "databases")
        if not tables.is_file():
            raise UserError(f"{tables} is not a file; give the file of schemas with --tables")
        if not databases.is_dir():
            raise UserError(f"{databases} is not a folder; give the folder of databases with --databases")
        others = path.with_name("train_others.json")
        further = []
        if path.name == "train_spider.json" and others.is_file() and Path(source).is_dir():
            further = [others]
            print(f"{path.parent}: {path.name} and {others.name} together")
        first = sum(len(part.dialogues) + part.skipped for part in parts)
        parts.append(load_dataset(path, tables, databases, config.allow_missing, further, first))
    dataset = join_datasets(parts)
    for source, count in dataset.missing.items():
        print(f"left out {count} dialogues of {source}: their database is missing")
    if split == "held_out" or (split == "train" and config.held_out):
        names = sorted({d.db_id for d in dataset.dialogues}, key=_scrambled)
        if not 0 < config.held_out < len(names):
            raise UserError(
                f"--held-out should be above 0 and leave some of the {len(names)} databases of train"
            )
        held_out, wanted = set(names[: config.held_out]), split == "held_out"
        dialogues = tuple(d for d in dataset.dialogues if (d.db_id in held_out) is wanted)
        dataset = replace(dataset, dialogues=dialogues)
    return dataset


def _of_source(given: Paths, index: int, config: DataOptions, flag: str) -> Path | None:
    """What the option `flag` says of source `index`, None if nothing; UserError for a wrong number."""
    if len(given) not in (0, 1, len(config.data)):
        raise UserError(f"{flag} should be one for all or one each of the {len(config.data)} --data")
    return Path(given[index % len(given)]) if given else None


def _scrambled(name: str) -> str:
    """A sort key without any meaning, so that what stands first is no sort of database."""
    return hashlib.sha256(name.encode()).hexdigest()


def make_environment(config: EpisodeOptions, dataset: Dataset, tokens: ChatTokens, tools: str) -> Environment:
    """The environment that all episodes of a run share."""
    limits = Limits(**{field.name: getattr(config, field.name) for field in fields(Limits)})
    recipe = load_recipe(config.recipe).make_recipe(prompt_options(config))
    executor = Executor(timeout_seconds=config.sql_timeout)
    return Environment(dataset.schemas, recipe, tokens, executor, limits, make_tools(tools))


def prompt_options(config: EpisodeOptions) -> PromptOptions:
    """How the recipe puts its questions."""
    turns = config.max_interactions + 1  # the answer is one more message
    compact = config.wording == "compact"
    return PromptOptions(compact, config.result_characters, config.schema, turns, config.native_thinking)


def make_sampling(config: PolicyOptions, environment: Environment, temperature: float) -> Sampling:
    """How the policy's messages are sampled: until the recipe's stop strings or --max-turn-tokens."""
    stops = environment.recipe.stop_strings
    return Sampling(temperature, max_turn_tokens=config.max_turn_tokens, stop_strings=stops)


def pick_device(name: str) -> torch.device:
    """The device of --device; `auto` is CUDA where there is a GPU.

    Of several GPUs it is the one that `join_processes` chose. Raises UserError for `cuda` without a GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no usable GPU; choose --device cpu")
    return torch.device(name, torch.cuda.current_device() if name == "cuda" else None)


@dataclass(frozen=True)
class Run:
    """What every command that plays episodes works with."""

    processes: Processes
    out: Path
    tokens: ChatTokens
    dataset: Dataset
    environment: Environment
    scorer: Scorer  # over the environment's databases, sharing its executor and cache
    policy: PreTrainedModel | PeftModel

    @property
    def attention(self) -> str:
        """The attention in use, which may be another than was asked for."""
        return self.policy.config._attn_implementation


def begin_run(config: PolicyOptions, split: str, **how: Any) -> Run:
    """The policy of --model, loaded as `how` says, and the questions of a split that it is to answer."""
    processes = join_processes()
    device = pick_device(config.device)
    torch.manual_seed(config.seed)  # new LoRA adapters start at random
    tokens = ChatTokens(load_tokenizer(config.model), config.thinking)
    dataset = load_split(config, split)
    environment = make_environment(config, dataset, tokens, config.tools)
    policy = load_policy(
        config.model, config.dtype, device, attention=config.attention, quantise=config.quantise, **how
    )
    scorer = Scorer(environment.schemas, environment.executor)
    return Run(processes, Path(config.out), tokens, dataset, environment, scorer, policy)


def training_questions(config: RewardOptions, run: Run) -> list[Example]:
    """The questions of the training split that can be scored."""
    return scorable(examples(run.dataset.dialogues, config.history), run.scorer, config.drop_empty)


def drawn_questions(config: CurriculumConfig | DemonstrationsConfig, run: Run) -> list[Example]:
    """--questions of the training questions, drawn by the seed; 0 is all of them."""
    asked = training_questions(config, run)
    if not config.questions:
        return asked
    return random.Random(config.seed).sample(asked, min(config.questions, len(asked)))


def reward_function(config: RewardOptions, run: Run, weights: str = "") -> RewardFunction:
    """The recipe's rewards in the preset of --rewards, with those `weights` changed that are given."""
    decode, options = run.tokens.tokenizer.decode, prompt_options(config)
    return load_recipe(config.recipe).make_reward(config.rewards, weights, run.scorer, decode, options)


@dataclass(frozen=True)
class Training(Run):
    """What a training script works with; `step` and `state` are those of the checkpoint it resumes."""

    reward: RewardFunction
    reference: Reference | None  # the policy of --model, adapters of a warm start included
    optimizer: torch.optim.Optimizer
    step: int
    state: dict[str, Any] | None  # None at the beginning

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """What is trained."""
        return stepped_parameters(self.optimizer)


def begin_training(
    config: TrainingOptions, weights: str = "", reference: bool = False, beta2: float = 0.999
) -> Training:
    """The training split and the policy: with --resume that of the newest checkpoint, else --model's.

    Raises UserError for options that do not go together, and if --out holds a run but --resume is not given.
    """
    if config.shard and config.optimizer == "adamw8bit":
        raise UserError("--shard needs --optimizer adamw; 8-bit moments cannot be sharded")
    lora = {"lora_rank": config.lora_rank, "gradient_checkpointing": config.gradient_checkpointing}
    run = begin_run(config, "train", **lora)
    if config.layout == "shared" and run.attention.startswith("flash"):
        raise UserError("--layout shared needs --attention sdpa; with flash-attn choose packed or rows")
    reward = reward_function(config, run, weights)
    found = find_checkpoint(run.out, config.resume) if run.processes.is_main else None
    checkpoint = run.processes.all_gather(found)[0]
    frozen = Reference(run.policy) if reference else None  # before a checkpoint's weights replace --model's
    if checkpoint is not None:
        restore_policy(run.policy, checkpoint / "policy", config.dtype)
    if config.shard:
        shard_policy(run.policy, run.processes)
    optimizer = make_optimizer(run.policy, config.learning_rate, config.optimizer, beta2)
    step, state = 0, None
    if checkpoint is not None:
        step, state, optimizer_state = load_training_state(checkpoint)
        restore_optimizer(run.policy, optimizer, optimizer_state)
    return Training(**vars(run), reward=reward, reference=frozen, optimizer=optimizer, step=step, state=state)


def find_checkpoint(out: Path, resume: bool) -> Path | None:
    """The newest whole checkpoint of a run to go on from, None to start at the beginning.

    Raises UserError if there is one but --resume is not given.
    """
    newest = newest_checkpoint(out)
    if newest is not None and not resume:
        raise UserError(f"{out} holds a run's checkpoints; go on with --resume or take another --out")
    if newest is None and resume:
        print(f"{out} holds no checkpoint; starting at the beginning")
    return newest


def save_checkpoint(
    config: TrainingOptions, run: Training, optimizer: torch.optim.Optimizer, step: int, state: dict[str, Any]
) -> None:
    """Write the state of a training run after `step` steps; all processes must call it."""
    weights, optimizer_state = whole_state(run.policy, optimizer)
    if run.processes.is_main:
        with new_checkpoint(run.out, step, KEPT_CHECKPOINTS) as folder:
            save_policy(run.policy, run.tokens.tokenizer, folder / "policy", weights)
            save_training_state(folder, optimizer_state, step, state)


def one_piece(config: PolicyOptions, run: Run) -> AbstractContextManager[None]:
    """While the block runs, the adapter is part of the weights if --merge-adapter asks for it."""
    return merged_adapter(run.policy) if config.merge_adapter else nullcontext()


@contextmanager
def weights_for_rollouts(config: PolicyOptions, run: Run) -> Iterator[None]:
    """The policy as rollouts need it while the block runs: whole, and with --merge-adapter in one piece."""
    with whole_weights(run.policy), one_piece(config, run):
        yield


def save_result(run: Run, folder: Path) -> None:
    """Write the policy as an ordinary Hugging Face or adapter folder; all processes must call it."""
    weights, _ = whole_state(run.policy)
    if run.processes.is_main:
        save_policy(run.policy, run.tokens.tokenizer, folder, weights)


def load_dev(config: GrpoConfig, run: Run) -> Run:
    """The run with the first dialogues of another split, for evaluations during training.

    With --held-out it is `held_out`, else `dev`.
    """
    dataset = load_split(config, "held_out" if config.held_out else "dev")
    dataset = replace(dataset, dialogues=dataset.dialogues[: config.evaluate_dialogues or None])
    environment = make_environment(config, dataset, run.tokens, config.tools)
    scorer = Scorer(environment.schemas, environment.executor)
    return replace(run, dataset=dataset, environment=environment, scorer=scorer)


def dev_scores(config: GrpoConfig, dev: Run) -> dict[str, float]:
    """EX, EM, and EX by hardness of greedy answers."""
    with weights_for_rollouts(config, dev):
        answered = answer_split(config, dev, dev.dataset.dialogues, 0.0, config.seed)
    scores = summarise(score_records(answered, dev.scorer, dev.environment.recipe.verifies))
    by_hardness = {f"ex_{name}": value for name, value in scores["ex"]["by_hardness"].items()}
    return {"ex": scores["ex"]["mean"], "em": scores["em"]["mean"], **by_hardness}


def answer_split(
    config: PolicyOptions,
    run: Run,
    dialogues: Sequence[Dialogue],
    temperature: float,
    seed: int,
    progress: Callable | None = None,
) -> list[tuple[Example, Trajectory]]:
    """One trajectory for each question of some dialogues, ordered by dialogue and turn.

    Each process plays its share; all get the whole.
    """
    answered = answer_dialogues(
        run.policy,
        run.environment,
        run.processes.share(dialogues),
        config.history,
        make_sampling(config, run.environment, temperature),
        seed,
        config.rows,
        progress,
        config.cache_gib,
    )
    everything = [pair for share in run.processes.all_gather(answered) for pair in share]
    return sorted(everything, key=lambda pair: (pair[0].dialogue_id, pair[0].turn_index))


def sample_questions(
    config: SftConfig | CurriculumConfig | DemonstrationsConfig,
    run: Run,
    numbered: Sequence[tuple[int, Example]],
    seed: tuple[int, ...],
    title: str,
) -> Iterator[tuple[Example, list[Trajectory]]]:
    """Each question with --samples-per-question trajectories, none if its prompt is too long.

    A trajectory's seed comes from `seed`, the question's number and the sample's. Questions come a chunk at
    a time, so that only what the caller keeps stays in memory.
    """
    sampling = make_sampling(config, run.environment, config.temperature)
    size = max(1, CHUNK * config.rows // config.samples_per_question)
    with tqdm(total=len(numbered), desc=title, unit="question", disable=not run.processes.is_main) as bar:
        for start in range(0, len(numbered), size):
            chunk, episodes = numbered[start : start + size], []
            for number, example in chunk:
                seeds = [trajectory_seed(*seed, number, i) for i in range(config.samples_per_question)]
                episodes += run.environment.episodes(example, seeds)
            episodes = [episode for episode in episodes if episode.trajectory.status is None]
            progress = show(bar, config.samples_per_question, start, len(numbered))
            played = rollout(
                run.policy, run.tokens, episodes, sampling, config.rows, progress, config.cache_gib
            )
            by_question = {name: list(group) for name, group in groupby(played, key=lambda t: t.example_id)}
            yield from ((example, by_question.get(example.id, [])) for _, example in chunk)
            bar.n = start + len(chunk)


def show(
    bar: tqdm, samples: int = 1, start: int = 0, questions: int = 0
) -> Callable[[int, int, dict[str, float]], None]:
    """A rollout's `progress` that shows questions, tokens/s, use of the slots and interactions.

    A question has so many `samples`; `start` of all `questions` (0: the rollout's own) were done before.
    """

    def progress(done: int, total: int, stats: dict[str, float]) -> None:
        bar.total, bar.n = questions or total, start + done // samples
        bar.set_postfix_str(
            f"{stats['tokens_per_second']:.0f} tokens/s, {stats['slots_in_use']:.0%} of slots in use, "
            f"{stats['interactions']:.1f} interactions"
        )

    return progress


def raise_not_finite(run: Run, step: int, trajectories: Sequence[Trajectory]) -> None:
    """Save the trajectories of a micro-batch whose loss is NaN or infinite, and stop."""
    path = run.out / "not_finite.jsonl"
    lines = [json.dumps(trajectory_record(t, run.tokens.tokenizer.decode)) + "\n" for t in trajectories]
    write_atomically(path, "".join(lines))
    raise UserError(f"step {step}: the loss is not finite; its trajectories are in {path}")
