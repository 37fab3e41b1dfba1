"""Shows trajectories with their loss mask in colour, in the terminal or as a page for a browser.

    python -m mtsql.report.viewer trajectories.jsonl [--index N] [--no-color]
    python -m mtsql.report.viewer trajectories.jsonl --html OUT.html [--beside OTHER.jsonl]

In the terminal, what the model sampled, and is trained on, is green; what the environment said is yellow; the
prompt is dim. Without colour, each segment's heading says the same.
The page is one file that needs no network: filters by status, reward, turn, hardness, step and database, a
search, one trajectory at a time with its results, verdicts, reward by part and log-probabilities. With
--beside each question stands next to the same question of another file: what RL changed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from mtsql.config import user_errors
from mtsql.errors import UserError, printable
from mtsql.files import load_json_lines, write_atomically
from mtsql.report.viewer_page import make_page

COLOURS = {"prompt": "\033[2m", "model": "\033[32m", "environment": "\033[33m"}
BOLD, RESET = "\033[1m", "\033[0m"
RULE = "─" * 72


def drop_later_records(path: Path, step: int) -> None:
    """Keep the records of steps before `step` in a file of trajectories, as a resumed run needs it.

    Raises UserError as `read_records`.
    """
    kept = []
    if step and path.exists():
        kept = [record for record in read_records(path) if (record.get("step") or 0) < step]
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))


def read_records(path: Path) -> Iterator[dict]:
    """The records of a JSONL file. Raises UserError for a missing file or a line that is no trajectory.

    Checked is what `render` needs.
    """
    if not path.exists() or path.is_dir():
        raise UserError(f"{path} is no file; give a run's trajectories.jsonl")
    for number, record in load_json_lines(path):
        if not _is_trajectory(record):
            raise UserError(f"{path}, line {number}: not a trajectory")
        yield record


def _is_trajectory(record: object) -> bool:
    """Whether it has what `render` shows."""
    if not isinstance(record, dict) or not {"example_id", "status"} <= record.keys():
        return False
    segments = record.get("segments")
    return (
        isinstance(record.get("reward"), int | float | None)
        and isinstance(record.get("step"), int | None)
        and isinstance(segments, list)
        and all(isinstance(segment, dict) and _is_segment(segment) for segment in segments)
    )


def _is_segment(segment: dict) -> bool:
    kinds = {"role": str, "text": str, "loss_mask_sum": int, "ids": list}
    whole = all(isinstance(segment.get(name), kind) for name, kind in kinds.items())
    return whole and segment["role"] in COLOURS


def render(record: dict, colour: bool) -> str:
    """One trajectory as text."""

    def paint(text: str, code: str) -> str:
        return f"{code}{text}{RESET}" if colour else text

    reward = "-" if record.get("reward") is None else f"{record['reward']:.3f}"
    trained = sum(segment["loss_mask_sum"] for segment in record["segments"])
    total = sum(len(segment["ids"]) for segment in record["segments"])
    title = (
        f"{record['example_id']}   status {record['status']}   reward {reward}   "
        f"{trained} of {total} tokens trained"
    )
    lines = [RULE, paint(printable(title), BOLD), RULE]
    for segment in record["segments"]:
        trained, count = segment["loss_mask_sum"], len(segment["ids"])
        lines.append(paint(f"[{segment['role']}: {count} tokens, {trained} trained]", BOLD))
        lines.append(paint(printable(segment["text"]), COLOURS[segment["role"]]))
    lines.append(paint(f"[answer] {printable(str(record.get('answer_sql') or '-'))}", BOLD))
    return "\n".join(lines)


def write_page(path: Path, out: Path, beside: Path | None) -> None:
    """Write the page of a file of trajectories. Raises UserError as `read_records`."""
    records = list(read_records(path))
    other = (beside.as_posix(), list(read_records(beside))) if beside else None
    page = make_page(path.as_posix(), records, other)
    write_atomically(out, page)
    print(f"{len(records):,} trajectories in {out} ({len(page) / 1e6:.1f} MB)")


def main(argv: list[str] | None = None) -> None:
    """The command. Raises UserError for wrong input."""
    parser = argparse.ArgumentParser(description="Show trajectories with their loss mask in colour.")
    parser.add_argument("path", type=Path, help="trajectories.jsonl")
    parser.add_argument("--index", type=int, help="print only this trajectory, counted from 0")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    parser.add_argument("--no-color", dest="color", action="store_const", const="never")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write a page for a browser instead")
    parser.add_argument(
        "--beside", type=Path, metavar="OTHER", help="its answers to the same questions (--html)"
    )
    arguments = parser.parse_args(argv)
    colour = arguments.color == "always"
    if arguments.color == "auto":  # on a terminal, unless NO_COLOR is set (no-color.org)
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    try:
        if arguments.beside and not arguments.html:
            raise UserError("--beside needs --html OUT.html")
        if arguments.html:
            write_page(arguments.path, arguments.html, arguments.beside)
            return
        count = 0
        for index, record in enumerate(read_records(arguments.path)):
            if arguments.index in (None, index):
                print(render(record, colour))
            count += 1
        if arguments.index is not None and not 0 <= arguments.index < count:
            raise UserError(f"--index {arguments.index}: {arguments.path} has {count} trajectories, from 0")
    except BrokenPipeError:
        sys.stdout = None


if __name__ == "__main__":
    user_errors(main)
