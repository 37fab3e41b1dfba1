"""Checkpoints: the state of a training run, written whole or not at all, and read only if still whole."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtsql.errors import UserError, loading
from mtsql.files import folder_atomically, recover_folder, temporary_sibling, write_atomically

STATE_FILE = "training_state.pt"
SUMS_FILE = "checksums.json"  # SHA-256 of every other file
CHECKPOINTS = "checkpoints"


@contextmanager
def new_checkpoint(out: Path, step: int, keep: int) -> Iterator[Path]:
    """A folder to fill with the state after `step` steps; then all but the last `keep` are deleted.

    While it is filled it has a temporary name, so that a process that is killed leaves the earlier
    checkpoints whole. One of more steps, which was damaged where this run comes from an earlier one, is
    deleted as well.
    """
    folder = out / CHECKPOINTS / f"step_{step:08d}"
    with folder_atomically(folder) as temporary:
        yield temporary
        sums = {path.relative_to(temporary).as_posix(): _sum(path) for path in _files(temporary)}
        write_atomically(temporary / SUMS_FILE, json.dumps(sums, indent=1))
    found = _checkpoints(out)
    kept = [path for path in found if path.name <= folder.name][-keep:]
    for old in set(found) - set(kept):
        retired = old.with_name(f".{old.name}.pruned")  # half a checkpoint must not bear its name
        old.rename(retired)
        shutil.rmtree(retired, ignore_errors=True)


def _checkpoints(out: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    return sorted((out / CHECKPOINTS).glob("step_*"))


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != SUMS_FILE]


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(folder: Path) -> str:
    """What is wrong with a checkpoint's files, "" if nothing is; one of before there were sums is trusted."""
    path = folder / SUMS_FILE
    if not path.is_file():
        return "" if (folder / STATE_FILE).is_file() else f"{STATE_FILE} is missing"
    try:
        sums = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError, RecursionError):
        return f"{SUMS_FILE} cannot be read"
    found = {file.relative_to(folder).as_posix(): _sum(file) for file in _files(folder)}
    wrong = sorted(name for name, value in sums.items() if found.get(name) != value)
    return f"{wrong[0]} is {'damaged' if wrong[0] in found else 'missing'}" if wrong else ""


def newest_checkpoint(out: Path) -> Path | None:
    """The newest whole checkpoint of a run, None if there is none; says which newer ones are damaged.

    Whatever a killed process left is put back or removed first. Raises UserError if all are damaged.
    """
    for replaced in (out / CHECKPOINTS).glob(".step_*.old"):
        recover_folder(replaced.with_name(replaced.name[1 : -len(".old")]))
    for leftover in (out / CHECKPOINTS).glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)
    wrong = ""
    for folder in reversed(_checkpoints(out)):
        wrong = damage(folder)
        if not wrong:
            return folder
        print(f"{folder} is not used: {wrong}", file=sys.stderr)
    if wrong:
        raise UserError(f"no checkpoint in {out / CHECKPOINTS} is whole; remove them to start anew")
    return None


def save_training_state(
    folder: Path, optimizer_state: dict[str, Any], step: int, extra: dict[str, Any]
) -> None:
    """Write `training_state.pt`: optimizer, step, and the states of all global random number generators.

    `extra` holds tensors and plain Python values, such as the state of a NumPy generator. Raises ValueError
    for anything else. The weights are saved beside it by `save_policy`.
    """
    _, numpy_keys, *numpy_rest = np.random.get_state()
    state = {
        "optimizer": optimizer_state,
        "step": step,
        "extra": extra,
        "python_rng": random.getstate(),
        "numpy_rng": numpy_keys.tolist(),
        "numpy_rng_rest": tuple(numpy_rest),
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    with temporary_sibling(folder / STATE_FILE) as temporary:
        torch.save(state, temporary)
        try:
            torch.load(temporary, weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"extra has a value that could not be read back: {error}") from error
        temporary.replace(folder / STATE_FILE)


def load_training_state(folder: Path) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Restore the random number generators; returns the step, the extra values and the optimizer's state.

    Raises UserError if the folder holds no training state.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        raise UserError(f"{folder} holds no {STATE_FILE}; nothing to resume")
    with loading(f"no training state could be loaded from {path}"):
        state = torch.load(path, map_location="cpu", weights_only=True)
    random.setstate(state["python_rng"])
    np.random.set_state(("MT19937", np.array(state["numpy_rng"], dtype=np.uint32), *state["numpy_rng_rest"]))
    torch.set_rng_state(state["torch_rng"])
    for gpu, generator in enumerate(state["cuda_rng"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator, gpu)
    return state["step"], state["extra"], state["optimizer"]
