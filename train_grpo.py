"""End-to-end GRPO on multi-turn trajectories: MTSQL-R1, sections 3.3.2 and 3.3.3.

    python train_grpo.py --config configs/toy.toml --model runs/sft/policy --data DATA --out runs/grpo
    torchrun --nproc-per-node 2 train_grpo.py ...   (the same on two GPUs)

One step: sample G trajectories for each of a batch of questions, reward each trajectory, normalise rewards
within each question's group, and take one clipped policy-gradient step on the tokens that the model wrote.
With --curriculum, questions that the policy sometimes fails come from easy to hard (section 3.3.1). The run
folder gets policy/, checkpoints/, metrics.csv, trajectories.jsonl (one group a step), asked.json (ids of the
questions) and dev.csv, which is filled with --evaluate-every.

Departures from the paper:
- A level has steps in proportion to its questions; appendix B.0.2's listing has 60 epochs for each.
- EM is the official exact set match, as in the authors' code; the text (--rewards paper) compares strings.
  EX is the official one too: DISTINCT and the order of columns do not count.
- Process rewards count a candidate once (rules: mtsql/recipes/mtsql_r1_rewards.py; how clause F1 is read:
  docs/recipe.md) and are paid at every level; the paper begins with those of medium difficulty (Finding 9):
  --process-from-level 2 of three levels.
- The dev set is evaluated after steps, not before the first.
- w1..w4: the paper chose them by grid search and gives none; the default rewards the outcome alone, the
  other presets of --rewards take those of the authors' code.
- Groups without variance in their rewards get no gradient but that of a KL in the loss (their advantage
  is 0 by definition) and stay in the denominator, as in the paper's formula.
- KL off by default, as in the paper's listing (its formula has a beta); --beta weighs it.
- One update a batch, so that the importance ratio is 1; --updates-per-batch above 1 needs the clip.
- Learning rate constant after a short warm-up; AdamW's beta2 is 0.99 (--beta2) and there is no weight decay
  (--weight-decay), where verl, whose defaults the paper keeps, has 0.999 and 0.01; LoRA with --lora-rank.
- Other papers' variants (mtsql/learn/variants.py, loss.py, advantages.py) are off unless a paper's file sets
  them, but for truncated importance sampling where sampler and trainer round apart: in half precision or on a
  GPU.
"""

from __future__ import annotations

from mtsql.config import GrpoConfig, read_options, save_config, user_errors

if __name__ == "__main__":  # before torch is imported, so that --help and wrong options are answered at once
    OPTIONS = read_options(GrpoConfig, __doc__)

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from mtsql.agent.rollout import trajectory_seed
from mtsql.agent.trajectory import Trajectory
from mtsql.data.datasets import Example
from mtsql.errors import UserError
from mtsql.files import write_atomically
from mtsql.learn.advantages import group_advantages, informative_groups
from mtsql.learn.batches import step_batches
from mtsql.learn.checkpoint import resume, save_checkpoint
from mtsql.learn.curriculum import curriculum_levels, level_of_step, question_order, read_counts
from mtsql.learn.interrupt import INTERRUPTED, finish_step_on_interrupt
from mtsql.learn.logprobs import token_batch, token_logprobs
from mtsql.learn.loss import grpo_loss, loss_denominator, truncation_cap
from mtsql.learn.model import Reference
from mtsql.learn.optimizer import optimizer_step, stepped_parameters, warmup_rate
from mtsql.learn.parallel import leave_processes
from mtsql.learn.samples import Sample, append_trajectories, group_metrics, logprob_gaps
from mtsql.learn.variants import check_variants, dynamic_sampling, idle_variants
from mtsql.recipes.rewards import RewardFunction, Rewards
from mtsql.report.evaluation import score_records
from mtsql.report.metrics import HARDNESS, MetricsLog, summarise
from mtsql.report.plots import plot_training
from mtsql.report.viewer import drop_later_records
from mtsql.task import (
    Task,
    answer_split,
    begin_training,
    fitting_questions,
    load_split,
    make_sampling,
    raise_not_finite,
    reward_function,
    save_result,
    task_over,
    training_questions,
)


def main(config: GrpoConfig) -> int:
    """The GRPO loop; returns the exit code."""
    check_variants(config)
    task = begin_training(config, "rl" if config.for_rl else "train")
    policy, processes, out = task.policy, task.processes, task.out
    decode = task.tokens.tokenizer.decode
    reward = reward_function(config, task.tokens, task.scorer, config.weights)
    early = outcome_only(config, task, reward) if config.process_from_level > 1 else reward
    reference = Reference(policy) if config.beta else None  # of --model, before a checkpoint replaces it
    optimizer, first, state = resume(config, out, policy, processes)
    counts = read_counts(Path(config.curriculum)) if config.curriculum else []
    levels = [fitting_questions(config, task, training_questions(config, task, counts))]
    if config.curriculum:
        levels = curriculum_levels(levels[0], counts, config.level_size)
    dev = dev_task(config, task) if config.evaluate_every else None
    if processes.is_main:
        save_config(config, out)
        for sentence in idle_variants(config):
            print(sentence)
        if config.curriculum:
            print(f"curriculum: levels of {', '.join(str(len(level)) for level in levels)} questions")
        log, dev_log = (MetricsLog(out / f"{name}.csv", first, config.track) for name in ("metrics", "dev"))
        drop_later_records(out / "trajectories.jsonl", first)
    stop, started = False, time.perf_counter()
    asked = set((state or {}).get("asked", ()))  # ids of the questions that were learned from
    bar = tqdm(range(first, config.steps), desc="GRPO", unit="step", disable=not processes.is_main)
    with finish_step_on_interrupt() as interrupted:
        for step in bar:
            # Sample G trajectories for each question and reward each.
            began = time.perf_counter()
            level = level_of_step(step, config.steps, list(map(len, levels)))[0] + 1
            rewarded_by = reward if level >= config.process_from_level else early
            groups, replaced = sample_groups(config, task, rewarded_by, levels, step)
            asked |= {group[0].example.id for group in groups}
            sampled = time.perf_counter()
            # Normalise the rewards within each group.
            informative = set_advantages(config, groups)  # (questions,)
            # Clipped policy gradient on what the policy wrote.
            rate = warmup_rate(config.learning_rate, step)
            statistics = clipped_step(config, task, reference, optimizer, groups, informative, rate, step)
            trained = time.perf_counter()
            if processes.is_main:
                row = {
                    "step": step,
                    "minutes": round((trained - started) / 60, 3),
                    "level": level,
                    **group_metrics(groups, informative, replaced, sampled - began, decode),
                    **statistics,
                    "learning_rate": rate,
                    "train_seconds": round(trained - sampled, 2),
                }
                log.append(row)
                append_trajectories(out / "trajectories.jsonl", step, groups[:1], task.tokens, task.scorer)
                bar.set_postfix_str(
                    f"reward {row['reward']:.2f}, EX {row['ex']:.2f}, length {row['response_tokens']:.0f}, "
                    f"entropy {row['entropy']:.2f}, {row['sampled_tokens_per_second']} tokens/s"
                )
            if dev is not None and (step + 1) % config.evaluate_every == 0:
                scores = {"step": step, **dev_scores(config, dev)}
                if processes.is_main:
                    dev_log.append(scores)
            stop = any(processes.all_gather(bool(interrupted)))
            due = stop or step + 1 == config.steps or (step + 1) % config.save_every == 0
            if due and processes.is_main:
                learned = {"asked": sorted(asked)}
                save_checkpoint(out, policy, task.tokens.tokenizer, optimizer, step + 1, learned)
            if stop:
                break
    if not stop:
        save_result(task, out / "policy")
    if processes.is_main and stop:
        print(f"saved a checkpoint after step {step + 1} in {out}; go on with --resume")
    elif processes.is_main:
        write_atomically(out / "asked.json", json.dumps(sorted(asked)))
        plot_training(out / "metrics.csv", out)
        print(f"policy after {max(first, config.steps)} steps: {out / 'policy'}")
    leave_processes(processes)
    return INTERRUPTED if stop else 0


def outcome_only(config: GrpoConfig, task: Task, reward: RewardFunction) -> RewardFunction:
    """The rewards with totals that leave out the process rewards, whose means are logged all the same."""
    outcome = reward_function(config, task.tokens, task.scorer, f"{config.weights},proposal=0,verify=0")

    def without_process(trajectory: Trajectory, example: Example) -> Rewards:
        return replace(reward(trajectory, example), total=outcome(trajectory, example).total)

    return without_process


def sample_groups(
    config: GrpoConfig, task: Task, reward: RewardFunction, levels: Sequence[Sequence[Example]], step: int
) -> tuple[list[list[Sample]], int]:
    """G rewarded samples of each of a step's questions, and how many groups `dynamic_sampling` replaced."""
    level, step_in_level = level_of_step(step, config.steps, list(map(len, levels)))
    questions = levels[level]
    wanted = min(config.prompts_per_step, len(questions))

    def order(attempt: int = 0) -> list[int]:
        return question_order(config.seed, len(questions), wanted, level, step_in_level, attempt)

    def play(indices: list[int], asked: int = 0) -> list[list[Sample]]:
        return play_questions(config, task, reward, [questions[i] for i in indices], step, asked)

    if config.resample_rounds:
        return dynamic_sampling(play, order, wanted, config.resample_rounds)
    return play(order()), 0


def play_questions(
    config: GrpoConfig,
    task: Task,
    reward: RewardFunction,
    questions: Sequence[Example],
    step: int,
    asked: int,
) -> list[list[Sample]]:
    """A group of G rewarded samples of each question; the step has `asked` so many before them."""
    size, sampling = config.samples_per_prompt, make_sampling(config, task.environment, config.temperature)
    episodes, examples = [], []
    for number, question in task.processes.share(list(enumerate(questions, start=asked))):
        seeds = [trajectory_seed(config.seed, step, number, sample) for sample in range(size)]
        episodes += task.environment.episodes(question, seeds)
        examples += [question] * size
    trajectories = task.play(episodes, sampling)
    samples = [Sample(t, e, reward(t, e)) for t, e in zip(trajectories, examples, strict=True)]
    for sample in samples:
        sample.in_loss = sample.rewards.kept or not config.filter_rollouts
    return task.processes.gather([samples[i : i + size] for i in range(0, len(samples), size)])


def set_advantages(config: GrpoConfig, groups: Sequence[Sequence[Sample]]) -> Tensor:
    """A_i of every sample (section 3.3.3); which groups teach something, (questions,) bool."""
    rewards = torch.tensor([[s.rewards.total for s in group] for group in groups])  # (questions, G)
    informative = informative_groups(rewards)  # (questions,)
    advantages = group_advantages(rewards, informative, config.divide_by)
    for group, of_group in zip(groups, advantages.tolist(), strict=True):
        for sample, advantage in zip(group, of_group, strict=True):
            sample.trajectory.advantage = advantage
    return informative


def clipped_step(
    config: GrpoConfig,
    task: Task,
    reference: Reference | None,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[Sample]],
    informative: Tensor,
    rate: float,
    step: int,
) -> dict[str, float]:
    """One update of a batch (or --updates-per-batch) by the clipped surrogate (section 3.3.3); statistics.

    Groups without variance add nothing to it, or the KL in the loss.
    """
    counted = [s.trajectory for group in groups for s in group if s.in_loss]
    denominator = loss_denominator(counted, config.aggregate, config.max_response_tokens)
    kept = [
        [s.trajectory for s in group if s.in_loss]
        for group, teaches in zip(groups, informative, strict=True)
        if teaches or reference
    ]
    trained = sorted(filter(None, kept), key=lambda group: sum(len(t.ids) for t in group))
    parts = step_batches(trained, config.layout, config.micro_batch_positions, task.processes)
    parameters = stepped_parameters(optimizer)
    task.policy.train()
    sums: Counter[str] = Counter()  # updated, never added: + would drop what is negative
    gaps, norm = [], 0.0
    for update in range(config.updates_per_batch):
        for part in parts:
            batch = token_batch(part.groups, config.layout, task.policy.device, task.attention)
            logprobs, entropy = token_logprobs(task.policy, batch, config.temperature)  # (tokens,) both
            reference_logprobs = None
            if reference:
                with torch.no_grad(), reference.policy() as frozen:
                    reference_logprobs, _ = token_logprobs(frozen, batch, config.temperature)
            loss, statistics = grpo_loss(
                logprobs,
                batch.advantages,
                batch.trajectory_index,
                denominator,
                aggregate=config.aggregate,
                old_logprobs=part.old_logprobs,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                reference_logprobs=reference_logprobs,
                beta=config.beta,
                sampling_logprobs=batch.sampling_logprobs,
                tis_cap=truncation_cap(config, task.policy),
            )
            if not torch.isfinite(loss):
                raise_not_finite(task, step, part.trajectories)
            loss.backward()
            sums.update({name: value / config.updates_per_batch for name, value in statistics.items()})
            if update == 0:
                part.old_logprobs = logprobs.detach()
                gaps.append((part.old_logprobs - batch.sampling_logprobs).abs().cpu())  # (tokens,)
                sums.update({"entropy": entropy.sum().item(), "trained_tokens": len(entropy)})
        if trained:
            task.processes.sum_gradients(parameters)
            norm = optimizer_step(optimizer, parameters, rate)
    totals: Counter[str] = Counter()
    for share in task.processes.all_gather(sums):
        totals.update(share)
    return {
        "entropy": totals["entropy"] / max(1, totals["trained_tokens"]),
        "clip_fraction": totals["clip_fraction"] / (totals["weight"] or 1.0),
        "kl": totals["kl"] / (totals["weight"] or 1.0),
        "tis_weight": totals["tis_weight"] / (totals["weight"] or 1.0),
        **logprob_gaps([gap for share in task.processes.all_gather(gaps) for gap in share]),
        "gradient_norm": norm,
    }


def dev_task(config: GrpoConfig, task: Task) -> Task:
    """The task with the first dialogues of another split, for evaluations during training.

    With --held-out it is `held_out`, else `dev`. Raises UserError where that would be what is trained on.
    """
    files = [source for source in config.data if Path(source).is_file()]
    if files and not config.held_out:
        raise UserError(
            f"--evaluate-every needs other questions than those trained on, and {files[0]} has one split; "
            "give --held-out, or --evaluate-every 0"
        )
    dataset = load_split(config, "held_out" if config.held_out else "dev")
    dataset = replace(dataset, dialogues=dataset.dialogues[: config.evaluate_dialogues or None])
    return replace(task, **task_over(config, task.tokens, dataset))


def dev_scores(config: GrpoConfig, dev: Task) -> dict[str, float]:
    """EX, EM, and EX by hardness of greedy answers."""
    greedy = make_sampling(config, dev.environment, 0.0)
    answered = answer_split(config, dev, dev.dataset.dialogues, greedy, config.seed)
    scores = summarise(score_records(answered, dev.scorer, dev.environment.recipe.verifies))
    by_hardness = {f"ex_{level}": scores["ex"]["by_hardness"][level] for level in HARDNESS}
    return {"ex": scores["ex"]["mean"], "em": scores["em"]["mean"], **by_hardness}


if __name__ == "__main__":
    user_errors(main, OPTIONS)
