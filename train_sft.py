"""Self-taught warm-start fine-tuning: Algorithm 1 of MTSQL-R1 (sections 3.2.1 and 3.2.2).

    python train_sft.py --config configs/toy.toml --model MODEL --data DATA --out runs/sft
    torchrun --nproc-per-node 2 train_sft.py ...   (the same on two GPUs)

Each round samples trajectories from the policy itself, keeps of those whose answer is right by EX and
EM some short ones of easy questions and some long, different ones of hard questions, fine-tunes on all
that were kept so far, and drops the questions that are solved. The run folder gets policy/ (of earlier
rounds: policies/round_N/), trajectories.jsonl (the set T, for mtsql.report.viewer), chat.jsonl (the same
as chat messages, for other fine-tuning tools), coverage.json (Table 7), metrics.csv and checkpoints/
(for --resume).

`--targets gold --tools none --rounds 1` is the short-horizon baseline: direct answers with the gold SQL.
`--targets teacher --teacher FILE.jsonl --rounds 1` learns from a teacher's right trajectories instead
(SQL-Trail, section 3.2): chat messages of any source, played again in our environment.

Departures from the paper, and how we read it:
- A trajectory is kept only if it follows Equation 1 throughout, since the data "strictly follow the MDP"
  (section 3.2.1); Algorithm 1 does not repeat this.
- "Interactions" are answered tool calls. Where no right trajectory of a question has at most (at least)
  two, those that come nearest are kept, so that every solved question has a trajectory.
- EM is the official exact set match, as in the authors' code; the paper's text says string match.
- Fine-tuning makes --epochs passes a round over everything kept, --trajectories-per-step at a time;
  the paper gives a per-device batch of 2 on 8 GPUs and no number of epochs.
- The loss is the mean over the trained tokens of a step, where the paper writes their sum.
- LoRA with --lora-rank; the paper fine-tunes all parameters.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from mtsql.agent.collection import sample_questions
from mtsql.agent.env import Environment
from mtsql.agent.trajectory import Stop, Trajectory, trajectory_record
from mtsql.config import Common, load_config, option, save_config, user_errors
from mtsql.data.datasets import Example, examples
from mtsql.files import write_atomically
from mtsql.learn.batches import micro_batches
from mtsql.learn.checkpoint import load_training_state, new_checkpoint, save_training_state
from mtsql.learn.embedding import Embedder, make_embedder
from mtsql.learn.interrupt import finish_step_on_interrupt
from mtsql.learn.logprobs import token_batch, token_logprobs
from mtsql.learn.loss import sft_loss
from mtsql.learn.model import (
    restore_policy,
    save_merged,
    save_policy,
)
from mtsql.learn.optimizer import clip_gradients, cosine_rate, make_optimizer, set_learning_rate
from mtsql.learn.parallel import (
    Processes,
    leave_processes,
    restore_optimizer,
    shard_policy,
    whole_state,
    whole_weights,
)
from mtsql.learn.selection import select_trajectories
from mtsql.learn.teacher import (
    Outcome,
    TeacherLine,
    format_replays,
    prefer_harder,
    read_teacher,
    replay_lines,
)
from mtsql.recipes import load_recipe
from mtsql.recipes.rewards import RewardFunction, is_right
from mtsql.report.chat import chat_record
from mtsql.report.metrics import MetricsLog, format_coverage
from mtsql.run import begin_training, make_sampling, raise_not_finite, wording_of
from mtsql.sql.score import Scorer, scorable


@dataclass(frozen=True, kw_only=True)
class SftConfig(Common):
    """Configuration of the warm start."""

    model: str = option(..., "local folder or hub name of a causal LM or a PEFT adapter")
    rounds: int = option(3, "N of Algorithm 1 (paper: 3)")
    targets: str = option("self", "own right trajectories (self), direct gold answers (gold), teacher")
    teacher: str = option("", "JSONL file of a teacher's chat messages, for --targets teacher")
    teacher_kept: int = option(0, "its right trajectories kept, easy ones last (SQL-Trail: 1000); 0 is all")
    questions: int = option(0, "training questions in play, drawn at random; 0 is all of them")
    samples_per_question: int = option(20, "rollouts of each question in each round (paper: 20)")
    temperature: float = option(0.7, "of these rollouts (paper: 0.7)")
    correct: str = option("ex_em", "a rollout is right by: ex_em (paper), ex")
    embedding: str = option("", "folder of Qwen3-Embedding for the clusters; else the policy's own states")
    epochs: int = option(2, "passes over the kept trajectories in each round")
    trajectories_per_step: int = option(16, "kept trajectories in each optimizer step (paper: 2 a GPU)")
    learning_rate: float = option(5e-6, "peak of a cosine schedule (paper: 5e-6)")
    layout: str = option("packed", "positions of a batch: packed, rows, shared prompts")
    micro_batch_positions: int = option(8192, "positions in one forward pass")
    lora_rank: int = option(0, "rank of LoRA on all linear layers; 0 trains all parameters")
    optimizer: str = option("adamw", "adamw, adamw8bit")
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass")
    shard: bool = option(False, "full weights, gradients, optimizer over the processes of torchrun (FSDP2)")
    save_every: int = option(200, "optimizer steps between checkpoints; there is one after each collection")
    keep_checkpoints: int = option(2, "newest checkpoints that are kept")
    resume: bool = option(False, "go on from the newest checkpoint in --out; from the start if none is there")
    merge: bool = option(False, "also write policy_merged/, the adapter merged into its base")


def main() -> None:
    """Algorithm 1."""
    config = load_config(SftConfig, "sft", __doc__)
    if config.targets == "gold" and (config.tools != "none" or config.rounds != 1):
        raise ValueError("--targets gold needs --tools none and --rounds 1: a gold SQL is a direct answer")
    if bool(config.teacher) != (config.targets == "teacher"):
        raise ValueError("--targets teacher and --teacher FILE.jsonl go together: give both or neither")
    if config.teacher and config.rounds != 1:
        raise ValueError("--targets teacher needs --rounds 1: another would replay the same trajectories")
    if config.teacher_kept < 0:
        raise ValueError(f"--teacher-kept should be at least 0, not {config.teacher_kept}")
    taught = read_teacher(Path(config.teacher)) if config.teacher else []
    processes, out, device, checkpoint, tokens, dataset, environment, scorer, policy, attention = (
        begin_training(config)
    )
    tokenizer = tokens.tokenizer
    reward = load_recipe(config.recipe).make_reward("", "", scorer, tokenizer.decode, wording_of(config))
    embed = make_embedder(policy, tokens, config.embedding)
    if checkpoint is not None:
        restore_policy(policy, checkpoint / "policy", config.dtype)
    if config.shard:
        shard_policy(policy, processes)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    rng = random.Random(config.seed)
    questions = examples(dataset.dialogues, config.history)
    pool = scorable(questions, scorer, config.drop_empty)  # D_0
    if config.questions:
        pool = rng.sample(pool, min(config.questions, len(pool)))
    example_of = {example.id: example for example in pool}
    remaining = pool  # D_i
    kept: list[Trajectory] = []  # the cumulative set T
    coverage: list[dict] = []  # of each round
    started, step, first_round, resumed = time.perf_counter(), 0, 0, None
    if checkpoint is not None:
        step, resumed, optimizer_state = load_training_state(checkpoint)
        if resumed["round"] >= config.rounds:
            raise ValueError(
                f"{checkpoint} is in round {resumed['round'] + 1}; give --rounds at least so many"
            )
        first_round, kept = resumed["round"], [Trajectory.from_plain(t) for t in resumed["kept"]]
        coverage = resumed["coverage"]
        remaining = [example for example in pool if example.id in set(resumed["remaining"])]
    if processes.first:
        save_config(config, out)
        log = MetricsLog(out / "metrics.csv", step)

    with finish_step_on_interrupt() as interrupted:
        for round_index in range(first_round, config.rounds):
            optimizer = make_optimizer(policy, config.learning_rate, kind=config.optimizer)
            if resumed is None:
                # S1 and S2: roll out the policy; keep some of what is right by EX and EM.
                share = processes.share(list(enumerate(remaining)))
                if config.targets == "gold":
                    found = gold_answers(environment, share)
                elif config.targets == "teacher":
                    found = taught_answers(
                        config, environment, scorer, reward, taught, questions, pool, processes
                    )
                else:
                    with whole_weights(policy):
                        found = collect(
                            config, policy, environment, scorer, reward, embed, share, round_index, processes
                        )
                found = processes.gather(found)
                solved = {question.example_id for question in found if question.kept}
                kept += [t for question in found for t in question.kept]
                coverage.append(
                    {
                        "round": round_index + 1,
                        "sampled": sum(question.sampled for question in found),
                        "right": sum(question.right for question in found),
                        "questions_asked": len(remaining),
                        "questions_solved": len(solved),
                        "questions_covered": len({t.example_id for t in kept}),
                        "trajectories": len(kept),
                    }
                )
                if processes.first:
                    if config.targets == "self":
                        print(format_coverage(len(pool), coverage))
                    write_atomically(out / "coverage.json", json.dumps(coverage, indent=1))
                    records = (chat_record(t, example_of[t.example_id], environment) for t in kept)
                    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
                    write_atomically(out / "chat.jsonl", lines)
                if not kept and config.teacher:
                    raise ValueError(
                        f"no trajectory of {config.teacher} can be kept; the counts above say why"
                    )
                if not kept:
                    raise ValueError(
                        f"no trajectory of {config.model} is right (--correct {config.correct}) and well "
                        "formed: nothing to learn from; try more --samples-per-question or another model"
                    )
                first_index, rng_state = 0, rng.getstate()
            else:
                restore_optimizer(policy, optimizer, optimizer_state)
                solved = set(resumed["solved"])
                first_index, rng_state = resumed["index"], resumed["rng"]
                rng.setstate(rng_state)
                resumed = None

            state = {
                "round": round_index,
                "kept": [t.to_plain() for t in kept],
                "remaining": [example.id for example in remaining],
                "solved": sorted(solved),
                "coverage": coverage,
                "rng": rng_state,
            }
            if first_index == 0:
                save_checkpoint(config, processes, policy, tokenizer, optimizer, step, state | {"index": 0})

            # S3: supervised fine-tuning on T, only on what the policy wrote.
            policy.train()
            stop = False
            steps = math.ceil(len(kept) / config.trajectories_per_step) * config.epochs
            order = [t for _ in range(config.epochs) for t in rng.sample(kept, len(kept))]
            bar = tqdm(
                range(first_index, steps),
                desc=f"round {round_index + 1}: fine-tune",
                unit="step",
                disable=not processes.first,
            )
            for index in bar:
                start = index * config.trajectories_per_step
                batch = order[start : start + config.trajectories_per_step]
                denominator = sum(t.sampled_length for t in batch)
                share = processes.share(sorted(batch, key=lambda t: len(t.ids)))
                loss_sum = entropy_sum = 0.0
                by_question = groupby(sorted(share, key=lambda t: t.example_id), key=lambda t: t.example_id)
                groups = [list(group) for _, group in by_question]
                parts = micro_batches(groups, config.layout, config.micro_batch_positions)
                weighted = processes.pad(parts, [batch[:1]]) if config.shard else [(p, 1.0) for p in parts]
                for part, weight in weighted:
                    inputs = token_batch(part, config.layout, device, attention)
                    logprobs, entropy = token_logprobs(policy, inputs)
                    loss = sft_loss(logprobs, denominator)
                    if not torch.isfinite(loss):
                        raise_not_finite(out, step, [t for group in part for t in group], tokens)
                    (loss * weight).backward()
                    if weight > 0:
                        loss_sum += loss.item()
                        entropy_sum += entropy.sum().item() / denominator
                rate = cosine_rate(config.learning_rate, index / steps)
                set_learning_rate(optimizer, rate)
                processes.sum_gradients(parameters)
                norm = clip_gradients(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad()  # gradients need no memory during rollouts
                sums = processes.of_each((loss_sum, entropy_sum))
                loss_sum, entropy_sum = (sum(parts) for parts in zip(*sums, strict=True))
                bar.set_postfix(loss=f"{loss_sum:.3f}")
                if processes.first:
                    log.append(
                        {
                            "step": step,
                            "minutes": round((time.perf_counter() - started) / 60, 3),
                            "round": round_index + 1,
                            "loss": loss_sum,
                            "entropy": entropy_sum,
                            "gradient_norm": norm,
                            "learning_rate": rate,
                            "trajectories_right": coverage[-1]["right"] / coverage[-1]["sampled"],
                            "questions_solved": len(solved) / len(remaining),
                        }
                    )
                step += 1
                stop = any(processes.of_each(bool(interrupted)))
                if stop or (index + 1) % config.save_every == 0:
                    done = state | {"index": index + 1}
                    save_checkpoint(config, processes, policy, tokenizer, optimizer, step, done)
                if stop:
                    break
            if stop:
                break

            # S4: what is solved leaves the pool.
            remaining = [example for example in remaining if example.id not in solved]
            if not remaining or round_index + 1 == config.rounds:
                break
            weights, _ = whole_state(policy, optimizer)
            if processes.first:
                save_policy(policy, tokenizer, out / "policies" / f"round_{round_index + 1}", weights)
    weights, _ = whole_state(policy, optimizer)
    if processes.first and stop:
        print(f"saved a checkpoint after step {step} in {out}; go on with --resume")
    elif processes.first:
        save_policy(policy, tokenizer, out / "policy", weights)
        records = (trajectory_record(t, tokenizer.decode) for t in kept)
        lines = "".join(json.dumps(record) + "\n" for record in records)
        write_atomically(out / "trajectories.jsonl", lines)
        if config.merge:
            save_merged(out / "policy", out / "policy_merged", config.dtype)
        print(f"policy after {round_index + 1} round(s): {out / 'policy'}")
    leave_processes(processes)


@dataclass(frozen=True)
class Collected:
    """What a round found of one question: rollouts, how many are right, and which were kept."""

    example_id: str
    sampled: int
    right: int
    kept: list[Trajectory]


def collect(
    config: SftConfig,
    policy: torch.nn.Module,
    environment: Environment,
    scorer: Scorer,
    reward: RewardFunction,
    embed: Embedder,
    numbered: Sequence[tuple[int, Example]],
    round_index: int,
    processes: Processes,
) -> list[Collected]:
    """S1 and S2 of Algorithm 1 for a process's share of the questions, given with their place in D_i.

    Questions whose prompt is too long have no rollouts.
    """
    found = []
    # S1: 20 rollouts a question; right are those whose answer is so by EX and EM.
    title, seed = f"round {round_index + 1}: collect", (config.seed, round_index)
    for example, sampled in sample_questions(
        policy,
        environment,
        numbered,
        config.samples_per_question,
        make_sampling(config, environment, config.temperature),
        config.rows,
        seed,
        title,
        processes.first,
        config.cache_gib,
    ):
        right = [t for t in sampled if is_right(reward(t, example), config.correct)]
        valid = [t for t in right if t.off_protocol == 0]
        # S2: difficulty-aware choice among them.
        easy = scorer.hardness(example.db_id, example.gold_sql) == "easy"
        simple = easy or len(right) == len(sampled)
        rng = random.Random(f"{config.seed}/{round_index}/{example.id}")
        chosen = select_trajectories(valid, simple, embed, rng) if valid else []
        found.append(Collected(example.id, len(sampled), len(right), chosen))
    return found


def gold_answers(environment: Environment, numbered: Sequence[tuple[int, Example]]) -> list[Collected]:
    """The gold SQL of every question as a direct answer: the data of short-horizon fine-tuning."""
    found = []
    for _, example in numbered:
        episode = environment.episodes(example, [0])[0]
        ids = environment.tokens.message_ids(environment.recipe.answer(example.gold_sql))
        if episode.trajectory.status is None:
            episode.step(ids, [0.0] * len(ids), Stop.END_OF_TURN)
        right = [episode.trajectory] if episode.trajectory.answer_sql is not None else []
        found.append(Collected(example.id, 1, len(right), right))
    return found


def taught_answers(
    config: SftConfig,
    environment: Environment,
    scorer: Scorer,
    reward: RewardFunction,
    taught: Sequence[TeacherLine | None],
    questions: Sequence[Example],
    pool: Sequence[Example],
    processes: Processes,
) -> list[Collected]:
    """What a process finds in its share of a teacher's lines; of `questions` those in `pool` are in play."""
    in_play = {example.id for example in pool}
    share = processes.share(taught)
    replays = processes.gather(
        replay_lines(share, questions, in_play, environment, reward, config.correct, processes.first)
    )
    if processes.first:
        print(format_replays(replays))
    chosen = prefer_harder(replays, config.teacher_kept, scorer, random.Random(config.seed))
    kept = {id(trajectory) for trajectory in chosen}
    return processes.share(
        [
            Collected(
                r.question.id, 1, r.outcome is Outcome.KEPT, [r.trajectory] * (id(r.trajectory) in kept)
            )
            for r in replays
            if r.question is not None
        ]
    )


def save_checkpoint(
    config: SftConfig,
    processes: Processes,
    policy: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    step: int,
    state: dict,
) -> None:
    """Write a checkpoint; `state` is what a round has collected and how far its fine-tuning is."""
    weights, optimizer_state = whole_state(policy, optimizer)
    if processes.first:
        with new_checkpoint(Path(config.out), step, config.keep_checkpoints) as folder:
            save_policy(policy, tokenizer, folder / "policy", weights)
            save_training_state(folder, optimizer_state, step, state)


if __name__ == "__main__":
    user_errors(main)
