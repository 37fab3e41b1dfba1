"""The recipe's speed with a real model on real dialogues: `python bench/real_model.py MODEL DATA`.

MODEL is the folder that `python -m mtsql.pretrained smollm2-135m MODEL` wrote, DATA a folder as for
`reproduce.py --suite real`. Measured, in one process after another, with all cores:
- fine-tuning (LoRA) on --groups databases of 16 questions: plain tokens (as if every question stood alone) a
  second with shared schemas in --dtype, and with one padded row a question in float32; their ratio.
- rollouts: 8 samples of 32 questions of SParC dev, 48 tokens each: seconds with this project's engine, the
  adapter merged or not, and with Hugging Face's `generate` on all rows, merged; the ratio of the two merged.
- one step of GRPO without tools from --policy, 24 questions x 8 samples: seconds of rollout and training, and
  the peak memory of the process.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from mtsql.agent.generator import Generator
from mtsql.agent.rollout import trajectory_seed
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.trajectory import Trajectory
from mtsql.config import EvaluateConfig, hardware, read_options
from mtsql.data.datasets import Example, examples
from mtsql.extras.demonstrations import gold_trajectories
from mtsql.files import write_atomically
from mtsql.learn.batches import micro_batches
from mtsql.learn.logprobs import token_batch, token_logprobs
from mtsql.learn.model import load_policy, merged_adapter
from mtsql.model_folder import load_tokenizer
from mtsql.task import load_split, make_environment

CONFIG = "configs/real_smollm2.toml"
QUESTIONS_PER_DATABASE, POSITIONS, NEW_TOKENS = 16, 2048, 48


def main() -> None:
    """Measure, print, and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--groups", type=int, default=4, help="databases in the fine-tuning step [4]")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="[float32]")
    parser.add_argument(
        "--policy", type=Path, default=Path("models/smollm2-135m-sql"), help="adapter for GRPO"
    )
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    chosen = parser.parse_args()
    numbers = {"hardware": hardware(), "dtype": chosen.dtype, "threads": torch.get_num_threads()}
    # grpo_step first: a child's peak memory on Linux is at least what its parent held when it was started.
    for measure in (grpo_step, fine_tuning, rollouts):
        numbers |= measure(chosen)
        print(json.dumps(numbers, indent=1), flush=True)
    if chosen.json:
        write_atomically(chosen.json, json.dumps(numbers, indent=1) + "\n")


def asked(chosen: argparse.Namespace, file: str, split: str) -> tuple[list[Example], object]:
    """The questions of a file, and the environment without tools."""
    data = chosen.data
    words = ["--config", CONFIG, "--data", data / file, "--tables", data / "sparc/tables.json"]
    words += ["--databases", data / "database", "--model", chosen.model, "--tools", "none", "--out", "none"]
    config = read_options(EvaluateConfig, None, [*map(str, words), "--split", split])
    dataset = load_split(config, split)
    environment = make_environment(config, dataset, ChatTokens(load_tokenizer(chosen.model)), "none")
    return examples(dataset.dialogues), environment


def fine_tuning(chosen: argparse.Namespace) -> dict:
    """Plain tokens a second of forward and backward passes."""
    questions, environment = asked(chosen, "real/train_mix.json", "train")
    by_database: dict[str, list[Example]] = {}
    for question in questions:
        by_database.setdefault(question.db_id, []).append(question)
    full = [held for held in by_database.values() if len(held) >= QUESTIONS_PER_DATABASE]
    groups = []
    for held in full[:: len(full) // chosen.groups][: chosen.groups]:
        answered = gold_trajectories(environment, held[:QUESTIONS_PER_DATABASE], 0)
        groups.append([t for found in answered for t in found])
    tokens = sum(len(t.ids) for group in groups for t in group)
    seconds = {}
    for name, layout, dtype in (("shared", "shared", chosen.dtype), ("rows", "rows", "float32")):
        policy = load_policy(chosen.model, dtype, lora_rank=32)
        for _ in range(2):  # the first warms up
            started = time.perf_counter()
            train(policy, groups, layout)
            seconds[name] = time.perf_counter() - started
    return {
        "fine_tuning_tokens_per_second": round(tokens / seconds["shared"]),
        "fine_tuning_float32_rows": round(tokens / seconds["rows"]),
        "fine_tuning_ratio": round(seconds["rows"] / seconds["shared"], 2),
    }


def train(policy: torch.nn.Module, groups: list[list[Trajectory]], layout: str) -> None:
    """Forward and backward passes over a step's micro-batches."""
    for part in micro_batches(groups, layout, POSITIONS):
        logprobs, _ = token_logprobs(policy, token_batch(part, layout, "cpu"))
        (-logprobs.sum()).backward()
    policy.zero_grad()


def rollouts(chosen: argparse.Namespace) -> dict:
    """Seconds of 8 samples of 32 questions, the engine beside `generate`."""
    questions, environment = asked(chosen, "sparc/dev.json", "dev")
    prompts = [environment.episodes(q, [0])[0].trajectory.ids for q in questions[:32] for _ in range(8)]
    policy = load_policy(chosen.model, chosen.dtype, lora_rank=32).eval()

    def ours() -> None:
        seeds = [trajectory_seed(0, i) for i in range(len(prompts))]
        with Generator(policy, ()) as generator:
            rows = generator.start(prompts, seeds, [NEW_TOKENS] * len(prompts))
            while any(row.decoding for row in rows):
                generator.step()

    def merged() -> None:
        with merged_adapter(policy):
            ours()

    def generate() -> None:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])  # (rows, width)
        attention_mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode(), merged_adapter(policy):
            policy.generate(
                input_ids=ids, attention_mask=attention_mask, do_sample=True, top_k=0,
                min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, pad_token_id=0,
            )  # fmt: skip

    seconds = {}
    for play in (ours, merged, generate):
        started = time.perf_counter()
        play()
        seconds[play.__name__] = time.perf_counter() - started
    sampled = len(prompts) * NEW_TOKENS
    return {f"rollout_seconds_{name}": round(value, 1) for name, value in seconds.items()} | {
        "rollout_tokens_per_second": round(sampled / seconds["merged"]),
        "rollout_ratio": round(seconds["generate"] / seconds["merged"], 2),
    }


def grpo_step(chosen: argparse.Namespace) -> dict:
    """One step of the script, in a process of its own."""
    data = chosen.data
    with tempfile.TemporaryDirectory() as folder:
        words = ["train_grpo.py", "--config", CONFIG, "--data", data / "real/train_mix.json"]
        words += ["--tables", data / "sparc/tables.json", "--databases", data / "database"]
        words += ["--model", chosen.policy, "--dtype", chosen.dtype, "--tools", "none"]
        words += ["--steps", 1, "--out", folder]
        subprocess.run([sys.executable, *map(str, words)], check=True, cwd=Path(__file__).parents[1])
        (row,) = csv.DictReader((Path(folder) / "metrics.csv").open())
    return {
        "grpo_rollout_seconds": float(row["rollout_seconds"]),
        "grpo_train_seconds": float(row["train_seconds"]),
        "peak_memory_gib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2),
    }


if __name__ == "__main__":
    main()
