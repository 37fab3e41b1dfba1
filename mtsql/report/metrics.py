"""Evaluation numbers with their uncertainty, and the log of training metrics."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import pstdev

import numpy as np

from mtsql.agent.trajectory import Status
from mtsql.errors import loading
from mtsql.files import file_errors, write_atomically
from mtsql.report.evaluation import ABILITIES
from mtsql.sql.score import FURTHER_METRICS

HARDNESS = ("easy", "medium", "hard", "extra")
TURNS = ("1", "2", "3", "4", ">4")
RESAMPLES = 10_000  # of a bootstrap interval
MANY_GROUPS = 100  # beyond, those with equal sums and sizes are drawn as one, which is faster
# Counts of a record that `summarise` averages; see also ABILITIES and FURTHER_METRICS.
COUNTS = ("interactions", "sampled_tokens", "response_tokens", "turns", "thought_characters")


def bootstrap_means(
    values_by_group: Sequence[Sequence[float]], seed: int = 0, draws: int = RESAMPLES
) -> np.ndarray:
    """Means over questions after drawing whole groups, dialogues or databases, anew: (draws,), float64.

    The questions of a dialogue or a database depend on each other, so groups are what is drawn.
    """
    count = len(values_by_group)
    totals = np.array([(sum(values), len(values)) for values in values_by_group], dtype=float)
    shares = np.full(count, 1 / count)
    if count > MANY_GROUPS:
        totals, alike = np.unique(totals, axis=0, return_counts=True)
        shares = alike / count
    drawn = np.random.default_rng(seed).multinomial(count, shares, size=draws)
    sums, sizes = (drawn @ totals).T
    return sums / sizes


def interval_of(means: np.ndarray, comparisons: int = 1) -> tuple[float, float]:
    """The 95 % interval of resampled means, wider where it is one of so many `comparisons` (Bonferroni)."""
    low, high = np.percentile(means, [2.5 / comparisons, 100 - 2.5 / comparisons])
    return float(low), float(high)


def bootstrap_interval(values_by_dialogue: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean over questions, from resampling whole dialogues: see `bootstrap_means`."""
    return interval_of(bootstrap_means(values_by_dialogue, seed))


def excludes_zero(means: np.ndarray, comparisons: int = 1) -> bool:
    """Whether `interval_of` resampled means lies beside 0 by more than its own Monte-Carlo error.

    Only then may a difference be claimed: an end nearer to 0 is on the other side with other draws. The
    share of means at 0 or beyond it is known to 1.96 standard errors.
    """
    draws = len(means)
    beyond = (min((means <= 0).sum(), (means >= 0).sum()) + 1) / (draws + 1)  # never quite 0
    return bool(beyond + 1.96 * math.sqrt(beyond * (1 - beyond) / draws) < 0.025 / comparisons)


def summarise(records: Sequence[dict]) -> dict:
    """All numbers of an evaluation.

    Each record is one question, with the keys dialogue_id, turn_index (from 0), hardness, difficulty, ex, em
    and FURTHER_METRICS (0 or 1), predicted, pred_parses, status, COUNTS (turns are model messages),
    tool_calls (tool -> count), reward_parts and abilities (ABILITIES, 0 to 1 or None).
    Shares are fractions; the mean over no question is None. Raises ValueError without records.
    """
    if not records:
        raise ValueError("there is nothing to summarise: no question was answered")
    dialogues = grouped(records, "dialogue_id")
    levels = [*HARDNESS, *sorted({r["hardness"] for r in records} - set(HARDNESS))]
    difficulties = sorted({r["difficulty"] for r in records} - {""})  # the dataset's own
    by = {
        "by_turn": {t: [r for r in records if turn_name(r["turn_index"]) == t] for t in TURNS},
        "by_hardness": {h: [r for r in records if r["hardness"] == h] for h in levels},
        "by_difficulty": {d: [r for r in records if r["difficulty"] == d] for d in difficulties},
    }

    def means(key: str) -> dict[str, dict[str, float | None]]:
        return {n: {group: _mean(r[key] for r in held) for group, held in by[n].items()} for n in by}

    summary: dict = {"questions": len(records), "dialogues": len(dialogues)}
    for metric in ("ex", "em"):
        values = [[r[metric] for r in dialogue] for dialogue in dialogues]
        low, high = bootstrap_interval(values)
        summary[metric] = {"mean": _mean(r[metric] for r in records), "low": low, "high": high}
        summary[metric] |= {"interaction_match": _mean(map(all, values)), **means(metric)}
    summary["further"] = {metric: _mean(r[metric] for r in records) for metric in FURTHER_METRICS}
    # An episode whose prompt is longer than --max-prompt-tokens ends before the policy has written anything.
    unwritten = [r for r in records if r["status"] == Status.OUT_OF_TOKENS and not r["response_tokens"]]
    summary["not_asked"] = len(unwritten)
    answers = [r for r in records if r["predicted"] is not None]
    summary["answers"] = len(answers)
    summary["official_grammar_cannot_read"] = sum(not r["pred_parses"] for r in answers)
    for name in ("by_turn", "by_hardness"):
        summary[f"questions_{name}"] = {group: len(held) for group, held in by[name].items()}
    summary["status"] = {str(s): _mean(r["status"] == s for r in records) for s in Status}
    tools = sorted({tool for r in records for tool in r["tool_calls"]})
    summary["tool_calls"] = {tool: _mean(r["tool_calls"].get(tool, 0) for r in records) for tool in tools}
    for key in COUNTS:
        summary[key] = _mean(r[key] for r in records)
        summary |= {f"{key}_{name}": groups for name, groups in means(key).items()}
    summary["turns_deviation"] = pstdev(r["turns"] for r in records)
    parts = sorted({part for r in records for part in r["reward_parts"]})
    summary["reward_parts"] = {p: _mean(r["reward_parts"].get(p, 0) for r in records) for p in parts}
    measured = {a: [r["abilities"][a] for r in records if r["abilities"][a] is not None] for a in ABILITIES}
    summary["abilities"] = {ability: _mean(values) for ability, values in measured.items()}
    return summary


def grouped(records: Sequence[dict], key: str) -> list[list[dict]]:
    """The records with equal `key` together, in the order of their first ones."""
    groups: dict[object, list[dict]] = {}
    for record in records:
        groups.setdefault(record[key], []).append(record)
    return list(groups.values())


def turn_name(index: int) -> str:
    """The bucket of a turn that counts from 0."""
    return TURNS[min(index, len(TURNS) - 1)]


def _mean(values: Iterable[float]) -> float | None:
    """None if there is nothing to take the mean of."""
    numbers = [float(v) for v in values]
    return sum(numbers) / len(numbers) if numbers else None


def format_summary(summary: dict) -> str:
    """The summary as a plain-text table; what no question falls under is shown as "-"."""
    ex, em = summary["ex"], summary["em"]

    def scored(label: str, in_ex: float | None, in_em: float | None, count: int | str = "") -> str:
        return f"{label:<22}{count:>10}{_percent(in_ex)}{_percent(in_em)}"

    def groups(name: str, label: str = "", counts: Mapping[str, int] | None = None) -> list[str]:
        counts = counts or {}
        return [scored(label + g, ex[name][g], em[name][g], counts.get(g, "")) for g in ex[name]]

    lines = [
        f"{summary['questions']} questions in {summary['dialogues']} dialogues",
        "",
        f"{'':<22}{'questions':>10}{'EX %':>9}{'EM %':>9}",
        scored("all questions", ex["mean"], em["mean"]),
        *(scored(f"  95 % dialogues, {end}", ex[end], em[end]) for end in ("low", "high")),
        *groups("by_turn", "turn ", summary["questions_by_turn"]),
        *groups("by_hardness", "", summary["questions_by_hardness"]),
        *groups("by_difficulty"),
        scored("whole dialogues", ex["interaction_match"], em["interaction_match"], summary["dialogues"]),
        "",
        *(f"{FURTHER_METRICS[m]:<32}{_percent(mean)} %" for m, mean in summary["further"].items()),
    ]
    unread, answers = summary["official_grammar_cannot_read"], summary["answers"]
    lines += [f"the official grammar cannot read {unread} of {answers} answers", ""]
    lines += [f"{status:<32}{_percent(share)} %" for status, share in summary["status"].items()]
    if summary["not_asked"]:
        counted = f"{summary['not_asked']} of {summary['questions']} were not asked, and count as wrong"
        lines.append(f"{counted}: their prompt is longer than --max-prompt-tokens")
    lines.append("")
    lines += [f"{tool + ' calls':<32}{mean:>9.2f} an answer" for tool, mean in summary["tool_calls"].items()]
    for key in COUNTS:
        spread = f", deviation {summary['turns_deviation']:.2f}" if key == "turns" else ""
        lines.append(f"{key.replace('_', ' '):<32}{summary[key]:>9.2f} an answer{spread}")
    lines += [f"{'reward: ' + part:<32}{mean:>9.3f}" for part, mean in summary["reward_parts"].items()]
    lines.append("")
    lines += [f"ability: {text:<23}{_percent(summary['abilities'][a])} %" for a, text in ABILITIES.items()]
    errors = summary.get("errors", {})
    lines += ["", *(f"error: {kind:<25}{_percent(share)} %" for kind, share in errors.items())]
    return "\n".join(lines)


def format_coverage(questions: int, rounds: Sequence[dict]) -> str:
    """Table 7: how many training questions have a trajectory after each round."""
    last = rounds[-1]
    counts = {"All training examples": questions}
    for r in rounds:
        name = f"Training samples that have trajectories (round {r['round']})"
        counts[name] = r["questions_covered"]
    counts[f"Final long-horizon trajectories (round {last['round']})"] = last["trajectories"]
    lines = [f"{name:<52}{count:>8,}" for name, count in counts.items()]
    lines.append(
        f"round {last['round']}: {last['right']} of {last['sampled']} rollouts right, "
        f"{last['questions_solved']} of {last['questions_asked']} questions solved"
    )
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return f"{'-':>9}" if share is None else f"{100 * share:>9.1f}"


class MetricsLog:
    """Appends rows to a CSV file. The first row decides the columns; `step` must be one of them."""

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        """Open `path`, dropping rows of steps >= `resume_step`, and a last row that was cut off.

        Raises UserError if the file is something else than such a log.
        """
        self.path, self.columns = path, None
        kept: list[dict[str, str]] = []
        if path.is_file() and resume_step > 0:
            with loading(f"{path} is damaged; put it right, or remove it to go on without its rows"):
                # A number that was cut off looks like another.
                ended = path.read_text("utf-8").rpartition("\n")[0]
                rows = csv.DictReader(io.StringIO(ended, newline=""))
                kept = [row for row in rows if int(row["step"]) < resume_step]
        write_atomically(path, self._lines(kept))

    def append(self, row: dict) -> None:
        """Write one row; a column it lacks stays empty. Raises ValueError for a new column."""
        with file_errors(self.path), self.path.open("a", newline="", encoding="utf-8") as file:
            file.write(self._lines([row]))

    def _lines(self, rows: list[dict]) -> str:
        """The text of rows, below the header if they are the first."""
        first = self.columns is None and bool(rows)
        if first:
            self.columns = list(rows[0])
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        if first:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()
