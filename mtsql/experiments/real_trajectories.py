"""Trajectories of the real suite worth reading, chosen by a rule that is stated on their page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.experiments.arms import read_evaluation, read_json, read_lines
from mtsql.experiments.markdown import joined
from mtsql.experiments.page import seed_of
from mtsql.files import write_atomically
from mtsql.parts import Part
from mtsql.recipes.mtsql_r1_prompts import VERDICT

OF_EACH, WIDEST_LINE = 2, 160
UNJUDGED = "unjudged"
ARMS_WITH_TOOLS = ("rl", "rl_outcome", "round_2", "round_1", "warm_start")  # the first that is there
Verdicts = Mapping[str, Sequence[str]]  # "pass", "no_pass" or UNJUDGED for each call, by the tool


def _all_passed(verdicts: Verdicts) -> bool:
    """Whether every call of a tool was judged, and never with "no_pass"."""
    return all(set(found) == {"pass"} for found in verdicts.values())


def _failed(verdicts: Verdicts, *tools: str) -> bool:
    """Whether a "no_pass" was said on what one of these tools returned."""
    return any("no_pass" in verdicts.get(tool, ()) for tool in tools)


# By the EX of the answer and the verdicts.
KINDS: dict[str, Callable[[int, Verdicts], bool]] = {
    "Right, and every check passed": lambda ex, said: bool(ex) and _all_passed(said),
    "no_pass after EXECUTE, then right": lambda ex, said: bool(ex) and _failed(said, EXEC_SQL),
    "no_pass after MEMORY-VERIFY, then right": lambda ex, said: bool(ex) and _failed(said, MEMORY_RETRIEVE),
    "Every check passed, and wrong": lambda ex, said: not ex and _all_passed(said),
    "no_pass, and wrong in the end": lambda ex, said: not ex and _failed(said, EXEC_SQL, MEMORY_RETRIEVE),
}


def write_trajectories(parts: Sequence[Part], page: Path) -> None:
    """Write those of the furthest arm with tools that is evaluated on SParC dev, if there is one.

    The file is <page>_trajectories_<arm>.md beside `page`.
    """
    folders = {part.done.parent.name: part for part in parts if part.done.parent.parent.name == "sparc"}
    for arm in filter(folders.__contains__, ARMS_WITH_TOOLS):
        folder = folders[arm].done.parent
        evaluation = read_evaluation(folder)
        played = read_json(folder / "trajectories.jsonl", read_lines)
        if evaluation is None or played is None:
            continue
        rule = (
            f"`{arm}`, seed {seed_of(folders[arm])}, on SParC dev, greedy. Of each kind the first {OF_EACH} "
            "in the order of the file that called a tool and gave an answer, from different databases. A "
            "check is a call of a tool and the agent's verdict on what it returned; what lacks a verdict has "
            f"not passed. Lines are cut at {WIDEST_LINE} characters. Questions, gold SQL and rows are of "
            "SParC and Spider, under CC BY-SA 4.0."
        )
        sections = (
            f"## {kind}\n\n{joined(*shown) or 'None.'}"
            for kind, shown in chosen(evaluation.records, played).items()
        )
        text = joined(f"# Trajectories of `{arm}`", rule, *sections)
        write_atomically(page.with_name(f"{page.stem}_trajectories_{arm}.md"), text + "\n")
        return


def chosen(records: Sequence[Mapping], played: Sequence[Mapping]) -> dict[str, list[str]]:
    """The trajectories of each kind as Markdown."""
    found: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    for record, trajectory in zip(records, played, strict=True):
        if not record["tool_calls"] or record["status"] != "answered":
            continue
        wrote = "".join(s["text"] for s in trajectory["segments"] if s["role"] == "model")
        verdicts = {}
        for tool, calls in record["tool_calls"].items():  # of a tool that there is, or of none
            said = VERDICT[tool].findall(wrote) if tool in VERDICT else []
            verdicts[tool] = [*said, *[UNJUDGED] * (calls - len(said))]
        for kind, holds in KINDS.items():
            of_kind = found[kind]
            if holds(record["ex"], verdicts) and len(of_kind) < OF_EACH and record["db_id"] not in of_kind:
                of_kind[record["db_id"]] = as_text(record, trajectory)
    return {kind: list(of_kind.values()) for kind, of_kind in found.items()}


def as_text(record: Mapping, trajectory: Mapping) -> str:
    """One trajectory: where it is from, the gold SQL, and every segment with its role."""
    lines = []
    for segment in trajectory["segments"]:
        lines.append(f"[{segment['role']}]")
        lines += [line[:WIDEST_LINE] for line in segment["text"].strip().splitlines()]
    text = "\n".join(lines).replace("~~~", "~ ~ ~")
    head = f"Question {record['example_id']} on `{record['db_id']}` ({record['hardness']})"
    return f"{head}, gold: `{record['gold']}`\n\n~~~text\n{text}\n~~~"
