"""The stand-in for a pre-trained language model: a tiny Qwen3 that imitates a scripted agent.

`python -m mtsql.toy.imitation --config configs/toy.toml` writes an ordinary Hugging Face folder, in
bfloat16; models/toy holds those of some seeds. It takes an hour or more, and goes on with --resume after an
interruption.

The scripted agent (`mtsql.toy.scripted_agent`) knows the SQL and uses its tools unevenly. So the model's most
likely behaviour is flawed, as an untrained base model's is, while its SQL skill is not. Beside demonstrations
stand repair lessons: what to write once a fault is noticed, without teaching to notice it. Before all else,
and beside the rest, come exercises on random words (`mtsql.toy.exercises`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mtsql.agent.env import Environment, Recipe
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE, TOOL_SETS
from mtsql.agent.trajectory import Trajectory
from mtsql.config import EpisodeOptions, Positive, from_toml, option, read_options, save_config, user_errors
from mtsql.data.datasets import Dataset, Example, examples
from mtsql.data.schema import Schema, read_json
from mtsql.errors import UserError
from mtsql.files import folder_atomically, hold_folder, refuse_filled
from mtsql.learn.batches import group_micro_batches
from mtsql.learn.checkpoint import (
    CHECKPOINTS,
    find_checkpoint,
    load_training_state,
    new_checkpoint,
    save_training_state,
)
from mtsql.learn.interrupt import INTERRUPTED, finish_step_on_interrupt
from mtsql.learn.logprobs import row_batch, shared_prompt_batch, token_logprobs
from mtsql.learn.loss import sft_loss
from mtsql.learn.model import restore_policy, save_policy
from mtsql.learn.optimizer import cosine_rate, set_learning_rate
from mtsql.recipes import RECIPES, load_recipe
from mtsql.task import load_split, make_environment, pick_device, prompt_options
from mtsql.toy.exercises import copying_exercise, repair_exercise
from mtsql.toy.muon import Muon
from mtsql.toy.scripted_agent import Habits, demonstrations
from mtsql.toy.tiny import tiny_qwen3, train_tokenizer

# What the compact wording adds to a schema and a question, for the tokenizer.
WORDING = f"now: \ntools: {EXEC_SQL} {MEMORY_RETRIEVE}\n1. SELECT -> 2 ; null empty error ..."


@dataclass(frozen=True, kw_only=True)
class ImitationConfig(EpisodeOptions):
    """Options of the imitation phase."""

    SECTION: ClassVar = "imitation"

    copying_steps: int = option(250, "optimizer steps on copying and repair exercises, before all else")
    copying_length: int = option(32, "random tokens in each exercise, to be copied in pieces")
    repair_exercises: int = option(4, "repair exercises beside the questions in each later step")
    answer_steps: int = option(1500, "optimizer steps on direct answers alone: the SQL skill")
    agent_steps: int = option(300, "optimizer steps on demonstrations with every set of tools")
    answer_databases: int = option(2, "databases in each of the former steps")
    agent_databases: int = option(1, "databases in each of the latter steps")
    questions_per_database: int = option(8, "training questions over each database of a step")
    skips_execution: float = option(0.65, "how often the agent does not run a query without conditions")
    skips_memory: float = option(0.55, "how often it does not ask the memory")
    micro_batch_positions: int = option(2500, "positions in one forward pass")
    learning_rate: float = option(4e-3, "peak of a cosine schedule: embeddings and vectors, AdamW")
    matrix_rate: float = option(0.025, "peak of a cosine schedule: matrices, Muon")
    further_recipes: str = option("", "recipes beside --recipe whose formats it learns too: skyrl_sql,...")
    vocabulary: int = option(1600, "pieces that the tokenizer learns, byte and control tokens excluded")
    hidden: int = option(192, "hidden size of the model")
    layers: int = option(4, "layers of the model")
    save_every: Positive = option(250, "optimizer steps between checkpoints")
    resume: bool = option(False, "go on from the newest checkpoint in --out, if one is there")


def markup(recipe: Recipe) -> list[str]:
    """What a recipe always writes before and after a query: one token each for the embedded model."""
    mark = "QUERY"
    return [text for message in (recipe.call(mark), recipe.answer(mark)) for text in message.split(mark)]


def by_database(asked: Sequence[Example], size: int, rng: random.Random) -> list[list[Example]]:
    """All questions in random order, in chunks of `size` over one database each."""
    databases: dict[str, list[Example]] = {}
    for example in rng.sample(asked, len(asked)):
        databases.setdefault(example.db_id, []).append(example)
    chunks = [
        questions[i : i + size]
        for questions in databases.values()
        for i in range(0, len(questions) - size + 1, size)
    ]
    return rng.sample(chunks, len(chunks))


def make_muon(
    model: torch.nn.Module, matrix_rate: float, learning_rate: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and vectors: for training from
    scratch, where it needs fewer steps than AdamW alone.
    """
    inside = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    chosen = {id(p) for p in inside}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    adamw = torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    return [Muon(inside, matrix_rate), adamw]


def _rate(config: ImitationConfig, step: int) -> float:
    """Learning rate as a share of its peak: warm-up while copying, half of a cosine for each phase then."""
    if step < config.copying_steps:
        return min(1.0, (step + 1) / 40)
    step -= config.copying_steps
    if step < config.answer_steps:
        return cosine_rate(1.0, 0.5 * step / config.answer_steps, warmup=0.0)
    return cosine_rate(1.0, 0.5 + 0.5 * (step - config.answer_steps) / config.agent_steps, warmup=0.0)


def recipes_of(config: ImitationConfig) -> list[str]:
    """--recipe and --further-recipes. Raises UserError for an unknown one."""
    further = list(filter(None, config.further_recipes.split(",")))
    for name in further:
        if name not in RECIPES:
            raise UserError(
                f"--further-recipes {name} is unknown; choose from {', '.join(RECIPES)}, with commas"
            )
    return [config.recipe, *further]


def make_tokenizer(
    config: ImitationConfig, schemas: Iterable[Schema], asked: Sequence[Example]
) -> PreTrainedTokenizerFast:
    """A tokenizer of the words of schemas, questions and gold SQL, with a token for each recipe's markup."""
    texts = [schema.text(compact=True) for schema in schemas]
    texts += [text for e in asked for text in (e.question, e.gold_sql)]
    texts += [WORDING] * len(asked)
    tagged = [name for name in recipes_of(config) if name != RECIPES[0]]  # its tags are always there
    tags = [tag for name in tagged for tag in markup(load_recipe(name).make_recipe(prompt_options(config)))]
    return train_tokenizer(texts, config.vocabulary, list(dict.fromkeys(tags)))


def make_environments(
    config: ImitationConfig, dataset: Dataset, tokens: ChatTokens
) -> list[dict[str, Environment]]:
    """The environments of each recipe, by the set of tools."""
    environments = []
    for name in recipes_of(config):
        played = config
        if name != config.recipe:
            turns = from_toml(Path("configs") / f"{name}.toml", ImitationConfig)["max_interactions"]
            played = replace(config, recipe=name, max_interactions=turns)
        environments.append({tools: make_environment(played, dataset, tokens, tools) for tools in TOOL_SETS})
    return environments


def training_groups(
    config: ImitationConfig, dataset: Dataset, tokens: ChatTokens, asked: Sequence[Example]
) -> Iterator[tuple[str, list[list[Trajectory]]]]:
    """For each optimizer step its phase and its trajectories, in groups.

    The phases are "copying", "answers" and "agent"; the groups of the latter two are of one database each.
    """
    environments = make_environments(config, dataset, tokens)
    dialogues = enumerate(read_json(Path(config.data[0]) / "scripted_mistakes.json"))
    wrong = {f"{i:05d}/{turn}": found for i, turns in dialogues for turn, found in enumerate(turns)}
    habits = Habits(skips_execution=config.skips_execution, skips_memory=config.skips_memory)
    rng = random.Random(config.seed)
    pieces = tokens.tokenizer.get_vocab()
    copyable = sorted(i for piece, i in pieces.items() if not piece.startswith("<"))
    words = sorted(i for piece, i in pieces.items() if piece[0] == " " and piece[1:].isalpha())

    def repairs(count: int) -> list[list[Trajectory]]:
        return [[repair_exercise(tokens, words, config.copying_length, rng)] for _ in range(count)]

    for _ in range(config.copying_steps):
        copying = [[copying_exercise(copyable, config.copying_length, rng)] for _ in range(8)]
        yield "copying", copying + repairs(8)
    order: list[list[Example]] = []
    for phase, steps, databases in (
        ("answers", config.answer_steps, config.answer_databases),
        ("agent", config.agent_steps, config.agent_databases),
    ):
        for _ in range(steps):
            if len(order) < databases:
                order += by_database(asked, config.questions_per_database, rng)
            groups, chunks, order = [], order[:databases], order[databases:]
            for chunk in chunks:
                played = environments[0] if len(environments) == 1 else rng.choice(environments)
                shown = [demonstrations(phase, played, e, wrong[e.id], habits, rng) for e in chunk]
                groups.append([trajectory for one in shown for trajectory in one])
            yield phase, groups + repairs(config.repair_exercises)


def save_checkpoint(
    config: ImitationConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    optimizers: Sequence[torch.optim.Optimizer],
    step: int,
) -> None:
    """Write what `resume_from` needs after `step` steps, in place of the checkpoint before."""
    with new_checkpoint(Path(config.out), step, keep=1) as folder:
        save_policy(model, tokenizer, folder / "policy")
        states = {str(i): optimizer.state_dict() for i, optimizer in enumerate(optimizers)}
        save_training_state(folder, states, step, {"options": fixed_options(config)})


def resume_from(
    checkpoint: Path,
    config: ImitationConfig,
    model: PreTrainedModel,
    optimizers: Sequence[torch.optim.Optimizer],
) -> int:
    """Put weights and optimizers back; the steps they have taken. Raises UserError for other options."""
    step, extra, states = load_training_state(checkpoint)
    now = fixed_options(config)
    for name, before in extra["options"].items():
        if now[name] != before:
            raise UserError(
                f"{config.out} goes on with the same options only: --{name.replace('_', '-')} was {before}, "
                f"is now {now[name]}"
            )
    restore_policy(model, checkpoint / "policy", "float32")
    for i, optimizer in enumerate(optimizers):
        optimizer.load_state_dict(states[str(i)])
    return step


def fixed_options(config: ImitationConfig) -> dict[str, str]:
    """The options on which the weights depend, in words."""
    free = ("out", "resume", "save_every", "device")
    return {name: str(value) for name, value in asdict(config).items() if name not in free}


def take_step(
    config: ImitationConfig,
    model: PreTrainedModel,
    optimizers: Sequence[torch.optim.Optimizer],
    step: int,
    phase: str,
    groups: list[list[Trajectory]],
) -> float:
    """One step of both optimizers on a step's trajectories; the mean loss a token."""
    trained_tokens = sum(sum(t.loss_mask) for group in groups for t in group)
    for optimizer, peak in zip(optimizers, (config.matrix_rate, config.learning_rate), strict=True):
        set_learning_rate(optimizer, peak * _rate(config, step))
        optimizer.zero_grad()
    total = 0.0
    for micro_batch in group_micro_batches(groups, config.micro_batch_positions):
        if phase == "copying":
            token_batch = row_batch([t for group in micro_batch for t in group], model.device)
        else:
            token_batch = shared_prompt_batch(micro_batch, model.device)
        logprobs, _ = token_logprobs(model, token_batch)
        loss = sft_loss(logprobs, trained_tokens)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return total


def imitate(config: ImitationConfig, checkpoint: Path | None) -> int:
    """Train tokenizer and model, from a checkpoint on if there is one, and save them; gives the exit code."""
    out, dataset = Path(config.out), load_split(config, "train")
    asked = examples(dataset.dialogues)
    trained = {dialogue.db_id for dialogue in dataset.dialogues}  # the other splits must stay unseen
    schemas = [schema for name, schema in dataset.schemas.items() if name in trained]
    tokenizer = make_tokenizer(config, schemas, asked)
    model = tiny_qwen3(tokenizer, config.hidden, config.layers, config.seed).to(pick_device(config.device))
    print(f"tiny Qwen3: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    optimizers = make_muon(model, config.matrix_rate, config.learning_rate)
    taken = resume_from(checkpoint, config, model, optimizers) if checkpoint else 0
    steps = config.copying_steps + config.answer_steps + config.agent_steps
    groups_of_steps = training_groups(config, dataset, ChatTokens(tokenizer), asked)
    bar = tqdm(groups_of_steps, desc="imitation", total=steps, unit="step", mininterval=5.0)
    with finish_step_on_interrupt() as interrupted:
        for step, (phase, groups) in enumerate(bar):
            if step < taken:  # its lessons are drawn again, so that those after it are the same
                continue
            loss = take_step(config, model, optimizers, step, phase, groups)
            bar.set_postfix_str(f"{phase}, loss {loss:.3f}", refresh=False)
            if interrupted or (step + 1) % config.save_every == 0:
                save_checkpoint(config, model, tokenizer, optimizers, step + 1)
            if interrupted:
                print(f"saved a checkpoint after step {step + 1} in {out}; go on with --resume")
                return INTERRUPTED
    with folder_atomically(out) as whole:
        save_policy(model.to(torch.bfloat16), tokenizer, whole)
        save_config(config, whole)
    return 0


def main(config: ImitationConfig) -> int:
    """Make the model, a Hugging Face folder with its run.json; returns the exit code.

    Raises UserError for a shape that cannot be, and if --out exists; the minutes and the checkpoints of an
    attempt that was interrupted may stand in it.
    """
    out = Path(config.out)
    if config.hidden < 1 or config.hidden % 96 or config.layers < 2:
        raise UserError("--hidden should be a multiple of 96 (heads of 48 in pairs) and --layers at least 2")
    refuse_filled(out, ["run.json.minutes", CHECKPOINTS])
    with hold_folder(out):
        return imitate(config, find_checkpoint(out, config.resume))


if __name__ == "__main__":
    user_errors(main, read_options(ImitationConfig, __doc__))
