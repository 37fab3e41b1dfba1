"""A results page of a folder of finished runs: what is common to the pages of all suites."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from mtsql.config import hardware
from mtsql.experiments.arms import DESCRIPTIONS, ELSEWHERE, Arms
from mtsql.experiments.markdown import decimal, joined, listed, table, with_seed_placeholder
from mtsql.experiments.suite import command_line
from mtsql.files import write_atomically
from mtsql.parts import Part, minutes_of


def write_page(
    path: Path,
    title: str,
    arms: Arms,
    seeds: Sequence[int],
    parts: Sequence[Part],
    made_with: str,
    sections: Mapping[str, str],
) -> Path:
    """Write a page and, beside it as .json, the raw numbers that its tables are made of; returns `path`.

    `parts` are those of all seeds; what is not finished is named at the top. `made_with` is the command that
    makes all of it. A section is left out if it is empty.
    """
    numbers = [
        {"arm": arm, "seed": seed, "command": evaluation.command} | evaluation.summary
        for arm in _ordered(arms)
        for seed, evaluation in arms[arm].items()
    ]
    write_atomically(path.with_suffix(".json"), "[\n" + ",\n".join(map(json.dumps, numbers)) + "\n]\n")
    notes = path.with_name(f"{path.stem}_notes.md")
    top = f"# {title}\n\n{heading(arms, seeds, parts, made_with, notes)}"
    closing = {"Minutes": minutes_table(parts, seeds), "Commands": command_list(parts, seeds)}
    below = (f"## {head}\n\n{body}" for head, body in {**sections, **closing}.items() if body)
    write_atomically(path, joined(top, *below) + "\n")
    return path


def heading(arms: Arms, seeds: Sequence[int], parts: Sequence[Part], made_with: str, notes: Path) -> str:
    """Where the numbers come from, what is missing, and a link to hand-written `notes` if they exist."""
    away = [arm for arm in arms if arm.endswith(ELSEWHERE)]
    questions = _counted(arms, arms.keys() - away)
    commits = sorted({e.commit[:10] for of in arms.values() for e in of.values() if e.commit})
    lines = [
        f"- Date: {datetime.now(UTC).date().isoformat()}",
        f"- Hardware: {hardware()}",
        f"- Seeds: {listed(seeds)}",
        *([f"- Commit: {', '.join(commits)}"] if commits else []),
        f"- Questions: {questions}" + (f"; elsewhere {_counted(arms, away)}" if away else ""),
        f"- `{made_with}` makes all numbers, tables and figures of this page.",
    ]
    begun = {seed for of in arms.values() for seed in of}
    if begun and begun < set(seeds):
        lines.append(f"- **Not there yet, and left out below:** seeds {listed(sorted(set(seeds) - begun))}")
    unfinished = unfinished_arms(arms, [part for part in parts if not begun or seed_of(part) in begun])
    if unfinished:
        shown = (f"`{arm}` (seed {listed(missing)})" for arm, missing in unfinished.items())
        lines.append(f"- **Not finished, and left out below:** {', '.join(shown)}")
    if notes.exists():
        lines.append(f"- What was tried, and how to read some of these numbers: [{notes.name}]({notes.name})")
    reading = (
        "EX is execution accuracy, EM exact set match, both greedy and in % of questions. Differences are in "
        "points. A mean is over the seeds that are finished."
    )
    return joined("\n".join(lines), reading)


def _counted(arms: Arms, names: Iterable[str]) -> str:
    """How many questions these arms were asked."""
    counts = {e.summary["questions"] for arm in names for e in arms[arm].values()}
    return " or ".join(map(str, sorted(counts))) or "none yet"


def unfinished_arms(arms: Arms, parts: Sequence[Part]) -> dict[str, list[int]]:
    """The seeds of each arm that `parts` evaluate and whose evaluation is not there."""
    missing: dict[str, list[int]] = {}
    for part in parts:
        seed, arm = seed_of(part), part.done.parent.name
        if seed is not None and part.done.name == "summary.json" and seed not in arms.get(arm, {}):
            missing.setdefault(arm, []).append(seed)
    return missing


def minutes_table(parts: Sequence[Part], seeds: Sequence[int]) -> str:
    """Minutes by seed, for training and for evaluation, of the parts that have run."""
    rows = []
    for seed in (None, *seeds):
        own = [part for part in parts if seed_of(part) == seed]
        evaluation = sum(minutes_of(part.done) for part in own if _evaluates(part))
        training = sum(minutes_of(part.done) for part in own if not _evaluates(part))
        finished = f"{sum(part.done.exists() for part in own)} of {len(own)}"
        name = "all seeds share" if seed is None else f"seed {seed}"
        if own:
            rows.append([name, *map(decimal, (training, evaluation, training + evaluation)), finished])
    header = ["", "training", "evaluation", "in all", "parts finished"]
    note = "Minutes on the clock. Training includes making data and counting successes for the curriculum."
    return table(header, rows, note)


def command_list(parts: Sequence[Part], seeds: Sequence[int]) -> str:
    """Those of the first seed, with SEED for the seed if all have them, and what other seeds have else."""
    groups: dict[str, list[str]] = {"# data and training": [], "# evaluation": []}
    lines = [(part, seed_of(part), command_line(part)) for part in parts]
    of_seed = {s: {with_seed_placeholder(line, s) for _, seed, line in lines if seed == s} for s in seeds}
    of_all = set.intersection(*of_seed.values()) if of_seed else set()  # some are of one seed alone
    for part, seed, line in lines:
        common = line if seed is None else with_seed_placeholder(line, seed)
        if common not in of_all or seed in (None, *seeds[:1]):
            group = "# evaluation" if _evaluates(part) else "# data and training"
            groups[group].append(common if common in of_all else line)
    blocks = joined(*("\n".join([head, *lines]) for head, lines in groups.items() if lines))
    if not blocks:
        return ""
    details = f"<details>\n<summary>all commands</summary>\n\n```bash\n{blocks}\n```\n\n</details>"
    return f"SEED stands for each of {listed(seeds)}.\n\n{details}"


def seed_of(part: Part) -> int | None:
    """The seed of a part whose result is below a folder seed<S>."""
    found = [name for name in part.done.parts if re.fullmatch(r"seed\d+", name)]
    return int(found[-1][4:]) if found else None


def _evaluates(part: Part) -> bool:
    return "evaluate.py" in part.command


def _ordered(arms: Arms) -> list[str]:
    """The arms in the paper's order; the variants of arms follow."""
    return [*(arm for arm in DESCRIPTIONS if arm in arms), *sorted(arms.keys() - DESCRIPTIONS.keys())]
