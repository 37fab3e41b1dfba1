"""The stand-in for a pre-trained language model: a tiny Qwen3 that imitates a scripted agent.

`python -m mtsql.toy.imitation --config configs/toy.toml` writes an ordinary Hugging Face folder.

The scripted agent knows the SQL and uses its tools unevenly: its first query is often wrong, in a way
that the database or the memory reveals, it often skips a tool, and notices only sometimes what a tool
shows. So its most likely behaviour is flawed, as an untrained base model's is, while its SQL skill is not.
It plays in the real environment: observations, tokens and loss masks are those of the recipe. Beside its
demonstrations stand repair lessons: what to write once a fault is noticed, without teaching to notice it.
Before all else, and beside the rest, come exercises on random words (`mtsql.toy.exercises`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from mtsql.agent.env import Environment, Episode, Recipe
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE, TOOL_SETS
from mtsql.agent.trajectory import ActionType, Stop, Trajectory
from mtsql.config import Common, load_config, option, save_config, user_errors
from mtsql.data.datasets import Example, examples
from mtsql.data.schema import read_json
from mtsql.learn.batches import group_micro_batches
from mtsql.learn.logprobs import row_batch, shared_prompt_batch, token_logprobs
from mtsql.learn.loss import sft_loss
from mtsql.learn.model import save_policy
from mtsql.learn.optimizer import cosine_rate, set_learning_rate
from mtsql.recipes import RECIPES, load_recipe
from mtsql.recipes.mtsql_r1_prompts import tool_call, verdict
from mtsql.run import load_split, make_environment, pick_device, wording_of
from mtsql.toy.exercises import copying_exercise, repair_exercise
from mtsql.toy.tiny import tiny_qwen3, train_tokenizer


@dataclass(frozen=True)
class Habits:
    """Probabilities of the scripted agent."""

    wrong_first: float = 0.9
    wrong_name: float = 0.4  # where the only mistakes at hand are wrong columns
    notices_execution: float = 0.4
    notices_memory: float = 0.35
    false_alarm: float = 0.03
    right_repair: float = 0.8
    skips_execution: float = 0.0  # of a query without conditions, of which the agent is too sure
    skips_memory: float = 0.0


ATTENTIVE = Habits(wrong_first=1, wrong_name=1, notices_execution=1, notices_memory=1, false_alarm=0)


# Mistakes that a tool reveals and a careful second look repairs; wrong columns come where there is none.
CARELESS = ("lost_constraint", "stale_value", "value_form")


# What the compact wording adds to a schema and a question, for the tokenizer.
WORDING = f"now: \ntools: {EXEC_SQL} {MEMORY_RETRIEVE}\n1. SELECT -> 2 ; null empty error ..."


def demonstrate(episode: Episode, wrong: list[dict], habits: Habits, rng: random.Random) -> Trajectory:
    """Play one episode as the scripted agent; `wrong` are the question's mistakes ({kind, query}).

    Without any tool the agent answers with what it knows, the gold SQL.
    """
    gold, tools, recipe = episode.example.gold_sql, episode.tools, episode.recipe
    careless = [m for m in wrong if m["kind"] in CARELESS]
    kind = rng.choice(sorted({m["kind"] for m in careless or wrong}) or [""])
    likely = [m["query"] for m in wrong if m["kind"] == kind]
    sql = gold
    if tools and likely and rng.random() < (habits.wrong_first if careless else habits.wrong_name):
        sql = rng.choice(likely)

    def repair() -> str:
        others = [q for q in likely if q != sql]
        return gold if not others or rng.random() < habits.right_repair else rng.choice(others)

    def say(text: str) -> bool:
        """Send one message; whether the episode goes on."""
        ids = episode.tokens.message_ids(text)
        return episode.step(ids, [0.0] * len(ids), stop=Stop.END_OF_TURN) is not None

    has_memory = recipe.verifies and MEMORY_RETRIEVE in tools and bool(episode.example.history)
    verdicts = ""
    executed = " WHERE " not in sql and rng.random() < habits.skips_execution
    checked_memory = rng.random() < habits.skips_memory
    while True:
        last = episode.trajectory.interactions == episode.limits.max_interactions
        if last or ((executed or EXEC_SQL not in tools) and (checked_memory or not has_memory)):
            say(verdicts + recipe.answer(sql))
            return episode.trajectory
        if not executed and EXEC_SQL in tools:
            say(verdicts + recipe.call(sql))
            suspicious = _suspicious(episode)
            alarm = rng.random() < (habits.notices_execution if suspicious else habits.false_alarm)
            verdicts = verdict(EXEC_SQL, not alarm) + "\n" if recipe.verifies else ""
            if alarm:
                sql = repair() if suspicious else sql
            executed = not alarm
        else:
            say(verdicts + tool_call(MEMORY_RETRIEVE, sql))
            alarm = rng.random() < (habits.notices_memory if sql != gold else habits.false_alarm)
            verdicts = verdict(MEMORY_RETRIEVE, not alarm) + "\n"
            checked_memory = not alarm or rng.random() < habits.skips_memory
            if alarm:
                sql = repair() if sql != gold else sql
                executed = False


def _suspicious(episode: Episode) -> bool:
    """Whether the last result looks wrong: an error, nothing, or a lone zero."""
    observation = episode.trajectory.observations[-1]
    return observation.outcome != "ok" or episode.result.rows == ((0,),)


def repair_lesson(
    environments: dict[str, Environment], example: Example, wrong: list[dict], rng: random.Random
) -> list[Trajectory]:
    """A demonstration up to its first repair, with loss mask 1 on the repair alone, behind the verdict.

    Empty where there is nothing to repair.
    """
    episode = environments["both"].episodes(example, [0])[0]
    verifies = episode.recipe.verifies
    kind = rng.choice(sorted({m["kind"] for m in wrong}) or [""])
    demonstration = demonstrate(episode, [m for m in wrong if m["kind"] == kind], ATTENTIVE, rng)
    repairs = [
        a.message
        for a in demonstration.actions
        if (a.passed is False if verifies else a.type is ActionType.SELF_CORRECT)
    ]
    if not repairs:
        return []
    last = 2 * min(repairs) + 1  # segments: prompt, message, observation, message, ...
    segments = [
        replace(segment, loss_mask=(0,) * len(segment.ids)) for segment in demonstration.segments[: last + 1]
    ]
    ids = segments[last].ids
    seen = verdict(demonstration.observations[min(repairs)].tool, False) + "\n" if verifies else ""
    behind = episode.tokens.count(seen)
    segments[last] = replace(segments[last], loss_mask=tuple(int(i >= behind) for i in range(len(ids))))
    return [replace(demonstration, segments=segments)]


@dataclass(frozen=True, kw_only=True)
class ImitationConfig(Common):
    """Configuration of the imitation phase."""

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


def demonstrations(
    phase: str,
    environments: dict[str, Environment],
    example: Example,
    wrong: list[dict],
    habits: Habits,
    rng: random.Random,
) -> list[Trajectory]:
    """What one question gives to one phase.

    "answers": a direct answer without tools. "agent": a demonstration with all tools, and at times
    without any or, where there are two, with a single one, so that the model knows every set of Table 4.
    A repair lesson goes with it.
    """
    shown = ["none"]
    if phase == "agent":
        single = (
            ("no_execution", "no_memory", None, None) if environments["both"].recipe.verifies else (None,)
        )
        others = (rng.choice(("none", None)), rng.choice(single))
        shown = ["both", *filter(None, others)]
    lessons = repair_lesson(environments, example, wrong, rng) if phase == "agent" else []
    return [
        demonstrate(environments[tools].episodes(example, [0])[0], wrong, habits, rng) for tools in shown
    ] + lessons


def markup(recipe: Recipe) -> list[str]:
    """What a recipe always writes before and after a query: one token each for the embedded model."""
    mark = "QUERY"
    return [part for message in (recipe.call(mark), recipe.answer(mark)) for part in message.split(mark)]


def by_database(asked: list[Example], size: int, rng: random.Random) -> list[list[Example]]:
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
    scratch, where it needs about half the steps of AdamW alone.
    """
    inside = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    chosen = {id(p) for p in inside}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(inside, lr=matrix_rate, weight_decay=0.01, adjust_lr_fn="original")
    return [muon, torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)]


def _rate(config: ImitationConfig, step: int) -> float:
    """Learning rate as a share of its peak: warm-up while copying, half of a cosine for each phase then."""
    if step < config.copying_steps:
        return min(1.0, (step + 1) / 40)
    step -= config.copying_steps
    if step < config.answer_steps:
        return cosine_rate(1.0, 0.5 * step / config.answer_steps, warmup=0.0)
    return cosine_rate(1.0, 0.5 + 0.5 * (step - config.answer_steps) / config.agent_steps, warmup=0.0)


def main() -> None:
    """Train the tokenizer and the model, and save them as a Hugging Face folder."""
    config = load_config(ImitationConfig, "imitation", __doc__)
    dataset = load_split(config, "train")
    mistakes_file = Path(config.data) / "scripted_mistakes.json"
    wrong = {
        f"{number:05d}/{turn}": found
        for number, dialogue in enumerate(read_json(mistakes_file))
        for turn, found in enumerate(dialogue)
    }
    asked = examples(dataset.dialogues)
    texts = [schema.text(compact=True) for schema in dataset.schemas.values()]
    texts += [text for e in asked for text in (e.question, e.gold_sql)]
    texts += [WORDING] * len(asked)
    further = list(filter(None, config.further_recipes.split(",")))
    unknown = sorted(set(further) - set(RECIPES))
    if unknown:
        raise ValueError(
            f"--further-recipes {unknown[0]} is unknown; choose from {', '.join(RECIPES)}, with commas"
        )
    tagged = [name for name in (config.recipe, *further) if name != RECIPES[0]]  # its tags are always there
    tags = [tag for name in tagged for tag in markup(load_recipe(name).make_recipe(wording_of(config)))]
    tokenizer = train_tokenizer(texts, config.vocabulary, list(dict.fromkeys(tags)))
    tokens = ChatTokens(tokenizer)
    environments = []  # of each recipe, by the set of tools
    for name in (config.recipe, *further):
        played = config
        if name != config.recipe:
            turns = load_recipe(name).SETTINGS["max_interactions"]
            played = replace(config, recipe=name, max_interactions=turns)
        environments.append({t: make_environment(played, dataset, tokens, t) for t in TOOL_SETS})
    device = pick_device(config.device)
    model = tiny_qwen3(tokenizer, config.hidden, config.layers, config.seed).to(device)
    print(f"tiny Qwen3: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    habits = Habits(skips_execution=config.skips_execution, skips_memory=config.skips_memory)
    optimizers = make_muon(model, config.matrix_rate, config.learning_rate)
    rng = random.Random(config.seed)
    pieces = tokenizer.get_vocab()
    copyable = sorted(i for piece, i in pieces.items() if not piece.startswith("<"))
    words = sorted(i for piece, i in pieces.items() if piece[0] == " " and piece[1:].isalpha())
    order: list[list[Example]] = []  # questions over one database, some at a time
    phases = (
        ["copying"] * config.copying_steps
        + ["answers"] * config.answer_steps
        + ["agent"] * config.agent_steps
    )
    bar = tqdm(phases, desc="imitation", unit="step", mininterval=5.0)
    for step, phase in enumerate(bar):
        if phase == "copying":
            groups = [[copying_exercise(copyable, config.copying_length, rng)] for _ in range(8)]
            groups += [[repair_exercise(tokens, words, config.copying_length, rng)] for _ in range(8)]
        else:
            databases = config.answer_databases if phase == "answers" else config.agent_databases
            if len(order) < databases:
                order += by_database(asked, config.questions_per_database, rng)
            batch, order = order[:databases], order[databases:]
            groups = []
            for chunk in batch:
                played = environments[0] if len(environments) == 1 else rng.choice(environments)
                group = [demonstrations(phase, played, e, wrong[e.id], habits, rng) for e in chunk]
                groups.append([t for found in group for t in found])
            groups += [
                [repair_exercise(tokens, words, config.copying_length, rng)]
                for _ in range(config.repair_exercises)
            ]
        trained_tokens = sum(sum(t.loss_mask) for group in groups for t in group)
        for optimizer, peak in zip(optimizers, (config.matrix_rate, config.learning_rate), strict=True):
            set_learning_rate(optimizer, peak * _rate(config, step))
            optimizer.zero_grad()
        total = 0.0
        for part in group_micro_batches(groups, config.micro_batch_positions):
            token_batch = (
                row_batch([t for group in part for t in group], device)
                if phase == "copying"
                else shared_prompt_batch(part, device)
            )
            logprobs, _ = token_logprobs(model, token_batch)
            loss = sft_loss(logprobs, trained_tokens)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        bar.set_postfix_str(f"{phase}, loss {total:.3f}", refresh=False)
    save_policy(model, tokenizer, Path(config.out))
    save_config(config, Path(config.out))


if __name__ == "__main__":
    user_errors(main)
