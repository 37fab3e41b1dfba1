"""Agreement with the official evaluator's verdicts: on the sample, and on more where they are at hand."""

import random

import pytest
from conftest import SAMPLE, SHARED, json_lines

from mtsql.data.schema import load_schemas
from mtsql.extras.prediction_files import score_pair
from mtsql.sql.execute import Executor
from mtsql.sql.score import Scorer

VERDICTS = SHARED / "conformance" / "sparc.jsonl"
OFFICIAL = ("hardness", "pred_parses", "em", "partial_f1", "ex")


def check(records, tables, databases):
    """Fail for every verdict that is not the official one."""
    scorer, disagreements = Scorer(load_schemas(tables, databases), Executor(timeout_seconds=20)), []
    for record in records:
        found = score_pair(record | {"predicted": record["pred"]}, scorer, "all", plug_value=False)
        if found["status"] == "gold failed":
            found["ex"] = None
        ours, theirs = ({name: of[name] for name in OFFICIAL} for of in (found, record))
        if ours != theirs:
            disagreements.append((record["db_id"], record["gold"], record["pred"], ours, theirs))
    assert not disagreements


def test_the_sample_agrees_with_the_official_evaluator():
    records = json_lines(SAMPLE.with_name("verdicts.jsonl"))
    assert len(records) == 200 and {r["ex"] for r in records} == {r["em"] for r in records} == {0, 1}
    check(records, SAMPLE / "tables.json", SAMPLE / "database")


@pytest.mark.skipif(not VERDICTS.exists(), reason="the recorded verdicts are not on this machine")
def test_verdicts_agree_with_the_official_evaluator():
    records = random.Random(0).sample(json_lines(VERDICTS), 600)
    check(records, SHARED / "data/sparc/tables.json", SHARED / "data/database")
