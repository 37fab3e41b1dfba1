"""The parts of a long run: commands that are skipped when what they make is there already."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from mtsql.learn.checkpoint import write_atomically


def run_part(title: str, command: list[str], done: Path) -> None:
    """Run one Python command unless `done` exists; its minutes go to a file beside `done`.

    A part that was interrupted adds the minutes of its attempts. Exits with the command's code if it
    fails.
    """
    print(f"\n== {title}\n   python {' '.join(command)}", flush=True)
    if done.exists():
        print(f"   {done} is there already")
        return
    started = time.perf_counter()
    try:
        outcome = subprocess.run([sys.executable, *command])
    finally:
        minutes = minutes_of(done) + (time.perf_counter() - started) / 60
        done.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_minutes_file(done), f"{minutes:.2f}\n")
    if outcome.returncode or not done.exists():
        print(f"error: this part failed (exit code {outcome.returncode})", file=sys.stderr)
        sys.exit(outcome.returncode or 1)
    print(f"   {minutes:.1f} minutes", flush=True)


def minutes_of(done: Path) -> float:
    """The minutes that a part took, 0 if it has not run."""
    path = _minutes_file(done)
    return float(path.read_text()) if path.exists() else 0.0


def _minutes_file(done: Path) -> Path:
    return done.parent / f"{done.name}.minutes"
