"""Trajectories in the forms that other fine-tuning programs read.

    python -m mtsql export runs/sft/trajectories.jsonl --format ids --out DATA.jsonl
    python -m mtsql export runs/sft/chat.jsonl --format messages --out DATA.jsonl

ids: `input_ids` and `labels` of each trajectory, -100 where the loss mask is 0; TRL's SFTTrainer keeps them
as they are. messages: `messages` and `tools` alone; the other program's chat template makes the ids, which
are ours only if it keeps thoughts and adds none. Calls and thoughts that stand apart in a message become a
part of its text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtsql.agent.tokens import message_text
from mtsql.config import command_line, user_errors
from mtsql.errors import UserError
from mtsql.files import load_json_lines, write_atomically
from mtsql.report.records import read_records

IGNORED = -100  # a label without loss


def main(argv: list[str] | None = None) -> None:
    """The command. Raises UserError for wrong input."""
    parser = command_line(__doc__)
    parser.add_argument("path", type=Path, help="trajectories.jsonl for ids, chat.jsonl for messages")
    parser.add_argument("--format", choices=("ids", "messages"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    chosen = parser.parse_args(argv)
    if chosen.out.resolve() == chosen.path.resolve():
        raise UserError(f"--out {chosen.out} is the file to read; name another")
    if chosen.format == "ids":
        rows = [with_ids(record) for record in read_records(chosen.path)]
    else:
        rows = list(read_conversations(chosen.path))
    write_atomically(chosen.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{len(rows):,} conversations in {chosen.out}")


def with_ids(record: dict[str, Any]) -> dict[str, list[int]]:
    """`input_ids` and `labels` of a record of trajectories.jsonl. Raises UserError if nothing is learned."""
    ids, labels = [], []
    for segment in record["segments"]:
        if segment["role"] == "model" and "loss_mask" not in segment:
            raise UserError("a record has no loss mask of each token; write trajectories.jsonl anew")
        ids += segment["ids"]
        loss_mask = segment.get("loss_mask", [0] * len(segment["ids"]))
        labels += [i if bit else IGNORED for i, bit in zip(segment["ids"], loss_mask, strict=True)]
    if set(labels) <= {IGNORED}:
        raise UserError(
            f"nothing in {record['example_id']} has loss mask 1 (a server's messages by chat have not); "
            "give chat.jsonl and --format messages"
        )
    return {"input_ids": ids, "labels": labels}


def read_conversations(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a chat.jsonl. Raises UserError for a missing file or a line that is no conversation."""
    for number, record in load_json_lines(path):
        try:
            messages = [{"role": m["role"], "content": message_text(m)} for m in record["messages"]]
            if any(not {"content", "tool_calls"} & m.keys() for m in record["messages"]):
                raise KeyError("content")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path}, line {number}: not a conversation with messages") from None
        if any(m.get("weight") == 0 for m in record["messages"]):
            raise UserError(
                f"{path}, line {number}: not all of it is to be learned, which only --format ids can say; "
                "give trajectories.jsonl"
            )
        yield {"messages": messages} | ({"tools": record["tools"]} if record.get("tools") else {})


if __name__ == "__main__":
    user_errors(main)
