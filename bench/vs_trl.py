"""GRPO here and in TRL, side by side: `python bench/vs_trl.py --help` (needs requirements-bridges.txt).

The same policy, questions, G, limits, loss, learning rate and threads through train_grpo.py and through
TRL's GRPOTrainer: its generation and training, our environment and rewards between its messages
(`mtsql.extras.bridges.trl`, whose gradient is ours). Trajectories a second without the first step, and
memory. Each repetition has its own seed, the order of the two alternates, and medians are printed. TRL has
whichever of --trl-micro-batches is fastest, no gradient checkpointing, float32 as here; the first step of its
warm-up has rate 0. train_grpo.py has the micro-batch of --config.
"""

import argparse
import csv
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from mtsql.config import command_line
from mtsql.files import write_atomically

RATE, BETA2, WARMUP = 3e-4, 0.99, 2
QUESTIONS = 3000  # in play


def timed(command: Sequence[object]) -> float:
    """Run a Python command in the project's root; its peak memory in GiB."""
    words = [sys.executable, *map(str, command)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    process = Popen(words, cwd=ROOT, env=environment, stdout=DEVNULL, stderr=PIPE)
    error = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(error.decode()[-3000:])
    return usage.ru_maxrss / 2**20


def train_here(chosen: argparse.Namespace, steps: int, out: Path, seed: int) -> tuple[list[float], float]:
    """Seconds of each step of train_grpo.py, and its peak memory."""
    command = ["train_grpo.py", *shared(chosen), "--seed", seed, "--out", out, "--steps", steps]
    command += ["--save-every", steps, "--questions", QUESTIONS]
    command += ["--prompts-per-step", chosen.prompts, "--samples-per-prompt", chosen.samples]
    memory = timed([*command, "--learning-rate", RATE])
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [float(row["rollout_seconds"]) + float(row["train_seconds"]) for row in rows], memory


def train_there(
    chosen: argparse.Namespace, steps: int, out: Path, seed: int, micro_batch: int
) -> tuple[list[float], float]:
    """Seconds of each step of TRL's trainer, and its peak memory."""
    trl = ["--max_steps", steps, "--num_generations", chosen.samples, "--learning_rate", RATE]
    trl += ["--per_device_train_batch_size", micro_batch, "--gradient_checkpointing", "False"]
    trl += ["--gradient_accumulation_steps", chosen.prompts * chosen.samples // micro_batch]
    trl += ["--adam_beta2", BETA2, "--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", WARMUP]
    trl += ["--max_completion_length", chosen.turn_tokens, "--save_strategy", "no", "--disable_tqdm", "True"]
    own = [*shared(chosen), "--questions", QUESTIONS, "--seed", seed, "--out", out]
    memory = timed([Path(__file__), "--trainer", *own, "--", *trl])
    return json.loads((out / "seconds.json").read_text()), memory


def shared(chosen: argparse.Namespace) -> list[object]:
    """Options of both."""
    options = ["--config", chosen.config, "--model", chosen.model, "--data", *chosen.data]
    return [*options, "--max-turn-tokens", chosen.turn_tokens]


def run_trainer(argv: list[str]) -> None:
    """One training run of TRL, in a process of its own: OUT/seconds.json."""
    from transformers import TrainerCallback

    from mtsql.config import read_options
    from mtsql.extras.bridges.task import BridgeConfig, load_task
    from mtsql.extras.bridges.trl import make_rollout, make_trainer

    end = argv.index("--")
    config = read_options(BridgeConfig, None, argv[:end])
    trainer, task, seconds = make_trainer(config, argv[end + 1 :]), load_task(config), []

    def write(ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        written, _ = trainer._generate_single_turn(ids, None, {}, 1)
        return written, [[0.0] * len(message) for message in written]  # TRL works them out itself

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            seconds.append(time.perf_counter() - self.began)

    trainer.rollout_func = make_rollout(task, config, write)
    trainer.add_callback(Clock())
    trainer.train()
    (Path(config.out) / "seconds.json").write_text(json.dumps(seconds))


def main() -> None:
    """Measure both, print, and write --json."""
    parser = command_line(__doc__)
    parser.add_argument("--model", required=True, help="policy to start from")
    parser.add_argument("--data", nargs="+", required=True, help="folder in SParC's format")
    parser.add_argument("--config", default="configs/toy.toml", help="settings of both")
    parser.add_argument("--turn-tokens", type=int, default=120, help="longest message")
    parser.add_argument("--prompts", type=int, default=24, help="questions in a step")
    parser.add_argument("--samples", type=int, default=8, help="trajectories of each")
    parser.add_argument("--steps", type=int, default=4, help="measured, after a first one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trl-micro-batches", type=int, nargs="+", default=[24, 96, 192])
    parser.add_argument("--json", type=Path, help="file to write")
    chosen = parser.parse_args()
    episodes = chosen.prompts * chosen.samples
    sizes = [size for size in chosen.trl_micro_batches if episodes % size == 0]
    if not sizes:
        parser.error(f"--trl-micro-batches should divide {episodes}, the trajectories of a step")
    folder = Path(tempfile.mkdtemp(prefix="vs_trl_"))
    tried = {
        size: statistics.median(train_there(chosen, 3, folder / f"try_{size}", 0, size)[0][1:])
        for size in sizes
    }
    best = min(tried, key=tried.get)
    print("TRL, seconds a step by micro-batch:", {size: round(value, 2) for size, value in tried.items()})
    engines = {
        "train_grpo.py": lambda steps, out, seed: train_here(chosen, steps, out, seed),
        "TRL": lambda steps, out, seed: train_there(chosen, steps, out, seed, best),
    }
    figures = {name: defaultdict(list) for name in engines}
    for repeat in range(chosen.repeats):
        for name in list(engines)[:: 1 if repeat % 2 == 0 else -1]:
            out = folder / f"{name}_{repeat}"
            seconds, memory = engines[name](chosen.steps + 1, out, repeat)
            figures[name]["trajectories_per_second"].append(episodes / statistics.median(seconds[1:]))
            figures[name]["peak_gib"].append(memory)
    rates = {name: statistics.median(of["trajectories_per_second"]) for name, of in figures.items()}
    for name, of in figures.items():
        print(f"{name:<14} {rates[name]:8.2f} trajectories/s, {statistics.median(of['peak_gib']):.2f} GiB")
    print(f"ratio          {rates['train_grpo.py'] / rates['TRL']:8.2f}")
    if chosen.json:
        settings = {name: str(value) for name, value in vars(chosen).items()}
        content = {"settings": settings, "trl_micro_batch": best, "figures": figures}
        write_atomically(chosen.json, json.dumps(content, indent=1))
    shutil.rmtree(folder)


if __name__ == "__main__":
    if "--trainer" in sys.argv:
        run_trainer(sys.argv[sys.argv.index("--trainer") + 1 :])
    else:
        main()
