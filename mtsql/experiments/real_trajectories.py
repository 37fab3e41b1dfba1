"""Trajectories of the real suite worth reading, chosen by a rule that is stated on their page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.experiments.arms import read_evaluation, read_json
from mtsql.experiments.markdown import joined
from mtsql.experiments.page import seed_of
from mtsql.files import write_atomically
from mtsql.parts import Part
from mtsql.recipes.mtsql_r1_prompts import verdict

OF_EACH, WIDEST_LINE = 2, 160
ARMS_WITH_TOOLS = ("rl", "rl_outcome", "round_2", "round_1", "demonstrations")  # the first that is there
# By the EX of the answer, and the tools on whose observation the agent's verdict was "no_pass".
KINDS: dict[str, Callable[[int, set[str]], bool]] = {
    "Right, and every check passed": lambda ex, failed: bool(ex) and not failed,
    "EXECUTE showed a mistake, then right": lambda ex, failed: bool(ex) and EXEC_SQL in failed,
    "The memory showed a mistake, then right": lambda ex, failed: bool(ex) and MEMORY_RETRIEVE in failed,
    "Every check passed, and wrong": lambda ex, failed: not ex and not failed,
    "A check failed, and wrong in the end": lambda ex, failed: not ex and bool(failed),
}


def write_trajectories(parts: Sequence[Part], path: Path) -> None:
    """Write the page of the furthest arm with tools that is evaluated on SParC dev; none if there is none."""
    folders = {part.done.parent.name: part for part in parts if part.done.parent.parent.name == "sparc"}
    for arm in ARMS_WITH_TOOLS:
        if arm not in folders or folders[arm].done.name != "summary.json":
            continue
        folder = folders[arm].done.parent
        evaluation = read_evaluation(folder)
        played = read_json(folder / "trajectories.jsonl", read_lines)
        if evaluation is None or played is None:
            continue
        rule = (
            f"`{arm}`, seed {seed_of(folders[arm])}, on SParC dev, greedy. Of each kind the first {OF_EACH} "
            "in the order of the file that called a tool and gave an answer, from different databases. Lines "
            f"are cut at {WIDEST_LINE} characters."
        )
        sections = (
            f"## {kind}\n\n{joined(*shown) or 'None.'}" for kind, shown in chosen(evaluation.records, played)
        )
        write_atomically(path, joined("# Trajectories of the real suite", rule, *sections) + "\n")
        return


def read_lines(text: str) -> list[dict]:
    """The rows of a JSONL file."""
    return list(map(json.loads, text.splitlines()))


def chosen(records: Sequence[Mapping], played: Sequence[Mapping]) -> Iterator[tuple[str, list[str]]]:
    """Every kind with its trajectories as Markdown."""
    found: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    for record, trajectory in zip(records, played, strict=True):
        if not record["interactions"] or record["status"] != "answered":
            continue
        wrote = "".join(s["text"] for s in trajectory["segments"] if s["role"] == "model")
        failed = {tool for tool in (EXEC_SQL, MEMORY_RETRIEVE) if verdict(tool, False) in wrote}
        for kind, holds in KINDS.items():
            of_kind = found[kind]
            if holds(record["ex"], failed) and len(of_kind) < OF_EACH and record["db_id"] not in of_kind:
                of_kind[record["db_id"]] = as_text(record, trajectory)
    return ((kind, list(of_kind.values())) for kind, of_kind in found.items())


def as_text(record: Mapping, trajectory: Mapping) -> str:
    """One trajectory: where it is from, the gold SQL, and every segment with its role."""
    lines = []
    for segment in trajectory["segments"]:
        lines.append(f"[{segment['role']}]")
        lines += [line[:WIDEST_LINE] for line in segment["text"].strip().splitlines()]
    text = "\n".join(lines).replace("~~~", "~ ~ ~")
    head = f"Question {record['example_id']} on `{record['db_id']}` ({record['hardness']})"
    return f"{head}, gold: `{record['gold']}`\n\n~~~text\n{text}\n~~~"
