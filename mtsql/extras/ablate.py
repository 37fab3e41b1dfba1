"""A grid of trainings, each evaluated, and a page with the differences.

    mtsql ablate --vary divide_by=group,none --vary clip_high=0.2,0.28 --seeds 0 1 --steps 16
    mtsql ablate --vary branch=main,my-reward
    mtsql ablate --config C --data D --model M --vary lora_rank=8,32 --split dev

Each cell of the grid is a training of every seed, then an evaluation, in parts that are skipped when they are
done: stop it at any time and start it again. The first value of each --vary makes the first cell, from which
the differences are. `branch` takes branches of this repository, so that a change of code is varied. All other
options go to the training, and those that evaluate.py has go to it too: an agent is evaluated as it was
trained. Without --data it is the embedded benchmark with the tiny model in models/toy/seed0.
--out gets ablation.md, its figures, and its rows as JSON, and a log of each cell.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from itertools import product
from pathlib import Path
from queue import SimpleQueue

from mtsql.config import Common, read_options, user_errors
from mtsql.errors import UserError
from mtsql.parts import Part, python, run_part

SCRIPTS = {"grpo": "train_grpo.py", "sft": "train_sft.py"}


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The grid, and the options of all its trainings."""
    parser = argparse.ArgumentParser(
        "mtsql ablate",
        "mtsql ablate --vary NAME=A,B [--vary ...] [--seeds N ...] [--OPTION-OF-THE-TRAINING VALUE ...]",
        __doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--vary", action="append", required=True, help="an option and its values, or branch=")
    parser.add_argument("--script", choices=SCRIPTS, default="grpo", help="what is trained [grpo]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of each cell [0]")
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"), help="[runs/ablation]")
    parser.add_argument("--config", default="configs/toy.toml", help="settings [configs/toy.toml]")
    parser.add_argument("--data", default="", help="[the embedded benchmark, made in --out]")
    parser.add_argument("--model", default="", help="what the trainings begin with [models/toy/seed0]")
    parser.add_argument("--split", default="", help="to evaluate on [test of the benchmark, else dev]")
    parser.add_argument("--jobs", type=int, default=0, help="cells at once [one a GPU, without: one a core]")
    parser.add_argument(
        "--dry-run", action="store_true", help="show the commands and what they cost, and stop"
    )
    parser.add_argument("--page", action="store_true", help="write the page of what is there, and stop")
    return parser.parse_known_args(argv)


if __name__ == "__main__":  # before torch is imported, so that --help is answered at once
    CHOSEN = read_arguments(sys.argv[1:])

import torch
from tqdm import tqdm

from mtsql.extras.reproduce.page import write_page
from mtsql.extras.reproduce.suites import BASE, TOY_BENCHMARK, Arm, Suite, Training, parts_of
from mtsql.files import shipped
from mtsql.toy.tiny import MODELS
from train_grpo import Args as GrpoArgs


def cells_of(vary: Sequence[str]) -> list[dict[str, str]]:
    """The cells of the grid, the first values first. Raises UserError for what is no NAME=A,B."""
    grid: dict[str, list[str]] = {}
    for given in vary:
        name, _, values = given.partition("=")
        grid[name.strip().replace("-", "_")] = [value.strip() for value in values.split(",")]
        if not values or len(values.split(",")) != len(set(values.split(","))):
            raise UserError(
                f"--vary {given} should be an option, =, and different values with commas between"
            )
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def title_of(cell: dict[str, str]) -> str:
    """A cell's name, of its values; it is a folder too."""
    return ",".join(f"{name}={value}" for name, value in cell.items()).replace("/", "-")


def changed(cell: dict[str, str], first: dict[str, str]) -> str:
    """The options in which a cell differs from the first."""
    return ", ".join(name for name in cell if cell[name] != first[name])


def of_evaluation(options: Sequence[str]) -> list[str]:
    """Those of a training's options that an evaluation has too, with their values."""
    known = {
        f"--{prefix}{field.name.replace('_', '-')}" for field in fields(Common) for prefix in ("", "no-")
    }
    kept, taken = [], False
    for word in options:
        taken = word.partition("=")[0] in known if word.startswith("--") else taken
        kept += [word] if taken else []
    return kept


def suite_of(chosen: argparse.Namespace, rest: Sequence[str]) -> Suite:
    """The grid as a suite: a training and an arm for each cell, and the differences to the first."""
    cells = {title_of(cell): cell for cell in cells_of(chosen.vary)}
    trainings, arms = {}, {}
    for title, cell in cells.items():
        options = list(rest)
        for name, value in cell.items():
            flag = f"--{name.replace('_', '-')}"
            switch = {"true": flag, "false": f"--no-{flag[2:]}"}.get(value)
            options += [] if name == "branch" else [switch] if switch else [flag, value]
        trainings[title] = Training((SCRIPTS[chosen.script],), BASE, tuple(options))
        arms[title] = Arm("" if arms else "compared with", title, tuple(of_evaluation(options)))
    first, *others = cells
    split = chosen.split or ("dev" if chosen.data else "test")
    return Suite(
        f"Ablation of {', '.join(next(iter(cells.values())))}",
        chosen.config,
        ("--data", "{data}"),
        {split: ("--data", "{data}", "--split", split)},
        trainings,
        arms,
        tuple((changed(cells[other], cells[first]), other, first) for other in others),
        seeds=tuple(chosen.seeds),
        benchmark=() if chosen.data else TOY_BENCHMARK,
        corrected=True,
    )


def chains_of(chosen: argparse.Namespace, suite: Suite) -> list[list[Part]]:
    """For each seed and cell the training and its evaluation. A branch is cloned, and its scripts are run.

    Raises UserError for a branch that is not there.
    """
    places = {
        "data": chosen.data or str(chosen.out / "benchmark"),
        "model": chosen.model or str(shipped(MODELS / "seed0")),
        "other": "",
        "rank": "0",
    }
    chains = []
    for seed in suite.seeds:
        parts = parts_of(suite, chosen.out, seed, places)
        for cell, training in zip(cells_of(chosen.vary), range(0, len(parts), 2), strict=True):
            chain = parts[training : training + 2]
            if "branch" in cell:
                folder = clone(cell["branch"], chosen.out / "branches")
                chain = [p._replace(command=[str(folder / p.command[0]), *p.command[1:]]) for p in chain]
            chains.append(chain)
    return chains


def clone(branch: str, folder: Path) -> Path:
    """A clone of a branch of the repository here, made once. Raises UserError if there is no such branch."""
    path = folder / branch.replace("/", "-")
    if not path.exists():
        command = ["git", "clone", "--quiet", "--branch", branch, ".", str(path)]
        if subprocess.run(command, capture_output=True).returncode:
            raise UserError(f"--vary branch={branch}: git has no such branch here")
    return path


def run_chains(chains: Sequence[Sequence[Part]], jobs: int) -> None:
    """Run what is not done yet, so many chains at once. Raises UserError for a part that fails."""
    slots: SimpleQueue[int] = SimpleQueue()
    for slot in range(jobs):
        slots.put(slot)
    bar = tqdm(total=sum(map(len, chains)), desc="ablation", unit="part")

    def run_chain(chain: Sequence[Part]) -> None:
        slot = slots.get()
        threads = str(max(1, (os.cpu_count() or 1) // jobs))
        for title, command, done in chain:
            if not done.exists():
                own = {"OMP_NUM_THREADS": threads}
                own |= {"CUDA_VISIBLE_DEVICES": str(slot)} if torch.cuda.device_count() > 1 else {}
                log = done.parent.with_suffix(".log")
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("a") as file:
                    process = subprocess.run(python(command), stdout=file, stderr=file, env=os.environ | own)
                if process.returncode:
                    raise UserError(f"{title} failed with exit code {process.returncode}; {log} says why")
            bar.update()
        slots.put(slot)

    with bar, ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(run_chain, chain) for chain in chains]
        try:
            for chain in running:
                chain.result()
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C, or when one failed, no other begins


def cost(chains: Sequence[Sequence[Part]], jobs: int) -> str:
    """What the trainings will cost, from the first step of the first cell, which is run for it."""
    command = chains[0][0].command
    steps = [read_options(GrpoArgs, None, chain[0].command[1:]).steps for chain in chains]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*python(command), "--steps", "1", "--out", folder], check=True)
        with Path(folder, "metrics.csv").open(newline="") as file:
            minutes = float(next(csv.DictReader(file))["minutes"])
    return (
        f"a step takes {60 * minutes:.0f} s, alone on this machine: {sum(steps)} steps some "
        f"{minutes * sum(steps) / 60:.1f} hours, less where {jobs} cells at once use it better; "
        f"{len(chains)} evaluations come on top"
    )


def main(chosen: argparse.Namespace, rest: list[str]) -> None:
    """Run the grid, then write the page."""
    suite = suite_of(chosen, rest)
    chains = chains_of(chosen, suite)
    jobs = min(len(chains), chosen.jobs or torch.cuda.device_count() or os.cpu_count() or 1)
    if not (chosen.data or chosen.page):
        benchmark = chosen.out / "benchmark"
        run_part("benchmark", [word.format(data=benchmark) for word in TOY_BENCHMARK], benchmark)
    if chosen.dry_run:
        for part in (part for chain in chains for part in chain):
            print(f"{'done' if part.done.exists() else 'to do':<6} python {' '.join(part.command)}")
        if chosen.script == "grpo":
            print(cost(chains, jobs))
        return
    if not chosen.page:
        run_chains(chains, jobs)
    page = write_page(suite, f"mtsql ablate {' '.join(sys.argv[1:])}", chosen.out / "ablation.md")
    print(f"\n{page.read_text()}\n{page}")


if __name__ == "__main__":
    user_errors(main, *CHOSEN)
