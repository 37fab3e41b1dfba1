"""Checkpoints: the state of a training run, written whole or not at all, and read only if still whole."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mtsql.config import Training
from mtsql.errors import UserError, loading
from mtsql.files import folder_atomically, load_json, recover_folder, write_atomically
from mtsql.learn.model import make_optimizer, optimizer_state, restore_optimizer, save_policy
from mtsql.learn.parallel import Processes
from mtsql.model_folder import Policy

STATE_FILE = "training_state.pt"
SUMS_FILE = "checksums.json"  # SHA-256 of every other file
KEPT_CHECKPOINTS = 2
INTERRUPTED = 130  # the exit code of a training that is not done, as of any command after Ctrl-C
# What a run that is resumed has to have in common with itself: its questions and prompts, their order, its
# start, the columns of its log, the state of its optimizer.
FIXED = (
    "model", "data", "tables", "databases", "held_out", "for_rl", "seed", "recipe", "tools", "ex",
    "curriculum", "level_size", "prompts_per_step", "questions", "targets", "databases_per_step",
    "trajectories_per_step", "lora_rank", "quantise", "rewards", "wording", "thinking",
    "sql_timeout", "error_hints", "max_prompt_tokens", "max_response_tokens",
)  # fmt: skip


def resume(
    config: Training, out: Path, policy: Policy, processes: Processes
) -> tuple[torch.optim.Optimizer, int, dict[str, Any] | None]:
    """The optimizer, the step and the extra values (None at the beginning) that a training goes on from.

    With --resume those of a checkpoint in `out` (`find_checkpoint`): `policy` gets its weights, torch its
    random state. Raises UserError if there is one but --resume is not given, if none is whole, if an option
    of FIXED is another now, and for a state that cannot be read.
    """
    found = find_checkpoint(out, config.resume) if processes.is_main else None
    if found is not None:
        for sentence in changed_options(config, out):
            print(sentence)
    checkpoint = processes.all_gather(found)[0]
    optimizer = make_optimizer(policy, config.learning_rate, config.BETA2)
    if checkpoint is None:
        return optimizer, 0, None
    with loading(f"no training state could be loaded from {checkpoint / STATE_FILE}"):
        state = torch.load(checkpoint / STATE_FILE, map_location="cpu", weights_only=True)
        restore_optimizer(policy, optimizer, state["optimizer"])
    torch.set_rng_state(state["torch_rng"])
    for gpu, generator in enumerate(state["cuda_rng"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator, gpu)
    return optimizer, state["step"], state["extra"]


def save_checkpoint(
    out: Path,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    step: int,
    extra: dict[str, Any],
) -> None:
    """Write the state of a training run after `step` steps, then delete all but the last KEPT_CHECKPOINTS.

    `extra` holds tensors and plain Python values. While it is written the folder has a temporary name, so
    that a process that is killed leaves the earlier checkpoints whole. A damaged one of more steps goes too.
    """
    folder = out / "checkpoints" / f"step_{step:08d}"
    with folder_atomically(folder) as temporary:
        save_policy(policy, tokenizer, temporary / "policy")
        state = {
            "optimizer": optimizer_state(optimizer),
            "step": step,
            "extra": extra,
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        torch.save(state, temporary / STATE_FILE)
        write_atomically(temporary / SUMS_FILE, json.dumps(_sums(temporary), indent=1))
    found = sorted(folder.parent.glob("step_*"))
    for old in set(found) - set([path for path in found if path <= folder][-KEPT_CHECKPOINTS:]):
        retired = old.with_name(f".{old.name}.pruned")  # half a checkpoint must not bear its name
        old.rename(retired)
        shutil.rmtree(retired, ignore_errors=True)


def find_checkpoint(out: Path, resume: bool) -> Path | None:
    """The newest whole checkpoint of a run to go on from, None to start at the beginning.

    Whatever a killed process left is put back or removed first, and newer ones that are damaged are named.
    Raises UserError if there is one but --resume is not given, and if none is whole.
    """
    folder = out / "checkpoints"
    for replaced in folder.glob(".step_*.old"):
        recover_folder(replaced.with_name(replaced.name[1 : -len(".old")]))
    for leftover in folder.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)
    found = sorted(folder.glob("step_*"), reverse=True)
    if found and not resume:
        raise UserError(f"{out} holds a run's checkpoints; go on with --resume or take another --out")
    for checkpoint in found:
        damaged = damaged_file(checkpoint)
        if damaged is None:
            return checkpoint
        print(f"{checkpoint} is not used: {damaged} is damaged or missing", file=sys.stderr)
    if found:
        raise UserError(f"no checkpoint in {folder} is whole; remove them to start anew")
    if resume:
        print(f"{out} holds no checkpoint; starting at the beginning")
    return None


def damaged_file(checkpoint: Path) -> str | None:
    """A file of a checkpoint that is not as it was written, None if all are."""
    try:
        written, found = {STATE_FILE: None, **load_json(checkpoint / SUMS_FILE)}, _sums(checkpoint)
    except (OSError, ValueError, TypeError):
        return SUMS_FILE
    return next((name for name, value in written.items() if found.get(name) != value), None)


def _sums(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of each file of a checkpoint."""
    found = {}
    for path in filter(Path.is_file, checkpoint.rglob("*")):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found[path.relative_to(checkpoint).as_posix()] = digest
    return found


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


@contextmanager
def finish_step_on_interrupt() -> Iterator[Event]:
    """The event that Ctrl-C sets, so that the step at hand ends; a second one ends the process at once."""
    interrupted = Event()

    def note(number: int, frame: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()
        what = "finishing this step or collection, then saving; again to quit now"
        print(f"\ninterrupted: {what}", file=sys.stderr)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
