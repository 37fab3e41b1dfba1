"""The queue of a lent GPU: the base carried there in parts, then jobs that write raw figures as they go.

    python bench/gpu_queue.py pack QWEN.gguf runs/carry      # here: parts of 40 MiB, to be carried one a call
    python bench/gpu_queue.py join runs/carry models/qwen2.5-coder-0.5b              # there, once all are
    python bench/gpu_queue.py run fine_tune --data DATA --out runs/queue --minutes 9 # there: one of JOBS
    python bench/gpu_queue.py collect runs/queue BACK                                # there: parts of 15 MiB

QWEN.gguf is the file that `python -m mtsql pretrained qwen2.5-coder-0.5b` pins. Its head and its embeddings
are the same weights quantised twice, so the embeddings stay behind: their bytes are zeros, which cost
nothing packed.

A job's commands start together and are interrupted when its minutes are over (Ctrl-C: a training ends its
step and saves a checkpoint, an evaluation has kept its answers). The same command goes on in the next call
while the machine is held. BACK gets all but checkpoints as one archive in parts (`cat BACK/part* | tar xJ`),
adapters in bfloat16. Jobs of RL need the policies that they start from under OUT. Run with the versions of
requirements.txt: older transformers compute the rotary embedding in TF32, unlike our decoder.
"""

import io
import lzma
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mtsql.config import command_line

PART_BYTES, PART_BYTES_BACK = 40 * 2**20, 15 * 2**20
CONFIG = ["--config", "configs/real_qwen.toml"]
SIZES = ["--micro-batch-positions", "12288", "--save-every", "50", "--resume"]
SOURCES = ["--tables", "{data}/sparc/tables.json", "--databases", "{data}/database"]
TRAIN = [*CONFIG, *SIZES, "--data", "{data}/real/train_mix.json", *SOURCES]
SFT = ["train_sft.py", *TRAIN, "--epochs", "1"]
GRPO = ["train_grpo.py", *TRAIN, "--evaluate-every", "0", "--model", "{out}/warm_start/policy"]
PROCESS, NO_TOOLS, TWICE = ["--rewards", "process"], ["--tools", "none"], ["--epochs", "2"]
PAPER = "--wording paper --result-characters 200 --no-error-hints --max-prompt-tokens 4000".split()
PAPER += "--max-response-tokens 8000 --max-turn-tokens 1000".split()
COSQL = ["--tables", "{data}/cosql/tables.json", "--databases", "{data}/database"]
UNTRAINED = {
    "sparc": ["evaluate.py", *CONFIG, *PAPER, "--data", "{data}/sparc/dev.json", *SOURCES],
    "cosql": ["evaluate.py", *CONFIG, *PAPER, "--data", "{data}/cosql/dev.json", *COSQL],
}
# Each job is commands that run side by side, by the name of their folder in {out}, which is --out.
JOBS: dict[str, dict[str, list[str]]] = {
    "fine_tune": {"short_sft": [*SFT, *NO_TOOLS], "warm_start": SFT},
    "fine_tune_twice": {"short_sft_2": [*SFT, *NO_TOOLS, *TWICE], "warm_start_2": [*SFT, *TWICE]},
    "rl_short": {"short_rl": [*GRPO, *NO_TOOLS, "--model", "{out}/short_sft/policy"]},
    "rl_outcome": {"rl_outcome": GRPO},
    "rl": {"rl": [*GRPO, *PROCESS]},
    "engine": {"decode": ["bench/decode.py"]},
    "rl_seed_1": {"rl_1": [*GRPO, *PROCESS, "--seed", "1"]},
    "paper_wording": {
        f"paper_{name}{'' if tools else '_no_tools'}": [*command, *([] if tools else NO_TOOLS)]
        for name, command in UNTRAINED.items()
        for tools in (True, False)
    },
}


def main() -> None:
    """One of the four."""
    parser = command_line(__doc__)
    kinds = parser.add_subparsers(dest="what", required=True)
    for function in (pack, join, collect):
        kind = kinds.add_parser(function.__name__)
        kind.set_defaults(function=function)
        kind.add_argument("source", type=Path)
        kind.add_argument("out", type=Path)
    job = kinds.add_parser("run")
    job.add_argument("job", choices=JOBS)
    job.add_argument("--data", required=True)
    job.add_argument("--out", required=True)
    job.add_argument("--minutes", type=float, default=9)
    chosen = parser.parse_args()
    if chosen.what == "run":
        sys.exit(run_job(chosen.job, chosen.data, chosen.out, chosen.minutes))
    chosen.function(chosen.source, chosen.out)


def pack(source: Path, out: Path) -> None:
    """Write the file in compressed parts to the folder `out`, its embeddings as zeros."""
    from gguf import GGUFReader

    held = bytearray(source.read_bytes())
    for tensor in GGUFReader(source).tensors:
        if tensor.name == "token_embd.weight":
            held[tensor.data_offset : tensor.data_offset + tensor.n_bytes] = bytes(tensor.n_bytes)
    write_parts(bytes(held), out, PART_BYTES)


def write_parts(content: bytes, out: Path, size: int) -> None:
    """Compress the content and write it to a new folder in parts of a size."""
    out.mkdir(parents=True)
    packed = lzma.compress(content, preset=0)
    for number, start in enumerate(range(0, len(packed), size)):
        (out / f"part{number:02d}").write_bytes(packed[start : start + size])
    print(f"{number + 1} parts, {len(packed) / 2**20:.0f} MiB of {len(content) / 2**20:.0f}")


def join(source: Path, out: Path) -> None:
    """Write the model folder of the parts in `source`."""
    from mtsql.learn.model import save_policy
    from mtsql.pretrained import read_gguf

    file = source / "model.gguf"
    file.write_bytes(lzma.decompress(b"".join(p.read_bytes() for p in sorted(source.glob("part*")))))
    save_policy(*read_gguf(file, "bfloat16"), out)
    file.unlink()


def collect(source: Path, out: Path) -> None:
    """Write what jobs made in `source` to `out`, but for checkpoints; adapters are bfloat16 from now on."""
    import torch
    from safetensors.torch import load_file, save_file

    for path in source.glob("*/policy/adapter_model.safetensors"):
        halved = {name: weight.to(torch.bfloat16) for name, weight in load_file(path).items()}
        save_file(halved, path, metadata={"format": "pt"})
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(source, ".", filter=lambda member: None if "checkpoints" in member.name else member)
    write_parts(archive.getvalue(), out, PART_BYTES_BACK)


def run_job(job: str, data: str, out: str, minutes: float) -> int:
    """Start a job's commands together, end them when the time is over; 0 if all did what they should."""
    Path(out).mkdir(parents=True, exist_ok=True)
    running = {}
    for name, words in JOBS[job].items():
        target = ["--json", f"{out}/{name}.json"] if job == "engine" else ["--out", f"{out}/{name}"]
        command = [sys.executable, *(word.format(data=data, out=out) for word in words), *target]
        log = (Path(out) / f"{name}.log").open("a")
        running[name] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 60 * minutes
    while time.monotonic() < deadline and any(process.poll() is None for process in running.values()):
        time.sleep(1)
    for process in running.values():
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    codes = {name: process.wait() for name, process in running.items()}
    print(codes)
    return max(map(abs, codes.values()))  # below 0 where a signal ended it


if __name__ == "__main__":
    main()
