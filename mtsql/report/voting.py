"""Test-time compute: the majority vote by execution result, and pass@k (SQL-Trail, sections 4.3 and A.8)."""

from __future__ import annotations

from collections import Counter
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
    right = []
    for record, *samples in zip(records, *runs, strict=True):
        answers = [sample["predicted"] for sample in samples]
        path = scorer.paths[record["db_id"]]
        winner, _ = majority_vote(answers, path, scorer.executor, scorer.kind)
        chosen = samples[winner]
        record |= {f"{key}_majority": chosen[key] for key in ("predicted", "ex", "em")}
        right.append(sum(sample["ex"] for sample in samples))
    count = len(runs)
    ks = [2**power for power in range(count.bit_length()) if 2**power < count] + [count]
    return {
        **{f"{metric}_majority": fmean(r[f"{metric}_majority"] for r in records) for metric in ("ex", "em")},
        "pass_at_k": {str(k): fmean(pass_at_k(count, c, k) for c in right) for k in ks},
    }


def format_votes(summary: dict) -> str:
    """The numbers of `add_votes` in two lines."""
    ex, em = (100 * summary[f"{metric}_majority"] for metric in ("ex", "em"))
    shares = ", ".join(f"pass@{k} {100 * share:.1f} %" for k, share in summary["pass_at_k"].items())
    return f"majority by execution result: EX {ex:.1f} %, EM {em:.1f} %\n{shares}"
