"""End-to-end GRPO on multi-turn trajectories: MTSQL-R1, sections 3.3.2 and 3.3.3.

    python train_grpo.py --config configs/toy.toml --model runs/sft/policy --data DATA --out runs/grpo

One step: sample G trajectories for each of a batch of questions, reward each trajectory, normalise
rewards within each question's group, and take one clipped policy-gradient step on the tokens that
the model wrote. The run folder gets policy/, checkpoint/ (for --resume), metrics.csv and
trajectories.jsonl (one group a step).

Departures from the paper:
- No curriculum yet: questions come in a random order (section 3.3.1 has an issue of its own).
- EM is the official exact set match, as in the authors' code; the paper's text says string match.
- w1..w4: the paper chose them by grid search and gives none; the default rewards the outcome alone.
- Groups without variance in their rewards get no gradient (their advantage is 0 by definition) and
  stay in the denominator, as in the paper's formula.
- KL off by default, as in the paper's listing (its formula has a beta); --beta turns on the k3
  estimate against the policy at the start of the run.
- One update a batch, so that the importance ratio is 1 and the clip does nothing; the clipped loss is
  the one that --updates-per-batch above 1 needs.
- Learning rate constant after a short warm-up; LoRA with --lora-rank.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from tqdm import tqdm

from mtsql.agent.env import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.agent.rollout import Sampling, rollout
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.trajectory import Status, Trajectory
from mtsql.config import Common, load_config, option, save_config, user_errors
from mtsql.data.datasets import examples
from mtsql.learn.advantages import group_advantages
from mtsql.learn.batches import group_micro_batches
from mtsql.learn.checkpoint import load_training_state, save_training_state, write_atomically
from mtsql.learn.interrupt import finish_step_on_interrupt
from mtsql.learn.logprobs import shared_prompt_batch, token_logprobs
from mtsql.learn.loss import grpo_loss
from mtsql.learn.model import Reference, load_policy, load_tokenizer, restore_policy, save_policy
from mtsql.learn.optimizer import make_optimizer, set_learning_rate
from mtsql.recipes.mtsql_r1 import RewardWeights, reward
from mtsql.report.evaluation import answer_dialogues, scorable, score_records
from mtsql.report.metrics import MetricsLog
from mtsql.report.plots import plot_training
from mtsql.report.viewer import drop_later_records, trajectory_record
from mtsql.run import (
    load_split,
    make_environment,
    make_scorer,
    pick_device,
    trajectory_seed,
)


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
    clip_high: float = option(0.2, "epsilon above 1")
    updates_per_batch: int = option(1, "optimizer steps on each batch of trajectories")
    aggregate: str = option("trajectory", "1/|M_i| for each trajectory (paper), or token (DAPO)")
    divide_by: str = option("group", "advantages over the group's standard deviation, or none")
    beta: float = option(0.0, "weight of the KL penalty")
    w_ex: float = option(1.0, "w1: execution match")
    w_em: float = option(1.0, "w2: exact match")
    w_proposal: float = option(0.0, "w3: clause F1 of proposals and corrections")
    w_verify: float = option(0.0, "w4: execution and memory verdicts")
    micro_batch_positions: int = option(16384, "positions in one forward pass")
    lora_rank: int = option(0, "rank of LoRA on all linear layers; 0 trains all parameters")
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass")
    evaluate_every: int = option(0, "steps between greedy evaluations on the dev split; 0 is never")
    evaluate_dialogues: int = option(100, "dialogues of the dev split in these evaluations")
    save_every: int = option(20, "steps between checkpoints")
    resume: bool = option(False, "go on from the checkpoint in --out")


def main() -> None:
    """The GRPO loop."""
    config = load_config(GrpoConfig, "grpo", __doc__)
    out = Path(config.out)
    checkpoint = out / "checkpoint"
    device = pick_device(config.device)
    torch.manual_seed(config.seed)  # new LoRA adapters start at random
    tokenizer = load_tokenizer(config.model)
    tokens = ChatTokens(tokenizer, config.thinking)
    dataset = load_split(config, "train")
    environment = make_environment(config, dataset, tokens, config.tools)
    scorer = make_scorer(environment)
    policy = load_policy(
        config.model,
        config.dtype,
        device,
        lora_rank=config.lora_rank,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    # The reference policy is the policy at the start of RL, adapters of a warm start included.
    reference = Reference(policy) if config.beta else None
    if config.resume:
        restore_policy(policy, checkpoint / "policy", config.dtype)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = make_optimizer(policy, config.learning_rate, config.beta2)
    first_step = load_training_state(checkpoint, optimizer, None)[0] if config.resume else 0
    questions = scorable(examples(dataset.dialogues, config.history), scorer)
    if config.evaluate_every:
        dev = load_split(config, "dev")
        dev_environment = make_environment(config, dev, tokens, config.tools)
        dev_scorer = make_scorer(dev_environment)
    save_config(config, out)
    log = MetricsLog(out / "metrics.csv", first_step)
    dev_log = MetricsLog(out / "dev.csv", first_step)
    drop_later_records(out / "trajectories.jsonl", first_step)
    weights = RewardWeights(config.w_ex, config.w_em, config.w_proposal, config.w_verify)
    sampling = Sampling(config.temperature, max_turn_tokens=config.max_turn_tokens)
    started = time.perf_counter()

    def save(step: int) -> None:
        save_policy(policy, tokenizer, checkpoint / "policy")
        save_training_state(checkpoint, optimizer, None, step, {})

    bar = tqdm(range(first_step, config.steps), desc="GRPO", unit="step")
    with finish_step_on_interrupt() as interrupted:
        for step in bar:
            # Sample G trajectories for each question.
            asked = [questions[i] for i in question_order(config, len(questions), step)]
            episodes = [
                episode
                for number, example in enumerate(asked)
                for episode in environment.episodes(
                    example,
                    [
                        trajectory_seed(config.seed, step, number, sample)
                        for sample in range(config.samples_per_prompt)
                    ],
                )
                if episode.trajectory.status is None
            ]
            if not episodes:
                raise ValueError(
                    f"every prompt of step {step} is longer than --max-prompt-tokens "
                    f"{config.max_prompt_tokens}"
                )
            began = time.perf_counter()
            trajectories = rollout(
                policy, tokens, episodes, sampling, config.rows, cache_gib=config.cache_gib
            )
            rollout_seconds = time.perf_counter() - began

            # Reward each trajectory; normalise within each group.
            by_id = {example.id: example for example in asked}
            rewards = [reward(t, by_id[t.example_id], scorer, weights) for t in trajectories]
            size = config.samples_per_prompt
            groups = [trajectories[i : i + size] for i in range(0, len(trajectories), size)]
            totals = torch.tensor([r.total for r in rewards]).view(-1, size)  # (questions, G)
            advantages, informative = group_advantages(totals, config.divide_by)  # (questions, G)
            advantage_of = dict(zip(map(id, trajectories), advantages.flatten(), strict=True))

            # Clipped policy gradient on what the model wrote. Groups without variance add nothing.
            began = time.perf_counter()
            policy.train()
            trained = [g for g, keep in zip(groups, informative, strict=True) if keep]
            batches = group_micro_batches(trained, config.micro_batch_positions)
            denominator = len(trajectories)
            if config.aggregate == "token":
                denominator = sum(t.sampled_length for t in trajectories)
            rate = config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup_steps))
            set_learning_rate(optimizer, rate)
            old_logprobs: list[torch.Tensor] = []  # of each micro-batch, before the first update
            statistics: Counter[str] = Counter()
            for update in range(config.updates_per_batch):
                optimizer.zero_grad()
                for number, part in enumerate(batches):
                    flat = [t for group in part for t in group]
                    batch = shared_prompt_batch(part, device)
                    logprobs, entropy = token_logprobs(policy, batch, config.temperature)
                    if update == 0:
                        old_logprobs.append(logprobs.detach())
                    reference_logprobs = None
                    if reference is not None:
                        with torch.no_grad(), reference.policy() as frozen:
                            reference_logprobs, _ = token_logprobs(frozen, batch, config.temperature)
                    loss, parts = grpo_loss(
                        logprobs,
                        torch.stack([advantage_of[id(t)] for t in flat]).to(device),
                        batch.trajectory_index,
                        denominator,
                        aggregate=config.aggregate,
                        old_logprobs=old_logprobs[number] if update else None,
                        clip_low=config.clip_low,
                        clip_high=config.clip_high,
                        reference_logprobs=reference_logprobs,
                        beta=config.beta,
                    )
                    if not torch.isfinite(loss):
                        raise_not_finite(out, step, flat, tokens)
                    loss.backward()
                    statistics.update(parts)
                    if update == 0:
                        gap = (logprobs.detach() - batch.sampling_logprobs).abs().max().item()
                        statistics["logprob_gap"] = max(statistics["logprob_gap"], gap)
                        statistics["entropy"] += entropy.sum().item()
                        statistics["trained_tokens"] += len(entropy)
                norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
            train_seconds = time.perf_counter() - began

            statuses = Counter(t.status for t in trajectories)
            calls = Counter(o.tool for t in trajectories for o in t.observations)
            count, updates = len(trajectories), config.updates_per_batch
            sampled = sum(t.sampled_length for t in trajectories)
            row = {
                "step": step,
                "minutes": round((time.perf_counter() - started) / 60, 3),
                "reward": fmean(r.total for r in rewards),
                "ex": fmean(r.ex for r in rewards),
                "em": fmean(r.em for r in rewards),
                "reward_proposal": fmean(r.proposal for r in rewards),
                "reward_e_verify": fmean(r.e_verify for r in rewards),
                "reward_m_verify": fmean(r.m_verify for r in rewards),
                "informative_groups": informative.float().mean().item(),
                "response_tokens": fmean(t.response_length for t in trajectories),
                "sampled_tokens": sampled / count,
                "interactions": fmean(t.interactions for t in trajectories),
                "off_protocol": fmean(t.off_protocol for t in trajectories),
                "calls_exec_sql": calls[EXEC_SQL] / count,
                "calls_memory_retrieve": calls[MEMORY_RETRIEVE] / count,
                **{f"status_{status}": statuses[status] / count for status in Status},
                "entropy": statistics["entropy"] / max(1, statistics["trained_tokens"]),
                "clip_fraction": statistics["clip_fraction"] / updates,
                "kl": statistics["kl"] / updates,
                "logprob_gap": statistics["logprob_gap"],
                "gradient_norm": float(norm),
                "learning_rate": rate,
                "rollout_seconds": round(rollout_seconds, 2),
                "train_seconds": round(train_seconds, 2),
                "sampled_tokens_per_second": round(sampled / rollout_seconds),
            }
            log.append(row)
            with (out / "trajectories.jsonl").open("a", encoding="utf-8") as file:
                for trajectory, verdict in zip(groups[0], rewards, strict=False):
                    record = trajectory_record(trajectory, tokenizer.decode, verdict.total)
                    file.write(json.dumps({"step": step, **record}) + "\n")
            bar.set_postfix_str(
                f"reward {row['reward']:.2f}, EX {row['ex']:.2f}, length {row['response_tokens']:.0f}, "
                f"entropy {row['entropy']:.2f}, {row['sampled_tokens_per_second']} tokens/s"
            )
            if config.evaluate_every and (step + 1) % config.evaluate_every == 0:
                answered = answer_dialogues(
                    policy,
                    dev_environment,
                    dev.dialogues[: config.evaluate_dialogues],
                    config.history,
                    Sampling(0.0, max_turn_tokens=config.max_turn_tokens),
                    config.seed,
                    config.rows,
                    cache_gib=config.cache_gib,
                )
                records = score_records(answered, dev_scorer)
                dev_log.append({"step": step, **{k: fmean(r[k] for r in records) for k in ("ex", "em")}})
            if interrupted or (step + 1) % config.save_every == 0:
                save(step + 1)
            if interrupted:
                print(f"saved {checkpoint}; go on with --resume")
                return
    save_policy(policy, tokenizer, out / "policy")
    plot_training(out / "metrics.csv", out)
    print(f"policy after {config.steps} steps: {out / 'policy'}")


def question_order(config: GrpoConfig, count: int, step: int) -> list[int]:
    """Indices of a step's questions: each epoch is a permutation of its own, drawn from the seed."""
    per_step = min(config.prompts_per_step, count)
    steps_in_epoch = count // per_step
    epoch, place = divmod(step, steps_in_epoch)
    permutation = np.random.default_rng((config.seed, epoch)).permutation(count)
    return permutation[place * per_step : (place + 1) * per_step].tolist()


def raise_not_finite(out: Path, step: int, flat: list[Trajectory], tokens: ChatTokens) -> None:
    """Save the trajectories of a micro-batch whose loss is NaN or infinite, and stop."""
    path = out / "not_finite.jsonl"
    lines = [json.dumps(trajectory_record(t, tokens.tokenizer.decode)) + "\n" for t in flat]
    write_atomically(path, "".join(lines))
    raise ValueError(f"step {step}: the loss is not finite; its trajectories are in {path}")


if __name__ == "__main__":
    user_errors(main)
