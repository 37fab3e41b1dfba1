"""Files and folders that are written whole or not at all, and the state of a training run."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

STATE_FILE = "training_state.pt"
CHECKPOINTS = "checkpoints"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name and rename it; an error leaves the old file as it was."""
    data = content.encode() if isinstance(content, str) else content
    with _temporary_sibling(path) as temporary:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


@contextmanager
def folder_atomically(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill, which replaces `folder` when the block ends without an error.

    An error, or Ctrl-C, leaves the old folder as it was. The exchange is two renames: a process
    killed between them leaves the old folder beside it, which `recover_folder` brings back.
    """
    recover_folder(folder)
    with _temporary_sibling(folder) as temporary:
        temporary.mkdir(parents=True)
        yield temporary
        retired = _retired(folder)
        shutil.rmtree(retired, ignore_errors=True)
        if folder.exists():
            folder.rename(retired)
        temporary.rename(folder)
        shutil.rmtree(retired, ignore_errors=True)


def recover_folder(folder: Path) -> None:
    """Bring back the old folder if a process was killed while `folder_atomically` replaced it."""
    if not folder.exists() and _retired(folder).is_dir():
        _retired(folder).rename(folder)


def _retired(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


@contextmanager
def _temporary_sibling(path: Path) -> Iterator[Path]:
    """A name beside `path`; what is still there at the end is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


@contextmanager
def new_checkpoint(out: Path, step: int, keep: int) -> Iterator[Path]:
    """A folder to fill with the state after `step` steps; once it is whole, the last `keep` stay.

    Until then it has another name, so that a process that is killed leaves the earlier ones.
    """
    folder = out / CHECKPOINTS / f"step_{step:08d}"
    with folder_atomically(folder) as temporary:
        yield temporary
    for old in whole_checkpoints(out)[:-keep]:
        retired = old.with_name(f".{old.name}.pruned")  # half a checkpoint must not bear its name
        old.rename(retired)
        shutil.rmtree(retired, ignore_errors=True)


def whole_checkpoints(out: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    return sorted((out / CHECKPOINTS).glob("step_*"))


def newest_checkpoint(out: Path) -> Path | None:
    """The newest whole checkpoint of a run, None if there is none; what a killed process left is removed."""
    for replaced in (out / CHECKPOINTS).glob(".step_*.old"):
        recover_folder(replaced.with_name(replaced.name[1 : -len(".old")]))
    for leftover in (out / CHECKPOINTS).glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)
    whole = whole_checkpoints(out)
    return whole[-1] if whole else None


def save_training_state(
    folder: Path,
    optimizer_state: dict[str, Any],
    step: int,
    extra: dict[str, Any],
) -> None:
    """Write `training_state.pt`: optimizer, step, and the states of all global RNGs.

    `extra` holds tensors and plain Python values, such as the state of a NumPy generator; anything
    else is a ValueError. The weights are saved beside it by `save_policy`.
    """
    numpy_state = np.random.get_state(legacy=False)
    state = {
        "optimizer": optimizer_state,
        "step": step,
        "extra": extra,
        "python_rng": random.getstate(),
        "numpy_rng": numpy_state["state"]["key"].tolist(),
        "numpy_rng_rest": (
            int(numpy_state["state"]["pos"]),
            int(numpy_state["has_gauss"]),
            float(numpy_state["gauss"]),
        ),
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    with _temporary_sibling(folder / STATE_FILE) as temporary:
        torch.save(state, temporary)
        try:
            torch.load(temporary, weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"extra has a value that could not be read back: {error}") from error
        temporary.replace(folder / STATE_FILE)


def load_training_state(folder: Path) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Restore the RNGs; returns the step, the extra values and the optimizer's state.

    Raises FileNotFoundError if the folder holds no training state.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {STATE_FILE}; nothing to resume")
    state = torch.load(path, map_location="cpu", weights_only=True)
    random.setstate(state["python_rng"])
    np.random.set_state(("MT19937", np.array(state["numpy_rng"], dtype=np.uint32), *state["numpy_rng_rest"]))
    torch.set_rng_state(state["torch_rng"])
    if state["cuda_rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda_rng"])
    return state["step"], state["extra"], state["optimizer"]
