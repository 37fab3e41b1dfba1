"""End-to-end GRPO on multi-turn trajectories: MTSQL-R1, sections 3.3.2 and 3.3.3.

    python train_grpo.py --config configs/toy.toml --model runs/sft/policy --data DATA --out runs/grpo
    torchrun --nproc-per-node 2 train_grpo.py ...   (the same on two GPUs)

One step: sample G trajectories for each of a batch of questions, reward each trajectory, normalise rewards
within each question's group, and take one clipped policy-gradient step on the tokens that the model wrote.
With --curriculum, questions not always answered right come in levels, most-solved first (section 3.3.1).
The run folder gets policy/, checkpoints/, metrics.csv, trajectories.jsonl (one group a step), asked.json (ids
of the questions that were sampled) and dev.csv, which is filled with --evaluate-every.

Departures from the paper:
- A level has steps in proportion to its questions; appendix B.0.2's listing has 60 epochs for each.
- EM is the official exact set match, as in the authors' code; the text (--rewards paper) compares strings.
  EX is the official one too: DISTINCT and the order of columns do not count.
- Process rewards count a candidate once (rules: mtsql/recipes/mtsql_r1_rewards.py; how clause F1 is read:
  docs/algorithm.md) and are paid at every level; the paper pays them from medium difficulty on (Finding 9):
  an edit of this file (docs/how_to.md).
- Of the dev set the first 100 dialogues are asked, after steps and not before the first.
- w1..w4: the paper chose them by grid search and gives none. By default only EX + EM count; the other presets
  of --rewards have the weights of the authors' code.
- Groups without variance in their rewards get no gradient, or only that of the KL with --beta (their
  advantage is 0 by definition) and stay in the denominator, as in the paper's formula.
- KL off by default, as in the paper's listing (its formula has a beta); --beta weighs it.
- One update a batch, so that the importance ratio is 1 and the clip does nothing (--updates-per-batch).
- Learning rate constant after a warm-up of three steps. The gradient's norm is clipped to 1 in every step.
  AdamW's beta2 is 0.99 (BETA2) and there is no weight decay; verl, whose defaults the paper keeps, has 0.999
  and 0.01. LoRA with --lora-rank.
- Other papers' variants (mtsql/learn/loss.py) are off unless a paper's file sets them, but for truncated
  importance sampling where sampler and trainer round apart: in half precision, in 4 bits, on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from mtsql.config import Rewarded, Training, option, read_options, save_config, user_errors


@dataclass(frozen=True, kw_only=True)
class Args(Rewarded, Training):
    """The options of GRPO; those of every training are in mtsql/config.py."""

    SECTION: ClassVar = "grpo"
    BETA2: ClassVar = 0.99  # of AdamW
    steps: int = option(100, "batches of questions", least=1)
    prompts_per_step: int = option(256, "questions in each step (paper: 256)", least=1)
    samples_per_prompt: int = option(5, "G, trajectories of each question (paper: 5)", least=2)
    temperature: float = option(1.0, "of the rollouts, and of the log-probabilities in the loss", least=0.01)
    learning_rate: float = option(1e-6, "constant after three steps of warm-up (paper: 1e-6)", least=0)
    curriculum: str = option("", "counts.jsonl of mtsql.extras.curriculum; levels from easy to hard")
    level_size: int = option(2000, "questions in a level (paper: 2000); 0: one, in random order", least=0)
    clip_high: float = option(0.2, "upper clip epsilon, idle at one update (DAPO: 0.28); lower 0.2", least=0)
    updates_per_batch: int = option(1, "optimizer steps on each batch of trajectories", least=1)
    aggregate: Literal["trajectory", "token", "constant"] = option(
        "trajectory", "1/|M_i| a trajectory (paper), DAPO's or Dr. GRPO's mean"
    )
    divide_by: Literal["group", "batch", "none"] = option(
        "group", "advantages over the deviation of group, batch (REINFORCE++-baseline), or none (Dr. GRPO)"
    )
    beta: float = option(0.0, "weight of the KL penalty (k3)", least=0)
    micro_batch_positions: int = option(16384, "positions in one forward pass", least=1)
    evaluate_every: int = option(0, "steps between evaluations on dev, or on --held-out; 0: never", least=0)
    save_every: int = option(20, "steps between checkpoints", least=1)


if __name__ == "__main__":  # before torch is imported, so that --help and wrong options are answered at once
    OPTIONS = read_options(Args, __doc__)

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from mtsql.data.datasets import Example
from mtsql.errors import UserError
from mtsql.files import write_atomically
from mtsql.learn.batches import micro_batches
from mtsql.learn.checkpoint import INTERRUPTED, finish_step_on_interrupt, resume, save_checkpoint
from mtsql.learn.curriculum import curriculum_levels, level_of_step, question_order, read_counts
from mtsql.learn.logprobs import shares_prompts, token_batch, token_logprobs
from mtsql.learn.loss import group_advantages, grpo_loss, informative_groups, loss_denominator, truncation_cap
from mtsql.learn.model import Reference, optimizer_step, stepped_parameters, warmup_rate
from mtsql.learn.parallel import leave_processes
from mtsql.learn.samples import Sample, append_group, group_metrics, logprob_gaps
from mtsql.recipes.rewards import RewardFunction
from mtsql.report.metrics import MetricsLog
from mtsql.report.records import drop_later_records
from mtsql.task import Task, begin_task, dev_scores, dev_task, reward_function, training_questions


def main(config: Args) -> int:
    """The GRPO loop; returns the exit code."""
    task = begin_task(config, "rl" if config.for_rl else "train")
    policy, processes, out = task.policy, task.processes, task.out
    decode = task.tokens.tokenizer.decode
    reward = reward_function(config, task.tokens, task.scorer, config.rewards)  # mtsql_r1_rewards.py: reward
    reference = Reference(policy) if config.beta else None  # of --model, before a checkpoint replaces it
    optimizer, first, state = resume(config, out, policy, processes)  # AdamW, new or of a checkpoint
    if first > config.steps:
        raise UserError(f"{out} has had {first} steps; give --steps at least so many")
    levels = curriculum(config, task, state)
    dev = dev_task(config, task) if config.evaluate_every else None
    if processes.is_main:
        save_config(config, out)
        if config.curriculum:
            print(f"curriculum: levels of {', '.join(str(len(level)) for level in levels)} questions")
        log, dev_log = (MetricsLog(out / f"{name}.csv", first) for name in ("metrics", "dev"))
        drop_later_records(out / "trajectories.jsonl", first)
    stop, started = False, time.perf_counter()
    bar = tqdm(range(first, config.steps), desc="GRPO", unit="step", disable=not processes.is_main)
    with finish_step_on_interrupt() as interrupted:
        for step in bar:
            began = time.perf_counter()
            # 1. Rollout: G trajectories of each question, each with its reward.
            groups = sample_groups(config, task, reward, levels, step)
            rollout_end = time.perf_counter()
            # 2. Advantages: the rewards normalised within each group.
            informative = set_advantages(config, groups)  # (questions,)
            # 3. A clipped policy-gradient step on the tokens that the policy wrote.
            statistics = clipped_step(config, task, reference, optimizer, groups, informative, step)
            # 4. Log, evaluate, save.
            if processes.is_main:
                row = {
                    "step": step,
                    "minutes": round((time.perf_counter() - started) / 60, 3),
                    "level": level_of_step(step, config.steps, list(map(len, levels)))[0] + 1,
                    **group_metrics(groups, informative, rollout_end - began, decode),
                    **statistics,
                    "train_seconds": round(time.perf_counter() - rollout_end, 2),
                }
                log.append(row)
                append_group(out / "trajectories.jsonl", step, groups[0], task.scorer, decode)
                bar.set_postfix_str(
                    f"reward {row['reward']:.2f}, EX {row['ex']:.2f}, length {row['response_tokens']:.0f}, "
                    f"entropy {row['entropy']:.2f}, {row['sampled_tokens_per_second']} tokens/s"
                )
            if dev is not None and (step + 1) % config.evaluate_every == 0:
                scores = {"step": step, **dev_scores(config, dev)}
                if processes.is_main:
                    dev_log.append(scores)
            stop = any(processes.all_gather(interrupted.is_set()))
            due = stop or step + 1 == config.steps or (step + 1) % config.save_every == 0
            if due and processes.is_main:
                state = {"questions": [question.id for level in levels for question in level]}
                save_checkpoint(out, policy, task.tokens.tokenizer, optimizer, step + 1, state)
            if stop:
                break
    if not stop:
        task.save(out / "policy")
    if processes.is_main and stop:
        print(f"saved a checkpoint after step {step + 1} in {out}; go on with --resume")
    elif processes.is_main:
        asked = {q.id for step in range(config.steps) for q in questions_of_step(config, levels, step)}
        write_atomically(out / "asked.json", json.dumps(sorted(asked)))
        print(f"policy after {config.steps} steps: {out / 'policy'}")
        print(f"its curves: python -m mtsql plot {out}")
    leave_processes(processes)
    return INTERRUPTED if stop else 0


def curriculum(config: Args, task: Task, state: dict | None) -> list[list[Example]]:
    """The training questions in levels from easy to hard (section 3.3.1), one level without --curriculum.

    They are those of the checkpoint's `state`, if there is one.
    """
    counts = read_counts(Path(config.curriculum)) if config.curriculum else []
    questions = training_questions(config, task, counts, state["questions"] if state else ())
    return curriculum_levels(questions, counts, config.level_size) if counts else [questions]


def questions_of_step(config: Args, levels: Sequence[Sequence[Example]], step: int) -> list[Example]:
    """The questions of a step, of one level; drawn by the seed, so that they are known before."""
    level, step_in_level = level_of_step(step, config.steps, list(map(len, levels)))
    count = len(levels[level])
    order = question_order(config.seed, count, config.prompts_per_step, level, step_in_level)
    return [levels[level][index] for index in order]


def sample_groups(
    config: Args, task: Task, reward: RewardFunction, levels: Sequence[Sequence[Example]], step: int
) -> list[list[Sample]]:
    """G rewarded samples of each of a step's questions; their seeds depend on its place in the step.

    `Task.sample` plays them by `mtsql.agent.rollout.rollout`.
    """
    numbered = task.processes.share(list(enumerate(questions_of_step(config, levels, step))))
    seed, count = (config.seed, step), config.samples_per_prompt
    groups = [
        [Sample(trajectory, example, reward(trajectory, example)) for trajectory in trajectories]
        for example, trajectories in task.sample(numbered, count, config.temperature, seed)
    ]
    return task.processes.gather(groups)


def rewards_of(groups: Sequence[Sequence[Sample]]) -> Tensor:
    """Rewards, (questions, G) float32."""
    return torch.tensor([[sample.rewards.total for sample in group] for group in groups])


def set_advantages(config: Args, groups: Sequence[Sequence[Sample]]) -> Tensor:
    """Set A_i of every sample (section 3.3.3); gives which groups teach something, (questions,) bool.

    Mean and deviation are over all G, those that GRPO-Filter keeps out of the loss included (`Rewards.kept`).
    """
    rewards = rewards_of(groups)  # (questions, G)
    informative = informative_groups(rewards)  # (questions,)
    advantages = group_advantages(rewards, informative, config.divide_by)
    for group, of_group in zip(groups, advantages.tolist(), strict=True):
        for sample, advantage in zip(group, of_group, strict=True):
            sample.trajectory.advantage = advantage
    return informative


def clipped_step(
    config: Args,
    task: Task,
    reference: Reference | None,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[Sample]],
    informative: Tensor,
    step: int,
) -> dict[str, float]:
    """One update of a batch (or --updates-per-batch) by the clipped surrogate (section 3.3.3); statistics.

    Groups without variance add nothing to it, or with --beta only their KL. Statistics are of what was in the
    forward pass, 0 without any.
    """
    # In the denominator are all that are kept, those of groups without variance too.
    counted = [[s.trajectory for s in group if s.rewards.kept] for group in groups]
    denominator = loss_denominator(
        [t for group in counted for t in group], config.aggregate, config.max_response_tokens
    )
    # In the forward pass are groups that teach something, or all where there is a KL.
    trained = [g for g, teaches in zip(counted, informative, strict=True) if g and (teaches or reference)]
    trained.sort(key=lambda group: sum(len(t.ids) for t in group))
    shared = shares_prompts(task.policy)
    parts = micro_batches(task.processes.share(trained), config.micro_batch_positions, shared)
    old_logprobs: list[Tensor | None] = [None] * len(parts)
    rate = warmup_rate(config.learning_rate, step)
    tis_cap = truncation_cap(task.policy)
    task.policy.train()
    sums: Counter[str] = Counter()  # added up by `update`: a Counter's + drops zeros
    gaps, norm = [], 0.0
    for update in range(config.updates_per_batch):
        for number, part in enumerate(parts):
            batch = token_batch(task.policy, part)
            old = old_logprobs[number]  # (tokens,), None in the first update: a ratio of 1
            logprobs, entropy = token_logprobs(task.policy, batch, config.temperature)  # (tokens,) both
            reference_logprobs = None
            if reference:
                with torch.no_grad(), reference.policy() as frozen:
                    reference_logprobs, _ = token_logprobs(frozen, batch, config.temperature)
            loss, statistics = grpo_loss(
                logprobs, batch, denominator, config, old, reference_logprobs, tis_cap
            )
            if not torch.isfinite(loss):
                task.raise_not_finite(step, part)
            loss.backward()
            sums.update({name: value / config.updates_per_batch for name, value in statistics.items()})
            if update == 0:
                old_logprobs[number] = logprobs.detach()
                gaps.append((logprobs.detach() - batch.sampling_logprobs).abs().cpu())  # (tokens,)
                sums.update({"entropy": entropy.sum().item(), "trained_tokens": len(entropy)})
        if trained:  # else the weights stay as they are: no step, not even of the moments
            task.processes.sum_gradients(stepped_parameters(optimizer))
            norm = optimizer_step(optimizer, rate)
    totals: Counter[str] = Counter()
    for sums_of_one in task.processes.all_gather(sums):
        totals.update(sums_of_one)
    return {
        "entropy": totals["entropy"] / max(1, totals["trained_tokens"]),
        **{name: totals[name] / (totals["weight"] or 1.0) for name in ("clip_fraction", "kl", "tis_weight")},
        **logprob_gaps([gap for of_one in task.processes.all_gather(gaps) for gap in of_one]),
        "gradient_norm": norm,
        "learning_rate": rate,
    }


if __name__ == "__main__":
    user_errors(main, OPTIONS)
