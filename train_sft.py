"""Self-taught warm-start fine-tuning: Algorithm 1 of MTSQL-R1 (sections 3.2.1 and 3.2.2).

    python train_sft.py --config configs/toy.toml --model MODEL --data DATA --out runs/sft
    torchrun --nproc-per-node 2 train_sft.py ...   (the same on two GPUs)

Each round samples trajectories from the policy itself, keeps those whose answer is right by EX and
EM, fine-tunes on all that were kept so far, and drops the questions that are solved. The run folder
gets policy/, trajectories.jsonl (all that were kept), metrics.csv and checkpoints/ (for --resume).

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
from transformers import PreTrainedTokenizerBase

from mtsql.agent.rollout import Sampling, rollout
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.trajectory import Trajectory
from mtsql.config import Common, load_config, option, save_config, user_errors
from mtsql.data.datasets import examples
from mtsql.learn.batches import micro_batches
from mtsql.learn.checkpoint import (
    load_training_state,
    new_checkpoint,
    save_training_state,
    write_atomically,
)
from mtsql.learn.interrupt import finish_step_on_interrupt
from mtsql.learn.logprobs import token_batch, token_logprobs
from mtsql.learn.loss import sft_loss
from mtsql.learn.model import (
    load_policy,
    load_tokenizer,
    restore_policy,
    save_merged,
    save_policy,
)
from mtsql.learn.optimizer import clip_gradients, cosine_rate, make_optimizer, set_learning_rate
from mtsql.learn.parallel import (
    Processes,
    join_processes,
    leave_processes,
    restore_optimizer,
    shard_policy,
    whole_state,
    whole_weights,
)
from mtsql.learn.selection import select_trajectories
from mtsql.recipes.mtsql_r1 import RewardWeights, reward
from mtsql.report.evaluation import scorable
from mtsql.report.metrics import MetricsLog
from mtsql.report.viewer import trajectory_record
from mtsql.run import (
    attention_in_use,
    check_training,
    find_checkpoint,
    load_split,
    make_environment,
    make_scorer,
    pick_device,
    raise_not_finite,
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
    check_training(config)
    processes = join_processes()
    out = Path(config.out)
    device = pick_device(config.device)
    checkpoint = processes.of_each(find_checkpoint(out, config.resume) if processes.first else None)[0]
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
        attention=config.attention,
        quantise=config.quantise,
        lora_rank=config.lora_rank,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    attention = attention_in_use(policy, config.layout)
    if checkpoint is not None:
        restore_policy(policy, checkpoint / "policy", config.dtype)
    if config.shard:
        shard_policy(policy, processes)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    rng = random.Random(config.seed)
    remaining = scorable(examples(dataset.dialogues, config.history), scorer)  # D_0
    if config.questions:
        remaining = rng.sample(remaining, min(config.questions, len(remaining)))
    kept: list[Trajectory] = []  # the cumulative set T
    sampling = Sampling(config.temperature, max_turn_tokens=config.max_turn_tokens)
    started, step, first_round, resumed = time.perf_counter(), 0, 0, None
    if checkpoint is not None:
        step, resumed, optimizer_state = load_training_state(checkpoint)
        if resumed["round"] >= config.rounds:
            raise ValueError(
                f"{checkpoint} is in round {resumed['round'] + 1}; give --rounds at least so many"
            )
        first_round, kept = resumed["round"], [Trajectory.from_plain(t) for t in resumed["kept"]]
        remaining = [example for example in remaining if example.id in set(resumed["remaining"])]
    if processes.first:
        save_config(config, out)
        log = MetricsLog(out / "metrics.csv", step)

    with finish_step_on_interrupt() as interrupted:
        for round_index in range(first_round, config.rounds):
            optimizer = make_optimizer(policy, config.learning_rate, kind=config.optimizer)
            if resumed is None:
                # S1: roll out the policy; keep what is right by EX and EM.
                episodes = [
                    episode
                    for number, example in processes.share(list(enumerate(remaining)))
                    for episode in environment.episodes(
                        example,
                        [
                            trajectory_seed(config.seed, round_index, number, sample)
                            for sample in range(config.samples_per_question)
                        ],
                    )
                    if episode.trajectory.status is None
                ]
                title = f"round {round_index + 1}: collect"
                progress = tqdm(total=len(episodes), desc=title, disable=not processes.first)
                with progress as bar, whole_weights(policy):
                    raw = rollout(
                        policy, tokens, episodes, sampling, config.rows, show(bar), config.cache_gib
                    )
                by_id = {example.id: example for example in remaining}
                verdicts = [reward(t, by_id[t.example_id], scorer, RewardWeights()) for t in raw]
                right = [t for t, r in zip(raw, verdicts, strict=True) if r.ex and r.em]
                groups = [list(group) for _, group in groupby(right, key=lambda t: t.example_id)]
                place = {example.id: number for number, example in enumerate(remaining)}
                valid = sorted(processes.gather(groups), key=lambda group: place[group[0].example_id])
                sampled = sum(processes.of_each(len(raw)))

                # S2: choose among the right trajectories of each question.
                for group in valid:
                    kept += select_trajectories(group, config.keep_per_question, rng)
                solved = {group[0].example_id for group in valid}
                right_share = sum(map(len, valid)) / max(1, sampled)
                if processes.first:
                    print(
                        f"round {round_index + 1}: {sum(map(len, valid))} of {sampled} trajectories right, "
                        f"{len(solved)} of {len(remaining)} questions solved, {len(kept)} trajectories kept"
                    )
                if not kept:
                    raise ValueError(
                        f"no trajectory of {config.model} is right by EX and EM, so there is nothing to "
                        "learn from; try more --samples-per-question or another model"
                    )
                first_index, rng_state = 0, rng.getstate()
            else:
                restore_optimizer(policy, optimizer, optimizer_state)
                solved, right_share = set(resumed["solved"]), resumed["right_share"]
                first_index, rng_state = resumed["index"], resumed["rng"]
                rng.setstate(rng_state)
                resumed = None

            state = {
                "round": round_index,
                "kept": [t.to_plain() for t in kept],
                "remaining": [example.id for example in remaining],
                "solved": sorted(solved),
                "right_share": right_share,
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
                            "trajectories_right": right_share,
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
            if not remaining:
                break
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
