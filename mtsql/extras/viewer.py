"""Shows trajectories with their loss mask in colour, in the terminal or as a page for a browser.

    python -m mtsql view trajectories.jsonl [--index N] [--color never]
    python -m mtsql view trajectories.jsonl --html OUT.html [--beside OTHER.jsonl]

In the terminal, what the model sampled, and is trained on, is green; what the environment said is yellow; the
prompt is dim. Without colour, each segment's heading says the same.
The page is one file that needs no network: filters by status, reward, turn, hardness, step and database, a
search, one trajectory at a time with its results, verdicts, reward by part and log-probabilities. With
--beside each question stands next to the same question of another file: what RL changed.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import sys
from importlib.resources import files
from pathlib import Path

from mtsql.config import command_line, user_errors
from mtsql.errors import UserError, printable
from mtsql.files import write_atomically
from mtsql.report.records import read_records

COLOURS = {"prompt": "\033[2m", "model": "\033[32m", "environment": "\033[33m"}
BOLD, RESET = "\033[1m", "\033[0m"
RULE = "─" * 72


def write_page(path: Path, out: Path, beside: Path | None) -> None:
    """Write the page of a file's records and, on the same questions, of another file's.

    The records are gzipped JSON in base64, so that nothing in them can be taken for HTML. A prompt that many
    trajectories share is held once. Raises UserError as `read_records`.
    """
    prompts: dict[str, int] = {}
    sides = [
        {"name": side.as_posix(), "records": [_shortened(record, prompts) for record in read_records(side)]}
        for side in (path, beside)
        if side
    ]
    content = json.dumps({"files": sides, "prompts": list(prompts)}, ensure_ascii=False)
    packed = base64.b64encode(gzip.compress(content.encode(errors="replace"), compresslevel=3, mtime=0))
    page = (files("mtsql.extras") / "viewer.html").read_bytes().replace(b"DATA_GOES_HERE", packed)
    write_atomically(out, page)
    print(f"{len(sides[0]['records']):,} trajectories in {out} ({len(page) / 1e6:.1f} MB)")


def _shortened(record: dict, prompts: dict[str, int]) -> dict:
    """A record with its prompt's place in `prompts`, and of each message what the page shows."""
    segments = [
        {key: value for key, value in segment.items() if key != "ids"} for segment in record["segments"]
    ]
    for segment in segments:
        if segment["role"] == "prompt":
            segment["text"] = prompts.setdefault(segment["text"], len(prompts))
        elif "tokens" in segment and "".join(segment["tokens"]) == segment["text"]:
            del segment["text"]  # the tokens say it
    return {**record, "segments": segments}


def render(record: dict, colour: bool) -> str:
    """One trajectory as text."""

    def paint(text: str, code: str) -> str:
        return f"{code}{printable(text)}{RESET}" if colour else printable(text)

    counts = [(segment["loss_mask_sum"], len(segment["ids"])) for segment in record["segments"]]
    trained, total = map(sum, zip(*counts, strict=True)) if counts else (0, 0)
    reward = "-" if record.get("reward") is None else f"{record['reward']:.3f}"
    status = f"status {record['status']}   reward {reward}   {trained} of {total} tokens trained"
    lines = [RULE, paint(f"{record['example_id']}   {status}", BOLD), RULE]
    for segment, (trained, total) in zip(record["segments"], counts, strict=True):
        lines.append(paint(f"[{segment['role']}: {total} tokens, {trained} trained]", BOLD))
        learned = trained or segment["role"] != "model"
        lines.append(paint(segment["text"], COLOURS[segment["role"]] if learned else ""))
    return "\n".join([*lines, paint(f"[answer] {record.get('answer_sql') or '-'}", BOLD)])


def main(argv: list[str] | None = None) -> None:
    """The command. Raises UserError for wrong input."""
    parser = command_line(__doc__)
    parser.add_argument("path", type=Path, help="trajectories.jsonl")
    parser.add_argument("--index", type=int, help="print only this trajectory, counted from 0")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write a page for a browser instead")
    parser.add_argument("--beside", type=Path, help="another file's answers to the same questions (--html)")
    given = parser.parse_args(argv)
    if given.beside and not given.html:
        raise UserError("--beside needs --html OUT.html")
    if given.html and given.index is not None:
        raise UserError("--index is for the terminal; the page of --html has all trajectories")
    if given.html and given.html.suffix != ".html":
        raise UserError(f"--html {given.html} should end in .html")
    if given.html:
        write_page(given.path, given.html, given.beside)
        return
    on_terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR")  # no-color.org
    colour = given.color == "always" or (given.color == "auto" and on_terminal)
    count = 0
    for count, record in enumerate(read_records(given.path), 1):
        if given.index in (None, count - 1):
            print(render(record, colour))
    if given.index is not None and not 0 <= given.index < count:
        raise UserError(f"--index {given.index}: {given.path} has {count} trajectories, from 0")


if __name__ == "__main__":
    user_errors(main)
