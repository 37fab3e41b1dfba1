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
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mtsql.config import Training
from mtsql.errors import UserError, loading
from mtsql.files import folder_atomically, recover_folder, temporary_sibling, write_atomically
from mtsql.learn.model import restore_policy, save_policy
from mtsql.learn.optimizer import make_optimizer, optimizer_state, restore_optimizer
from mtsql.learn.parallel import Processes

if TYPE_CHECKING:
    from peft import PeftModel

STATE_FILE = "training_state.pt"
SUMS_FILE = "checksums.json"  # SHA-256 of every other file
CHECKPOINTS = "checkpoints"
KEPT_CHECKPOINTS = 2
# What a run that is resumed has to have in common with itself: its questions and prompts, their order, its
# start, the columns of its log, the state of its optimizer.
FIXED = (
    "model", "data", "tables", "databases", "held_out", "for_rl", "seed", "history", "drop_empty", "recipe",
    "tools", "ex", "beta2", "weight_decay",
    "curriculum", "level_size", "prompts_per_step", "questions", "targets", "teacher", "databases_per_step",
    "trajectories_per_step", "lora_rank", "rewards", "optimizer", "wording",
    "thinking", "sql_timeout", "error_hints", "max_prompt_tokens",
    "max_response_tokens",
)  # fmt: skip


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


def resume(
    config: Training, out: Path, policy: PreTrainedModel | PeftModel, processes: Processes
) -> tuple[torch.optim.Optimizer, int, dict[str, Any] | None]:
    """The optimizer, the step and the extra values (None at the beginning) that a training goes on from.

    With --resume those of the newest checkpoint in `out`, whose weights `policy` gets. Raises UserError if
    there is one but --resume is not given, or an option of FIXED is another now.
    """
    found = find_checkpoint(out, config.resume) if processes.is_main else None
    if found is not None:
        for sentence in changed_options(config, out):
            print(sentence)
    checkpoint = processes.all_gather(found)[0]
    if checkpoint is not None:
        restore_policy(policy, checkpoint / "policy", config.dtype)
    optimizer = make_optimizer(
        policy, config.learning_rate, config.optimizer, config.beta2, config.weight_decay
    )
    if checkpoint is None:
        return optimizer, 0, None
    step, state, moments = load_training_state(checkpoint)
    restore_optimizer(optimizer, moments)
    return optimizer, step, state


def save_checkpoint(
    out: Path,
    policy: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    step: int,
    state: dict[str, Any],
) -> None:
    """Write the state of a training run after `step` steps."""
    with new_checkpoint(out, step, KEPT_CHECKPOINTS) as folder:
        save_policy(policy, tokenizer, folder / "policy")
        save_training_state(folder, optimizer_state(policy, optimizer), step, state)


def changed_options(config: Training, out: Path) -> list[str]:
    """A sentence for each option in which this run differs from the one in `out` that it goes on from.

    Raises UserError if an option of FIXED is among them.
    """
    path = out / "run.json"
    try:
        before = dict(json.loads(path.read_bytes())["config"]) if path.is_file() else {}
    except (ValueError, LookupError, TypeError, RecursionError):
        return [f"{path} is damaged, so that nobody can say which options have changed; it is written anew"]
    now = json.loads(json.dumps(asdict(config)))
    changed = {n: (before[n], now[n]) for n in now if n in before and before[n] != now[n] and n != "resume"}
    sentences = [f"--{n.replace('_', '-')} was {old}, is now {new}" for n, (old, new) in changed.items()]
    levels = ("steps",) if before.get("curriculum") and before.get("level_size") else ()  # which share them
    fixed = [sentence for n, sentence in zip(changed, sentences, strict=True) if n in (*FIXED, *levels)]
    if fixed:
        raise UserError(f"{out} goes on with the same questions and policy only: {'; '.join(fixed)}")
    return sentences


def find_checkpoint(out: Path, resume: bool) -> Path | None:
    """The newest whole checkpoint of a run to go on from, None to start at the beginning.

    Raises UserError if there is one but --resume is not given.
    """
    newest = newest_checkpoint(out)
    if newest is not None and not resume:
        raise UserError(f"{out} holds a run's checkpoints; go on with --resume or take another --out")
    if newest is None and resume:
        print(f"{out} holds no checkpoint; starting at the beginning")
    return newest
