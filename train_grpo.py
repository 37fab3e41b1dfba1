"""End-to-end GRPO on multi-turn trajectories: MTSQL-R1, sections 3.3.2 and 3.3.3.

    python train_grpo.py --config configs/toy.toml --model runs/sft/policy --data DATA --out runs/grpo
    torchrun --nproc-per-node 2 train_grpo.py ...   (the same on two GPUs)

One step: sample G trajectories for each of a batch of questions, reward each trajectory, normalise
rewards within each question's group, and take one clipped policy-gradient step on the tokens that
the model wrote. The run folder gets policy/, checkpoints/ (for --resume), metrics.csv and
trajectories.jsonl (one group a step).

With --curriculum, questions that the policy sometimes fails come level by level, from easy to hard
(section 3.3.1); without, all come in a random order.

Departures from the paper:
- A level has steps in proportion to its questions; the paper does not say how long it stays in one.
- EM is the official exact set match, as in the authors' code; the paper's text says string match.
- w1..w4: the paper chose them by grid search and gives none; the default rewards the outcome alone, the
  other presets of --rewards take those of the authors' code. `mtsql.experiments.grid_search` searches.
- Groups without variance in their rewards get no gradient but that of a KL in the loss (their advantage
  is 0 by definition) and stay in the denominator, as in the paper's formula.
- KL off by default, as in the paper's listing (its formula has a beta); --beta turns on an estimate
  (--kl) against the policy at the start of the run.
- One update a batch, so that the importance ratio is 1 and the clip does nothing; the clipped loss is
  the one that --updates-per-batch above 1 needs.
- Learning rate constant after a short warm-up; LoRA with --lora-rank.
- Off by default, from other papers: clip-higher, token mean and resampling of groups (DAPO), constant
  denominator and no division by the deviation (Dr. GRPO), sequence ratios (GSPO), dual clip, truncated
  importance sampling, what becomes of truncated trajectories, and GRPO-Filter (MTIR-SQL, Equation 3).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from tqdm import tqdm

from mtsql.agent.env import Environment
from mtsql.agent.rollout import rollout, trajectory_seed
from mtsql.agent.trajectory import Status, Trajectory, trajectory_record
from mtsql.config import Common, load_config, option, save_config, user_errors
from mtsql.data.datasets import Example, examples
from mtsql.learn.advantages import group_advantages, informative_groups
from mtsql.learn.batches import micro_batches
from mtsql.learn.checkpoint import load_training_state, new_checkpoint, save_training_state
from mtsql.learn.curriculum import curriculum_levels, level_of_step, read_counts
from mtsql.learn.interrupt import finish_step_on_interrupt
from mtsql.learn.logprobs import token_batch, token_logprobs
from mtsql.learn.loss import grpo_loss, kl_estimate
from mtsql.learn.model import (
    Reference,
    restore_policy,
    save_merged,
    save_policy,
)
from mtsql.learn.optimizer import clip_gradients, make_optimizer, set_learning_rate
from mtsql.learn.parallel import (
    Processes,
    leave_processes,
    restore_optimizer,
    shard_policy,
    whole_state,
    whole_weights,
)
from mtsql.recipes import load_recipe
from mtsql.recipes.rewards import RewardFunction, Rewards
from mtsql.report.evaluation import answer_dialogues, score_records
from mtsql.report.metrics import MetricsLog, describe, summarise
from mtsql.report.plots import plot_training
from mtsql.report.viewer import drop_later_records
from mtsql.run import (
    begin_training,
    load_split,
    make_environment,
    make_sampling,
    make_scorer,
    raise_not_finite,
    wording_of,
)
from mtsql.sql.score import scorable


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(Common):
    """Configuration of GRPO."""

    model: str = option(..., "local folder or hub name: the policy and the reference policy at the start")
    steps: int = option(100, "optimizer batches")
    prompts_per_step: int = option(256, "questions in each step (paper: 256)")
    samples_per_prompt: int = option(5, "G, trajectories of each question (paper: 5)")
    temperature: float = option(1.0, "of the rollouts, and of the log-probabilities in the loss")
    learning_rate: float = option(1e-6, "constant after --warmup-steps (paper: 1e-6)")
    warmup_steps: int = option(3, "steps of linear warm-up")
    beta2: float = option(0.99, "of AdamW")
    clip_low: float = option(0.2, "epsilon below 1")
    clip_high: float = option(0.2, "epsilon above 1 (clip-higher: above --clip-low)")
    dual_clip: float = option(0.0, "bound of the ratio of bad tokens, above 1; 0 is none")
    ratio: str = option("token", "importance ratio of each token, or of the sequence (GSPO)")
    updates_per_batch: int = option(1, "optimizer steps on each batch of trajectories")
    tis_cap: float = option(0.0, "cap of truncated importance sampling, trainer over sampler; 0 is off")
    aggregate: str = option("trajectory", "1/|M_i| a trajectory (paper), token (DAPO), constant (Dr. GRPO)")
    divide_by: str = option("group", "advantages over the deviation of the group, of the batch, or none")
    truncated: str = option("keep", "trajectories out of tokens: keep, exclude from the loss, penalise")
    truncation_penalty: float = option(1.0, "taken off their reward with --truncated penalise")
    filter_rollouts: bool = option(False, "GRPO-Filter (MTIR-SQL): drop trajectories of low quality")
    filter_threshold: float = option(0.0, "the quality that a trajectory has to exceed")
    resample_rounds: int = option(0, "times that other questions replace groups without variance (DAPO)")
    beta: float = option(0.0, "weight of the KL penalty")
    kl: str = option("k3", "its estimate: k2 or k3 in the loss, k1 in the reward")
    curriculum: str = option("", "counts.jsonl of mtsql.commands.curriculum; levels from easy to hard")
    level_size: int = option(2000, "questions in a level (paper: 2000); 0: one level in random order")
    rewards: str = option(
        "",
        "preset of the recipe's rewards, its first if not given; mtsql_r1: outcome, process, paper, authors",
    )
    weights: str = option("", "weights that replace the preset's: ex=1,proposal=0.5")
    layout: str = option("shared", "positions of a batch: shared prompts, packed, rows")
    micro_batch_positions: int = option(16384, "positions in one forward pass")
    lora_rank: int = option(0, "rank of LoRA on all linear layers; 0 trains all parameters")
    optimizer: str = option("adamw", "adamw, adamw8bit")
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass")
    shard: bool = option(False, "full weights, gradients, optimizer over the processes of torchrun (FSDP2)")
    evaluate_every: int = option(0, "steps between greedy evaluations on the dev split; 0 is never")
    evaluate_dialogues: int = option(100, "dialogues of the dev split in these evaluations; 0 is all")
    save_every: int = option(20, "steps between checkpoints")
    keep_checkpoints: int = option(2, "newest checkpoints that are kept")
    resume: bool = option(False, "go on from the newest checkpoint in --out; from the start if none is there")
    merge: bool = option(False, "also write policy_merged/, the adapter merged into its base")


def main() -> None:
    """The GRPO loop."""
    config = load_config(GrpoConfig, "grpo", __doc__)
    if config.temperature <= 0:
        raise ValueError("--temperature should be above 0: greedy samples of a question are all the same")
    if 0 < config.dual_clip <= 1:
        raise ValueError(f"--dual-clip should be above 1, or 0 for none, not {config.dual_clip:g}")
    processes, out, device, checkpoint, tokens, dataset, environment, scorer, policy, attention = (
        begin_training(config)
    )
    tokenizer = tokens.tokenizer
    reward = load_recipe(config.recipe).make_reward(
        config.rewards, config.weights, scorer, tokenizer.decode, wording_of(config)
    )
    # The reference policy is the policy at the start of RL, adapters of a warm start included.
    reference = Reference(policy) if config.beta else None
    if checkpoint is not None:
        restore_policy(policy, checkpoint / "policy", config.dtype)
    if config.shard:
        shard_policy(policy, processes)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = make_optimizer(policy, config.learning_rate, config.beta2, kind=config.optimizer)
    first_step = 0
    if checkpoint is not None:
        first_step, _, optimizer_state = load_training_state(checkpoint)
        restore_optimizer(policy, optimizer, optimizer_state)
    questions = scorable(examples(dataset.dialogues, config.history), scorer, config.drop_empty)
    levels = [questions]
    if config.curriculum:
        levels = curriculum_levels(questions, read_counts(Path(config.curriculum)), config.level_size)
    if processes.first and config.curriculum:
        print(f"curriculum: levels of {', '.join(str(len(level)) for level in levels)} questions")
    if config.evaluate_every:
        dev = load_split(config, "dev")
        dev_environment = make_environment(config, dev, tokens, config.tools)
        dev_scorer = make_scorer(dev_environment)
    if processes.first:
        save_config(config, out)
        log = MetricsLog(out / "metrics.csv", first_step)
        dev_log = MetricsLog(out / "dev.csv", first_step)
        drop_later_records(out / "trajectories.jsonl", first_step)
    started = time.perf_counter()

    bar = tqdm(range(first_step, config.steps), desc="GRPO", unit="step", disable=not processes.first)
    with finish_step_on_interrupt() as interrupted:
        for step in bar:
            # Sample G trajectories for each question and reward each.
            began = time.perf_counter()
            with whole_weights(policy):
                groups, rewards, divergences, dropped = sample_groups(
                    config, policy, reference, environment, reward, levels, step, processes
                )
            rollout_seconds = time.perf_counter() - began

            # Normalise within each group.
            began = time.perf_counter()
            totals = torch.tensor([[v.total for v in verdicts] for verdicts in rewards])  # (questions, G)
            informative = informative_groups(totals)  # (questions,)
            # KL in the reward counts after a group was found to teach something without it.
            totals = totals - config.beta * torch.tensor(divergences)
            advantages, _ = group_advantages(totals, config.divide_by)
            advantages = advantages * informative[:, None]  # (questions, G)
            trajectories = [t for group in groups for t in group]
            advantage_of = dict(zip(map(id, trajectories), advantages.flatten(), strict=True))

            # Clipped policy gradient on what the model wrote. Groups without variance add nothing, or KL.
            kl_in_loss = reference is not None and config.kl != "k1"
            out_of_loss = {id(t) for t in trajectories if config.truncated == "exclude" and is_truncated(t)}
            if config.filter_rollouts:
                qualities = [verdict.quality for verdicts in rewards for verdict in verdicts]
                pairs = zip(trajectories, qualities, strict=True)
                out_of_loss |= {id(t) for t, quality in pairs if quality <= config.filter_threshold}
            counted = [t for t in trajectories if id(t) not in out_of_loss]
            denominator = {
                "trajectory": max(1, len(counted)),
                "token": max(1, sum(t.sampled_length for t in counted)),
                "constant": max(1, len(counted)) * config.max_response_tokens,
            }[config.aggregate]
            trained = [
                [t for t in group if id(t) not in out_of_loss]
                for group, keep in zip(groups, informative, strict=True)
                if keep or kl_in_loss
            ]
            trained = sorted(filter(None, trained), key=lambda g: sum(len(t.ids) for t in g))
            batches = micro_batches(processes.share(trained), config.layout, config.micro_batch_positions)
            if config.shard:
                batches = processes.pad(batches, [trained[0][:1]]) if trained else []
            else:
                batches = [(part, 1.0) for part in batches]
            rate = config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup_steps))
            set_learning_rate(optimizer, rate)
            policy.train()
            old_logprobs: list[torch.Tensor] = []  # of each micro-batch, before the first update
            statistics: Counter[str] = Counter()
            largest_gap = norm = 0.0
            for update in range(config.updates_per_batch):
                for number, (part, weight) in enumerate(batches):
                    flat = [t for group in part for t in group]
                    batch = token_batch(part, config.layout, device, attention)
                    logprobs, entropy = token_logprobs(policy, batch, config.temperature)
                    if update == 0:
                        old_logprobs.append(logprobs.detach())
                    reference_logprobs = None
                    if kl_in_loss:
                        with torch.no_grad(), reference.policy() as frozen:
                            reference_logprobs, _ = token_logprobs(frozen, batch, config.temperature)
                    loss, parts = grpo_loss(
                        logprobs,
                        torch.stack([advantage_of[id(t)] for t in flat]).to(device),
                        batch.trajectory_index,
                        denominator,
                        aggregate=config.aggregate,
                        ratio=config.ratio,
                        old_logprobs=old_logprobs[number] if update else None,
                        clip_low=config.clip_low,
                        clip_high=config.clip_high,
                        dual_clip=config.dual_clip,
                        reference_logprobs=reference_logprobs,
                        kl=config.kl,
                        beta=config.beta if kl_in_loss else 0.0,
                        sampling_logprobs=batch.sampling_logprobs,
                        tis_cap=config.tis_cap,
                    )
                    if not torch.isfinite(loss):
                        raise_not_finite(out, step, flat, tokens)
                    (loss * weight).backward()
                    if weight == 0:
                        continue
                    statistics.update(parts)
                    if update == 0:
                        gap = (logprobs.detach() - batch.sampling_logprobs).abs().max().item()
                        largest_gap = max(largest_gap, gap)
                        statistics["entropy"] += entropy.sum().item()
                        statistics["trained_tokens"] += len(entropy)
                if trained:
                    processes.sum_gradients(parameters)
                    norm = clip_gradients(parameters, 1.0)
                    optimizer.step()
                    optimizer.zero_grad()  # gradients need no memory during rollouts
            train_seconds = time.perf_counter() - began
            statistics = sum(processes.of_each(statistics), Counter())
            largest_gap = max(processes.of_each(largest_gap))

            if processes.first:
                row = {
                    "step": step,
                    "minutes": round((time.perf_counter() - started) / 60, 3),
                    "level": level_of_step(step, config.steps, list(map(len, levels)))[0] + 1,
                    **describe(trajectories, [r for verdicts in rewards for r in verdicts]),
                    "informative_groups": informative.float().mean().item(),
                    "left_out": len(out_of_loss) / len(trajectories),
                    "dropped_groups": dropped / (dropped + len(groups)),
                    "entropy": statistics["entropy"] / max(1, statistics["trained_tokens"]),
                    "clip_fraction": statistics["clip_fraction"] / config.updates_per_batch,
                    "kl": statistics["kl"] / config.updates_per_batch
                    + fmean(
                        k / max(1, t.sampled_length)
                        for group, ks in zip(groups, divergences, strict=True)
                        for t, k in zip(group, ks, strict=True)
                    ),
                    "tis_weight": statistics["tis_weight"] / config.updates_per_batch,
                    "logprob_gap": largest_gap,
                    "gradient_norm": norm,
                    "learning_rate": rate,
                    "rollout_seconds": round(rollout_seconds, 2),
                    "train_seconds": round(train_seconds, 2),
                    "sampled_tokens_per_second": round(
                        sum(t.sampled_length for t in trajectories) / rollout_seconds
                    ),
                }
                log.append(row)
                with (out / "trajectories.jsonl").open("a", encoding="utf-8") as file:
                    for trajectory, verdict in zip(groups[0], rewards[0], strict=True):
                        record = trajectory_record(trajectory, tokenizer.decode, verdict.total)
                        file.write(json.dumps({"step": step, **record}) + "\n")
                bar.set_postfix_str(
                    f"reward {row['reward']:.2f}, EX {row['ex']:.2f}, length {row['response_tokens']:.0f}, "
                    f"entropy {row['entropy']:.2f}, {row['sampled_tokens_per_second']} tokens/s"
                )
            if config.evaluate_every and (step + 1) % config.evaluate_every == 0:
                with whole_weights(policy):
                    answered = answer_dialogues(
                        policy,
                        dev_environment,
                        processes.share(dev.dialogues[: config.evaluate_dialogues or None]),
                        config.history,
                        make_sampling(config, dev_environment, 0.0),
                        config.seed,
                        config.rows,
                        cache_gib=config.cache_gib,
                    )
                records = processes.gather(score_records(answered, dev_scorer, environment.recipe.verifies))
                if processes.first:
                    scores = summarise(records)
                    by_hardness = {f"ex_{h}": v for h, v in scores["ex"]["by_hardness"].items()}
                    dev_log.append(
                        {"step": step, "ex": scores["ex"]["mean"], "em": scores["em"]["mean"], **by_hardness}
                    )
            stop = any(processes.of_each(bool(interrupted)))
            if stop or (step + 1) % config.save_every == 0:
                weights, optimizer_state = whole_state(policy, optimizer)
                if processes.first:
                    with new_checkpoint(out, step + 1, config.keep_checkpoints) as folder:
                        save_policy(policy, tokenizer, folder / "policy", weights)
                        save_training_state(folder, optimizer_state, step + 1, {})
            if stop:
                if processes.first:
                    print(f"saved a checkpoint after step {step + 1} in {out}; go on with --resume")
                break
        else:
            weights, _ = whole_state(policy, optimizer)
            if processes.first:
                save_policy(policy, tokenizer, out / "policy", weights)
                if config.merge:
                    save_merged(out / "policy", out / "policy_merged", config.dtype)
                plot_training(out / "metrics.csv", out)
                print(f"policy after {config.steps} steps: {out / 'policy'}")
    leave_processes(processes)


def sample_groups(
    config: GrpoConfig,
    policy: torch.nn.Module,
    reference: Reference | None,
    environment: Environment,
    reward: RewardFunction,
    levels: Sequence[Sequence[Example]],
    step: int,
    processes: Processes,
) -> tuple[list[list[Trajectory]], list[list[Rewards]], list[list[float]], int]:
    """G trajectories, with their rewards and, with --kl k1, their divergences from the reference, for each
    question of a step at its level of the curriculum; and how many groups were replaced.

    With --resample-rounds, groups whose rewards are all equal are replaced by those of other questions,
    so many times at most (DAPO, section 3.2); what is missing then is filled up with them. Questions
    whose prompt is too long are left out. Raises ValueError if no group is left.
    """
    level, step_in_level = level_of_step(step, config.steps, list(map(len, levels)))
    questions = levels[level]
    wanted = min(config.prompts_per_step, len(questions))
    sampling = make_sampling(config, environment, config.temperature)
    size = config.samples_per_prompt
    kept: list[tuple[list[Trajectory], list[Rewards], list[float]]] = []
    equal: list[tuple[list[Trajectory], list[Rewards], list[float]]] = []
    asked: list[int] = []
    for attempt in range(config.resample_rounds + 1):
        order = question_order(config, len(questions), level, step_in_level, attempt)
        order = [i for i in order if i not in set(asked)]
        numbered = list(enumerate(order[: wanted - len(kept)], start=len(asked)))
        asked += [i for _, i in numbered]
        episodes, played = [], []
        for number, index in processes.share(numbered):
            seeds = [trajectory_seed(config.seed, step, number, sample) for sample in range(size)]
            group = environment.episodes(questions[index], seeds)
            if group[0].trajectory.status is None:
                episodes += group
                played += [questions[index]] * size
        trajectories = rollout(
            policy, environment.tokens, episodes, sampling, config.rows, cache_gib=config.cache_gib
        )
        verdicts = [reward(t, e) for t, e in zip(trajectories, played, strict=True)]
        if config.truncated == "penalise":
            verdicts = [
                replace(v, total=v.total - config.truncation_penalty * is_truncated(t))
                for v, t in zip(verdicts, trajectories, strict=True)
            ]
        divergences = [0.0] * len(trajectories)
        if reference is not None and config.kl == "k1":
            divergences = kl_of(config, trajectories, reference)
        found = [
            (trajectories[i : i + size], verdicts[i : i + size], divergences[i : i + size])
            for i in range(0, len(trajectories), size)
        ]
        for group in processes.gather(found):
            spread = informative_groups(torch.tensor([[v.total for v in group[1]]])).item()
            (kept if spread or config.resample_rounds == 0 else equal).append(group)
        if len(kept) >= wanted:
            break
    replaced = max(0, len(equal) - max(0, wanted - len(kept)))
    kept += equal[: wanted - len(kept)]
    if not kept:
        raise ValueError(
            f"every prompt of step {step} is longer than --max-prompt-tokens {config.max_prompt_tokens}"
        )
    groups, rewards, divergences = (list(parts) for parts in zip(*kept, strict=True))
    return groups, rewards, divergences, replaced


def kl_of(config: GrpoConfig, trajectories: Sequence[Trajectory], reference: Reference) -> list[float]:
    """Sum over each trajectory's tokens of log policy - log reference, the policy's as it was sampled."""
    sums = {id(t): 0.0 for t in trajectories}
    with torch.no_grad(), reference.policy() as frozen:
        for part in micro_batches([trajectories], "packed", config.micro_batch_positions):
            batch = token_batch(part, "packed", frozen.device, frozen.config._attn_implementation)
            logprobs, _ = token_logprobs(frozen, batch, config.temperature)
            k1 = kl_estimate(batch.sampling_logprobs, logprobs, "k1")  # (tokens,)
            for index, value in zip(batch.trajectory_index.tolist(), k1.tolist(), strict=True):
                sums[id(part[index][0])] += value
    return [sums[id(t)] for t in trajectories]


def is_truncated(trajectory: Trajectory) -> bool:
    """Whether it ended because it was too long."""
    return trajectory.status is Status.OUT_OF_TOKENS


def question_order(config: GrpoConfig, count: int, level: int, step: int, attempt: int = 0) -> list[int]:
    """Indices of a step's questions: each epoch of a level is a permutation of its own, from the seed.

    `step` counts within the level. Later attempts of a step draw from all its questions.
    """
    if attempt:
        return np.random.default_rng((config.seed, level, step, attempt)).permutation(count).tolist()
    per_step = min(config.prompts_per_step, count)
    steps_in_epoch = count // per_step
    epoch, place = divmod(step, steps_in_epoch)
    permutation = np.random.default_rng((config.seed, level, epoch)).permutation(count)
    return permutation[place * per_step : (place + 1) * per_step].tolist()


if __name__ == "__main__":
    user_errors(main)
