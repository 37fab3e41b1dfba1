"""The parts of a long run: commands that are skipped when what they make is there already."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from mtsql.errors import UserError
from mtsql.files import load_json


class Part(NamedTuple):
    """One command, and the path that exists once it is done."""

    title: str
    command: list[str]
    done: Path

    def listed(self) -> str:
        """Its command, and whether it is done."""
        return f"{'done' if self.done.exists() else 'to do':<6} python {shlex.join(self.command)}"


def refuse_other_options(part: Part) -> None:
    """Raise UserError for a part that was done with other options than its command has."""
    run, (script, *options) = part.done.with_name("run.json"), part.command
    options = options[script == "-m" :]
    if part.done.exists() and run.exists() and load_json(run)["command"][1:] != options:
        raise UserError(f"{run.parent} is of other options; give another --out")


def python(command: list[str]) -> list[str]:
    """A command with its interpreter; a script of the project that is not here is the installed module."""
    script = Path(command[0])
    if script.suffix == ".py" and script.name == command[0] and not script.exists():
        command = ["-m", script.stem, *command[1:]]
    return [sys.executable, *command]


def run_part(title: str, command: list[str], done: Path) -> None:
    """Run one Python command unless `done` exists; exits with the command's code if it fails.

    Ctrl-C reaches the command as well, which saves what it has done before it ends; then this exits.
    SIGTERM is passed on, so that no command is left alone. Another process that needs the same waits.
    """
    print(f"\n== {title}\n   python {shlex.join(command)}", flush=True)
    done.parent.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(done.parent.with_name(f".{done.parent.name}.part.lock")):
        if done.exists():
            print(f"   {done} is there already")
        else:
            _run(command, done)


def _run(command: list[str], done: Path) -> None:
    started, code, interrupted = time.perf_counter(), None, False
    process = subprocess.Popen(python(command))
    previous = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while code is None:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            interrupted = True
    signal.signal(signal.SIGTERM, previous)
    if interrupted:
        print("interrupted; the same command again goes on from here", file=sys.stderr)
        sys.exit(130)
    if code or not done.exists():
        print(f"error: this part failed (exit code {code})", file=sys.stderr)
        sys.exit(128 - code if code < 0 else code or 1)
    print(f"   {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
