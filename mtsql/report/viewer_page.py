"""Trajectories as one self-contained HTML file: no network, no framework."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

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
    template = (files("mtsql.report") / "viewer.html").read_bytes()
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
