"""The page of the real language model: real.md and real.json in the suite's --out.

The suite takes days on a laptop, and its parts may run on several machines. So the page is made of real.json,
in which finished evaluations replace their rows, and all other rows stay.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from mtsql.config import hardware
from mtsql.errors import UserError
from mtsql.experiments.arms import read_evaluation, read_json
from mtsql.experiments.figures import DPI, log_figure
from mtsql.experiments.markdown import EMPTY, decimal, joined, listed, signed, table
from mtsql.experiments.page import command_list, seed_of
from mtsql.experiments.real import ARMS, DATASETS, HELD_OUT, SPIDER, sets_of
from mtsql.experiments.real_trajectories import write_trajectories
from mtsql.files import write_atomically
from mtsql.parts import Part, minutes_of
from mtsql.report.metrics import RESAMPLES, bootstrap_interval, bootstrap_means, excludes_zero, interval_of
from mtsql.report.plots import save_figure

NAMES = {"sparc": "SParC dev", "cosql": "CoSQL dev", HELD_OUT: "held-out databases", SPIDER: "Spider dev"}
# MTSQL-R1, Table 2, in domain: EX and EM.
PAPER = {
    "base": {
        "1.7B": {"sparc": (23.9, 17.8), "cosql": (22.6, 16.3)},
        "4B": {"sparc": (57.6, 44.1), "cosql": (60.3, 45.6)},
    },
    "short_sft": {
        "1.7B": {"sparc": (74.3, 69.2), "cosql": (68.1, 59.3)},
        "4B": {"sparc": (78.3, 71.5), "cosql": (73.1, 64.8)},
    },
    "round_1": {
        "1.7B": {"sparc": (70.6, 62.0), "cosql": (69.9, 57.6)},
        "4B": {"sparc": (73.8, 63.1), "cosql": (73.9, 62.1)},
    },
    "round_2": {
        "1.7B": {"sparc": (72.3, 63.0), "cosql": (72.2, 60.5)},
        "4B": {"sparc": (74.9, 64.8), "cosql": (74.7, 62.8)},
    },
    "rl_outcome": {
        "1.7B": {"sparc": (76.2, 66.1), "cosql": (76.6, 62.7)},
        "4B": {"sparc": (78.1, 67.8), "cosql": (79.1, 64.5)},
    },
    "rl": {
        "1.7B": {"sparc": (76.2, 66.1), "cosql": (77.3, 63.5)},
        "4B": {"sparc": (79.0, 68.7), "cosql": (79.9, 65.2)},
    },
}
CONTRASTS = {  # of EX, the first arm minus the second
    "RL without tools, beside its warm start": ("short_rl", "short_sft"),
    "the protocol shown, beside gold SQL alone": ("warm_start", "short_sft"),
    "the protocol shown and two rounds, beside gold SQL alone": ("round_2", "short_sft"),
    "RL (outcome and process), beside gold SQL alone": ("rl", "short_sft"),
    "RL (outcome), beside its warm start": ("rl_outcome", "warm_start"),
    "RL (outcome and process), beside its warm start": ("rl", "warm_start"),
    "process rewards, beside outcome alone": ("rl", "rl_outcome"),
    "long horizon, beside short-horizon RL": ("rl_outcome", "short_rl"),
    "long horizon with process rewards, beside short-horizon RL": ("rl", "short_rl"),
    "EXECUTE": ("rl", "rl_no_execution"),
    "MEMORY-VERIFY": ("rl", "rl_no_memory"),
    "gold history, beside its own answers": ("rl", "rl_predicted"),
}
WARM_STARTS = ("short_sft", "warm_start", "round_2")  # trained with seed 0 alone

Row = dict[str, Any]


def write_real_page(
    parts_by_seed: Mapping[int, Sequence[Part]],
    path: Path,
    model: str,
    listing: Callable[[int], Sequence[Part]],
    made_with: str,
) -> Path:
    """Bring the .json beside `path` up to date, write the page and return its path.

    `listing` gives the parts of a seed whose commands the page shows, `made_with` is the suite's command but
    for the seeds. Raises UserError if a row has other questions than the others of its data set.
    """
    numbers = path.with_suffix(".json")
    rows = {(r["dataset"], r["arm"], r["seed"]): r for r in read_json(numbers) or []}
    for seed, parts in parts_by_seed.items():
        for row in filter(None, map(finished_row, parts)):
            key = (row["dataset"], row["arm"], seed)
            same = key in rows and all(rows[key][name] == row[name] for name in ("commit", "right"))
            # The page may be written on another day and machine than the row.
            rows[key] = row | {name: rows[key][name] for name in ("date", "hardware")} if same else row
    order = {arm: place for place, arm in enumerate(ARMS)}
    found = sorted(rows.values(), key=lambda r: (r["dataset"], order[r["arm"]], r["seed"]))
    check_questions(found)
    write_atomically(numbers, "[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
    seeds = sorted({r["seed"] for r in found})
    of = {name: [r for r in found if r["dataset"] == name] for name in NAMES}
    sections = {
        "EX and EM": accuracy_table(of),
        "What each step is worth": contrast_table(of),
        "Beside the paper": paper_table(of),
        "During RL": joined(curve_figure(of[DATASETS[0]], path), curve_table(of[DATASETS[0]])),
        "By turn and by hardness": breakdown_table(of),
        "Kinds of errors": errors_table(of),
        "Commands": command_list([part for seed in seeds for part in listing(seed)], seeds),
    }
    made_with += f" --seeds {' '.join(map(str, seeds))}"
    top = f"# {Path(model).name} on SParC and CoSQL\n\n{heading(found, made_with)}"
    write_trajectories(parts_by_seed.get(0, ()), path)
    to_read = sorted(file.name for file in path.parent.glob(f"{path.stem}_trajectories_*.md"))
    if to_read:
        links = ", ".join(f"[{name}]({name})" for name in to_read)
        top += f"\n\nTrajectories to read, chosen by a rule: {links}"
    kept = path.with_name(f"{path.stem}_notes.md")
    text = kept.read_text(encoding="utf-8").strip() if kept.exists() else ""
    below = (f"## {head}\n\n{body}" for head, body in sections.items() if body)
    write_atomically(path, joined(top, text, *below) + "\n")
    return path


def check_questions(rows: Sequence[Row]) -> None:
    """Raise UserError for a row whose questions are not those of its data set's first row."""
    first = {r["dataset"]: r for r in reversed(rows)}
    for row in rows:
        if row["databases"] != first[row["dataset"]]["databases"]:
            named = [f"{r['arm']}, seed {r['seed']}" for r in (row, first[row["dataset"]])]
            raise UserError(
                f"{row['dataset']}: {named[0]}, has other questions than {named[1]}; evaluate it with the "
                "same data and databases"
            )


def finished_row(part: Part) -> Row | None:
    """What real.json keeps of a part, if that is a finished evaluation."""
    folder = part.done.parent
    if part.done.name != "summary.json":
        return None
    evaluation = read_evaluation(folder)
    if evaluation is None:
        return None
    records, summary = evaluation.records, evaluation.summary
    databases = [[name, len(list(group))] for name, group in groupby(r["db_id"] for r in records)]
    low, high = bootstrap_interval(_by_database([(databases, [float(r["ex"]) for r in records])]))
    run = read_json(folder / "run.json") or {}
    return {
        "dataset": folder.parent.name,
        "arm": folder.name,
        "seed": seed_of(part),
        "ex": round(100 * summary["ex"]["mean"], 4),
        "ex_interval": [round(100 * low, 4), round(100 * high, 4)],
        "em": round(100 * summary["em"]["mean"], 4),
        "questions": summary["questions"],
        "minutes": round(minutes_of(part.done), 1) or None,  # unless run by hand
        "by_turn": {name: _share(value) for name, value in summary["ex"]["by_turn"].items()},
        "by_hardness": {name: _share(value) for name, value in summary["ex"]["by_hardness"].items()},
        "errors": {name: _share(value) for name, value in summary["errors"].items()},
        "status": {name: _share(value) for name, value in summary["status"].items()},
        "tool_calls": {name: round(value, 2) for name, value in summary["tool_calls"].items()},
        "date": datetime.fromtimestamp(part.done.stat().st_mtime, UTC).date().isoformat(),
        "hardware": run.get("hardware") or hardware(),
        "commit": run.get("commit"),
        "databases": databases,
        "curve": curve(folder.parents[2] / folder.name) if folder.parent.name == DATASETS[0] else [],  # once
        "right": "".join(str(r["ex"]) for r in records),  # one a question, for paired differences
    }


def curve(training: Path) -> list[list[float]]:
    """Step and EX in % of the evaluations during a run of GRPO; none for another run."""
    path = training / "dev.csv"
    rows = csv.DictReader(path.open(newline="", encoding="utf-8")) if path.is_file() else ()
    return [[int(row["step"]) + 1, round(100 * float(row["ex"]), 2)] for row in rows]


def _share(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 4)


def _by_database(rows: Iterable[tuple[Sequence[Sequence], Sequence[float]]]) -> list[list[float]]:
    """The values of each database's questions, all rows together; a row is its databases and its values."""
    groups: dict[str, list[float]] = {}
    for databases, values in rows:
        names = (name for name, count in databases for _ in range(count))
        for name, value in zip(names, values, strict=True):
            groups.setdefault(name, []).append(value)
    return list(groups.values())


def heading(rows: Sequence[Row], made_with: str) -> str:
    """What was measured, on what, and what is missing."""
    measured = {(r["arm"], r["dataset"]) for r in rows}
    missing = {
        name: [arm for arm in ARMS if dataset in sets_of(arm) and (arm, dataset) not in measured]
        for dataset, name in NAMES.items()
    }
    lines = [
        f"- Dates: {', '.join(sorted({r['date'] for r in rows}) or [EMPTY])}",
        f"- Hardware: {', '.join(sorted({r['hardware'] for r in rows}) or [EMPTY])}",
        f"- `{made_with}`, in parts that resume; raw figures in real.json, with the commit of each.",
    ]
    lacking = (f"{name}: {', '.join(f'`{arm}`' for arm in arms)}" for name, arms in missing.items() if arms)
    if any(missing.values()):
        lines.append(f"- **Not measured:** {'; '.join(lacking)}")
    reading = (
        "EX is execution accuracy, EM exact set match, greedy, with gold history, in %. In brackets: 95 % "
        f"intervals, resampling databases ({RESAMPLES:,} draws). The training data is a mix of Spider, CoSQL "
        "and SParC whose SParC part is rebuilt, and the databases are of another export than the official "
        "one, so these are no official scores of the data sets."
    )
    return joined("\n".join(lines), reading)


def _seeds(rows: Sequence[Row], arm: str) -> dict[int, Row]:
    return {r["seed"]: r for r in rows if r["arm"] == arm}


def accuracy_table(of: Mapping[str, Sequence[Row]]) -> str:
    """EX with its interval, and EM, of every arm on every set of questions."""
    lines = []
    for arm, description in ARMS.items():
        cells = []
        for rows in of.values():
            own = list(_seeds(rows, arm).values())
            ex, em = (fmean(r[key] for r in own) if own else None for key in ("ex", "em"))
            interval = ""
            if own:
                groups = _by_database((r["databases"], [100.0 * int(bit) for bit in r["right"]]) for r in own)
                interval = f" [{', '.join(map(decimal, bootstrap_interval(groups)))}]"
            each = by_seed({r["seed"]: decimal(r["ex"]) for r in own})
            cells += [f"{decimal(ex)}{interval}{each}", decimal(em)]
        seeds = sorted({r["seed"] for rows in of.values() for r in _seeds(rows, arm).values()})
        if seeds:
            lines.append([f"`{arm}`", description, *cells, listed(seeds)])
    header = ["arm", "what it is"]
    for name, rows in of.items():
        count = rows[0]["questions"] if rows else 0
        header += [f"{NAMES[name]} ({count}): EX", "EM"]
    return table([*header, "seeds"], lines, "Means over seeds; behind an interval EX of each seed.")


def contrast_table(of: Mapping[str, Sequence[Row]]) -> str:
    """Paired differences of EX, means over seeds, with intervals over databases."""
    lines = []
    for title, (better, worse) in CONTRASTS.items():
        cells = []
        for rows in of.values():
            found = _difference(_seeds(rows, better), _seeds(rows, worse), worse in WARM_STARTS)
            if found is None:
                cells.append(EMPTY)
            else:
                mean, drawn, of_seed = found
                each = by_seed({seed: signed(value) for seed, value in of_seed.items()})
                shown = f"{signed(mean)} [{', '.join(map(signed, interval_of(drawn)))}]"
                cells.append((f"**{shown}**" if excludes_zero(drawn) else shown) + each)
        if set(cells) != {EMPTY}:
            lines.append([title, f"`{better}` - `{worse}`", *cells])
    note = (
        "`short_rl`, `rl_outcome` and `rl` have the same steps, groups and samples, on databases that "
        "fine-tuning has not seen, each on the questions that its own warm start solves now and then. The "
        "earlier SQL stands in every prompt, as in the paper's. Intervals resample databases "
        "alone, all seeds together: they say nothing of other seeds. Behind them is each seed's own "
        "difference; a warm start of seed 0 stands beside every seed of RL. In bold: 0 is outside the "
        "interval by more than the draws' own Monte-Carlo error; the others claim nothing."
    )
    return table(["step", "arms", *(NAMES[name] for name in of)], lines, note)


def _difference(
    better: Mapping[int, Row], worse: Mapping[int, Row], is_warm_start: bool
) -> tuple[float, np.ndarray, dict[int, float]] | None:
    """Mean, resampled means and each seed's mean in points; a warm start of seed 0 is beside every seed."""
    of_seed, databases = {}, {}
    for seed, a in better.items():
        b = worse.get(0 if is_warm_start else seed)
        if b is not None:
            pairs = zip(a["right"], b["right"], strict=True)
            of_seed[seed], databases[seed] = [100.0 * (int(x) - int(y)) for x, y in pairs], a["databases"]
    if not of_seed:
        return None
    groups = _by_database((databases[seed], values) for seed, values in of_seed.items())
    means = {seed: fmean(values) for seed, values in of_seed.items()}
    return fmean(value for group in groups for value in group), bootstrap_means(groups), means


def by_seed(values: Mapping[int, str]) -> str:
    """The values of several seeds, or of one that is not seed 0; "" for seed 0 alone."""
    if set(values) <= {0}:
        return ""
    return f" (seed {', '.join(f'{seed}: {value}' for seed, value in sorted(values.items()))})"


def paper_table(of: Mapping[str, Sequence[Row]]) -> str:
    """Our arms and the paper's, EX / EM."""
    lines = []
    for arm, models in PAPER.items():
        sets = []  # of each data set: EX and EM here, of the paper's 1.7B, of its 4B
        for dataset in DATASETS:
            own = list(_seeds(of[dataset], arm).values())
            here = tuple(fmean(r[key] for r in own) if own else None for key in ("ex", "em"))
            sets.append([here, *(models[model][dataset] for model in ("1.7B", "4B"))])
        both = (zip(*pairs, strict=True) for pairs in zip(*sets, strict=True))  # EX of both sets, then EM
        sets.append([[None if None in two else fmean(two) for two in pair] for pair in list(both)])
        lines.append([f"`{arm}`", *(" / ".join(map(decimal, pair)) for pairs in sets for pair in pairs)])
    header = [
        f"{name}: {model}"
        for name in (*(NAMES[dataset] for dataset in DATASETS), "mean of both")
        for model in ("here", "1.7B, paper", "4B, paper")
    ]
    return table(
        ["arm", *header],
        lines,
        "EX / EM. The paper's are Qwen3-1.7B and 4B, trained whole on each data set's own training set and "
        "scored on the official databases (Table 2, in domain), by Algorithm 1 alone, RL after three "
        "rounds. Ours has a LoRA adapter, and is trained on the mix.",
    )


def curve_table(rows: Sequence[Row]) -> str:
    """EX on a part of the held-out databases, during RL."""
    steps = sorted({step for r in rows for step, _ in r["curve"]})
    lines = [
        [
            f"`{r['arm']}`",
            str(r["seed"]),
            *(decimal(dict(map(tuple, r["curve"])).get(step)) for step in steps),
        ]
        for r in rows
        if r["curve"]
    ]
    header = ["arm", "seed", *(f"step {step}" for step in steps)]
    note = (
        "EX on the first dialogues over the held-out databases, after so many steps; the tables above have "
        "all dialogues."
    )
    return table(header, lines, note)


def curve_figure(rows: Sequence[Row], path: Path) -> str:
    """The same as a figure beside the page; returns the line that shows it."""
    logs: dict[str, dict[int, list[dict[str, float]]]] = {}
    for r in filter(lambda r: r["curve"], rows):
        logs.setdefault(r["arm"], {})[r["seed"]] = [{"step": s - 1, "ex": ex / 100} for s, ex in r["curve"]]
    figure = log_figure(logs, {"ex": "EX, held-out databases, %"})
    if figure is None:
        return ""
    file = save_figure(figure, path.with_name(f"{path.stem}_curves.png"), DPI)
    return f"![EX on held-out databases over the steps of RL]({file.name})"


def _breakdown(of: Mapping[str, Sequence[Row]], key: str) -> str:
    """The shares below `key` of the rows of the dev sets, of seed 0; real.json has those of the others."""
    rows = [r for dataset in DATASETS for r in of[dataset] if r["seed"] == 0]
    names = list(dict.fromkeys(name for r in rows for name, value in r[key].items() if value is not None))
    lines = [
        [NAMES[r["dataset"]], f"`{r['arm']}`", str(r["seed"]), *(decimal(r[key].get(name)) for name in names)]
        for r in rows
    ]
    return table(["set", "arm", "seed", *names], lines)


def breakdown_table(of: Mapping[str, Sequence[Row]]) -> str:
    """EX by turn and by hardness."""
    return joined(*(_breakdown(of, key) for key in ("by_turn", "by_hardness")))


def errors_table(of: Mapping[str, Sequence[Row]]) -> str:
    """Kinds of errors of every arm."""
    shown = _breakdown(of, "errors")
    note = "Share of all questions, in %; an answer may have several. execution: no SQL, or it fails."
    return joined(shown, note if shown else "")
