"""The first minute on a GPU: does everything compute what it should, in the memory and time it should?

    python -m mtsql.gpu_check --json runs/gpu_check.json
    python -m mtsql.gpu_check --device cpu             what can be checked without one

Models have random weights and Qwen3's shape: small ones where results are compared, that of Qwen3-1.7B for
speed and memory on a GPU. Each row says pass, fail, or why it is not available, with what was measured and
what was asked for. Exit code 0 if nothing failed, else 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import is_flash_attn_2_available
from transformers.utils import logging as transformers_logging

from mtsql.agent.cache import cache_bytes_per_token
from mtsql.agent.generator import Generator
from mtsql.agent.trajectory import Segment, Trajectory
from mtsql.config import GrpoConfig, user_errors
from mtsql.files import write_atomically
from mtsql.learn.logprobs import token_batch, token_logprobs
from mtsql.learn.model import DTYPES, load_policy, merged_adapter
from mtsql.learn.optimizer import make_optimizer, optimizer_step, stepped_parameters
from mtsql.planner.footprint import largest_micro_batch
from mtsql.planner.plan import make_plan
from mtsql.task import pick_device

SMALL = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.08,
}  # fmt: skip
QWEN3_17B = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}  # fmt: skip
PROMPTS = (3, 40, 70, 130, 300, 520)  # tokens
# 99th percentile of the log-probability gap; TF32 has the mantissa of float16
GAP = {"float32": 2e-3, "TF32": 0.02, "bfloat16": 0.1, "float16": 0.02}
LEAST_SHARE = {"cuda": 0.4, "cpu": 0.0}  # of the decode floor at 64 equal rows


class NotAvailable(Exception):
    """A check that this machine cannot make; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """A row of the table."""

    check: str
    verdict: str  # pass, fail or not available
    measured: str
    wanted: str


@dataclass(frozen=True)
class Measured:
    """What a check found, and whether it is as it should be."""

    passed: bool
    text: str


def random_qwen3(
    device: torch.device, dtype: str = "float32", attention: str = "sdpa", seed: int = 0, **shape: object
) -> PreTrainedModel:
    """A Qwen3 with random weights; `shape` goes over SMALL."""
    config = Qwen3Config(**(SMALL | shape), attn_implementation=attention)
    torch.manual_seed(seed)
    with torch.device(device):
        return Qwen3ForCausalLM(config).to(DTYPES[dtype]).train()


def with_lora(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """The model with adapters that do something."""
    torch.manual_seed(seed)
    adapted = get_peft_model(
        model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return adapted


def some_prompts(lengths: Sequence[int], vocabulary: int = 1000) -> list[list[int]]:
    """Random prompts of these lengths; the last two begin alike."""
    draw = torch.Generator().manual_seed(1)
    made = [torch.randint(1, vocabulary, (n,), generator=draw).tolist() for n in lengths]
    made[-1][: len(made[-2])] = made[-2][: len(made[-1])]
    return made


def sample(
    model: PreTrainedModel,
    temperature: float = 1.0,
    tokens: int = 48,
    watch: Callable[[Generator], None] = lambda _: None,
    **options: object,
) -> list[Trajectory]:
    """Two messages a prompt with an observation between them; `watch` sees the generator before each step."""
    with Generator(model, (0,), temperature, **options) as generator:
        prompts = some_prompts(PROMPTS)
        rows = generator.start(prompts, range(len(prompts)), [tokens] * len(prompts))
        played = [Trajectory(str(i), i, [Segment.given("prompt", p)]) for i, p in enumerate(prompts)]
        for turn in range(2):
            while any(row.decoding for row in rows):
                watch(generator)
                generator.step()
            for row, trajectory in zip(rows, played, strict=True):
                trajectory.segments.append(Segment.sampled(row.ids, row.logprobs))
                if turn == 0:
                    trajectory.segments.append(Segment.given("environment", [7, 8, 9]))
            if turn == 0:
                generator.append(rows, [[7, 8, 9]] * len(rows), [tokens] * len(rows))
    for index, trajectory in enumerate(played):
        trajectory.advantage = 1.0 - index % 3
    return played


@torch.no_grad()
def gaps(model: PreTrainedModel, played: Sequence[Trajectory]) -> Tensor:
    """|log-probability in the trainer - in the sampler| of each sampled token, (tokens,)."""
    batch = token_batch([[t] for t in played], "packed", model.device)
    logprobs, _ = token_logprobs(model, batch)
    return (logprobs - batch.sampling_logprobs).abs().sort().values


def gap_row(found: Tensor, dtype: str) -> Measured:
    """Mean, 99th percentile and maximum against the bound for this dtype."""
    high = found[int(0.99 * (len(found) - 1))].item()
    text = f"mean {found.mean():.1e}, 99 % {high:.1e}, most {found[-1]:.1e}"
    return Measured(high <= GAP[dtype], text)


def gradient(model: PreTrainedModel, played: Sequence[Trajectory], layout: str) -> Tensor:
    """The gradient of the mean of advantage x log-probability, as one vector; two prompts begin alike."""
    groups = [[t] for t in played]
    if layout == "shared":
        groups[-2:] = [played[-2:]]
    model.zero_grad()
    batch = token_batch(groups, layout, model.device, model.config._attn_implementation)
    logprobs, _ = token_logprobs(model, batch)
    (logprobs * batch.advantages[batch.trajectory_index]).mean().backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


@contextmanager
def without_tf32() -> Iterator[None]:
    """Float32 products in full, for ids and log-probabilities: TF32 rounds by the shape of a product."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@without_tf32()
def check_generate(device: torch.device) -> Measured:
    """Greedy ids of the sampler and of Hugging Face generate, each prompt alone."""
    model = random_qwen3(device)
    wrong = 0
    for trajectory in sample(model, temperature=0.0, static_shapes=True):
        prompt, message = trajectory.segments[0].ids, trajectory.segments[1].ids
        ids = torch.tensor([prompt], device=device)
        with torch.no_grad():
            full = model.eval().generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=48,
                eos_token_id=0, pad_token_id=0,
            )  # fmt: skip
        wrong += full[0, len(prompt) :].tolist() != list(message)
    return Measured(wrong == 0, f"{len(PROMPTS) - wrong} of {len(PROMPTS)} messages")


def check_gap(dtype: str) -> Callable[[torch.device], Measured]:
    """A check of one dtype, with float32 products in full."""
    return without_tf32()(lambda device: gap_row(gaps(m := random_qwen3(device, dtype), sample(m)), dtype))


def check_tf32(device: torch.device) -> Measured:
    """Float32 as it is trained on a GPU, its products with TF32."""
    if torch.get_float32_matmul_precision() == "highest":
        raise NotAvailable("no TF32")
    return gap_row(gaps(m := random_qwen3(device), sample(m)), "TF32")


@without_tf32()
def check_lora(device: torch.device) -> Measured:
    """An adapter apart from its base, and merged into it."""
    model = with_lora(random_qwen3(device))
    apart = gaps(model, sample(model))
    with merged_adapter(model):
        played = sample(model)
    return gap_row(torch.cat([apart, gaps(model, played)]).sort().values, "float32")


@without_tf32()
def check_4_bits(device: torch.device) -> Measured:
    """Sampling from a 4-bit base, and gradients for all adapters after it."""
    with TemporaryDirectory() as folder:
        random_qwen3(torch.device("cpu")).save_pretrained(folder)
        model = load_policy(folder, "float32", device, quantise="nf4", lora_rank=8)
    found = gaps(model, played := sample(model))
    gradient(model, played, "packed")
    learning = [
        p.grad is not None and bool(p.grad.any()) for n, p in model.named_parameters() if "lora_B" in n
    ]
    row = gap_row(found, "float32")
    return Measured(
        row.passed and all(learning), f"{row.text}; {sum(learning)} of {len(learning)} adapters learn"
    )


@without_tf32()
def check_graphs(device: torch.device) -> Measured:
    """The same seeds and shapes with and without CUDA graphs."""
    if device.type != "cuda":
        raise NotAvailable("no CUDA")
    model, captures = random_qwen3(device), 0

    def count(generator: Generator) -> None:
        nonlocal captures
        captures = max(captures, generator.graphs.captures)

    def leave_out(generator: Generator) -> None:
        generator.graphs = None

    with_graphs, without = (sample(model, watch=watch, static_shapes=True) for watch in (count, leave_out))
    same = sum(a.ids == b.ids for a, b in zip(with_graphs, without, strict=True))
    text = f"{same} of {len(PROMPTS)} trajectories, {captures} captures"
    return Measured(same == len(PROMPTS) and captures > 0, text)


@without_tf32()
def check_giving_way(device: torch.device) -> Measured:
    """The same seeds in a cache in which rows have to give way."""
    model, waiting = random_qwen3(device), set()
    need = max(PROMPTS) + 120
    gib = 1.3 * need * cache_bytes_per_token(model) / 2**30

    def watch(generator: Generator) -> None:
        waiting.update(row for row in generator.rows if row.tier is None and row.ids)

    small, large = sample(model, watch=watch, longest=need, cache_gib=gib), sample(model)
    same = sum(a.ids == b.ids for a, b in zip(small, large, strict=True))
    text = f"{same} of {len(PROMPTS)} trajectories, {len(waiting)} gave way"
    return Measured(same == len(PROMPTS) and bool(waiting), text)


def check_layouts(device: torch.device) -> Measured:
    """Gradients of packed and shared prompts against padded rows, the slow reference."""
    model = random_qwen3(device)
    played = sample(model)
    rows = gradient(model, played, "rows")
    apart = max(
        ((gradient(model, played, x) - rows).norm() / rows.norm()).item() for x in ("packed", "shared")
    )
    return Measured(apart < (1e-4 if device.type == "cpu" else 5e-3), f"{apart:.1e} of its length")


def check_flash(device: torch.device) -> Measured:
    """The packed gradient through flash-attn against SDPA, in bfloat16."""
    if device.type != "cuda" or not is_flash_attn_2_available():
        raise NotAvailable("flash-attn is not installed" if device.type == "cuda" else "no CUDA")
    plain, flash = (random_qwen3(device, "bfloat16", a) for a in ("sdpa", "flash_attention_2"))
    played = sample(plain)
    expected = gradient(plain, played, "packed")
    apart = ((gradient(flash, played, "packed") - expected).norm() / expected.norm()).item()
    return Measured(apart < 0.05, f"{apart:.1e} of its length")


def check_memory(device: torch.device) -> Measured:
    """The peak of one optimizer step of Qwen3-0.6B's shape with LoRA against the plan."""
    if device.type != "cuda":
        raise NotAvailable("no CUDA")
    config = GrpoConfig(
        model="Qwen/Qwen3-0.6B", data=(), out="", dtype="bfloat16", lora_rank=32, gradient_checkpointing=True,
        max_prompt_tokens=1000, max_response_tokens=1000, micro_batch_positions=8000, samples_per_prompt=7,
        rows=8, cache_gib=1.0,
    )  # fmt: skip
    plan = make_plan(config)
    shape = QWEN3_17B | {"hidden_size": 1024, "intermediate_size": 3072}
    model = random_qwen3(device, "bfloat16", **shape)
    model = get_peft_model(
        model, LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = make_optimizer(model, 1e-5)
    torch.cuda.reset_peak_memory_stats(device)
    batch = token_batch(largest_micro_batch(config), config.layout, device)
    logprobs, _ = token_logprobs(model, batch)
    logprobs.mean().backward()
    optimizer_step(optimizer, stepped_parameters(optimizer), 1e-5)
    peak = torch.cuda.max_memory_allocated(device)
    training = max(plan.total(phase) for phase in plan.phases if phase != "rollout")
    planned = training - plan.always["CUDA context"]
    return Measured(peak <= planned, f"{peak / 2**30:.2f} GiB, planned {planned / 2**30:.2f}")


def check_processes(device: torch.device) -> Measured:
    """A sum over one process, by NCCL on a GPU."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    with TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            values = torch.arange(4.0, device=device)
            dist.all_reduce(values)
        finally:
            dist.destroy_process_group()
    return Measured(values.tolist() == [0, 1, 2, 3], backend)


def bandwidth(device: torch.device) -> float:
    """Bytes a second of the fastest of several copies of 1 GiB, of 64 MiB on a CPU."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        start = now(device)
        target.copy_(source)
        best = max(best, 2 * source.nbytes / (now(device) - start))
    return best


def now(device: torch.device) -> float:
    """Seconds, when all that was started on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class DecodeSpeed:
    """What was measured of some decode steps."""

    tokens_per_second: float
    rows: int  # that decoded at once; the others found no room in the cache
    share_of_floor: float  # of the tokens a second if a step read all weights and its rows' cache once


def decode_speed(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    steps: int,
    static_shapes: bool | None = None,
    cache_gib: float = 0.0,
) -> DecodeSpeed:
    """Time decode steps, but not those that warm up, capture a graph, or let rows in."""
    with Generator(model, (), 1.0, static_shapes=static_shapes, cache_gib=cache_gib) as generator:
        rows = generator.start(prompts, range(len(prompts)), [steps + 3] * len(prompts))
        seconds = sampled = read = 0
        for step in range(steps + 3):
            before = generator.graphs and generator.graphs.captures, generator.in_cache
            count, start = sum(len(row.ids) for row in rows), now(model.device)
            generator.step()
            took = now(model.device) - start
            steady = before == (generator.graphs and generator.graphs.captures, generator.in_cache)
            if step >= 3 and steady:
                seconds += took
                sampled += sum(len(row.ids) for row in rows) - count
                read += model_bytes(model) + sum(
                    row.length * cache_bytes_per_token(model) for row in generator.in_cache
                )
        floor = read / bandwidth(model.device)  # seconds
        return DecodeSpeed(sampled / seconds, len(generator.in_cache), floor / seconds)


def model_bytes(model: PreTrainedModel) -> int:
    """Bytes of all weights."""
    return sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())


def check_decode(rows: int, mixed: bool, lora: bool) -> Callable[[torch.device], Measured]:
    """A check of decoding speed: rows of one length or of three, with or without an adapter."""

    def measure(device: torch.device) -> Measured:
        cuda = device.type == "cuda"
        model = random_qwen3(device, "bfloat16", **QWEN3_17B) if cuda else random_qwen3(device)
        model = (with_lora(model) if lora else model).eval()
        longest, steps = (3800, 64) if cuda else (200, 4)
        lengths = [longest // (1, 3, 8)[i % 3] if mixed else longest for i in range(rows)]
        prompts = some_prompts([*lengths, longest], model.config.vocab_size)[:rows]
        speed = decode_speed(model, prompts, steps)
        bound = LEAST_SHARE[device.type] if rows == 64 and not mixed and not lora else 0.0
        text = f"{speed.tokens_per_second:,.0f} tokens/s, {speed.share_of_floor:.0%} of the floor"
        if speed.rows < rows:
            text += f", {speed.rows} at once"
        return Measured(speed.share_of_floor >= bound, text)

    return measure


def all_checks() -> list[tuple[str, str, Callable[[torch.device], Measured]]]:
    """Name, what is wanted, and the function of every row."""
    checks: list[tuple[str, str, Callable[[torch.device], Measured]]] = [
        ("greedy ids are those of generate", "all", check_generate),
        ("graphs on and off", "the same ids", check_graphs),
        ("a cache that is too small", "the same ids", check_giving_way),
    ]
    for dtype in ("float32", "bfloat16", "float16"):
        checks.append((f"log-probability gap, {dtype}", f"99 % within {GAP[dtype]:g}", check_gap(dtype)))
    checks += [
        ("log-probability gap, TF32", f"99 % within {GAP['TF32']:g}", check_tf32),
        ("log-probability gap, LoRA apart and merged", f"99 % within {GAP['float32']:g}", check_lora),
        ("4 bits: gap, and gradients after sampling", f"99 % within {GAP['float32']:g}, all", check_4_bits),
        ("gradients of the layouts", "within 1e-4 (CPU), 5e-3", check_layouts),
        ("flash-attn's gradient", "within 0.05", check_flash),
        ("peak of a training step", "within the plan", check_memory),
        ("processes", "a sum", check_processes),
    ]
    for rows in (1, 16, 64):
        for mixed in (False, True) if rows > 1 else (False,):
            name = f"decoding {rows} rows{', mixed lengths' if mixed else ''}"
            wanted = f"{LEAST_SHARE['cuda']:.0%} of the floor (CUDA)" if rows == 64 and not mixed else ""
            checks.append((name, wanted, check_decode(rows, mixed, lora=False)))
    checks.append(("decoding 64 rows, mixed lengths, LoRA", "", check_decode(64, mixed=True, lora=True)))
    return checks


def make_checks(device: torch.device, show: Callable[[Outcome], None]) -> list[Outcome]:
    """Make every check; one that raises has failed. `show` gets each outcome as it is there."""
    outcomes = []
    for name, wanted, check in all_checks():
        try:
            found = check(device)
            outcome = Outcome(name, "pass" if found.passed else "fail", found.text, wanted)
        except NotAvailable as reason:
            outcome = Outcome(name, "not available", str(reason), wanted)
        except Exception as error:  # what it is, is what the user needs to know
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            outcome = Outcome(name, "fail", text, wanted)
        outcomes.append(outcome)
        show(outcome)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return outcomes


def main() -> None:
    """Print the table; exit code 1 if a row failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--json", type=Path, help="file for all rows")
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers to itself
    device = pick_device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}")
    started = time.perf_counter()
    outcomes = make_checks(
        device, lambda o: print(f"{o.check:44} {o.verdict:14} {o.measured:58} {o.wanted}", flush=True)
    )
    failed = sum(o.verdict == "fail" for o in outcomes)
    print(f"{failed} of {len(outcomes)} failed, {time.perf_counter() - started:.0f} seconds")
    if options.json:
        rows = [asdict(outcome) for outcome in outcomes]
        write_atomically(options.json, json.dumps({"device": name, "rows": rows}, indent=1))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    user_errors(main)
