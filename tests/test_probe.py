"""The probe of mtsql.extras.probe: its probabilities against a plain forward pass, and its command."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import data_of, json_lines, run, write_lines

from evaluate import Args as EvaluateArgs
from mtsql.agent.tools import EXEC_SQL
from mtsql.data.datasets import examples
from mtsql.errors import UserError
from mtsql.extras.demonstrations import Mistake
from mtsql.extras.probe import Args, own_failures, probe
from mtsql.recipes.mtsql_r1 import verdict
from mtsql.task import begin_task

KEYS = {"failures", "gold_seen", "gold_blind", "gap", "copy_seen", "copy_blind"}


def test_the_probe_reads_what_the_policy_says_after_an_error(work, tmp_path):
    asked = json.loads((work / "benchmark" / "train.json").read_text())
    lines = [
        {"example_id": f"{number:05d}/0", "predicted": sql}
        for number in range(len(asked))
        for sql in ("SELECT absent FROM nowhere", "SELECT 1", None)
    ]
    wrong = write_lines(tmp_path / "predictions.jsonl", lines)
    out = run(
        "-m", "mtsql.extras.probe", *data_of(work), "--held-out", 1, "--error-hints", "--questions", 3,
        "--failures", wrong, "--out", tmp_path / "probe",
    )  # fmt: skip
    means = json.loads((tmp_path / "probe" / "probe.json").read_text())
    rows = json_lines(tmp_path / "probe" / "probe.jsonl")
    assert "gold_seen" in out and {"own", "stale column", "stale table"} <= set(means)
    assert all(set(row) == KEYS for row in means.values())
    own = [row for row in rows if row["kind"] == "own"]
    assert own and {row["failed"] for row in own} == {"SELECT absent FROM nowhere"}  # what fails, alone
    assert means["stale table"]["failures"] == 3
    for row in rows:
        assert abs(row["gap"] - (row["gold_seen"] - row["gold_blind"])) < 1e-6
        assert 0 < row["gold_seen"] + row["copy_seen"] <= 1.001 and 0 < row["gold_blind"] < 1


@pytest.mark.parametrize("line", ["[1]", "{", "{}", '{"example_id": [], "predicted": "x"}'])
def test_failures_from_another_file_are_one_sentence(tmp_path, line):
    config = Args(model="m", data=("d",), out="", failures=str(tmp_path / "predictions.jsonl"))
    run_ = SimpleNamespace(dataset=SimpleNamespace(dialogues=()))
    with pytest.raises(UserError, match=r"predictions\.jsonl: No such file"):
        list(own_failures(config, run_))
    (tmp_path / "predictions.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(UserError, match=r"predictions\.jsonl, line 2: give an evaluation's"):
        list(own_failures(config, run_))


def test_its_probabilities_are_of_the_token_where_repair_and_copy_part(work):
    options = EvaluateArgs(
        model=str(work / "imitation"), data=(str(work / "benchmark"),), out="", split="train",
        wording="compact", error_hints=True, max_prompt_tokens=2000,
    )  # fmt: skip
    task, asked = begin_task(options, "train"), []
    example, policy, text = examples(task.dataset.dialogues)[1], task.policy.eval(), task.tokens.decode
    shown = (example, task.environment.schemas[example.db_id])

    def watched(ids, **how):
        asked.append(ids)
        return policy(ids, **how)

    watched.device = policy.device
    copied = "SELECT absent FROM nowhere"
    found = probe(replace(task, policy=watched), example, Mistake(copied, shown))
    judged, call = verdict(EXEC_SQL, False) + "\n", task.environment.recipe.call
    gold, copy = (task.tokens.message_ids(judged + call(sql)) for sql in (example.gold_sql, copied))
    place = next(i for i, (a, b) in enumerate(zip(gold, copy, strict=False)) if a != b)
    for ids, name in zip(asked, ("seen", "blind"), strict=True):
        given = text(ids[0].tolist())
        assert ("error: the query fails" in given) == (name == "blind")
        assert ("tables" in given) == (name == "seen")  # the hint
        assert ids[0, -place:].tolist() == gold[:place]
        with torch.no_grad():
            expected = torch.softmax(policy(ids).logits[0, -1], -1)  # (vocabulary,)
        assert abs(expected[gold[place]].item() - found[f"gold_{name}"]) < 1e-4
        assert abs(expected[copy[place]].item() - found[f"copy_{name}"]) < 1e-4
    assert probe(task, example, Mistake(example.gold_sql, shown)) is None  # it does not fail
