"""Test-time compute: the majority vote by execution result, and pass@k (SQL-Trail, sections 4.3 and A.8)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import comb
from pathlib import Path
from statistics import fmean

from mtsql.sql.execute import MAX_GOLD_ROWS, Executor, as_scored, results_equal
from mtsql.sql.score import Scorer


def majority_vote(
    candidates: Sequence[str | None], db_path: str | Path, executor: Executor, kind: str = "official"
) -> tuple[int, int]:
    """The index of the candidate that wins, and its votes; a candidate None is a sample without an answer.

    Candidates with equal results, as EX compares them (DISTINCT dropped, columns in any order), form a
    group. The earliest member of the largest group wins; of equally large groups, that of the earliest
    candidate. With the other kinds of EX (`Scorer`) DISTINCT is kept; by "bird" equal are equal sets of rows,
    whatever their order. Else the order of rows matters if more than half of the voters have an ORDER BY: one
    rule a question, as the gold query's ORDER BY decides in EX. What fails to run has no vote; if nothing
    runs, the first answer wins with 0 votes. Raises FileNotFoundError if the database is missing.
    """
    queries = [None if sql is None else as_scored(sql, kind) for sql in candidates]
    rows = [None if sql is None else executor.predicted_rows(db_path, MAX_GOLD_ROWS, *sql) for sql in queries]
    voters = [index for index, result in enumerate(rows) if result is not None]
    if not voters:
        return next((index for index, sql in enumerate(queries) if sql is not None), 0), 0
    order_matters = 2 * sum("order by" in queries[index][0].lower() for index in voters) > len(voters)

    def same(one: int, other: int) -> bool:
        if kind == "bird":
            return set(rows[one]) == set(rows[other])
        return results_equal(rows[one], rows[other], order_matters)

    # Equality is transitive, so the earliest equal candidate stands for its group.
    groups = Counter(next(first for first in voters if same(first, index)) for index in voters)
    return groups.most_common(1)[0]  # of equally large ones the first


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The probability that k of the samples, drawn without replacement, hold a right one.

    The unbiased estimator of Chen et al. 2021, equation 1.
    """
    return 1 - comb(samples - right, k) / comb(samples, k)


def add_votes(records: Sequence[dict], runs: Sequence[Sequence[dict]], scorer: Scorer) -> dict:
    """Add predicted_majority, ex_majority and em_majority to each record; return the summary's numbers.

    `runs` are sampled evaluations of the same questions in the same order, with the same histories (see
    mtsql.report.evaluation.score_records). The numbers, as fractions: ex_majority, em_majority, and
    pass_at_k of EX by k (1, 2, 4, ... and the number of runs).
    """
    counts = [sum(sample["ex"] for sample in samples) for samples in zip(*runs, strict=True)]
    n = len(runs)
    ks = [2**power for power in range(n.bit_length()) if 2**power < n] + [n]
    pass_at = {str(k): fmean(pass_at_k(n, count, k) for count in counts) for k in ks}
    return _add_elected(records, runs, scorer, "majority") | {"pass_at_k": pass_at}


def add_fallback(records: Sequence[dict], runs: Sequence[Sequence[dict]], scorer: Scorer) -> dict:
    """Add predicted_fallback, ex_fallback and em_fallback to each record; return the summary's numbers.

    They are the record's own, or the majority's where `runs` hold the question: sampled evaluations of those
    that the policy left without SQL. Such an agent knows that it has failed, and tries again.
    """
    return _add_elected(records, runs, scorer, "fallback")


def _add_elected(
    records: Sequence[dict], runs: Sequence[Sequence[dict]], scorer: Scorer, name: str
) -> dict[str, float]:
    samples = defaultdict(list)
    for run in runs:
        for sample in run:
            samples[sample["example_id"]].append(sample)
    for record in records:
        chosen, own = record, samples[record["example_id"]]
        if own:
            answers, path = [sample["predicted"] for sample in own], scorer.paths[record["db_id"]]
            chosen = own[majority_vote(answers, path, scorer.executor, scorer.kind)[0]]
        record |= {f"{key}_{name}": chosen[key] for key in ("predicted", "ex", "em")}
    return {f"{metric}_{name}": fmean(r[f"{metric}_{name}"] for r in records) for metric in ("ex", "em")}


def format_votes(summary: dict) -> str:
    """The numbers of `add_votes` and `add_fallback`, where there are some, a line each."""
    lines = [
        f"{what}: EX {100 * summary[f'ex_{name}']:.1f} %, EM {100 * summary[f'em_{name}']:.1f} %"
        for name, what in (
            ("majority", "majority by execution result"),
            ("fallback", "the same only where there is no SQL"),
        )
        if f"ex_{name}" in summary
    ]
    if "pass_at_k" in summary:
        shares = (f"pass@{k} {100 * share:.1f} %" for k, share in summary["pass_at_k"].items())
        lines.append(", ".join(shares))
    return "\n".join(lines)
