"""Shows trajectories with their loss mask in colour, in the terminal or as a page for a browser.

    python -m mtsql view trajectories.jsonl [--index N] [--no-color]
    python -m mtsql view trajectories.jsonl --html OUT.html [--beside OTHER.jsonl]

In the terminal, what the model sampled, and is trained on, is green; what the environment said is yellow; the
prompt is dim. Without colour, each segment's heading says the same.
The page is one file that needs no network: filters by status, reward, turn, hardness, step and database, a
search, one trajectory at a time with its results, verdicts, reward by part and log-probabilities. With
--beside each question stands next to the same question of another file: what RL changed.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from mtsql.config import user_errors
from mtsql.errors import UserError, printable
from mtsql.files import write_atomically
from mtsql.report.records import read_records

COLOURS = {"prompt": "\033[2m", "model": "\033[32m", "environment": "\033[33m"}
BOLD, RESET = "\033[1m", "\033[0m"
RULE = "─" * 72
PLACE = "DATA_GOES_HERE"
DROPPED = ("ids", "loss_mask_sum")  # of a segment: what tokens and roles say already
COMPRESSION = 3  # of 9: faster, and hardly larger


def make_page(name: str, records: Iterable[dict], beside: tuple[str, Iterable[dict]] | None) -> bytes:
    """The page of a file's records and, on the same questions, of another file's.

    The records are gzipped JSON in base64, so that nothing in them can be taken for HTML. A prompt that many
    trajectories share is held once.
    """
    prompts: dict[str, int] = {}
    sides = [(name, records), *([beside] if beside else [])]
    content = {
        "files": [{"name": n, "records": [_shortened(r, prompts) for r in rows]} for n, rows in sides],
        "prompts": list(prompts),
    }
    packed = gzip.compress(
        json.dumps(content, ensure_ascii=False).encode(errors="replace"), COMPRESSION, mtime=0
    )
    template = (files("mtsql.extras") / "viewer.html").read_bytes()
    return template.replace(PLACE.encode(), base64.b64encode(packed))


def _shortened(record: dict, prompts: dict[str, int]) -> dict[str, Any]:
    """A record with its prompt's place in `prompts`, and messages with what the page shows of them."""
    segments: Sequence[dict] = record["segments"]
    shown = []
    for segment in segments:
        kept = {key: value for key, value in segment.items() if key not in DROPPED}
        kept["learned"] = bool(segment.get("loss_mask_sum"))
        if all(kept.get("loss_mask", [])) or not kept["learned"]:
            kept.pop("loss_mask", None)  # one for all of the message
        if segment["role"] == "prompt":
            kept["text"] = prompts.setdefault(segment["text"], len(prompts))
        elif "tokens" in kept and "".join(kept["tokens"]) == kept["text"]:
            del kept["text"]
        shown.append(kept)
    return {**record, "segments": shown}


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
