"""Decoding speed at long context against the memory-bandwidth floor, with and without CUDA graphs.

    python bench/decode.py      # Qwen3-1.7B's shape, bf16, 64 slots, 4,000 tokens, on a GPU
    python bench/decode.py --layers 2 --slots 4 --context 256 --steps 8 --vocabulary 2000     # to try it

The weights are random. The floor of a step is the time that the device takes to read all weights and the
cache of all slots once, at the bandwidth that a large copy reaches in the same run. Hugging Face
`generate` decodes the same prompts for comparison (its prefill is timed apart and taken off).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from mtsql.agent.cache import cache_bytes_per_token
from mtsql.agent.generator import Generator
from mtsql.files import write_atomically

QWEN3_17B = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40_960, "tie_word_embeddings": True,
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--context", type=int, default=4_000, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=128, help="tokens decoded in each slot")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = Qwen3Config(vocab_size=options.vocabulary, num_hidden_layers=options.layers, **QWEN3_17B)
    with torch.device(device):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).to(dtype).eval()
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, options.vocabulary, (options.slots, options.context), generator=draw).tolist()
    figures = {
        f"{name}_tokens_per_second": decode_speed(model, prompts, options.steps, static)
        for name, static in (("graphs" if device.type == "cuda" else "static_shapes", True), ("eager", False))
    }
    figures["hf_generate_tokens_per_second"] = generate_speed(model, prompts, options.steps)
    weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    context = options.context + options.steps / 2
    step_bytes = weights + options.slots * context * cache_bytes_per_token(model)
    figures["memory_bandwidth_gb_per_second"] = bandwidth(device) / 1e9
    figures["floor_tokens_per_second"] = options.slots * bandwidth(device) / step_bytes
    best = max(
        value for name, value in figures.items() if name.split("_")[0] in ("graphs", "static", "eager")
    )
    figures["share_of_floor"] = best / figures["floor_tokens_per_second"]
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, {dtype}, {vars(options)}")
    for name, value in figures.items():
        print(f"{name:34}{value:>14,.2f}")
    if options.json:
        write_atomically(options.json, json.dumps(figures, indent=1))


def _wait(model: PreTrainedModel) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def decode_speed(model: PreTrainedModel, prompts: list[list[int]], steps: int, static: bool) -> float:
    """Sampled tokens a second of this project's decode steps, after two that warm up or capture."""
    with Generator(model, (), temperature=1.0, static_shapes=static) as generator:
        generator.start(prompts, list(range(len(prompts))), [steps + 2] * len(prompts))
        for _ in range(2):
            generator.step()
        start = _wait(model)
        for _ in range(steps):
            generator.step()
        return len(prompts) * steps / (_wait(model) - start)


def generate_speed(model: PreTrainedModel, prompts: list[list[int]], steps: int) -> float:
    """The same of Hugging Face `generate`: `steps` + 1 tokens less the time for one."""
    ids = torch.tensor(prompts, device=model.device)  # (slots, context)

    def seconds(tokens: int) -> float:
        start = _wait(model)
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
        return _wait(model) - start

    with torch.no_grad():
        seconds(1)
        prefill = seconds(1)
        return len(prompts) * steps / (seconds(steps + 1) - prefill)


def bandwidth(device: torch.device) -> float:
    """Bytes a second of the fastest of several copies of 1 GiB."""
    source = torch.ones(2**28, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2 * source.nbytes / (time.perf_counter() - start))
    return best


if __name__ == "__main__":
    main()
