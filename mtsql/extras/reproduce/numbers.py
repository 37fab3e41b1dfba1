"""Means and differences of evaluations with 95 % intervals over databases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple, TypeAlias

import numpy as np

from mtsql.report.metrics import RESAMPLES, bootstrap_means, excludes_zero, interval_of

Values: TypeAlias = Sequence[tuple[str, float]]  # database and value of each question, in order


class Estimate(NamedTuple):
    """The mean of the seeds' means, its interval (None with fewer than two databases), and each seed's mean.

    `sure` is whether the interval lies beside 0 by more than the Monte-Carlo error of its ends.
    """

    mean: float
    interval: tuple[float, float] | None
    by_seed: dict[int, float]
    sure: bool


def estimate(
    by_seed: Mapping[int, Values], other_seeds: bool = False, draws: int = RESAMPLES, comparisons: int = 1
) -> Estimate | None:
    """Mean and interval of some questions' values, all seeds together; None without any.

    Databases are drawn anew with replacement, a database's answers of all seeds together. Seeds are too few
    for that: five of the same sign, drawn with replacement, would be beside 0 without any effect. So with
    `other_seeds` the spread of the seeds' own means is added as Student's t with one degree of freedom less
    than seeds. Without, or with one seed, nothing is said of others. `comparisons` widens the interval.
    """
    if not by_seed:
        return None
    means = {seed: fmean(value for _, value in values) for seed, values in by_seed.items()}
    mean = fmean(means.values())
    pooled = [pair for values in by_seed.values() for pair in values]
    groups: dict[str, list[float]] = {}
    for database, value in pooled:
        groups.setdefault(database, []).append(value)
    count = len(groups)
    if count < 2:
        return Estimate(mean, None, means, False)
    drawn = bootstrap_means([groups[name] for name in sorted(groups)], draws=draws)
    drawn = mean + (drawn - fmean(value for _, value in pooled)) * np.sqrt(count / (count - 1))
    if other_seeds and len(means) > 1:
        error = stdev(means.values()) / len(means) ** 0.5
        drawn += error * np.random.default_rng(1).standard_t(len(means) - 1, size=draws)
    return Estimate(mean, interval_of(drawn, comparisons), means, excludes_zero(drawn, comparisons))


def decimal(number: float) -> str:
    """With one decimal."""
    return f"{number:.1f}"


def signed(number: float) -> str:
    """With its sign and one decimal; what rounds to 0 is +0."""
    return f"{round(number, 1) + 0.0:+.1f}"


def with_interval(found: Estimate, show: Callable[[float], str]) -> str:
    """The mean with its interval, if there is one: +3.4 [+1.7, +5.2]."""
    ends = f" [{', '.join(map(show, found.interval))}]" if found.interval else ""
    return show(found.mean) + ends
