"""Agreement with the official evaluator's verdicts: on the sample, and on more where they are at hand."""

import json
import random

import pytest
from conftest import SAMPLE, SHARED, json_lines

from mtsql.extras.prediction_files import official_prediction
from mtsql.sql.execute import Executor, execution_match
from mtsql.sql.grammar import SqlParseError, SqlSchema, foreign_key_map, parse_sql
from mtsql.sql.match import exact_set_match, hardness, partial_match

VERDICTS = SHARED / "conformance" / "sparc.jsonl"


def verdicts(executor, path, schema, keys, record):
    gold, pred = record["gold"], official_prediction(record["pred"])
    try:
        parse_sql(pred, schema)
        parses = True
    except SqlParseError:
        parses = False
    try:
        matches = int(execution_match(executor, path, gold, pred))
    except ValueError:
        matches = None  # the gold query fails
    return {
        "hardness": hardness(gold, schema),
        "pred_parses": parses,
        "em": int(exact_set_match(gold, pred, schema, keys)),
        "partial_f1": {n: part.f1 for n, part in partial_match(gold, pred, schema, keys).items()},
        "ex": matches,
    }


def check(records, tables, databases):
    """Fail for every verdict that is not the official one."""
    keys = {e["db_id"]: foreign_key_map(e) for e in json.loads(tables.read_text(encoding="utf-8"))}
    executor = Executor(timeout_seconds=20)
    disagreements = []
    for record in records:
        db_id = record["db_id"]
        path = databases / db_id / f"{db_id}.sqlite"
        schema = SqlSchema.from_database(path)
        ours = verdicts(executor, path, schema, keys[db_id], record)
        theirs = {name: record[name] for name in ours}
        if ours != theirs:
            disagreements.append((db_id, record["gold"], record["pred"], ours, theirs))
    assert not disagreements


def test_the_sample_agrees_with_the_official_evaluator():
    records = json_lines(SAMPLE.with_name("verdicts.jsonl"))
    assert len(records) == 200 and {r["ex"] for r in records} == {r["em"] for r in records} == {0, 1}
    check(records, SAMPLE / "tables.json", SAMPLE / "database")


@pytest.mark.skipif(not VERDICTS.exists(), reason="the recorded verdicts are not on this machine")
def test_verdicts_agree_with_the_official_evaluator():
    records = random.Random(0).sample(json_lines(VERDICTS), 600)
    check(records, SHARED / "data/sparc/tables.json", SHARED / "data/database")
