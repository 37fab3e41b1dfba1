"""Self-taught warm-start fine-tuning: Algorithm 1 of MTSQL-R1 (sections 3.2.1 and 3.2.2).

    python train_sft.py --config configs/toy.toml --model MODEL --data DATA --out runs/sft

Each round samples trajectories from the policy itself, keeps those whose answer is right by EX and
EM, fine-tunes on all that were kept so far, and drops the questions that are solved. The run folder
gets policy/ (after the last finished round), trajectories.jsonl (all that were kept), metrics.csv.

Departures from the paper:
- S2 keeps a random choice of the right trajectories of a question; the paper's difficulty-aware
  selection and clustering are not here yet.
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
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from tqdm import tqdm

from mtsql.agent.rollout import Sampling, rollout
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.trajectory import Trajectory
from mtsql.config import Common, load_config, option, save_config, user_errors
from mtsql.data.datasets import examples
from mtsql.learn.batches import row_micro_batches
from mtsql.learn.checkpoint import write_atomically
from mtsql.learn.interrupt import finish_step_on_interrupt
from mtsql.learn.logprobs import row_batch, token_logprobs
from mtsql.learn.loss import sft_loss
from mtsql.learn.model import load_policy, load_tokenizer, save_policy
from mtsql.learn.optimizer import cosine_rate, make_optimizer, set_learning_rate
from mtsql.learn.selection import select_trajectories
from mtsql.recipes.mtsql_r1 import RewardWeights, reward
from mtsql.report.evaluation import scorable
from mtsql.report.metrics import MetricsLog
from mtsql.report.viewer import trajectory_record
from mtsql.run import (
    load_split,
    make_environment,
    make_scorer,
    pick_device,
    show,
    trajectory_seed,
)


@dataclass(frozen=True, kw_only=True)
class SftConfig(Common):
    """Configuration of the warm start."""

    model: str = option(..., "local folder or hub name of a causal LM or a PEFT adapter")
    rounds: int = option(2, "N of Algorithm 1")
    questions: int = option(0, "training questions in play, drawn at random; 0 is all of them")
    samples_per_question: int = option(20, "rollouts of each question in each round (paper: 20)")
    temperature: float = option(0.7, "of these rollouts (paper: 0.7)")
    keep_per_question: int = option(3, "right trajectories kept of one question in one round")
    epochs: int = option(2, "passes over the kept trajectories in each round")
    trajectories_per_step: int = option(16, "kept trajectories in each optimizer step (paper: 2 a GPU)")
    learning_rate: float = option(5e-6, "peak of a cosine schedule (paper: 5e-6)")
    micro_batch_positions: int = option(8192, "positions in one forward pass")
    lora_rank: int = option(0, "rank of LoRA on all linear layers; 0 trains all parameters")
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass")


def main() -> None:
    """Algorithm 1."""
    config = load_config(SftConfig, "sft", __doc__)
    out = Path(config.out)
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
    rng = random.Random(config.seed)
    remaining = scorable(examples(dataset.dialogues, config.history), scorer)  # D_0
    if config.questions:
        remaining = rng.sample(remaining, min(config.questions, len(remaining)))
    save_config(config, out)
    log = MetricsLog(out / "metrics.csv")
    kept: list[Trajectory] = []  # the cumulative set T
    sampling = Sampling(config.temperature, max_turn_tokens=config.max_turn_tokens)
    started, step = time.perf_counter(), 0

    with finish_step_on_interrupt() as interrupted:
        for round_index in range(config.rounds):
            # S1: roll out the policy; keep what is right by EX and EM.
            episodes = [
                episode
                for number, example in enumerate(remaining)
                for episode in environment.episodes(
                    example,
                    [
                        trajectory_seed(config.seed, round_index, number, sample)
                        for sample in range(config.samples_per_question)
                    ],
                )
                if episode.trajectory.status is None
            ]
            with tqdm(total=len(episodes), desc=f"round {round_index + 1}: collect") as bar:
                raw = rollout(policy, tokens, episodes, sampling, config.rows, show(bar), config.cache_gib)
            by_id = {example.id: example for example in remaining}
            verdicts = [reward(t, by_id[t.example_id], scorer, RewardWeights()) for t in raw]
            valid = [t for t, r in zip(raw, verdicts, strict=True) if r.ex and r.em]

            # S2: choose among the right trajectories of each question.
            chosen = [
                trajectory
                for _, group in groupby(valid, key=lambda t: t.example_id)
                for trajectory in select_trajectories(list(group), config.keep_per_question, rng)
            ]
            kept += chosen
            solved = {t.example_id for t in valid}
            print(
                f"round {round_index + 1}: {len(valid)} of {len(raw)} trajectories right, "
                f"{len(solved)} of {len(remaining)} questions solved, {len(kept)} trajectories kept"
            )
            if not kept:
                raise ValueError(
                    f"no trajectory of {config.model} is right by EX and EM, so there is nothing to "
                    "learn from; try more --samples-per-question or another model"
                )

            # S3: supervised fine-tuning on T, only on what the policy wrote.
            policy.train()
            optimizer = make_optimizer(policy, config.learning_rate)
            parameters = [p for p in policy.parameters() if p.requires_grad]
            steps = math.ceil(len(kept) / config.trajectories_per_step) * config.epochs
            order = [t for _ in range(config.epochs) for t in rng.sample(kept, len(kept))]
            bar = tqdm(range(steps), desc=f"round {round_index + 1}: fine-tune", unit="step")
            for index in bar:
                start = index * config.trajectories_per_step
                batch = order[start : start + config.trajectories_per_step]
                denominator = sum(t.sampled_length for t in batch)
                optimizer.zero_grad()
                loss_sum = entropy_sum = 0.0
                for part in row_micro_batches(batch, config.micro_batch_positions):
                    logprobs, entropy = token_logprobs(policy, row_batch(part, device))
                    loss = sft_loss(logprobs, denominator)
                    loss.backward()
                    loss_sum += loss.item()
                    entropy_sum += entropy.sum().item() / denominator
                rate = cosine_rate(config.learning_rate, index / steps)
                set_learning_rate(optimizer, rate)
                norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                bar.set_postfix(loss=f"{loss_sum:.3f}")
                log.append(
                    {
                        "step": step,
                        "minutes": round((time.perf_counter() - started) / 60, 3),
                        "round": round_index + 1,
                        "loss": loss_sum,
                        "entropy": entropy_sum,
                        "gradient_norm": float(norm),
                        "learning_rate": rate,
                        "trajectories_right": len(valid) / len(raw),
                        "questions_solved": len(solved) / len(remaining),
                    }
                )
                step += 1
                if interrupted:
                    break
            save_policy(policy, tokenizer, out / "policy")
            records = (trajectory_record(t, tokenizer.decode) for t in kept)
            lines = "".join(json.dumps(record) + "\n" for record in records)
            write_atomically(out / "trajectories.jsonl", lines)

            # S4: what is solved leaves the pool.
            remaining = [example for example in remaining if example.id not in solved]
            if interrupted or not remaining:
                break
    print(f"policy after {round_index + 1} round(s): {out / 'policy'}")


if __name__ == "__main__":
    user_errors(main)
