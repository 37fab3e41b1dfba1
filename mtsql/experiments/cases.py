"""Cases of Finding 13: what the final agent's tools revealed and it repaired, found by a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mtsql.agent.trajectory import ActionType
from mtsql.experiments.arms import read_evaluation, read_json, read_lines
from mtsql.experiments.markdown import joined
from mtsql.experiments.real_trajectories import as_text

ARM, OF_EACH = "rl_process", 2
KINDS = {  # what the tool that revealed the fault answered, and which verdict said so
    "execution failure": ("error", ActionType.E_VERIFY),
    "null result": ("null", ActionType.E_VERIFY),
    "coherence error": ("", ActionType.M_VERIFY),
}
RULE = (
    f"Right answers of `{ARM}`, greedy, the first seed that is finished, in which a verdict was `no_pass` "
    "and the message that said so corrected the query. *Execution failure*: after an error of EXECUTE; "
    "*null result*: after an empty result, or nothing but NULL; *coherence error*: after MEMORY-VERIFY. "
    f"Shown are the first {OF_EACH} of each kind in the order of the file, from different databases."
)


def cases(runs: Path, seeds: Sequence[int]) -> str:
    """The section of the page; "" until the arm is evaluated with one of the seeds."""
    for seed in seeds:
        folder = runs / f"seed{seed}" / "evaluation" / ARM
        evaluation = read_evaluation(folder)
        played = read_json(folder / "trajectories.jsonl", read_lines)
        if evaluation and played:
            found = repaired(evaluation.records, played)
            counts = ", ".join(f"{kind} {len(texts)}" for kind, texts in found.items())
            shown = (
                f"### {kind.capitalize()}, repaired\n\n{joined(*_from_different_databases(texts)) or 'None.'}"
                for kind, texts in found.items()
            )
            return joined(f"{RULE} In all: {counts}.", *shown)
    return ""


def repaired(records: Sequence[Mapping], played: Sequence[Mapping]) -> dict[str, list[tuple[str, str]]]:
    """(database, trajectory as Markdown) of every right answer with such a repair, by kind."""
    found: dict[str, list[tuple[str, str]]] = {kind: [] for kind in KINDS}
    for record, trajectory in zip(records, played, strict=True):
        for kind in repairs(trajectory) if record["ex"] else ():
            found[kind].append((record["db_id"], as_text(record, trajectory)))
    return found


def repairs(trajectory: Mapping) -> set[str]:
    """The kinds of fault that a verdict named and the same message corrected."""
    actions, seen = trajectory["actions"], trajectory["observations"]
    corrected = {a["message"] for a in actions if a["type"] == ActionType.SELF_CORRECT}
    failed = [a for a in actions if a["passed"] is False and a["message"] in corrected]
    return {
        kind
        for kind, (outcome, verdict) in KINDS.items()
        for a in failed
        if a["type"] == verdict and outcome in ("", seen[a["message"] - 1]["outcome"])
    }


def _from_different_databases(found: Sequence[tuple[str, str]]) -> list[str]:
    first: dict[str, str] = {}
    for database, text in found:
        first.setdefault(database, text)
    return list(first.values())[:OF_EACH]
