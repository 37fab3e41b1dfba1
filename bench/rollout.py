"""Rollouts three ways on one workload, in one process: `python bench/rollout.py --help`.

(a) this project's engine; (b) Hugging Face `generate`, called each turn on all re-rendered conversations
at once, padded on the left, which is what people write; (c) transformers' own continuous batching, called
each turn likewise. Every trajectory has a fixed number of messages of fixed lengths, and fixed tool
outputs between them, so all three sample the same number of tokens. The order of the three alternates
between the repetitions; the ratios are medians. How far (a) is from the floor on a GPU: bench/decode.py.
"""

import json
import logging
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mtsql.agent.rollout import Sampling, rollout
from mtsql.agent.trajectory import Segment, Stop, Trajectory
from mtsql.config import command_line
from mtsql.files import write_atomically

END = 0


@dataclass(frozen=True)
class Conversation:
    """A prompt, the lengths of the model's messages, and the tool outputs between them."""

    prompt: list[int]
    lengths: list[int]
    outputs: list[list[int]]


class FixedEpisode:
    """A conversation as this project's rollout plays it."""

    def __init__(self, seed: int, conversation: Conversation) -> None:
        self.conversation = conversation
        self.trajectory = Trajectory(str(seed), seed, [Segment.given("prompt", conversation.prompt)])
        self.turn = 0
        self.planned = False

    def remaining_tokens(self) -> int:
        """The rollout asks first how long all may grow, then, before each message, how long that may."""
        if not self.planned:
            self.planned = True
            return sum(self.conversation.lengths) + sum(map(len, self.conversation.outputs))
        return self.conversation.lengths[self.turn]

    def step(self, ids: list[int], logprobs: list[float], stop: Stop) -> list[int] | None:
        """The next tool output, None after the last message."""
        self.trajectory.segments.append(Segment.sampled(ids, logprobs))
        if self.turn == len(self.conversation.outputs):
            return None
        output = self.conversation.outputs[self.turn]
        self.trajectory.segments.append(Segment.given("environment", output))
        self.turn += 1
        return output


def make_workload(
    questions: int, samples: int, vocabulary: int, prompt: int, message: int, output: int, messages: int
) -> list[Conversation]:
    """`samples` conversations a question; lengths vary between half and one and a half of those given."""
    draw = np.random.default_rng(0)

    def length(typical: int) -> int:
        return int(draw.integers(typical // 2, typical * 3 // 2 + 1))

    def text(typical: int) -> list[int]:
        return draw.integers(1, vocabulary, length(typical)).tolist()

    workload = []
    for _ in range(questions):
        first = text(prompt)
        for _ in range(samples):
            lengths = [length(message) for _ in range(messages)]
            workload.append(Conversation(first, lengths, [text(output) for _ in range(messages - 1)]))
    return workload


def this_engine(model: PreTrainedModel, workload: list[Conversation], rows: int) -> int:
    """(a); the number of sampled tokens."""
    episodes = [FixedEpisode(seed, conversation) for seed, conversation in enumerate(workload)]
    tokens = SimpleNamespace(end_of_turn_ids=())
    trajectories = rollout(model, tokens, episodes, Sampling(max_turn_tokens=10_000), rows)
    return sum(t.sampled_length for t in trajectories)


class FixedLengths(LogitsProcessor):
    """Forbids the end of a row before its length and forces it there."""

    def __init__(self, start: int, lengths: list[int]) -> None:
        self.start = start
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (rows, vocabulary) for the next token."""
        scores[:, END] = -torch.inf
        over = self.lengths.to(scores.device) <= input_ids.shape[1] - self.start
        scores[over] = -torch.inf
        scores[over, END] = 0.0
        return scores


def hugging_face_generate(model: PreTrainedModel, workload: list[Conversation], rows: int) -> int:
    """(b); the number of sampled tokens."""
    texts = [list(c.prompt) for c in workload]
    sampled = 0
    for turn in range(len(workload[0].lengths)):
        for begin in range(0, len(workload), rows):
            batch = range(begin, min(begin + rows, len(workload)))
            width = max(len(texts[i]) for i in batch)
            ids = torch.tensor([[END] * (width - len(texts[i])) + texts[i] for i in batch])  # (rows, width)
            visible = torch.tensor([[0] * (width - len(texts[i])) + [1] * len(texts[i]) for i in batch])
            lengths = [workload[i].lengths[turn] for i in batch]
            how = {"do_sample": True, "top_k": 0, "max_new_tokens": max(lengths), "eos_token_id": END}
            how |= {"pad_token_id": END, "logits_processor": [FixedLengths(width, lengths)]}
            ids, visible = ids.to(model.device), visible.to(model.device)
            out = model.generate(ids, attention_mask=visible, **how)[:, width:]
            for i, row, length in zip(batch, out.tolist(), lengths, strict=True):
                texts[i] += row[:length]
                sampled += length
        if turn < len(workload[0].outputs):
            for text, conversation in zip(texts, workload, strict=True):
                text += conversation.outputs[turn]
    return sampled


def continuous_batching(model: PreTrainedModel, workload: list[Conversation], rows: int) -> int:
    """(c); the number of sampled tokens."""
    texts = [list(c.prompt) for c in workload]
    sampled = 0
    longest = max(len(c.prompt) + sum(c.lengths) + sum(map(len, c.outputs)) for c in workload)
    page = 64
    blocks = (rows + 1) * (longest // page + 2)
    settings = ContinuousBatchingConfig(
        page_size=page, num_blocks=blocks, max_batch_tokens=2048, max_requests_per_batch=rows
    )
    sampling = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=10_000, eos_token_id=-1, pad_token_id=END
    )
    for turn in range(len(workload[0].lengths)):
        with model.continuous_batching_context_manager(
            sampling, continuous_batching_config=settings
        ) as manager:
            names = [
                manager.add_request(text, max_new_tokens=c.lengths[turn], eos_token_id=-1)
                for text, c in zip(texts, workload, strict=True)
            ]
            done: dict[str, list[int]] = {}
            while len(done) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("continuous batching ended early")
        for text, conversation, name in zip(texts, workload, names, strict=True):
            text += done[name]
            sampled += len(done[name])
            if turn < len(conversation.outputs):
                text += conversation.outputs[turn]
    return sampled


# Questions, tokens of a prompt, and rows at once for each way: the fastest of 4 to 256 on 2 cores.
TOY = (32, 160, {"engine": 256, "hf_generate": 32, "continuous_batching": 16})
QWEN = (4, 300, {"engine": 32, "hf_generate": 32, "continuous_batching": 16})


def toy_shape() -> PreTrainedModel:
    """The tiny model's, with random weights, as the other."""
    sizes = {"vocab_size": 1885, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48}
    return Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **sizes, **heads))


def qwen_shape() -> PreTrainedModel:
    """Qwen2.5-0.5B's, in bfloat16."""
    sizes = {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **sizes, **heads)).bfloat16()


def main() -> None:
    """Measure and print one table."""
    parser = command_line(__doc__)
    parser.add_argument("--qwen", action="store_true", help="Qwen2.5-0.5B's shape, not the tiny model's")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each [3]")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model, (questions, prompt, rows) = (qwen_shape(), QWEN) if options.qwen else (toy_shape(), TOY)
    workload = make_workload(questions, 8, model.config.vocab_size, prompt, 24, 20, 3)
    figures = measure(model.eval(), workload, rows, options.repetitions)
    print(f"{len(workload)} trajectories of 3 messages, G = 8, rows {rows}")
    for key, value in figures.items():
        print(f"  {key:34}{value:>12,.2f}")
    if options.json:
        write_atomically(options.json, json.dumps(figures, indent=1))


def measure(
    model: PreTrainedModel, workload: list[Conversation], rows: dict[str, int], repetitions: int
) -> dict[str, float]:
    """Seconds, sampled tokens a second and ratios; medians over the repetitions."""
    others = {"hf_generate": hugging_face_generate, "continuous_batching": continuous_batching}
    ways = {"engine": this_engine, **others}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    expected = sum(sum(c.lengths) for c in workload)
    with torch.no_grad():
        for name, way in ways.items():
            way(model, workload[:16], rows[name])  # the first calls in a process are slower
        for repetition in range(repetitions):
            order = list(ways) if repetition % 2 == 0 else list(ways)[::-1]
            for name in order:
                start = time.perf_counter()
                sampled = ways[name](model, workload, rows[name])
                seconds[name].append(time.perf_counter() - start)
                if sampled != expected:
                    raise RuntimeError(f"{name} sampled {sampled} tokens, not {expected}")
        found = {f"{name}_seconds": statistics.median(times) for name, times in seconds.items()}
        found |= {f"{name}_tokens_per_second": expected / found[f"{name}_seconds"] for name in ways}
        for name in others:
            ratios = [slow / fast for slow, fast in zip(seconds[name], seconds["engine"], strict=True)]
            found[f"ratio_{name}"] = statistics.median(ratios)
    return found


if __name__ == "__main__":
    main()
