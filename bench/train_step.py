"""Time and peak memory of SFT and GRPO steps against plain code: `python bench/train_step.py --help`.

Plain is what a tutorial does: fixed numbers of trajectories in the order given, each micro-batch padded to
its longest row, full logits (rows, positions, vocabulary), log-softmax, a masked mean; no entropy. Ours is
`token_logprobs`, entropy included, in two layouts: "packed" (trajectories end to end),
"shared_prompt" (groups behind their prompt, as the scripts have them). All run on one workload in one
process, after their gradients were found to agree; a step here is micro-batches, forward and backward passes,
without the optimizer, the same for all. The order alternates between the repetitions; ratios are medians.
Memory is that of head and loss at Qwen3's vocabulary: what a fresh process takes on top of model and data.

Wanted: speedup at least 2 (the slower of both steps), loss_memory_ratio at most 1/20 (head and loss, 8,000
tokens), shared_prompt_time_saved at least 0.8 of tokens_saved_share.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtsql.agent.trajectory import Segment, Trajectory
from mtsql.files import write_atomically
from mtsql.learn.batches import micro_batches
from mtsql.learn.logprobs import TokenBatch, shared_prompt_batch, token_logprobs
from mtsql.learn.loss import group_advantages, grpo_loss, informative_groups, sft_loss
from train_grpo import Args

SAMPLES = 8  # G
LOSS_TOKENS = 8_000
PLAIN_TOKENS = 4_000  # of the plain loss, which takes 15 GB for 8,000
LAYOUTS = {"sft": ("plain", "packed"), "grpo": ("plain", "packed", "shared_prompt")}


# Shape, positions and trajectories of a step as in configs/toy.toml; lengths as in its warm start: 97 to 431
# tokens, 205 in the mean, a quarter of them trained.
WORK = SimpleNamespace(  # ranges of lengths are inclusive
    shape={"vocab_size": 1885, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
           "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48},
    questions={"sft": 32, "grpo": 16},  # of each step; SFT has one trajectory of each, GRPO has G
    prompt=(68, 196), text=(5, 38),  # a prompt; a model message, a tool output
    positions={"sft": 2500, "grpo": 4000}, plain_rows=16,  # of a micro-batch of ours, of plain
)  # fmt: skip
LARGE_HEAD = {  # for the loss: Qwen3's vocabulary
    "vocab_size": 151_936, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip


def make_groups(task: str) -> list[list[Trajectory]]:
    """Trajectories of one to four model messages with tool outputs between them, behind their prompt."""
    draw = np.random.default_rng(0)

    def text(shortest: int, longest: int) -> list[int]:
        length = int(draw.integers(shortest, longest + 1))
        return draw.integers(1, WORK.shape["vocab_size"], length).tolist()

    groups = []
    for question in range(WORK.questions[task]):
        shortest, longest = WORK.prompt
        length = shortest + round((longest - shortest) * draw.random() ** 2)  # more short than long ones
        prompt = Segment.given("prompt", text(length, length))
        group = []
        for sample in range(SAMPLES if task == "grpo" else 1):
            segments = [prompt]
            for message in range(int(draw.integers(1, 5))):
                if message > 0:
                    segments.append(Segment.given("environment", text(*WORK.text)))
                ids = text(*WORK.text)
                segments.append(Segment.sampled(ids, [0.0] * len(ids)))
            group.append(Trajectory(str(question), sample, segments))
        groups.append(group)
    return groups


class Step:
    """The gradient of one step, in any of the layouts."""

    def __init__(self, task: str) -> None:
        self.task = task
        torch.manual_seed(0)
        self.model = Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **WORK.shape)).train()
        self.groups = make_groups(task)
        self.flat = [t for group in self.groups for t in group]
        rewards = torch.rand(len(self.groups), SAMPLES)  # (questions, G)
        advantages = group_advantages(rewards, informative_groups(rewards)).flatten()  # (questions x G,)
        for trajectory, advantage in zip(self.flat, advantages.tolist(), strict=False):
            trajectory.advantage = advantage
        self.tokens = sum(t.sampled_length for t in self.flat)

    def parts(self, layout: str) -> list:
        """The step's micro-batches: lists of groups, for "plain" lists of trajectories."""
        if layout == "plain":
            rows = WORK.plain_rows
            return [self.flat[i : i + rows] for i in range(0, len(self.flat), rows)]
        return micro_batches(self.groups, WORK.positions[self.task], layout == "shared_prompt")

    def positions(self, layout: str) -> int:
        """Positions that the model runs on, padding included."""
        if layout == "plain":
            return sum(len(part) * max(len(t.ids) for t in part) for part in self.parts(layout))
        return sum(shared_prompt_batch(part).ids.numel() for part in self.parts(layout))

    def run(self, layout: str) -> None:
        """Leave the gradient in the model."""
        self.model.zero_grad()
        for part in self.parts(layout):
            (self.plain_loss(part) if layout == "plain" else self.our_loss(part)).backward()

    def our_loss(self, part: list[list[Trajectory]]) -> Tensor:
        """As train_sft.py and train_grpo.py."""
        batch = shared_prompt_batch(part)
        logprobs, _ = token_logprobs(self.model, batch)  # (tokens,)
        if self.task == "sft":
            return sft_loss(logprobs, self.tokens)
        return grpo_loss(logprobs, batch, len(self.flat), Args(model="", data=(), out=""))[0]

    def plain_loss(self, part: list[Trajectory]) -> Tensor:
        """As a tutorial."""
        columns = ([t.ids for t in part], [[1] * len(t.ids) for t in part], [t.loss_mask for t in part])
        padded = [pad_sequence([torch.tensor(row) for row in rows], batch_first=True) for rows in columns]
        ids, visible, mask = padded  # (rows, positions) each
        mask = mask[:, 1:]  # (rows, positions - 1), as everything below
        logits = self.model(input_ids=ids, attention_mask=visible).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        if self.task == "sft":
            return -(logprobs * mask).sum() / self.tokens
        advantage = torch.tensor([t.advantage for t in part])[:, None]  # (rows, 1)
        ratio = (logprobs - logprobs.detach()).exp()
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -((objective * mask).sum(1) / mask.sum(1)).sum() / len(self.flat)

    def check(self) -> float:
        """Largest relative distance of a gradient from the plain one; RuntimeError above 1e-4."""
        gradients = []
        for layout in LAYOUTS[self.task]:
            self.run(layout)
            gradients.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]))
        plain, *others = gradients  # (parameters,) each
        worst = max(float((g - plain).norm() / plain.norm()) for g in others)
        if not worst <= 1e-4:
            raise RuntimeError(f"{self.task}: a gradient is {worst:.1e} from the plain one")
        return worst


def peak_of(action: Callable[[], None]) -> tuple[float, float]:
    """Bytes that this process takes at most on top of what it has now, and seconds."""

    def resident(which: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split(which)[1].split()[0]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of making model and data
    before = resident("VmRSS:")
    start = time.perf_counter()
    action()
    return resident("VmHWM:") - before, time.perf_counter() - start


def loss_peak(layout: str, tokens: int) -> tuple[float, float]:
    """Peak bytes and seconds of head and loss, forward and backward; the head's gradient is there before,
    as after a first micro-batch. For a fresh process.
    """
    model = Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **LARGE_HEAD))
    head = model.lm_head
    head.weight.grad = torch.zeros_like(head.weight).add_(0.0)
    hidden = torch.randn(1, tokens, LARGE_HEAD["hidden_size"], requires_grad=True)
    targets = torch.randint(LARGE_HEAD["vocab_size"], (tokens,))
    everything = torch.arange(tokens)

    def loss() -> Tensor:
        if layout == "plain":
            logits = head(hidden[0])  # (tokens, vocabulary)
            return -logits.log_softmax(-1).gather(-1, targets[:, None]).mean()
        kept = SimpleNamespace(last_hidden_state=hidden)
        model.model.forward = lambda **_: kept  # the layers are not measured
        batch = TokenBatch(everything[None], everything, targets, everything, everything, everything)
        return sft_loss(token_logprobs(model, batch)[0], tokens)

    return peak_of(lambda: loss().backward())


def in_fresh_process(function: Callable, *arguments: object):
    """The function's result, from a process that has computed nothing yet."""
    threads = torch.get_num_threads()
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        return pool.submit(function, *arguments).result()


def measure_steps(repetitions: int) -> dict[str, float]:
    """Seconds, positions and ratios of both steps, by the names under which they are written."""
    found: dict[str, float] = {}
    for task, layouts in LAYOUTS.items():
        step = Step(task)
        found[f"{task}_gradient_distance"] = step.check()
        seconds = np.zeros((repetitions, len(layouts)))
        for repetition in range(repetitions):
            for column in range(len(layouts))[:: 1 if repetition % 2 == 0 else -1]:
                start = time.perf_counter()
                step.run(layouts[column])
                seconds[repetition, column] = time.perf_counter() - start
        speedups = np.median(seconds[:, :1] / seconds, axis=0)  # (layouts,), over plain, the first
        for column, layout in enumerate(layouts):
            found[f"{task}_{layout}_positions"] = step.positions(layout)
            found[f"{task}_{layout}_seconds"] = float(np.median(seconds[:, column]))
            found[f"{task}_{layout}_speedup"] = float(speedups[column])
    found["shared_prompt_speedup"] = float(np.median(seconds[:, 1] / seconds[:, 2]))
    found["shared_prompt_time_saved"] = 1 - 1 / found["shared_prompt_speedup"]
    found["tokens_saved_share"] = 1 - found["grpo_shared_prompt_positions"] / found["grpo_packed_positions"]
    found["speedup"] = min(found["sft_packed_speedup"], found["grpo_shared_prompt_speedup"])
    return found


def measure_loss() -> dict[str, float]:
    """Peaks at LOSS_TOKENS; the plain one on a line through two smaller ones."""
    plain, seconds = in_fresh_process(loss_peak, "plain", PLAIN_TOKENS)
    half, _ = in_fresh_process(loss_peak, "plain", PLAIN_TOKENS // 2)
    plain += (plain - half) / (PLAIN_TOKENS - PLAIN_TOKENS // 2) * (LOSS_TOKENS - PLAIN_TOKENS)
    ours, our_seconds = in_fresh_process(loss_peak, "ours", LOSS_TOKENS)
    return {
        "loss_plain_peak_mib": plain / 2**20,
        "loss_plain_seconds": seconds * LOSS_TOKENS / PLAIN_TOKENS,
        "loss_ours_peak_mib": ours / 2**20,
        "loss_ours_seconds": our_seconds,
        "loss_memory_ratio": ours / max(plain, 1),  # bytes
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="of each step [5]")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    figures = measure_steps(options.repetitions) | measure_loss()
    for key, value in figures.items():
        print(f"{key:46}{value:>14,.4g}")
    if options.json:
        write_atomically(options.json, json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
