"""A grid of trainings, each evaluated, and a page with the differences.

    mtsql ablate --vary divide_by=group,none --vary aggregate=trajectory,token --seeds 0 1 --steps 16
    mtsql ablate --vary branch=main,my-reward
    mtsql ablate --config C --data D --model M --vary lora_rank=8,32 --split dev

Each cell of the grid is a training of every seed, then an evaluation, in parts that are skipped when they
are done: stop it at any time and start it again. Seeds may run side by side, each in a process of its own
with the same --out, and with OMP_NUM_THREADS=1 or a GPU in CUDA_VISIBLE_DEVICES. The first value of each
--vary makes the first cell, from which the differences are; values that hold commas stand between |.
`branch` takes local branches of the repository, as they are committed, so that a change of code is varied;
each is trained and evaluated by its own code, with the settings that are here. Other options go to the
script that has them: those of both to both, so that an agent is evaluated as it was trained, those of
evaluate.py alone (--dialogues 20) to it. Without --data it is the embedded benchmark with the tiny model in
models/toy/seed0. --out gets ablation.md, its figures, and its rows as JSON.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path

from mtsql.config import Common, command_line, read_options, user_errors
from mtsql.errors import UserError
from mtsql.extras.reproduce import Part, refuse_other_options, run_part

Cells = Mapping[str, Mapping[str, str]]  # title, which is a folder too: the cell's options and their values


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The grid, and the options of all its trainings."""
    usage = "mtsql ablate --vary NAME=A,B [--vary ...] [--seeds N ...] [--OPTION-OF-TRAINING VALUE ...]"
    parser = command_line(__doc__, usage=usage)
    parser.add_argument("--vary", action="append", required=True, help="an option and its values, or branch=")
    parser.add_argument("--script", choices=("grpo", "sft"), default="grpo", help="what is trained [grpo]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of each cell [0]")
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"), help="[runs/ablation]")
    parser.add_argument("--config", nargs="+", default=["configs/toy.toml"], help="[configs/toy.toml]")
    parser.add_argument("--data", default="", help="[the embedded benchmark, made in --out]")
    parser.add_argument("--model", default="", help="what the trainings begin with [models/toy/seed0]")
    parser.add_argument("--split", default="", help="to evaluate on [test of the benchmark, else dev]")
    parser.add_argument("--dry-run", action="store_true", help="show the commands, and stop")
    parser.add_argument("--page", action="store_true", help="write the page of what is there, and stop")
    return parser.parse_known_args(argv)


if __name__ == "__main__":  # before torch is imported, so that --help is answered at once
    CHOSEN = read_arguments(sys.argv[1:])

from evaluate import Args as EvaluateArgs
from mtsql.extras.reproduce.page import write_page
from mtsql.extras.reproduce.suites import BASE, SUITES, Arm, Suite, Training, parts_of
from mtsql.files import folder_atomically, shipped
from mtsql.toy.tiny import MODELS
from train_grpo import Args as GrpoArgs
from train_sft import Args as SftArgs

ARGS = {"train_grpo.py": GrpoArgs, "train_sft.py": SftArgs, "evaluate.py": EvaluateArgs}


def cells_of(vary: Sequence[str]) -> Cells:
    """The cells of the grid, the first values first; a branch has its commit with it.

    Raises UserError for what is no NAME=A,B, for what all cells share, and for branches that are not there
    or are the same.
    """
    grid: dict[str, list[str]] = {}
    for given in vary:
        name, _, values = given.partition("=")
        if name.strip() in ("config", "data", "out", "seed"):
            raise UserError(f"--vary {given}: a grid has one --{name.strip()} (of seeds there is --seeds)")
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
    cells = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return {",".join(f"{name}={value}" for name, value in c.items()).replace("/", "-"): c for c in cells}


def commit_of(branch: str) -> str:
    """The commit of a branch here, shortened. Raises UserError if there is none."""
    command = ["git", "rev-parse", "--verify", "--quiet", "--short", f"refs/heads/{branch}"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not found:
        raise UserError(f"--vary branch={branch}: git has no such branch here")
    return found


def parted(options: Sequence[str], script: str) -> tuple[str, str]:
    """Options of the training, and of the evaluation: what both have is for both, but for `temperature`."""
    own = {field.name for field in fields(ARGS[script])}
    shared = {field.name for field in fields(Common)} - {"model"}  # what was trained is evaluated
    asked = {field.name for field in fields(EvaluateArgs)}
    training, evaluation, name = [], [], ""
    for word in options:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].removeprefix("no-").replace("-", "_")
        training += [word] if name in own or name not in asked else []
        evaluation += [word] if name in shared or name in asked - own else []
    return shlex.join(training), shlex.join(evaluation)


def suite_of(chosen: argparse.Namespace, rest: Sequence[str], cells: Cells) -> Suite:
    """The grid as a suite: a training and an arm for each cell, and the differences to the first.

    Beside them is what all begin with. Raises UserError for a --seed.
    """
    if any(word.partition("=")[0] == "--seed" for word in rest):
        raise UserError("give --seeds, which are those of the trainings, instead of --seed")
    script, (first, *others) = f"train_{chosen.script}.py", cells
    trainings, arms = {}, {"start": Arm("what all begin with", BASE, parted(rest, script)[1])}
    for title, cell in cells.items():
        options = list(rest)
        for name, value in cell.items():
            flag = f"--{name.replace('_', '-')}"
            switch = {"true": flag, "false": f"--no-{flag[2:]}"}.get(value)
            options += [] if name == "branch" else [switch] if switch else [flag, value]
        training, evaluation = parted(options, script)
        trainings[title] = Training(script, BASE, training)
        arms[title] = Arm("the first cell" if title == first else "", title, evaluation)
    split = chosen.split or ("dev" if chosen.data else "test")
    changed = {t: ", ".join(n for n in cells[t] if cells[t][n] != cells[first][n]) for t in others}
    return Suite(
        f"Ablation of {', '.join(cells[first])}",
        " ".join(chosen.config),
        "--data {data}",
        {split: f"--data {{data}} --split {split}"},
        trainings,
        arms,
        tuple((changed[other], other, first) for other in others),
        seeds=chosen.seeds,
        once=(BASE,),
        benchmark="" if chosen.data else SUITES["toy"].benchmark,
        corrected=True,
    )


def parts_of_grid(chosen: argparse.Namespace, suite: Suite, cells: Cells) -> list[Part]:
    """The data, and for each seed and cell the training and its evaluation, by the clone of a branch.

    Exits with one sentence for an option or value that a script does not have. Raises UserError for a part
    that was done with other options.
    """
    data, model = chosen.data or str(chosen.out / "benchmark"), chosen.model or shipped(MODELS / "seed0")
    places = {"data": data, "model": str(model)}
    parts = [suite.benchmark_part(chosen.out)] if suite.benchmark else []
    for part in (part for seed in suite.seeds for part in parts_of(suite, chosen.out, seed, places)):
        script, *options = part.command
        read_options(ARGS[script], None, options)
        refuse_other_options(part)
        branch = cells.get(part.done.parent.name, {}).get("branch")
        if branch:
            script = str(clone_folder(branch, chosen.out) / script)
        parts.append(part._replace(command=[script, *options]))
    return parts


def clone_folder(branch: str, out: Path) -> Path:
    """Where the clone of a branch at a commit is to be."""
    return out / "branches" / branch.replace("/", "-")


def clone(branch: str, out: Path) -> None:
    """Clone a branch at its commit, once, and say what is not in it."""
    path, name = clone_folder(branch, out), branch.rpartition("@")[0]
    if not path.exists():
        with folder_atomically(path) as whole:
            subprocess.run(["git", "clone", "--quiet", "--shared", "--branch", name, ".", whole], check=True)
    changes = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout
    if changes:
        print("the changes that are not committed are in none of the branches")


def main(chosen: argparse.Namespace, rest: list[str]) -> None:
    """Run the grid, then write the page."""
    cells = cells_of(chosen.vary)
    suite = suite_of(chosen, rest, cells)
    parts = [] if chosen.page else parts_of_grid(chosen, suite, cells)
    if chosen.dry_run:
        print("\n".join(part.listed() for part in parts))
        return
    for branch in {cell["branch"] for cell in cells.values() if parts and "branch" in cell}:
        clone(branch, chosen.out)
    for part in parts:
        run_part(*part)
    words = shlex.join(word for word in sys.argv[1:] if word != "--page")
    page = write_page(suite, f"mtsql ablate {words}", chosen.out / "ablation.md")
    print(f"\n{page.read_text()}\n{page}")


if __name__ == "__main__":
    user_errors(main, *CHOSEN)
