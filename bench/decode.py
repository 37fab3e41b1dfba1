"""Decoding speed at long context against the memory-bandwidth floor, with and without CUDA graphs.

    python bench/decode.py      # Qwen3-1.7B's shape, bf16, 64 slots, 3,800 tokens, on a GPU
    python bench/decode.py --layers 2 --slots 4 --context 256 --steps 8 --vocabulary 2000     # to try it

The weights are random. Rows are of one length, or a third each of that, a third and an eighth of it; also
with a LoRA adapter of rank 16. All is decoded twice, and timed the second time, when all graphs are captured.
The floor of a step is the time that the device takes to read all weights and the cache of all rows once, at
the bandwidth that a large copy reaches in the same run. Hugging Face `generate` decodes the prompts of one
length for comparison (its prefill is timed apart and taken off). --json is written after each figure.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from mtsql.agent.cache import cache_bytes_per_token
from mtsql.agent.generator import Generator, Sampling
from mtsql.config import command_line
from mtsql.files import write_atomically
from mtsql.task import pick_device

QWEN3_17B = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 40_960,
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--context", type=int, default=3_800, help="tokens of the longest prompts")
    parser.add_argument("--steps", type=int, default=128, help="tokens decoded in each row")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    device = pick_device()
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    shape = Qwen3Config(**QWEN3_17B, vocab_size=options.vocabulary, num_hidden_layers=options.layers)
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(shape, attn_implementation="sdpa", dtype=dtype).eval()
    lengths = [options.context // (1, 3, 8)[i % 3] for i in range(options.slots)]
    equal, mixed = (
        [torch.randint(1, options.vocabulary, (n,)).tolist() for n in each]
        for each in ([options.context] * options.slots, lengths)
    )
    figures: dict[str, float] = {"memory_bandwidth_gb_per_second": bandwidth(device) / 1e9}

    print(f"{torch.cuda.get_device_name() if cuda else 'CPU'}, {dtype}, {vars(options)}")

    def keep(name: str, found: dict[str, float]) -> None:
        for what, value in found.items():
            figures[f"{name}_{what}"] = value
            print(f"{f'{name}_{what}':40}{value:>14,.2f}", flush=True)
        if options.json:
            write_atomically(options.json, json.dumps(figures, indent=1))

    for name, prompts, graphs in (("equal", equal, True), ("mixed", mixed, True), ("eager", equal, False)):
        keep(name, decode_speed(model, prompts, options.steps, graphs))
    lora = LoraConfig(r=16, init_lora_weights=False, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).eval()
    keep("mixed_lora", decode_speed(model, mixed, options.steps, graphs=True))
    found = generate_speed(model.unload(), equal, options.steps)
    keep("hf_generate", {"tokens_per_second": found})


def now(device: torch.device) -> float:
    """Seconds, when all that was started on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def bandwidth(device: torch.device) -> float:
    """Bytes a second of the fastest of several copies of 1 GiB, of 64 MiB on a CPU."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**24, device=device)
    target, best = torch.empty_like(source), 0.0
    for _ in range(5):
        start = now(device)
        target.copy_(source)
        best = max(best, 2 * source.nbytes / (now(device) - start))
    return best


def decode_speed(
    model: PreTrainedModel, prompts: list[list[int]], steps: int, graphs: bool
) -> dict[str, float]:
    """Time the decoding of as many of the prompts as the cache holds at once, `rows_at_once`.

    `share_of_floor` is of the tokens a second if a step read weights and its rows' cache once.
    """
    weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    with Generator(model, (), Sampling()) as generator:
        generator.graphs = generator.graphs if graphs else None
        for _ in range(2):
            rows = generator.start(prompts, range(len(prompts)), [steps] * len(prompts))
            prompts = [list(row.history) for row in generator.in_cache]
            start = now(model.device)
            while any(row.decoding for row in rows):
                generator.step()
            seconds = now(model.device) - start
            generator.release(rows)
        sampled = len(prompts) * steps
        cached = steps * sum(map(len, prompts)) + sampled * (steps - 1) // 2  # tokens, of all steps
        read = steps * weights + cached * cache_bytes_per_token(model)
        return {
            "rows_at_once": len(prompts),
            "tokens_per_second": sampled / seconds,
            "share_of_floor": read / bandwidth(model.device) / seconds,
        }


def generate_speed(model: PreTrainedModel, prompts: list[list[int]], steps: int) -> float:
    """Sampled tokens a second of Hugging Face `generate`: `steps` + 1 tokens less the time for one."""
    ids = torch.tensor(prompts, device=model.device)  # (rows, context)

    how = {"attention_mask": torch.ones_like(ids), "do_sample": True, "top_k": 0, "eos_token_id": 0}

    def seconds(tokens: int) -> float:
        start = now(model.device)
        model.generate(ids, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0, **how)
        return now(model.device) - start

    with torch.no_grad():
        seconds(1)
        prefill = seconds(1)
        return len(prompts) * steps / (seconds(steps + 1) - prefill)


if __name__ == "__main__":
    main()
