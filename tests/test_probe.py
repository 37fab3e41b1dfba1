"""The probe of mtsql.extras.probe: its probabilities against a plain forward pass, and its command."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import TOY, run

from evaluate import Args as EvaluateArgs
from mtsql.data.datasets import examples
from mtsql.errors import UserError
from mtsql.extras.probe import Args, Failure, own_failures, probe, repair_contexts
from mtsql.task import begin_task

KEYS = {"failures", "gold_seen", "gold_blind", "gap", "copy_seen", "copy_blind"}


def test_the_probe_reads_what_the_policy_says_after_an_error(work, tmp_path):
    data = ["--data", work / "benchmark", "--model", work / "imitation", "--held-out", 1]
    wrong = tmp_path / "predictions.jsonl"
    asked = json.loads((work / "benchmark" / "train.json").read_text())
    lines = [
        {"example_id": f"{number:05d}/0", "predicted": sql}
        for number in range(len(asked))
        for sql in ("SELECT absent FROM nowhere", "SELECT 1", None)
    ]
    wrong.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = run(
        "-m", "mtsql.extras.probe", *TOY, *data, "--error-hints", "--questions", 3, "--failures", wrong,
        "--out", tmp_path / "probe",
    )  # fmt: skip
    means = json.loads((tmp_path / "probe" / "probe.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "probe" / "probe.jsonl").open()]
    assert "P(gold) seen" in out and {"own", "stale column", "stale table"} <= set(means)
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
    with pytest.raises(UserError, match=r"predictions\.jsonl does not exist"):
        list(own_failures(config, run_))
    (tmp_path / "predictions.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(UserError, match=r"predictions\.jsonl, line 2: give an evaluation's"):
        list(own_failures(config, run_))


def test_its_probabilities_are_those_of_a_plain_forward_pass(work):
    options = EvaluateArgs(
        model=str(work / "imitation"), data=(str(work / "benchmark"),), out="", split="train"
    )
    options = replace(options, wording="compact", error_hints=True, max_prompt_tokens=2000)
    run_ = begin_task(options, "train")
    example = examples(run_.dataset.dialogues)[1]
    failure = Failure("own", example, "SELECT absent FROM nowhere")
    found = probe(run_, failure)
    contexts = repair_contexts(run_.environment, failure)
    policy = run_.policy.eval()
    for name, (given, gold, copy) in contexts.items():
        with torch.no_grad():
            logits = policy(torch.tensor([given])).logits[0, -1]  # (vocabulary,)
        expected = torch.softmax(logits, -1)
        assert abs(expected[gold].item() - found[f"gold_{name}"]) < 1e-4
        assert abs(expected[copy].item() - found[f"copy_{name}"]) < 1e-4
        assert ("tables" in run_.tokens.decode(given)) == (name == "seen")
    assert probe(run_, Failure("own", example, example.gold_sql)) is None  # it does not fail
