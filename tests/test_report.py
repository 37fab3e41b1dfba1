"""Evaluation numbers, the metrics log and figures; votes over sampled runs."""

import json
from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from conftest import data_of, json_lines, make_database, run
from matplotlib.image import imread

from mtsql.agent.trajectory import Status
from mtsql.data.schema import load_schemas
from mtsql.errors import UserError
from mtsql.extras.plot import plot_training
from mtsql.extras.prediction_files import paired_difference
from mtsql.report.evaluation import ABILITIES
from mtsql.report.metrics import MetricsLog, bootstrap_interval, excludes_zero, format_summary, summarise
from mtsql.report.records import AnswerLog, drop_later_records
from mtsql.report.voting import majority_vote, pass_at_k
from mtsql.sql.execute import Executor
from mtsql.sql.score import FURTHER_METRICS, Scorer


def test_interval_of_hand_cases():
    assert bootstrap_interval([[1, 1], [1]]) == (1.0, 1.0)
    assert bootstrap_interval([[1, 0, 1]]) == pytest.approx((2 / 3, 2 / 3))  # one dialogue
    assert bootstrap_interval([[0], [1]]) == (0.0, 1.0)  # 0, 1/2, 1 at 25, 50, 25 %
    assert bootstrap_interval([[0, 0, 0], [1]]) == (0.0, 1.0)  # a mean over questions: 0, 1/4 or 1


@pytest.mark.parametrize(("dialogues", "error"), [(100, 0.05), (400, 0.025)])
def test_interval_agrees_with_theory_and_repeats(dialogues, error):
    """Of one-question dialogues at 50 %: 1.96 standard errors. Of many, equal ones are drawn as one."""
    values = [[i % 2] for i in range(dialogues)]
    interval = bootstrap_interval(values)
    assert interval == pytest.approx((0.5 - 1.96 * error, 0.5 + 1.96 * error), abs=0.3 * error)
    assert bootstrap_interval(values) == interval
    uneven = [[i % 7 / 6] for i in range(dialogues)]
    assert bootstrap_interval(uneven, seed=1) != bootstrap_interval(uneven)


def test_an_end_within_its_own_error_of_zero_claims_nothing():
    draws = np.ones(10_000)
    for beyond, excluded in ((0, True), (200, True), (240, False), (250, False), (300, False)):
        draws[:beyond] = -1  # the interval's end is above 0 up to 249; its own error is 31 draws
        assert (excludes_zero(draws), excludes_zero(-draws)) == (excluded, excluded), beyond
    assert not excludes_zero(np.zeros(10_000))


def test_paired_difference_by_hand():
    a = [[1, 1], [1, 1], [1, 0]]
    b = [[1, 0], [0, 0], [0, 0]]
    difference, low, high, p = paired_difference(a, b)
    assert difference == pytest.approx(4 / 6)
    assert low == pytest.approx(0.5) and high == pytest.approx(5 / 6, abs=0.2)
    assert p == pytest.approx(2 * 0.5**4)  # four discordant questions, all one way
    assert paired_difference(b, a)[0] == pytest.approx(-4 / 6)
    assert paired_difference(a, a) == (0.0, 0.0, 0.0, 1.0)
    assert paired_difference([[1, 0, 1]], [[0, 1, 1]])[3] == 1.0
    with pytest.raises(ValueError, match="argument 2 is longer"):
        paired_difference([[1]], [[1, 0]])


def make_record(dialogue: object, turn: int, ex: int, em: int, **changes) -> dict:
    place = {"dialogue_id": dialogue, "turn_index": turn, "hardness": "easy", "status": "answered"}
    scores = {"ex": ex, "em": em, **dict.fromkeys(FURTHER_METRICS, ex), "pred_parses": dialogue == "a"}
    counts = {"interactions": 2, "turns": 3, "sampled_tokens": 10, "response_tokens": 20}
    counts |= {"thought_characters": 0, "difficulty": "", "reward_parts": {}}
    other = {"tool_calls": {"exec_sql": 1}, "abilities": dict.fromkeys(ABILITIES, 1.0)}
    return {"predicted": "SELECT 1"} | place | scores | counts | other | changes


RECORDS = [
    make_record("a", 0, 1, 1),
    make_record("a", 1, 1, 0, hardness="hard", sampled_tokens=30, abilities=dict.fromkeys(ABILITIES, 0.25)),
    make_record("b", 0, 1, 1, tool_calls={}, abilities=dict.fromkeys(ABILITIES, 0.5) | {"m_verify": None}),
    make_record("b", 5, 0, 0, hardness="unknown", status=Status.OUT_OF_TOKENS, interactions=4),
]


def test_turns_thoughts_and_parts_of_rewards_by_hand():
    names = ("turns", "thought_characters", "reward_parts", "difficulty")
    more = (
        (3, 10, {"syntax": 1.0}, "simple"), (3, 30, {"syntax": 0.5}, "simple"),
        (3, 0, {"syntax": 1.0}, "challenging"), (5, 40, {"syntax": 0.0}, ""),
    )  # fmt: skip
    records = [r | dict(zip(names, values, strict=True)) for r, values in zip(RECORDS, more, strict=True)]
    summary = summarise(records)
    assert (summary["turns"], summary["turns_deviation"]) == (3.5, pytest.approx(0.75**0.5))
    assert summary["turns_by_difficulty"] == {"simple": 3, "challenging": 3}
    assert summary["thought_characters_by_difficulty"] == {"simple": 20, "challenging": 0}
    assert summary["reward_parts"] == {"syntax": 0.625}
    text = format_summary(summary)
    assert "3.50 an answer, deviation 0.87" in text and "reward: syntax" in text
    assert summarise(RECORDS)["reward_parts"] == {}


def test_summary_by_hand():
    summary = summarise(RECORDS)
    assert (summary["questions"], summary["dialogues"]) == (4, 2)
    ex, em = summary["ex"], summary["em"]
    assert (ex["mean"], ex["low"], ex["high"], ex["interaction_match"]) == (0.75, 0.5, 1.0, 0.5)
    assert (em["mean"], em["interaction_match"]) == (0.5, 0.0)
    assert ex["by_turn"] == {"1": 1.0, "2": 1.0, "3": None, "4": None, ">4": 0.0}
    assert em["by_turn"]["2"] == 0.0
    assert summary["questions_by_turn"] == {"1": 2, "2": 1, "3": 0, "4": 0, ">4": 1}
    assert ex["by_hardness"] == {"easy": 1, "medium": None, "hard": 1, "extra": None, "unknown": 0}
    assert set(summary["status"]) == {str(s) for s in Status}
    assert (summary["status"]["answered"], summary["status"]["out_of_tokens"]) == (0.75, 0.25)
    assert summary["tool_calls"] == {"exec_sql": 0.75}
    assert summary["further"]["ex_bird"] == 0.75
    assert (summary["official_grammar_cannot_read"], summary["answers"]) == (2, 4)
    assert (summary["interactions"], summary["sampled_tokens"]) == (2.5, 15.0)
    assert summary["interactions_by_turn"] == {"1": 2.0, "2": 2.0, "3": None, "4": None, ">4": 4.0}
    assert summary["sampled_tokens_by_hardness"]["hard"] == 30.0
    assert summary["abilities"]["generation"] == (1 + 0.25 + 0.5 + 1) / 4
    assert summary["abilities"]["m_verify"] == 0.75  # over the three questions that have one
    assert json.loads(json.dumps(summary)) == summary
    with pytest.raises(ValueError, match="nothing to summarise"):
        summarise([])


def test_questions_whose_prompt_is_too_long_are_counted():
    lines = format_summary(summarise(RECORDS)).splitlines()
    table = lines[2 : lines.index("", 2)]
    assert {len(line) for line in table} == {50}  # it is aligned
    assert "turn >4                        1      0.0      0.0" in table
    assert "turn 3                         0        -        -" in table
    assert not any("not asked" in line for line in lines)  # one ran out of tokens, but had been asked
    summary = summarise([*RECORDS, RECORDS[-1] | {"response_tokens": 0, "sampled_tokens": 0}])
    assert summary["not_asked"] == 1
    assert "\n1 of 5 were not asked, and count as wrong: their prompt is" in format_summary(summary)


def test_metrics_log_columns_and_resume(tmp_path):
    path = tmp_path / "metrics.csv"
    log = MetricsLog(path)
    for step in range(4):
        log.append({"step": step, "reward": step / 2, "note": 'a "b", c'} if step != 1 else {"step": 1})
    with pytest.raises(ValueError, match="not in fieldnames: 'late'"):
        log.append({"step": 9, "late": 1})
    text = path.read_text()
    assert text.splitlines()[:3] == ["step,reward,note", '0,0.0,"a ""b"", c"', "1,,"]
    path.write_text(text + "4,2.")  # cut off by a crash
    MetricsLog(path, resume_step=2).append({"note": "again", "step": 2})
    assert path.read_text().splitlines()[1:] == ['0,0.0,"a ""b"", c"', "1,,", "2,,again"]
    MetricsLog(path).append({"step": 0, "other": 1})  # a new run starts anew
    assert path.read_text() == "step,other\n0,1\n"
    MetricsLog(path, resume_step=5).append({"step": 5, "other": 2})
    assert path.read_text() == "step,other\n0,1\n5,2\n"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="is damaged; put it right"):
        MetricsLog(path, resume_step=1)
    for cut_off in ("1,0.5", "1"):  # 0.5 of 0.5625, and whatever its step
        path.write_text("step,reward\n0,0.25\n" + cut_off)
        MetricsLog(path, resume_step=5)
        assert path.read_text() == "step,reward\n0,0.25\n"


def test_a_damaged_log_is_one_sentence(tmp_path):
    path = tmp_path / "noise"
    path.write_bytes(b"step,a\nx,\xff\x00\n")
    for read in (lambda: MetricsLog(path, 2), lambda: AnswerLog(path, {})):
        with pytest.raises(UserError, match="noise is damaged"):
            read()
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match="line 1: not a trajectory"):
        drop_later_records(path, 3)


def test_figures_are_written(tmp_path):
    path = tmp_path / "metrics.csv"
    log = MetricsLog(path)
    for step in range(5):
        log.append({"step": step, "reward": 0.1 * step, "ex": "" if step % 2 else 0.5, "entropy": 1})
    figure = tmp_path / "plots" / "training.png"
    assert plot_training([path], figure) == figure
    alone = imread(figure)
    other = tmp_path / "other" / "metrics.csv"
    other.parent.mkdir()
    MetricsLog(other).append({"step": 0, "reward": 1.0})
    assert imread(plot_training([other], figure)).shape[1] < alone.shape[1]  # one panel, not three
    assert imread(plot_training([path, other], figure)).shape == alone.shape
    MetricsLog(path).append({"step": 0, "loss": 1.0})
    with pytest.raises(UserError, match="no row with any of reward, ex"):
        plot_training([path], figure)
    for noise in (b"\xff\xfe", b"step,ex\nx,1\n", b"ex\n1\n", b"step,ex\n1,\0\n"):
        path.write_bytes(noise)
        with pytest.raises(UserError, match=f"{path} is damaged"):
            plot_training([path], figure)
    path.write_text("\ufeffstep,reward\n0,1.0\n", "utf-8")
    plot_training([path], figure)


# Votes over sampled runs, pass@k


UP, DOWN = "SELECT x FROM t ORDER BY x", "SELECT x FROM t ORDER BY x DESC"
NO_ROW, BROKEN = "SELECT x FROM t WHERE x > 9", "SELECT nothing FROM nowhere"


@pytest.fixture(scope="module")
def vote(tmp_path_factory):
    """The index that wins among candidates over t(x, y): (1, 'a'), (2, 'b'), (2, NULL)."""
    script = "create table t (x, y); insert into t values (1, 'a'), (2, 'b'), (2, null);"
    path = make_database(tmp_path_factory.mktemp("vote") / "t.sqlite", script)
    return lambda *candidates, kind="official": majority_vote(candidates, path, Executor(), kind)[0]


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
        asked = ["--split", "train", "--dialogues", 4, "--out", tmp_path / name]
        out = run("evaluate.py", *data_of(work), *asked, *options)
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        return out, summary, json_lines(tmp_path / name / "predictions.jsonl")

    out, summary, records = evaluate("voted", "--sampled-runs", 3)
    assert "majority by execution result: EX" in out and "pass@1" in out
    schemas = load_schemas(work / "benchmark" / "tables.json", work / "benchmark" / "database")
    scorer = Scorer(schemas, Executor())
    right = [round(3 * record["ex_sampled"]) for record in records]
    assert {1, 2} & set(right)  # runs differ
    for record, count in zip(records, right, strict=True):
        verdict = scorer.ex(record["db_id"], record["gold"], record["predicted_majority"])
        assert record["ex_majority"] == verdict
        assert count in (1, 2) or verdict == (count == 3)  # the winner is one of the three
    for metric in ("ex", "em"):
        assert summary[f"{metric}_majority"] == fmean(r[f"{metric}_majority"] for r in records)
    shares = {str(k): fmean(pass_at_k(3, count, k) for count in right) for k in (1, 2, 3)}
    assert summary["pass_at_k"] == pytest.approx(shares | {"1": summary["ex_sampled"]})
    # The same votes only where the policy has no SQL.
    out, summary, fallen = evaluate("fallback", "--fallback", 3)
    assert 0 < sum(record["predicted"] is None for record in fallen) < len(fallen)
    for record, voted in zip(fallen, records, strict=True):
        expected = voted if record["predicted"] is None else record
        name = "_majority" if record["predicted"] is None else ""
        assert all(record[f"{key}_fallback"] == expected[key + name] for key in ("predicted", "ex", "em"))
    assert "the same only where there is no SQL: EX" in out
    assert summary["ex_fallback"] == fmean(record["ex_fallback"] for record in fallen)
    asked = [*data_of(work), "--history", "predicted", "--fallback", 3, "--out", tmp_path / "no"]
    assert "--fallback needs --history gold" in run("evaluate.py", *asked, expect=2)
    out, summary, records = evaluate("predicted", "--sampled-runs", 2, "--history", "predicted")
    assert "no majority vote and no pass@k: with --history predicted" in out and "ex_sampled" in summary
    assert "pass_at_k" not in summary and "ex_majority" not in records[0]
