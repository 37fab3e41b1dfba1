"""The stand-in for a pre-trained language model: a tiny Qwen3 that imitates a scripted agent.

`python -m mtsql.learn.imitation --config configs/toy.toml` writes an ordinary Hugging Face folder.

The scripted agent knows the SQL and uses its tools unevenly: its first query is often wrong, in a way
that the database or the memory reveals, and it notices only sometimes. So its most likely behaviour is
flawed, as an untrained base model's is, while its SQL skill is not. It plays in the real environment:
observations, tokens and loss masks are those of the recipe.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from mtsql.agent.env import EXEC_SQL, MEMORY_RETRIEVE, TOOL_SETS, Environment, Episode
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.trajectory import Trajectory
from mtsql.config import Common, load_config, option, save_config
from mtsql.data.datasets import Example, examples
from mtsql.data.schema import read_json
from mtsql.learn.batches import group_micro_batches
from mtsql.learn.loss import sft_loss, shared_prompt_batch, token_logprobs
from mtsql.learn.model import save_policy
from mtsql.learn.optimizer import cosine_rate, make_muon, set_learning_rate
from mtsql.learn.tiny import tiny_qwen3, train_tokenizer
from mtsql.recipes.mtsql_r1 import tool_call, verdict
from mtsql.run import load_split, make_environment, pick_device, user_errors


@dataclass(frozen=True)
class Habits:
    """Probabilities of the scripted agent."""

    wrong_first: float = 0.65
    notices_execution: float = 0.4
    notices_memory: float = 0.35
    false_alarm: float = 0.03
    right_repair: float = 0.8


# The mistake of each question: the first kind that applies to it.
MISTAKE_ORDER = ("lost_constraint", "stale_value", "value_form", "look_alike", "misnamed_column")


def demonstrate(episode: Episode, wrong: list[dict], habits: Habits, rng: random.Random) -> Trajectory:
    """Play one episode as the scripted agent; `wrong` are the question's mistakes ({kind, query}).

    Without any tool the agent answers with what it knows, the gold SQL.
    """
    gold, tools = episode.example.gold_sql, episode.tools
    ordered = sorted(wrong, key=lambda m: MISTAKE_ORDER.index(m["kind"]))
    likely = [m["query"] for m in ordered if m["kind"] == ordered[0]["kind"]]
    sql = gold
    if tools and likely and rng.random() < habits.wrong_first:
        sql = likely[0] if rng.random() < 0.8 else rng.choice(likely)

    def repair() -> str:
        others = [q for q in likely if q != sql]
        return gold if not others or rng.random() < habits.right_repair else rng.choice(others)

    def say(text: str) -> bool:
        """Send one message; whether the episode goes on."""
        ids = episode.tokens.message_ids(text)
        return episode.step(ids, [0.0] * len(ids), ended=True) is not None

    has_memory = MEMORY_RETRIEVE in tools and bool(episode.example.history)
    verdicts = ""
    checked_memory = executed = False
    while True:
        last = episode.trajectory.interactions == episode.limits.max_interactions - 1
        if last or ((executed or EXEC_SQL not in tools) and (checked_memory or not has_memory)):
            say(f"{verdicts}<answer_sql>{sql}</answer_sql>")
            return episode.trajectory
        if not executed and EXEC_SQL in tools:
            say(verdicts + tool_call(EXEC_SQL, sql))
            suspicious = _suspicious(episode)
            alarm = rng.random() < (habits.notices_execution if suspicious else habits.false_alarm)
            verdicts = verdict(EXEC_SQL, not alarm) + "\n"
            if alarm:
                sql = repair() if suspicious else sql
            executed = not alarm
        else:
            say(verdicts + tool_call(MEMORY_RETRIEVE, sql))
            alarm = rng.random() < (habits.notices_memory if sql != gold else habits.false_alarm)
            verdicts = verdict(MEMORY_RETRIEVE, not alarm) + "\n"
            checked_memory = True
            if alarm:
                sql = repair() if sql != gold else sql
                executed = False


def _suspicious(episode: Episode) -> bool:
    """Whether the last result looks wrong: an error, nothing, or a lone zero."""
    observation = episode.trajectory.observations[-1]
    return observation.outcome != "ok" or episode.result.rows == ((0,),)


@dataclass(frozen=True, kw_only=True)
class ImitationConfig(Common):
    """Configuration of the imitation phase."""

    answer_steps: int = option(1500, "optimizer steps on direct answers alone: the SQL skill")
    agent_steps: int = option(300, "optimizer steps on demonstrations with every set of tools")
    databases_per_step: int = option(2, "databases in each step")
    questions_per_database: int = option(8, "training questions over each of them")
    demonstrations: int = option(1, "demonstrations with both tools for each question")
    micro_batch_positions: int = option(2500, "positions in one forward pass")
    learning_rate: float = option(4e-3, "peak of a cosine schedule: embeddings and vectors, AdamW")
    matrix_rate: float = option(0.025, "peak of a cosine schedule: matrices, Muon")
    vocabulary: int = option(1400, "pieces that the tokenizer learns, byte and control tokens excluded")
    hidden: int = option(192, "hidden size of the model")
    layers: int = option(4, "layers of the model")


def demonstrations(
    environments: dict[str, Environment],
    example: Example,
    wrong: list[dict],
    count: int,
    rng: random.Random,
) -> list[Trajectory]:
    """Demonstrations of one question: one without tools and, if `count` is not 0, `count` with both
    and at times one with a single tool, so that the model knows every set of Table 4.
    """
    wanted = {"none": 1}
    if count:
        wanted["both"] = count
        single = rng.choice(("no_execution", "no_memory", None, None))
        if single:
            wanted[single] = 1
    return [
        demonstrate(episode, wrong, Habits(), rng)
        for tools, copies in wanted.items()
        for episode in environments[tools].episodes(example, [0] * copies)
    ]


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
    tokenizer = train_tokenizer(texts, config.vocabulary)
    tokens = ChatTokens(tokenizer)
    environments = {name: make_environment(config, dataset, tokens, name) for name in TOOL_SETS}
    device = pick_device(config.device)
    model = tiny_qwen3(tokenizer, config.hidden, config.layers, config.seed).to(device)
    print(f"tiny Qwen3: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    optimizers = make_muon(model, config.matrix_rate, config.learning_rate)
    rng = random.Random(config.seed)
    order: list[list[Example]] = []  # questions over one database, some at a time
    steps = config.answer_steps + config.agent_steps
    bar = tqdm(range(steps), desc="imitation", unit="step", mininterval=5.0)
    for step in bar:
        if len(order) < config.databases_per_step:
            order += by_database(asked, config.questions_per_database, rng)
        batch, order = order[: config.databases_per_step], order[config.databases_per_step :]
        count = 0 if step < config.answer_steps else config.demonstrations
        groups = [
            [
                trajectory
                for example in chunk
                for trajectory in demonstrations(environments, example, wrong[example.id], count, rng)
            ]
            for chunk in batch
        ]
        trained_tokens = sum(t.sampled_length for group in groups for t in group)
        # Half of the cosine for each phase, however many steps it has.
        if step < config.answer_steps:
            progress = 0.5 * step / config.answer_steps
        else:
            progress = 0.5 + 0.5 * (step - config.answer_steps) / config.agent_steps
        for optimizer, peak in zip(optimizers, (config.matrix_rate, config.learning_rate), strict=True):
            set_learning_rate(optimizer, cosine_rate(peak, progress))
            optimizer.zero_grad()
        total = 0.0
        for part in group_micro_batches(groups, config.micro_batch_positions):
            logprobs, _ = token_logprobs(model, shared_prompt_batch(part, device))
            loss = sft_loss(logprobs, trained_tokens)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        bar.set_postfix(loss=f"{total:.3f}")
    save_policy(model, tokenizer, Path(config.out))
    save_config(config, Path(config.out))


if __name__ == "__main__":
    user_errors(main)
