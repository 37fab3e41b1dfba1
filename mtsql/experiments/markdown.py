"""How the results pages write their tables, numbers and commands in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mtsql.experiments.arms import Answer, Arms, Difference, Seeds, estimate, look_up, mean_over_seeds

EMPTY = "–"


def table(header: Iterable[str], rows: Sequence[Sequence[str]], *notes: str) -> str:
    """A table and the paragraphs below it; "" without rows.

    Columns of numbers, signs and intervals are aligned right, the others left.
    """
    if not rows:
        return ""
    numbers = [all(re.match(r"[-+\[\d–]", cell) for cell in column) for column in zip(*rows, strict=True)]
    rule = ["---:" if number else "---" for number in numbers]
    return joined("\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)), *notes)


def joined(*paragraphs: str) -> str:
    """The paragraphs that are not empty, with a blank line between them."""
    return "\n\n".join(filter(None, paragraphs))


def decimal(number: float | None, places: int = 1) -> str:
    """A number with so many decimals."""
    return EMPTY if number is None else f"{number:,.{places}f}"


def percent(share: float | None) -> str:
    """A fraction in percent with one decimal."""
    return EMPTY if share is None else decimal(100 * share)


def signed(number: float, places: int = 1) -> str:
    """With its sign; what rounds to 0 is +0."""
    return f"{round(number, places) + 0.0:+.{places}f}"


def interval_of(difference: Difference, scale: float = 100, places: int = 1) -> str:
    """The interval of a difference, by default in points."""
    if difference.interval is None:
        return EMPTY
    return f"[{', '.join(signed(scale * bound, places) for bound in difference.interval)}]"


def difference_of(found: Sequence[Answer]) -> str:
    """The mean of differences in points, with its interval."""
    difference = estimate(found)
    return f"{signed(100 * difference.mean)} {interval_of(difference)}" if difference else EMPTY


def mean_and_seeds(side: Seeds, seeds: Sequence[int], metric: str = "ex") -> str:
    """The mean of EX or EM over seeds, and each seed's."""
    if not side:
        return EMPTY
    each = (percent(look_up(side[s].summary, metric, "mean")) if s in side else EMPTY for s in seeds)
    return f"{percent(mean_over_seeds(side, metric, 'mean'))} ({', '.join(each)})"


def listed(seeds: Iterable[int]) -> str:
    """The seeds in a sentence."""
    return ", ".join(map(str, seeds))


def with_seed_placeholder(line: str, seed: int) -> str:
    """A command line with SEED for its seed."""
    return re.sub(rf"(--seed[ =]|\bseed){seed}\b", r"\1SEED", line)


def made_by(what: str, seed: int, line: str) -> str:
    """The line below a table that names the command of one of its rows."""
    return f"Command of {what}: `{with_seed_placeholder(line, seed)}`"


def made_by_arm(arms: Arms, names: Iterable[str]) -> str:
    """The command of the first of these arms that is finished."""
    for arm in names:
        for seed, evaluation in arms.get(arm, {}).items():
            if evaluation.command:
                return made_by(f"the row of `{arm}`", seed, evaluation.command)
    return ""
