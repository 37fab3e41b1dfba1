"""Trajectories as the token ids that other fine-tuning programs read.

    python -m mtsql export runs/sft/trajectories.jsonl --out DATA.jsonl

`input_ids` and `labels` of each trajectory, -100 where the loss mask is 0; TRL's SFTTrainer keeps them as
they are. As messages a run's chat.jsonl has them already; there the other program's chat template makes the
ids, which are ours only if it keeps thoughts and adds none.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mtsql.config import command_line, user_errors
from mtsql.errors import UserError
from mtsql.files import json_lines, write_atomically
from mtsql.report.records import read_records

IGNORED = -100  # a label without loss


def main(argv: list[str] | None = None) -> None:
    """The command. Raises UserError for wrong input."""
    parser = command_line(__doc__)
    parser.add_argument("path", type=Path, help="trajectories.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    chosen = parser.parse_args(argv)
    if os.path.realpath(chosen.out) == os.path.realpath(chosen.path):
        raise UserError(f"--out {chosen.out} is the file to read; name another")
    rows = [with_ids(record) for record in read_records(chosen.path) if len(record["segments"]) > 1]
    write_atomically(chosen.out, json_lines(rows))
    print(f"{len(rows):,} conversations in {chosen.out}")


def with_ids(record: dict[str, Any]) -> dict[str, list[int]]:
    """`input_ids` and `labels` of a record of trajectories.jsonl. Raises UserError if nothing is learned."""
    ids, labels = [], []
    for segment in record["segments"]:
        ids += segment["ids"]
        loss_mask = segment.get("loss_mask", [0] * len(segment["ids"]))
        labels += [i if bit else IGNORED for i, bit in zip(segment["ids"], loss_mask, strict=True)]
    if set(labels) <= {IGNORED}:
        raise UserError(
            f"nothing in {record['example_id']} has loss mask 1 (a server's messages by chat have not): "
            "chat.jsonl has them as messages"
        )
    return {"input_ids": ids, "labels": labels}


if __name__ == "__main__":
    user_errors(main)
