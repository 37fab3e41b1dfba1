"""Cases of Finding 13: what the final agent's tools revealed and it repaired, found by a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mtsql.agent.trajectory import ActionType
from mtsql.experiments.arms import read_evaluation, read_json
from mtsql.experiments.markdown import joined
from mtsql.experiments.real_trajectories import as_text, read_lines

ARM, OF_EACH = "rl_process", 2
SIGNS = {  # in a trajectory's text: what the tool showed, or the agent's verdict on what it showed
    "execution failure": "<tool_response>\nerror: ",
    "null result": "<tool_response>\nempty",
    "coherence error": "<memory_verify>no_pass</memory_verify>",
}
RULE = (
    f"Right answers of `{ARM}` that corrected themselves, greedy, the first seed that is finished. "
    "*Execution failure*: a query was answered with an error; *null result*: with no row; *coherence "
    f"error*: the agent said `no_pass` to what MEMORY-VERIFY returned. Shown are the first {OF_EACH} of each "
    "kind in the order of the file, from different databases."
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
    """(database, trajectory as Markdown) of every right answer with a self-correction, by kind."""
    found: dict[str, list[tuple[str, str]]] = {kind: [] for kind in SIGNS}
    for record, trajectory in zip(records, played, strict=True):
        corrected = any(action["type"] == ActionType.SELF_CORRECT for action in trajectory["actions"])
        text = "".join(segment["text"] for segment in trajectory["segments"])
        for kind, sign in SIGNS.items():
            if record["ex"] and corrected and sign in text:
                found[kind].append((record["db_id"], as_text(record, trajectory)))
    return found


def _from_different_databases(found: Sequence[tuple[str, str]]) -> list[str]:
    first: dict[str, str] = {}
    for database, text in found:
        first.setdefault(database, text)
    return list(first.values())[:OF_EACH]
