"""The results page of the reproduction: tables, figures and raw numbers from a folder of finished runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtsql.experiments.arms import DESCRIPTIONS, Arms, command_of, read_arms, read_coverage
from mtsql.experiments.figures import write_figures
from mtsql.experiments.findings import findings, signed
from mtsql.experiments.tables import (
    EMPTY,
    abilities_table,
    ablation_table,
    accuracy_table,
    breakdown_tables,
    cap_table,
    coverage_table,
    errors_table,
    joined,
    latency_table,
    listed,
    made_by,
    made_by_arm,
    snowball_table,
    table,
    with_seed_placeholder,
)
from mtsql.files import write_atomically
from mtsql.parts import minutes_of

Commands = Sequence[tuple[str, str, Path]]  # title, command line, the path that exists once it is done
FIGURES = {
    "breakdown": "Figures 4 and 12: EX, tokens and interactions by hardness and by turn, means over seeds.",
    "abilities": "Figures 5 and 6: the five abilities and EX over the stages, means over seeds.",
    "errors": "Figure 7: questions with an error of each kind, means over seeds.",
    "training": "Figures 8, 9, 10 and 13: the course of RL. Thick: mean over seeds; thin: each seed; "
    "dotted: the next level of the curriculum begins.",
    "dev": "Figure 11: EX on the dev split during RL, in all and by hardness.",
}


def write_page(
    runs: Path,
    seeds: Sequence[int],
    folder: Path,
    name: str,
    title: str,
    commands: Commands,
    hardware: str,
    date: str,
    made_with: str,
) -> Path:
    """Write folder/<name>.md with its figures <name>_*.png and raw numbers <name>.json; returns the page.

    `made_with` is the command that makes all of it.
    `commands` are all parts of all seeds. What is not finished is left out, and named at the top.
    """
    arms = read_arms(runs, seeds)
    coverage = read_coverage(runs, seeds)
    figures = write_figures(arms, runs, seeds, folder, name)
    training = command_of(runs, seeds, "rl_process")

    def figure(key: str) -> str:
        return f"![{FIGURES[key]}]({figures[key].name})\n\n{FIGURES[key]}" if key in figures else ""

    sections = [
        (
            f"# {title}",
            heading(arms, seeds, commands, hardware, date, made_with, folder / f"{name}_notes.md"),
        ),
        ("## Findings", findings_table(arms, coverage, seeds)),
        ("## EX and EM (Tables 2 and 3)", accuracy_table(arms, seeds)),
        ("## The two tools (Table 4)", ablation_table(arms, seeds)),
        (
            "## Coverage of the self-taught rounds (Table 7)",
            coverage_table(coverage, seeds, command_of(runs, seeds, "sft")),
        ),
        ("## Latency and tokens (Table 8)", latency_table(arms)),
        (
            "## By turn and by hardness (Figures 4 and 12)",
            joined(breakdown_tables(arms), figure("breakdown")),
        ),
        ("## The five abilities (Figures 5 and 6)", joined(abilities_table(arms), figure("abilities"))),
        ("## Errors (Figure 7)", joined(errors_table(arms), figure("errors"))),
        ("## Gold against predicted history", snowball_table(arms)),
        ("## A cap on the response", cap_table(arms)),
        (
            "## Training (Figures 8 to 11 and 13)",
            joined(
                figure("training"),
                figure("dev"),
                made_by("the training of `rl_process`", *training) if training and figures else "",
            ),
        ),
        ("## Minutes", minutes_table(commands, seeds)),
        ("## Commands", command_list(commands, seeds)),
    ]
    page = folder / f"{name}.md"
    write_atomically(
        folder / f"{name}.json", "[\n" + ",\n".join(map(json.dumps, raw_numbers(arms))) + "\n]\n"
    )
    write_atomically(page, "\n\n".join(f"{head}\n\n{body}" for head, body in sections if body) + "\n")
    return page


def heading(
    arms: Arms,
    seeds: Sequence[int],
    commands: Commands,
    hardware: str,
    date: str,
    made_with: str,
    notes: Path,
) -> str:
    """Where the numbers come from, what is missing, and a link to hand-written `notes` if they exist."""
    shifted = {arm: found for arm, found in arms.items() if arm.endswith("_shifted")}
    inside = {arm: found for arm, found in arms.items() if arm not in shifted}
    questions = _counted(inside) + (f"; out of domain {_counted(shifted)}" if shifted else "")
    lines = [
        f"- Date: {date}",
        f"- Hardware: {hardware}",
        f"- Seeds: {', '.join(map(str, seeds))}",
        f"- Questions: {questions}",
        f"- `{made_with}` makes all numbers, tables and figures of this page.",
    ]
    unfinished = unfinished_arms(arms, commands)
    if unfinished:
        shown = (f"`{arm}` (seed {', '.join(map(str, missing))})" for arm, missing in unfinished.items())
        lines.append(f"- **Not finished, and left out below:** {', '.join(shown)}")
    if notes.exists():
        lines.append(f"- What was tried, and how to read some of these numbers: [{notes.name}]({notes.name})")
    reading = (
        "EX is execution accuracy, EM exact set match, both greedy and in % of questions. Differences are in "
        "points of EX. A mean is over the seeds that are finished."
    )
    return "\n".join(lines) + f"\n\n{reading}"


def _counted(arms: Arms) -> str:
    counts = {e.summary["questions"] for found in arms.values() for e in found.values()}
    return " or ".join(map(str, sorted(counts))) or "none yet"


def unfinished_arms(arms: Arms, commands: Commands) -> dict[str, list[int]]:
    """The seeds of each arm that `commands` evaluate and whose evaluation is not there."""
    missing: dict[str, list[int]] = {}
    for _, _, done in commands:
        seed = seed_of(done)
        if seed is not None and done.name == "summary.json" and seed not in arms.get(done.parent.name, {}):
            missing.setdefault(done.parent.name, []).append(seed)
    return missing


def findings_table(arms: Arms, coverage: Mapping[int, Sequence[dict]], seeds: Sequence[int]) -> str:
    """One row a finding: the difference, its interval and the verdict."""
    found = findings(arms, coverage)
    if not found:
        return ""
    rows = []
    for f in found:
        scale, unit = (100, "") if f.unit == "points" else (1, f" {f.unit}")
        d, places = f.difference, 2 if f.unit == "interactions" else 1

        def shown(number: float | None, scale: int = scale, places: int = places) -> str:
            return EMPTY if number is None else signed(scale * number, places)

        each = ", ".join(shown(d.by_seed.get(seed)) for seed in seeds)
        interval = f"[{', '.join(map(shown, d.interval))}]" if d.interval else EMPTY
        mean, sampled = shown(d.mean) + unit, shown(f.sampled)
        rows.append([f.claim, f.source, f.compared, mean, each, interval, sampled, f"**{f.verdict}**"])
    header = [
        "The paper finds that",
        "where",
        "compared",
        "mean",
        f"seeds {listed(seeds)}",
        "95 % interval",
        "at temperature 1",
        "verdict",
    ]
    note = (
        "Differences on the same questions, in points (of EX, of the ability, of all training questions) "
        "unless a unit is given. The interval resamples dialogues, with all seeds' answers to a dialogue "
        "together; it says nothing of further seeds. *Holds*: the whole interval is above 0 (coverage: every "
        "seed is). *Holds in the mean, not beyond chance*: the mean is above 0, the interval is not. *Does "
        "not hold*: the mean is below 0. At temperature 1: the same mean of sampled answers."
    )
    return joined(table(header, rows), note, made_by_arm(arms, ("rl_process", *arms)))


def minutes_table(commands: Commands, seeds: Sequence[int]) -> str:
    """Minutes by seed, for training and for evaluation, of the parts that have run."""
    if not commands:
        return ""
    rows = []
    for seed in (None, *seeds):
        parts = [(line, done) for _, line, done in commands if seed_of(done) == seed]
        if not parts:
            continue
        minutes = {False: 0.0, True: 0.0}
        for line, done in parts:
            minutes[_is_evaluation(line)] += minutes_of(done)
        finished = sum(done.exists() for _, done in parts)
        times = (minutes[False], minutes[True], sum(minutes.values()))
        name = "all seeds share" if seed is None else f"seed {seed}"
        rows.append([name, *(f"{t:,.1f}" for t in times), f"{finished} of {len(parts)}"])
    header = ["", "training", "evaluation", "in all", "parts finished"]
    note = "Minutes on the clock. Training includes making data and counting successes for the curriculum."
    return joined(table(header, rows), note)


def command_list(commands: Commands, seeds: Sequence[int]) -> str:
    """The commands of the first seed, and those that all seeds share, with SEED for the seed."""
    groups: dict[str, list[str]] = {"# data and training": [], "# evaluation": []}
    for _, line, done in commands:
        seed = seed_of(done)
        if seed in (None, *seeds[:1]):
            group = "# evaluation" if _is_evaluation(line) else "# data and training"
            groups[group].append(line if seed is None else with_seed_placeholder(line, seed))
    blocks = ["\n".join([head, *lines]) for head, lines in groups.items() if lines]
    if not blocks:
        return ""
    code = "```bash\n" + "\n\n".join(blocks) + "\n```"
    details = f"<details>\n<summary>all commands</summary>\n\n{code}\n\n</details>"
    return f"SEED stands for each of {listed(seeds)}.\n\n{details}"


def raw_numbers(arms: Arms) -> list[dict]:
    """What the tables are made of, one entry for each arm and seed; shares are fractions."""
    entries = []
    for arm in _ordered(arms):
        for seed, evaluation in arms[arm].items():
            summary = evaluation.summary
            entry: dict = {"arm": arm, "seed": seed}
            for metric in ("ex", "em"):
                entry |= {
                    metric: summary[metric]["mean"],
                    f"{metric}_by_turn": summary[metric]["by_turn"],
                    f"{metric}_by_hardness": summary[metric]["by_hardness"],
                }
            rest = {k: v for k, v in summary.items() if k not in ("ex", "em", "questions")}
            for metric in ("ex", "em"):
                given = ("mean", "by_turn", "by_hardness")
                rest[metric] = {k: v for k, v in summary[metric].items() if k not in given}
            entry |= {"questions": summary["questions"], "command": evaluation.command, "summary": rest}
            entries.append(entry)
    return entries


def seed_of(done: Path) -> int | None:
    """The seed that a path below a folder seed<S> belongs to."""
    found = [part for part in done.parts if re.fullmatch(r"seed\d+", part)]
    return int(found[-1][4:]) if found else None


def _is_evaluation(line: str) -> bool:
    return "evaluate.py" in line.split()


def _ordered(arms: Arms) -> list[str]:
    """The arms in the paper's order; the variants of arms follow."""
    return [*(arm for arm in DESCRIPTIONS if arm in arms), *sorted(arms.keys() - DESCRIPTIONS.keys())]
