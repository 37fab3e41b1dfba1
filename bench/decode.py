"""Decoding speed at long context against the memory-bandwidth floor, with and without CUDA graphs.

    python bench/decode.py      # Qwen3-1.7B's shape, bf16, 64 slots, 3,800 tokens, on a GPU
    python bench/decode.py --layers 2 --slots 4 --context 256 --steps 8 --vocabulary 2000     # to try it

The weights are random. Rows are of one length, or a third each of that, a third and an eighth of it; also
with a LoRA adapter of rank 16. Neither warm-up nor a step that captures a graph is timed. The floor of a step
is the time that the device takes to read all weights and the cache of all rows once, at the bandwidth that a
large copy reaches in the same run. Hugging Face `generate` decodes the prompts of one length for comparison
(its prefill is timed apart and taken off).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import PreTrainedModel

from mtsql.files import write_atomically
from mtsql.gpu_check import (
    QWEN3_17B,
    bandwidth,
    decode_speed,
    now,
    random_qwen3,
    some_prompts,
    with_lora,
)
from mtsql.task import pick_device


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--context", type=int, default=3_800, help="tokens of the longest prompts")
    parser.add_argument("--steps", type=int, default=128, help="tokens decoded in each row")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    device = pick_device("auto")
    cuda = device.type == "cuda"
    dtype = "bfloat16" if cuda else "float32"
    shape = QWEN3_17B | {"vocab_size": options.vocabulary, "num_hidden_layers": options.layers}
    model = random_qwen3(device, dtype, **shape).eval()
    equal = some_prompts([options.context] * options.slots, options.vocabulary)
    mixed = some_prompts(
        [options.context // (1, 3, 8)[i % 3] for i in range(options.slots)], options.vocabulary
    )
    figures: dict[str, float] = {"memory_bandwidth_gb_per_second": bandwidth(device) / 1e9}

    def measure(name: str, prompts: list[list[int]], static_shapes: bool) -> None:
        speed = decode_speed(model, prompts, options.steps, static_shapes)
        figures[f"{name}_rows_at_once"] = speed.rows
        figures[f"{name}_tokens_per_second"] = speed.tokens_per_second
        figures[f"{name}_share_of_floor"] = speed.share_of_floor

    shapes = "graphs" if cuda else "static_shapes"
    for name, static in ((shapes, True), ("eager", False)):
        measure(name, equal, static)
        measure(f"{name}_mixed", mixed, static)
    figures["hf_generate_tokens_per_second"] = generate_speed(model, equal, options.steps)
    model = with_lora(model).eval()
    measure(f"{shapes}_mixed_lora", mixed, static_shapes=True)
    print(f"{torch.cuda.get_device_name() if cuda else 'CPU'}, {dtype}, {vars(options)}")
    for name, value in figures.items():
        print(f"{name:40}{value:>14,.2f}")
    if options.json:
        write_atomically(options.json, json.dumps(figures, indent=1))


def generate_speed(model: PreTrainedModel, prompts: list[list[int]], steps: int) -> float:
    """Sampled tokens a second of Hugging Face `generate`: `steps` + 1 tokens less the time for one."""
    ids = torch.tensor(prompts, device=model.device)  # (rows, context)

    def seconds(tokens: int) -> float:
        start = now(model.device)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            eos_token_id=0,
            pad_token_id=0,
        )
        return now(model.device) - start

    with torch.no_grad():
        seconds(1)
        prefill = seconds(1)
        return len(prompts) * steps / (seconds(steps + 1) - prefill)


if __name__ == "__main__":
    main()
