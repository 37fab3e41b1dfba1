"""The models in models/toy answer questions over databases that they have not seen."""

from __future__ import annotations

import json

import pytest
from conftest import ROOT, TOY, run

from mtsql.config import from_toml
from mtsql.toy import benchmark
from mtsql.toy.imitation import ImitationConfig
from mtsql.toy.tiny import MODELS

SHIPPED = sorted(path.name for path in (ROOT / MODELS).glob("seed*"))


@pytest.fixture(scope="module")
def unseen(tmp_path_factory, request):
    """A benchmark of another seed than the models' own."""
    folder = tmp_path_factory.mktemp("unseen") / "benchmark"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "SPLITS", {"train": {"known": (1, 1)}, "test": {"known": (10, 2)}})
        benchmark.write_benchmark(folder, seed=benchmark.MODELS_SEED + 100)
    return folder


def test_models_that_are_made_anew_learn_as_the_shipped_ones_did():
    files = ("toy.toml", "toy_suite.toml")
    settings = [from_toml(ROOT / "configs" / file, ImitationConfig) for file in files]
    assert settings[0] == settings[1] and SHIPPED
    for name in SHIPPED:
        made = json.loads((ROOT / MODELS / name / "run.json").read_text())["config"]
        now = json.loads(json.dumps(vars(ImitationConfig(**settings[0], data=("",), out=""))))
        kept = made.keys() - {"data", "out", "seed"}
        assert {key: made[key] for key in kept} == {key: now[key] for key in kept}, name


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_knows_its_sql(name, unseen, tmp_path):
    run(
        "evaluate.py", *TOY, "--data", unseen, "--split", "test", "--model", ROOT / MODELS / name,
        "--tools", "none", "--sampled-runs", 0, "--out", tmp_path / "e",
    )  # fmt: skip
    summary = json.loads((tmp_path / "e" / "summary.json").read_text())
    assert summary["questions"] >= 30 and summary["ex"]["mean"] >= 0.85 and summary["em"]["mean"] >= 0.9
