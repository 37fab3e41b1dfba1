"""Self-taught warm-start fine-tuning: Algorithm 1 of MTSQL-R1 (sections 3.2.1 and 3.2.2).

    python train_sft.py --config configs/toy.toml --model MODEL --data DATA --out runs/sft
    torchrun --nproc-per-node 2 train_sft.py ...   (the same on two GPUs)

Each round samples trajectories from the policy itself. Of those whose answer is right by EX and EM it keeps a
few: short ones of easy questions, long and different ones of hard questions. It fine-tunes on all that were
kept so far, and drops the questions that are solved. The run folder gets policy/ (of earlier
rounds: policies/round_N/), trajectories.jsonl (the set T, for mtsql.extras.viewer), chat.jsonl (the same
as chat messages, for other fine-tuning tools), coverage.json (Table 7), metrics.csv and checkpoints/
(for --resume).

`--targets gold --rounds 1` learns from the gold SQL instead. With `--tools none` that is the short-horizon
baseline, direct answers; with tools, demonstrations of the protocol (mtsql/extras/demonstrations.py).
`--targets FILE.jsonl --rounds 1` learns from a teacher's right trajectories instead
(SQL-Trail, section 3.2): chat messages of any source, played again in our environment.

Departures from the paper, and how we read it:
- A trajectory is kept only if it follows Equation 1 throughout, since the data "strictly follow the MDP"
  (section 3.2.1); Algorithm 1 does not repeat this. The examples of appendix D, which have no verdict tags,
  would be dropped. coverage.json counts what each filter rejects.
- "Interactions" are answered tool calls. Where no right trajectory of a question has at most (at least)
  two, those that come nearest are kept, so that every solved question has a trajectory.
- EM is the official exact set match, as in the authors' code; the paper's text says string match. EX is the
  official one too: DISTINCT and the order of columns do not count.
- Clusters are of the policy's own hidden states; the paper's are of Qwen3-Embedding's.
- Fine-tuning makes --epochs passes a round over everything kept, --trajectories-per-step at a time;
  the paper gives a per-device batch of 2 on 8 GPUs and no number of epochs. The cosine
  begins anew in each round, after a warm-up over 3 % of its steps; the paper names none.
- The loss is the mean over the trained tokens of a step, where the paper writes their sum.
- LoRA with --lora-rank; the paper fine-tunes all parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mtsql.config import Training, option, read_options, save_config, user_errors


@dataclass(frozen=True, kw_only=True)
class Args(Training):
    """The options of the warm start; those of every training are in mtsql/config.py."""

    SECTION: ClassVar = "sft"
    rounds: int = option(3, "N of Algorithm 1 (paper: 3)", least=1)
    targets: str = option("self", "own right trajectories, gold answers, a teacher's: self, gold, FILE.jsonl")
    samples_per_question: int = option(20, "rollouts of a question in a round, if self (paper: 20)", least=1)
    temperature: float = option(0.7, "of these rollouts (paper: 0.7)", least=0.01)
    epochs: float = option(2.0, "passes a round over all kept so far; the last perhaps partial", least=0.01)
    trajectories_per_step: int = option(16, "trajectories in an optimizer step (paper: 2 a GPU)", least=1)
    databases_per_step: int = option(0, "databases they are over, to share schemas; 0: any", least=0)
    learning_rate: float = option(5e-6, "peak of a cosine schedule (paper: 5e-6)", least=0)
    save_every: int = option(200, "optimizer steps between checkpoints; also after a collection", least=1)


if __name__ == "__main__":  # before torch is imported, so that --help and wrong options are answered at once
    OPTIONS = read_options(Args, __doc__)

import json
import math
import random
import time
from collections import Counter
from functools import partial
from pathlib import Path
from threading import Event

import torch
from tqdm import tqdm

from mtsql.data.datasets import examples
from mtsql.errors import UserError
from mtsql.files import json_lines, write_atomically
from mtsql.learn.batches import alike, micro_batches, training_order
from mtsql.learn.checkpoint import INTERRUPTED, finish_step_on_interrupt, resume, save_checkpoint
from mtsql.learn.logprobs import shares_prompts, token_batch, token_logprobs
from mtsql.learn.loss import sft_loss
from mtsql.learn.model import cosine_rate, optimizer_step, stepped_parameters
from mtsql.learn.parallel import leave_processes
from mtsql.learn.warm_start import Collected, Progress, embed_with_policy, rejection, select_trajectories
from mtsql.recipes.rewards import RewardFunction
from mtsql.report.metrics import MetricsLog, format_coverage
from mtsql.report.records import chat_record, question_record
from mtsql.task import Task, begin_task, reward_function, training_questions


def main(config: Args) -> int:
    """Algorithm 1; returns the exit code."""
    check(config)
    task = begin_task(config, "train")
    processes, out = task.processes, task.out
    reward = reward_function(config, task.tokens, task.scorer)
    optimizer, first, state = resume(config, out, task.policy, processes)
    rng = random.Random(config.seed)
    pool = training_questions(config, task, known=state["pool"] if state else ())  # D_0
    progress = Progress.from_plain(state, pool) if state else Progress(pool, pool)
    if progress.round >= config.rounds:
        raise UserError(f"{out} is in round {progress.round + 1}; give --rounds at least so many")
    log = MetricsLog(out / "metrics.csv", first) if processes.is_main else None
    if log:
        save_config(config, out)
    stop = False
    with finish_step_on_interrupt() as interrupted:
        for round_index in range(progress.round, config.rounds):
            progress.round = round_index
            if not progress.collected:
                # S1 and S2: roll out the policy; keep some of what is right by EX and EM.
                found = collect(config, task, reward, progress)
                progress.add(processes.gather(found), rng)
                if processes.is_main:
                    write_collected(config, task, progress)
                if not progress.kept:
                    source = config.model if config.targets == "self" else f"--targets {config.targets}"
                    raise UserError(
                        f"no trajectory of {source} can be kept: "
                        "the counts above say why, and there is nothing to learn from"
                    )
                save(task, optimizer, progress)
            rng.setstate(progress.rng_state)

            # S3: supervised fine-tuning on T, only on what the policy wrote.
            stop = fine_tune(config, task, optimizer, progress, rng, log, interrupted)
            if stop:
                break

            # S4: what is solved leaves the pool.
            progress.drop_solved()
            if not progress.remaining or progress.round + 1 == config.rounds:
                break
            task.save(out / "policies" / f"round_{progress.round + 1}")
            optimizer.state.clear()  # a round begins with fresh moments
    if not stop:
        task.save(out / "policy")
    if processes.is_main and stop:
        print(f"saved a checkpoint after step {progress.step} in {out}; go on with --resume")
    elif processes.is_main:
        decode, asked = task.tokens.tokenizer.decode, {example.id: example for example in pool}
        shown = (question_record(t, asked[t.example_id], task.scorer, decode) for t in progress.kept)
        write_atomically(out / "trajectories.jsonl", json_lines(shown))
        print(f"policy after {progress.round + 1} round(s): {out / 'policy'}")
    leave_processes(processes)
    return INTERRUPTED if stop else 0


def check(config: Args) -> None:
    """Raise UserError for what the types of the options cannot say."""
    if config.targets != "self" and config.rounds != 1:
        raise UserError(f"--targets {config.targets} needs --rounds 1: another would learn the same")
    without_thoughts = config.wording == "compact" or config.thinking == "native"
    direct = config.tools == "none" and without_thoughts
    if config.targets == "gold" and not direct and config.recipe != "mtsql_r1":
        raise UserError(
            "--targets gold needs --recipe mtsql_r1, whose protocol is shown, or --tools none and a prompt "
            "that asks for no thoughts: --wording compact or --thinking native"
        )
    if config.targets not in ("self", "gold") and not Path(config.targets).is_file():
        raise UserError(f"--targets {config.targets} should be self, gold or a JSONL file of chat messages")


def collect(config: Args, task: Task, reward: RewardFunction, progress: Progress) -> list[Collected]:
    """S1 and S2 of Algorithm 1 for a process's share of D_i, or what --targets names in their place."""
    numbered = task.processes.share(list(enumerate(progress.remaining)))
    if config.targets == "gold":
        from mtsql.extras.demonstrations import gold_trajectories

        asked = [example for _, example in numbered]
        shown = gold_trajectories(task.environment, asked, config.seed)
        return [Collected(e.id, 1, len(t), t) for e, t in zip(asked, shown, strict=True)]
    if config.targets != "self":
        from mtsql.extras.teacher import read_teacher, taught_answers

        return taught_answers(task, reward, read_teacher(Path(config.targets)), progress.pool)
    embed = partial(embed_with_policy, task.policy)
    found, round_index = [], progress.round
    # S1: 20 rollouts a question; right are those whose answer is so by EX and EM.
    title, seed = f"round {round_index + 1}: collect", (config.seed, round_index)
    count = config.samples_per_question
    for example, sampled in task.sample(numbered, count, config.temperature, seed, title):
        reasons = [rejection(t, reward(t, example), task.environment.recipe) for t in sampled]
        valid = [t for t, reason in zip(sampled, reasons, strict=True) if reason is None]
        right = sum(reason in (None, "off_protocol") for reason in reasons)
        # S2: difficulty-aware choice among them.
        easy = task.scorer.hardness(example.db_id, example.gold_sql) == "easy"
        simple = easy or right == len(sampled)
        rng = random.Random(f"{config.seed}/{round_index}/{example.id}")
        chosen = select_trajectories(valid, simple, embed, rng) if valid else []
        rejected = Counter(filter(None, reasons)) + Counter(not_selected=len(valid) - len(chosen))
        found.append(Collected(example.id, len(sampled), right, chosen, rejected))
    return found


def fine_tune(
    config: Args,
    task: Task,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    rng: random.Random,
    log: MetricsLog | None,
    interrupted: Event,
) -> bool:
    """S3 of Algorithm 1: --epochs passes over T, from the step of the round where `progress` is.

    Returns whether it was interrupted.
    """
    task.policy.train()
    shared = shares_prompts(task.policy)
    databases, size = None, 1
    if config.databases_per_step:
        databases = {e.id: e.db_id for e in examples(task.dataset.dialogues)}
        size = max(1, config.trajectories_per_step // config.databases_per_step)
    order = training_order(progress.kept, config.epochs, rng, databases, size)
    steps = math.ceil(len(order) / config.trajectories_per_step)
    title, hidden = f"round {progress.round + 1}: fine-tune", not task.processes.is_main
    bar = tqdm(range(progress.index, steps), desc=title, unit="step", disable=hidden)
    for index in bar:
        start = index * config.trajectories_per_step
        batch = order[start : start + config.trajectories_per_step]
        denominator = max(1, sum(t.trained_length for t in batch))
        groups = [part for group in alike(batch) for part in task.processes.split(group)]
        sums: Counter[str] = Counter()
        for part in micro_batches(task.processes.share(groups), config.micro_batch_positions, shared):
            inputs = token_batch(task.policy, part)
            logprobs, entropy = token_logprobs(task.policy, inputs)  # (tokens,) both
            loss = sft_loss(logprobs, denominator)
            if not torch.isfinite(loss):
                task.raise_not_finite(progress.step, part)
            loss.backward()
            sums.update(loss=loss.item(), entropy=entropy.sum().item() / denominator)
        task.processes.sum_gradients(stepped_parameters(optimizer))
        rate = cosine_rate(config.learning_rate, (index + 0.5) / steps)
        norm = optimizer_step(optimizer, rate)
        totals: Counter[str] = Counter()
        for share in task.processes.all_gather(sums):
            totals.update(share)
        bar.set_postfix(loss=f"{totals['loss']:.3f}")
        if log is not None:
            row = {
                "step": progress.step,
                "minutes": round((time.perf_counter() - progress.started) / 60, 3),
                "round": progress.round + 1,
                "loss": totals["loss"],
                "entropy": totals["entropy"],
                "gradient_norm": norm,
                "learning_rate": rate,
                "share_right": progress.coverage[-1]["right"] / progress.coverage[-1]["sampled"],
                "share_solved": len(progress.solved) / len(progress.remaining),
            }
            log.append(row)
        progress.step, progress.index = progress.step + 1, index + 1
        stop = any(task.processes.all_gather(interrupted.is_set()))
        if stop or progress.index % config.save_every == 0:
            save(task, optimizer, progress)
        if stop:
            return True
    return False


def save(task: Task, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write a checkpoint."""
    if task.processes.is_main:
        at, state = progress.step, progress.to_plain()
        save_checkpoint(task.out, task.policy, task.tokens.tokenizer, optimizer, at, state)


def write_collected(config: Args, task: Task, progress: Progress) -> None:
    """Print and save Table 7, and save T as chat messages."""
    example_of = {example.id: example for example in progress.pool}
    if config.targets == "gold":
        from mtsql.extras.demonstrations import format_repairs

        print(f"gold SQL: {format_repairs(progress.kept)}")
    else:
        print(format_coverage(len(progress.pool), progress.coverage))
        rejected = progress.coverage[-1]["rejected"]
        print("rollouts not kept: " + ", ".join(f"{name} {count:,}" for name, count in rejected.items()))
    write_atomically(task.out / "coverage.json", json.dumps(progress.coverage, indent=1))
    records = (chat_record(t, example_of[t.example_id], task.environment) for t in progress.kept)
    write_atomically(task.out / "chat.jsonl", json_lines(filter(None, records)))


if __name__ == "__main__":
    user_errors(main, OPTIONS)
