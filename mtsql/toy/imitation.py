"""The stand-in for a pre-trained language model: a tiny Qwen3 that imitates a scripted agent.

`python -m mtsql.toy.imitation --config configs/toy.toml` writes an ordinary Hugging Face folder, in
bfloat16; models/toy holds those of some seeds. It takes an hour or more.

The scripted agent (`mtsql.toy.scripted_agent`) knows the SQL and uses its tools unevenly. So the model's most
likely behaviour is flawed, as an untrained base model's is, while its SQL skill is not. Beside demonstrations
stand repair lessons: what to write once a fault is noticed, without teaching to notice it. Before all else,
and beside the rest, come exercises on random words.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import ClassVar

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mtsql.agent.env import Environment
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE, TOOL_SETS
from mtsql.agent.trajectory import Trajectory
from mtsql.config import Common, from_toml, option, read_options, save_config, user_errors
from mtsql.data.datasets import Dataset, Example, examples
from mtsql.data.schema import read_json
from mtsql.errors import UserError
from mtsql.files import folder_atomically, hold_folder, refuse_filled, shipped
from mtsql.learn.batches import micro_batches
from mtsql.learn.logprobs import row_batch, shared_prompt_batch, token_logprobs
from mtsql.learn.loss import sft_loss
from mtsql.learn.model import cosine_rate, save_policy, set_learning_rate
from mtsql.recipes import RECIPES, load_recipe
from mtsql.task import load_split, make_environment, pick_device, prompt_options
from mtsql.toy.scripted_agent import Habits, copying_exercise, lessons, repair_exercise
from mtsql.toy.tiny import tiny_qwen3, train_tokenizer

# What the compact wording adds to a schema and a question, for the tokenizer.
WORDING = f"now: \ntools: {EXEC_SQL} {MEMORY_RETRIEVE}\n1. SELECT -> 2 ; null empty error ..."
VOCABULARY = 1600  # pieces that the tokenizer learns, byte and control tokens excluded
EXERCISE = 32  # random tokens in an exercise
DATABASES = {"answers": 2, "agent": 1}  # databases in each step of a phase
MATRIX_RATE, LEARNING_RATE = 0.025, 4e-3  # peaks of the schedule: matrices, Muon; all else, AdamW
MICRO_BATCH_POSITIONS = 2500


@dataclass(frozen=True, kw_only=True)
class ImitationConfig(Common):
    """Options of the imitation phase."""

    SECTION: ClassVar = "imitation"

    model: str = option("", "nothing: the model is a new one")
    copying_steps: int = option(250, "optimizer steps on copying and repair exercises, before all else")
    repair_exercises: int = option(4, "repair exercises beside the questions in each later step")
    answer_steps: int = option(1500, "optimizer steps on direct answers alone: the SQL skill")
    agent_steps: int = option(300, "optimizer steps on demonstrations with every set of tools")
    questions_per_database: int = option(8, "training questions over each database of a step", least=1)
    skips_execution: float = option(0.65, "how often the agent does not run a query without conditions")
    skips_memory: float = option(0.55, "how often it does not ask the memory")
    all_recipes: bool = option(False, "learn the formats of all papers' recipes, not of --recipe alone")
    hidden: int = option(192, "hidden size of the model")
    layers: int = option(4, "layers of the model")


class Muon(torch.optim.Optimizer):
    """The orthogonalised momentum of matrices (Jordan 2024), with Nesterov's look-ahead.

    For training from scratch, where it needs fewer steps than AdamW. A matrix with more rows than columns
    takes longer steps. In float32: torch.optim.Muon iterates in bfloat16, which is slow on many processors.
    """

    def __init__(self, matrices: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(matrices, {"lr": 0.0, "momentum": 0.95, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step on the gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.state[p].setdefault("momentum", torch.zeros_like(p))
                velocity.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalised(p.grad.lerp(velocity, group["momentum"]))
                rate = group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Nearly the nearest orthogonal matrix: five Newton-Schulz steps; singular values end in 0.7 to 1.2."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalised(matrix.mT).mT
    x = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT  # (rows, rows)
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x


def make_optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and vectors."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [model.get_input_embeddings().weight, *(p for p in model.parameters() if p.ndim == 1)]
    return [Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)]


def by_database(asked: Sequence[Example], size: int, rng: random.Random) -> list[list[Example]]:
    """Questions in random order, in chunks of `size` over one database each; what is left is not asked."""
    databases = defaultdict(list)
    for example in rng.sample(asked, len(asked)):
        databases[example.db_id].append(example)
    chunks = [of[i : i + size] for of in databases.values() for i in range(0, len(of) - size + 1, size)]
    return rng.sample(chunks, len(chunks))


def recipes_of(config: ImitationConfig) -> Sequence[str]:
    """The recipes whose formats the model learns."""
    return RECIPES if config.all_recipes else (config.recipe,)


def make_tokenizer(config: ImitationConfig, dataset: Dataset) -> PreTrainedTokenizerFast:
    """A tokenizer of the words of schemas, questions and gold SQL.

    What a recipe always writes before and after a query is a token each; MTSQL-R1's always is.
    """
    trained = {dialogue.db_id for dialogue in dataset.dialogues}  # the other splits must stay unseen
    texts = [schema.text(compact=True) for name, schema in dataset.schemas.items() if name in trained]
    for example in examples(dataset.dialogues):
        texts += [example.question, example.gold_sql, WORDING]
    tags: list[str] = []
    for name in recipes_of(config):
        recipe = load_recipe(name).make_recipe(prompt_options(config))
        tags += [*recipe.call("QUERY").split("QUERY"), *recipe.answer("QUERY").split("QUERY")]
    return train_tokenizer(texts, VOCABULARY, tags)


def make_environments(
    config: ImitationConfig, dataset: Dataset, tokens: ChatTokens
) -> list[dict[str, Environment]]:
    """Each recipe's environments by set of tools; one beside --recipe has its paper's number of turns."""
    environments = []
    for name in recipes_of(config):
        played = replace(config, recipe=name)
        if name != config.recipe:
            own = from_toml(shipped(f"configs/{name}.toml"), ImitationConfig)
            played = replace(played, max_interactions=own["max_interactions"])
        environments.append({tools: make_environment(played, dataset, tokens, tools) for tools in TOOL_SETS})
    return environments


def training_groups(
    config: ImitationConfig, dataset: Dataset, tokens: ChatTokens
) -> Iterator[tuple[str, list[list[Trajectory]]]]:
    """For each optimizer step its phase and its trajectories, in groups.

    The phases are "copying", "answers" and "agent"; the groups of the latter two are of one database each.
    """
    environments = make_environments(config, dataset, tokens)
    dialogues = chain(*(read_json(Path(folder) / "scripted_mistakes.json") for folder in config.data))
    wrong = {f"{i:05d}/{t}": found for i, turns in enumerate(dialogues) for t, found in enumerate(turns)}
    habits = Habits(skips_execution=config.skips_execution, skips_memory=config.skips_memory)
    rng = random.Random(config.seed)
    pieces = tokens.tokenizer.get_vocab()
    copyable = sorted(i for piece, i in pieces.items() if not piece.startswith("<"))
    words = sorted(i for piece, i in pieces.items() if piece[0] == " " and piece[1:].isalpha())
    asked, chunks = examples(dataset.dialogues), []
    steps = {"copying": config.copying_steps, "answers": config.answer_steps, "agent": config.agent_steps}
    for phase in chain.from_iterable([phase] * count for phase, count in steps.items()):
        if phase == "copying":
            groups = [[copying_exercise(copyable, EXERCISE, rng)] for _ in range(8)]
        else:
            if len(chunks) < DATABASES[phase]:
                chunks += by_database(asked, config.questions_per_database, rng)
                if len(chunks) < DATABASES[phase]:
                    raise UserError(
                        "too few databases have so many questions; lower --questions-per-database"
                    )
            groups = []
            for _ in range(DATABASES[phase]):
                played = environments[0] if len(environments) == 1 else rng.choice(environments)
                taught = (lessons(phase, played, e, wrong[e.id], habits, rng) for e in chunks.pop(0))
                groups.append(list(chain.from_iterable(taught)))
        repairs = 8 if phase == "copying" else config.repair_exercises
        exercises = [[repair_exercise(tokens, words, EXERCISE, rng)] for _ in range(repairs)]
        yield phase, groups + exercises


def rate_at(config: ImitationConfig, step: int) -> float:
    """Learning rate as a share of its peak: warm-up while copying, half of a cosine for each phase then."""
    if step < config.copying_steps:
        return min(1.0, (step + 1) / 40)
    answers, agent = config.answer_steps, config.agent_steps
    step -= config.copying_steps
    phases = step / answers if step < answers else 1 + (step - answers) / agent
    return cosine_rate(1.0, phases / 2, warmup=0.0)


def take_step(model: PreTrainedModel, optimizers: Sequence, rate: float, phase: str, groups: list) -> float:
    """One step of both optimizers on a step's trajectories; the mean loss a token."""
    trained_tokens = sum(t.trained_length for group in groups for t in group)
    for optimizer, peak in zip(optimizers, (MATRIX_RATE, LEARNING_RATE), strict=True):
        set_learning_rate(optimizer, peak * rate)
        optimizer.zero_grad()
    total = 0.0
    for micro_batch in micro_batches(groups, MICRO_BATCH_POSITIONS):
        flat = [t for group in micro_batch for t in group]
        copying = phase == "copying"  # random tokens share no prompt
        batch = row_batch(flat, model.device) if copying else shared_prompt_batch(micro_batch, model.device)
        logprobs, _ = token_logprobs(model, batch)
        loss = sft_loss(logprobs, trained_tokens)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return total


def main(config: ImitationConfig) -> None:
    """Make tokenizer and model: a Hugging Face folder with its run.json.

    Raises UserError for a shape that cannot be, and if --out exists.
    """
    if config.hidden < 1 or config.hidden % 96 or config.layers < 2:
        raise UserError("--hidden should be a multiple of 96 (heads of 48 in pairs) and --layers at least 2")
    out = Path(config.out)
    refuse_filled(out)
    lock = hold_folder(out)
    dataset = load_split(config, "train")
    tokenizer = make_tokenizer(config, dataset)
    model = tiny_qwen3(tokenizer, config.hidden, config.layers, config.seed).to(pick_device())
    print(f"tiny Qwen3: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    optimizers = make_optimizers(model)
    groups_of_steps = training_groups(config, dataset, ChatTokens(tokenizer))
    steps = config.copying_steps + config.answer_steps + config.agent_steps
    bar = tqdm(groups_of_steps, desc="imitation", total=steps, unit="step", mininterval=5.0)
    for step, (phase, groups) in enumerate(bar):
        loss = take_step(model, optimizers, rate_at(config, step), phase, groups)
        bar.set_postfix_str(f"{phase}, loss {loss:.3f}", refresh=False)
    with lock, folder_atomically(out) as whole:
        save_policy(model.to(torch.bfloat16), tokenizer, whole)
        save_config(config, whole)


if __name__ == "__main__":
    user_errors(main, read_options(ImitationConfig, __doc__))
