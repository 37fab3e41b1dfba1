"""docs/results/suite_toy.md is what the raw figures beside it make."""

from __future__ import annotations

import json
import tarfile

import pytest
from conftest import ROOT

from mtsql.experiments import tables
from mtsql.experiments.arms import command_of, read_arms, read_coverage

RESULTS, SEEDS = ROOT / "docs" / "results", range(5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The run folder that the archives hold."""
    folder = tmp_path_factory.mktemp("runs")
    for archive in sorted((RESULTS / "suite_toy_raw").glob("*.tar.xz")):
        with tarfile.open(archive) as raw:
            raw.extractall(folder, filter="data")
    return folder


def test_the_tables_are_made_of_the_raw_figures(runs):
    """Those without resampling, which another version of numpy may draw otherwise."""
    page = (RESULTS / "suite_toy.md").read_text(encoding="utf-8")
    arms, coverage = read_arms(runs, SEEDS), read_coverage(runs, SEEDS)
    assert len(arms) > 20
    made = [
        tables.accuracy_table(arms, SEEDS),
        tables.averages_table(arms),
        tables.sizes_table(arms),
        tables.coverage_table(coverage, SEEDS, command_of(runs, SEEDS, "sft")),
        tables.latency_table(arms),
        tables.breakdown_tables(arms),
        tables.abilities_table(arms),
        tables.errors_table(arms),
        tables.cap_table(arms),
    ]
    assert [table[:80] for table in made if table not in page] == []


def test_the_numbers_beside_the_page_are_those_of_the_raw_figures(runs):
    numbers = json.loads((RESULTS / "suite_toy.json").read_text(encoding="utf-8"))
    found = {
        (arm, seed): evaluation.summary
        for arm, seeds in read_arms(runs, SEEDS).items()
        for seed, evaluation in seeds.items()
    }
    assert len(numbers) == len(found)
    for row in numbers:
        summary = found[row["arm"], row["seed"]]
        assert {key: row[key] for key in summary} == summary
