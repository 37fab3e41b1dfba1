"""The majority vote by execution result, pass@k, and all of it in evaluate.py."""

from __future__ import annotations

import json
from itertools import combinations
from statistics import fmean

import pytest
from conftest import data_of, json_lines, make_database, run

from mtsql.data.schema import load_schemas
from mtsql.report.voting import majority_vote, pass_at_k
from mtsql.sql.execute import Executor
from mtsql.sql.score import Scorer

UP, DOWN = "SELECT x FROM t ORDER BY x", "SELECT x FROM t ORDER BY x DESC"
NO_ROW, BROKEN = "SELECT x FROM t WHERE x > 9", "SELECT nothing FROM nowhere"


@pytest.fixture(scope="module")
def vote(tmp_path_factory):
    """The index that wins among candidates over t(x, y): (1, 'a'), (2, 'b'), (2, NULL)."""
    script = "create table t (x, y); insert into t values (1, 'a'), (2, 'b'), (2, null);"
    path = make_database(tmp_path_factory.mktemp("vote") / "t.sqlite", script)
    return lambda *candidates, kind="official": majority_vote(candidates, path, Executor(), kind)


@pytest.mark.parametrize(
    ("winner", "candidates"),
    [
        (1, ["SELECT 1", "SELECT 2", "SELECT 3 - 1"]),  # the earliest member of the largest group
        (0, ["SELECT 1", "SELECT 2", "SELECT 2", "SELECT 1"]),  # a tie: the earliest group
        # Neither failures nor missing answers vote, however many they are.
        (4, [BROKEN, None, BROKEN, "", "SELECT 1", BROKEN]),
        (2, [None, None, BROKEN, "-- nothing"]),  # nothing runs: the first answer
        (0, [None, None]),
        # Empty results are equal whatever their columns, and are no failures.
        (1, ["SELECT 1", NO_ROW, "SELECT x, y FROM t WHERE 0"]),
        # NULL equals NULL; it is neither 0, nor '', nor no row.
        (4, ["SELECT 0", "SELECT ''", NO_ROW, "SELECT 1", "SELECT NULL", "SELECT max(x) FROM t WHERE x > 9"]),
        # Without ORDER BY in most of the voters the order of rows is free ...
        (1, ["SELECT 7", "SELECT x FROM t", DOWN, "SELECT y FROM t"]),
        (0, [DOWN, UP, "SELECT x FROM t", "SELECT 7 FROM t"]),  # half is not most
        # ... with it the order counts; who does not run has no say in that either.
        (1, [DOWN, UP, "SELECT x FROM t"]),
        (4, [BROKEN, BROKEN, None, DOWN, UP, UP]),
    ],
)
def test_votes_by_hand(vote, winner, candidates):
    assert vote(*candidates) == winner


@pytest.mark.parametrize(
    ("winners", "candidates"),
    [  # by the official EX, with DISTINCT kept, by BIRD's
        ((1, 0, 0), ["SELECT x FROM t GROUP BY x", "SELECT x FROM t", "SELECT DISTINCT x FROM t"]),
        ((1, 1, 0), ["SELECT 7", "SELECT x, y FROM t", "SELECT y, x FROM t"]),
        ((0, 0, 1), ["SELECT 7 FROM t ORDER BY 1", UP, DOWN]),
    ],
)
def test_votes_by_each_kind_of_ex(vote, winners, candidates):
    assert tuple(vote(*candidates, kind=k) for k in ("official", "keep_distinct", "bird")) == winners


def test_pass_at_k_by_hand_and_over_all_subsets():
    assert (pass_at_k(8, 0, 8), pass_at_k(8, 1, 8), pass_at_k(8, 2, 1)) == (0, 1, 0.25)
    assert pass_at_k(4, 1, 2) == 0.5  # the right one is in 3 of 6 pairs
    assert pass_at_k(5, 4, 2) == 1  # fewer wrong ones than k
    for samples in range(1, 7):
        for right in range(samples + 1):
            for k in range(1, samples + 1):
                drawn = [max(d) for d in combinations([1] * right + [0] * (samples - right), k)]
                assert pass_at_k(samples, right, k) == pytest.approx(fmean(drawn))


def test_evaluation_votes_over_its_sampled_runs(work, tmp_path):
    def evaluate(name, *options):
        out = run(
            "evaluate.py", *data_of(work), "--split", "train", "--dialogues", 4, "--out", tmp_path / name,
            *options,
        )  # fmt: skip
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        return out, summary, json_lines(tmp_path / name / "predictions.jsonl")

    out, summary, records = evaluate("voted", "--sampled-runs", 3)
    assert "majority by execution result: EX" in out and "pass@1" in out
    schemas = load_schemas(work / "benchmark" / "tables.json", work / "benchmark" / "database")
    scorer = Scorer(schemas, Executor())
    right = [round(3 * record["ex_sampled"]) for record in records]
    assert len(set(right)) > 1
    for record, count in zip(records, right, strict=True):
        verdict = scorer.ex(record["db_id"], record["gold"], record["predicted_majority"])
        assert record["ex_majority"] == verdict
        assert count in (1, 2) or verdict == (count == 3)  # the winner is one of the three
    for metric in ("ex", "em"):
        assert summary[f"{metric}_majority"] == fmean(r[f"{metric}_majority"] for r in records)
    shares = {str(k): fmean(pass_at_k(3, count, k) for count in right) for k in (1, 2, 3)}
    assert summary["pass_at_k"] == pytest.approx(shares | {"1": summary["ex_sampled"]})
    out, summary, records = evaluate("predicted", "--sampled-runs", 2, "--history", "predicted")
    assert "no majority vote and no pass@k: with --history predicted" in out and "ex_sampled" in summary
    assert "pass_at_k" not in summary and "ex_majority" not in records[0]
