"""A grid of trainings, each evaluated, and a page with the differences.

    mtsql ablate --vary divide_by=group,none --vary clip_high=0.2,0.28 --seeds 0 1 --steps 16
    mtsql ablate --vary branch=main,my-reward
    mtsql ablate --config C --data D --model M --vary lora_rank=8,32 --split dev

Each cell of the grid is a training of every seed, then an evaluation, in parts that are skipped when they are
done: stop it at any time and start it again. The first value of each --vary makes the first cell, from which
the differences are; values that hold commas stand between |. `branch` takes local branches of the repository,
as they are committed, so that a change of code is varied; each is trained and evaluated by its own code, with
the settings that are here. Other options go to the script that has them: those of both to both, so that an
agent is evaluated as it was trained, those of evaluate.py alone (--dialogues 20) to it. Without --data it is
the embedded benchmark with the tiny model in models/toy/seed0. --out gets ablation.md, its figures, its rows
as JSON, and a log of each part.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
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
    parser.add_argument("--config", nargs="+", default=["configs/toy.toml"], help="[configs/toy.toml]")
    parser.add_argument("--data", default="", help="[the embedded benchmark, made in --out]")
    parser.add_argument("--model", default="", help="what the trainings begin with [models/toy/seed0]")
    parser.add_argument("--split", default="", help="to evaluate on [test of the benchmark, else dev]")
    parser.add_argument("--jobs", type=int, default=0, help="cells at once [one a GPU, without: one a core]")
    parser.add_argument("--dry-run", action="store_true", help="show the commands, and stop")
    parser.add_argument(
        "--cost", action="store_true", help="run one step of GRPO, say what all cost, and stop"
    )
    parser.add_argument("--page", action="store_true", help="write the page of what is there, and stop")
    return parser.parse_known_args(argv)


if __name__ == "__main__":  # before torch is imported, so that --help is answered at once
    CHOSEN = read_arguments(sys.argv[1:])

import torch
from tqdm import tqdm

from evaluate import Args as EvaluateArgs
from mtsql.extras.reproduce.page import write_page
from mtsql.extras.reproduce.suites import BASE, TOY_BENCHMARK, Arm, Suite, Training, parts_of
from mtsql.files import shipped
from mtsql.toy.tiny import MODELS
from train_grpo import Args as GrpoArgs
from train_sft import Args as SftArgs

ARGS = {"grpo": GrpoArgs, "sft": SftArgs, "evaluate": EvaluateArgs}


def cells_of(vary: Sequence[str]) -> list[dict[str, str]]:
    """The cells of the grid, the first values first; a branch has its commit with it.

    Raises UserError for what is no NAME=A,B, and for branches that are not there or are the same.
    """
    grid: dict[str, list[str]] = {}
    for given in vary:
        name, _, values = given.partition("=")
        found = [value.strip() for value in values.split("|" if "|" in values else ",")]
        if name == "branch":
            found = [f"{branch}@{commit_of(branch)}" for branch in found]
            if len({value.rpartition("@")[2] for value in found}) < len(found):
                raise UserError(f"--vary {given}: two of these branches are one commit; commit the change")
        if not values or len(found) != len(set(found)):
            raise UserError(
                f"--vary {given} should be an option, =, and different values between commas or |"
            )
        grid[name.strip().replace("-", "_")] = found
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def commit_of(branch: str) -> str:
    """The commit of a branch here, shortened. Raises UserError if there is none."""
    command = ["git", "rev-parse", "--verify", "--quiet", "--short", f"refs/heads/{branch}"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not found:
        raise UserError(f"--vary branch={branch}: git has no such branch here")
    return found


def title_of(cell: dict[str, str]) -> str:
    """A cell's name, of its values; it is a folder too."""
    return ",".join(f"{name}={value}" for name, value in cell.items()).replace("/", "-")


def changed(cell: dict[str, str], first: dict[str, str]) -> str:
    """The options in which a cell differs from the first."""
    return ", ".join(name for name in cell if cell[name] != first[name])


def parted(options: Sequence[str], script: str) -> tuple[list[str], list[str]]:
    """Options of the training, and of the evaluation: what both have is for both, but for `temperature`."""
    own = {field.name for field in fields(ARGS[script])}
    shared, asked = {field.name for field in fields(Common)}, {field.name for field in fields(EvaluateArgs)}
    training, evaluation, name = [], [], ""
    for word in options:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].removeprefix("no-").replace("-", "_")
        training += [word] if name in own or name not in asked else []
        evaluation += [word] if name in shared or name in asked - own else []
    return training, evaluation


def suite_of(chosen: argparse.Namespace, rest: Sequence[str]) -> Suite:
    """The grid as a suite: a training and an arm for each cell, and the differences to the first.

    Beside them is what all begin with. Raises UserError for a --seed.
    """
    if any(word.partition("=")[0] == "--seed" for word in rest):
        raise UserError("give --seeds, which are those of the trainings, instead of --seed")
    cells = {title_of(cell): cell for cell in cells_of(chosen.vary)}
    trainings, arms = {}, {"start": Arm("what all begin with", BASE, tuple(parted(rest, chosen.script)[1]))}
    for title, cell in cells.items():
        options = list(rest)
        for name, value in cell.items():
            flag = f"--{name.replace('_', '-')}"
            switch = {"true": flag, "false": f"--no-{flag[2:]}"}.get(value)
            options += [] if name == "branch" else [switch] if switch else [flag, value]
        training, evaluation = parted(options, chosen.script)
        trainings[title] = Training((SCRIPTS[chosen.script],), BASE, tuple(training))
        arms[title] = Arm("" if trainings.keys() - {title} else "the first cell", title, tuple(evaluation))
    first, *others = cells
    split = chosen.split or ("dev" if chosen.data else "test")
    return Suite(
        f"Ablation of {', '.join(next(iter(cells.values())))}",
        " ".join(chosen.config),
        ("--data", "{data}"),
        {split: ("--data", "{data}", "--split", split)},
        trainings,
        arms,
        tuple((changed(cells[other], cells[first]), other, first) for other in others),
        seeds=tuple(chosen.seeds),
        once=(BASE,),
        benchmark=() if chosen.data else TOY_BENCHMARK,
        corrected=True,
    )


def chains_of(chosen: argparse.Namespace, suite: Suite) -> list[list[Part]]:
    """For each seed and cell the training and its evaluation; of a branch, with the scripts of its clone.

    Exits with one sentence for an option or value that a script does not have.
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
        alone = len(parts) % 2  # of what all begin with
        chains += [parts[:alone]] if alone else []
        for cell, training in zip(cells_of(chosen.vary), range(alone, len(parts), 2), strict=True):
            chain = parts[training : training + 2]
            if "branch" in cell:
                folder = clone_folder(cell["branch"], chosen.out)
                chain = [p._replace(command=[str(folder / p.command[0]), *p.command[1:]]) for p in chain]
            chains.append(chain)
    for _, (script, *given), _ in (part for chain in chains for part in chain):
        name = Path(script).stem
        read_options(ARGS["evaluate" if name == "evaluate" else chosen.script], None, given)
    return chains


def clone_folder(branch: str, out: Path) -> Path:
    """Where the clone of a branch at a commit is to be."""
    return out / "branches" / branch.replace("/", "-")


def clone(branch: str, out: Path) -> None:
    """Clone a branch at its commit, once, and say what is not in it."""
    path, name = clone_folder(branch, out), branch.rpartition("@")[0]
    if not path.exists():
        subprocess.run(["git", "clone", "--quiet", "--shared", "--branch", name, ".", str(path)], check=True)
    changes = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout
    if changes:
        print("the changes that are not committed are in none of the branches")


def run_chains(chains: Sequence[Sequence[Part]], jobs: int) -> None:
    """Run what is not done yet, so many chains at once. Raises UserError for a part that fails, and for one
    that was done with other options.
    """
    slots: SimpleQueue[int] = SimpleQueue()
    for slot in range(jobs):
        slots.put(slot)
    bar = tqdm(total=sum(map(len, chains)), desc="ablation", unit="part")

    def run_chain(chain: Sequence[Part]) -> None:
        slot = slots.get()
        try:
            for part in chain:
                run_logged(part, slot, jobs)
                bar.update()
        finally:
            slots.put(slot)

    with bar, ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(run_chain, chain) for chain in chains]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C, or when one failed, no other begins
    for chain in running:
        if not chain.cancelled():
            chain.result()


def run_logged(part: Part, slot: int, jobs: int) -> None:
    """Run a part that is not done, on one of `jobs` shares of the machine, its output in a log beside it."""
    title, command, done = part
    log, shown = done.parent.with_name(f"{done.parent.name}.log"), f"$ python {' '.join(command)}\n"
    if done.exists():
        if log.exists() and f"\n{shown}" not in "\n" + log.read_text():
            raise UserError(f"{done.parent} is of other options; give another --out")
        return
    own = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    own |= {"CUDA_VISIBLE_DEVICES": str(slot)} if torch.cuda.device_count() > 1 else {}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(shown)
        file.flush()
        process = subprocess.run(python(command), stdout=file, stderr=file, env=os.environ | own)
    if process.returncode:
        raise UserError(f"{title} failed with exit code {process.returncode}; {log} says why")


def cost(chains: Sequence[Sequence[Part]], jobs: int) -> str:
    """What the trainings will cost, from the first step of the first cell, which is run for it."""
    trained = [chain[0].command for chain in chains if len(chain) > 1]
    command, steps = trained[0], [read_options(GrpoArgs, None, given[1:]).steps for given in trained]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*python(command), "--steps", "1", "--out", folder], check=True)
        with Path(folder, "metrics.csv").open(newline="") as file:
            minutes = float(next(csv.DictReader(file))["minutes"])
    return (
        f"the first step took {60 * minutes:.0f} s, alone on this machine: {sum(steps)} steps some "
        f"{minutes * sum(steps):.0f} minutes, less where {jobs} cells at once use it better; "
        f"{len(chains)} evaluations come on top"
    )


def main(chosen: argparse.Namespace, rest: list[str]) -> None:
    """Run the grid, then write the page."""
    suite = suite_of(chosen, rest)
    chains = chains_of(chosen, suite)
    jobs = min(len(chains), chosen.jobs or torch.cuda.device_count() or os.cpu_count() or 1)
    if chosen.dry_run:
        for part in (part for chain in chains for part in chain):
            print(f"{'done' if part.done.exists() else 'to do':<6} python {' '.join(part.command)}")
        return
    for branch in {cell["branch"]: 0 for cell in cells_of(chosen.vary) if "branch" in cell}:
        clone(branch, chosen.out)
    if not (chosen.data or chosen.page):
        benchmark = chosen.out / "benchmark"
        run_part("benchmark", [word.format(data=benchmark) for word in TOY_BENCHMARK], benchmark)
    if chosen.cost:
        print(cost(chains, jobs))
        return
    if not chosen.page:
        try:
            run_chains(chains, jobs)
        except KeyboardInterrupt:
            print("\ninterrupted; the same command goes on from here", file=sys.stderr)
            sys.exit(130)
    words = " ".join(word for word in sys.argv[1:] if word != "--page")
    page = write_page(suite, f"mtsql ablate {words}", chosen.out / "ablation.md")
    print(f"\n{page.read_text()}\n{page}")


if __name__ == "__main__":
    user_errors(main, *CHOSEN)
