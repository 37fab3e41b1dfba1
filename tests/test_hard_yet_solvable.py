"""Questions for RL by Equation 13 of SQL-Trail, and that GRPO trains on exactly those."""

from __future__ import annotations

import json
import random

import pytest
from conftest import ROOT, TOY

from mtsql.config import read_options, user_errors
from mtsql.data.datasets import examples
from mtsql.extras import hard_yet_solvable
from mtsql.extras.hard_yet_solvable import SelectionConfig, choose, score
from mtsql.learn.curriculum import SuccessCount, curriculum_levels, read_counts
from mtsql.sql.execute import Executor
from mtsql.sql.score import Scorer, scorable
from mtsql.task import load_split
from mtsql.toy import benchmark as toy


def test_equation_13():
    rights = {0: 1.0, 1: 1 / 6, 2: 1 / 3, 5: 5 / 6, 6: 1.0}
    assert {right: score(SuccessCount("q", right, 6, "zoo")) for right in rights} == rights
    assert score(SuccessCount("never sampled", 0, 0, "zoo")) == 1.0


def test_the_hardest_that_can_be_solved_then_the_hardest_that_cannot():
    shares = {"a": (1, 6), "b": (5, 6), "c": (1, 12), "d": (3, 6), "all": (6, 6), "unsampled": (0, 0)}
    unsolved = {"u": "easy", "v": "extra", "w": "medium", "x": "hard", "y": "unread"}
    counts = [SuccessCount(name, *share, "zoo") for name, share in shares.items()] + [
        SuccessCount(n, 0, 6, "zoo") for n in unsolved
    ]
    hardness = dict.fromkeys(shares, "medium") | unsolved

    def names(balanced: int, exploration: int) -> tuple[str, str]:
        parts = choose(counts, hardness, balanced, exploration, random.Random(0))
        return tuple(" ".join(count.example_id for count in part) for part in parts)

    assert names(3, 2) == ("c a d", "v x")
    assert names(4, 5) == names(700, 327) == ("c a d b", "v x w u y")  # what is there
    assert names(0, 1) == ("", "v")


def test_ties_are_broken_by_the_seed():
    counts = [SuccessCount(str(i), i % 2, 6, "zoo") for i in range(40)]
    hardness = {str(i): "extra" for i in range(40)}
    first, again, other = (choose(counts, hardness, 5, 5, random.Random(seed)) for seed in (0, 0, 1))
    assert first == again
    assert all(set(one) != set(two) for one, two in zip(first, other, strict=True))
    assert all(c.right == 1 for c in first[0]) and all(c.right == 0 for c in first[1])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A small benchmark, with counts of its questions of which some were always right or not sampled."""
    folder = tmp_path_factory.mktemp("choice")
    splits = {"train": {"known": (3, 3)}, "dev": {"known": (1, 1)}, "test": {"known": (1, 1)}}
    toy.write_benchmark(folder / "benchmark", seed=0, splits=splits)
    dialogues = json.loads((folder / "benchmark" / "train.json").read_text())
    names = [
        (f"{i:05d}/{k}", dialogue["database_id"])
        for i, dialogue in enumerate(dialogues)
        for k in range(len(dialogue["interaction"]))
    ]
    counts = [SuccessCount(name, number % 7, 6, db) for number, (name, db) in enumerate(names[1:])]
    counts += [SuccessCount("99999/0", 1, 6, "zoo"), SuccessCount(names[0][0], 0, 0, names[0][1])]
    (folder / "counts.jsonl").write_text("".join(json.dumps(vars(c)) + "\n" for c in counts))
    return folder


def options_of(data, out, *further):
    options = [*TOY, "--data", data / "benchmark", "--counts", data / "counts.jsonl", "--out", out, *further]
    return list(map(str, options))


def test_grpo_trains_on_the_chosen_questions(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    options = options_of(data, tmp_path, "--balanced", 4, "--exploration", 99)
    hard_yet_solvable.main(read_options(SelectionConfig, "", options))
    chosen = read_counts(tmp_path / "counts.jsonl")
    unsolved = [c for c in read_counts(data / "counts.jsonl") if c.sampled and not c.right]
    assert [c.right for c in chosen] == sorted(c.right for c in chosen[:4]) + [0] * len(unsolved)
    assert {c.example_id for c in chosen[4:]} == {c.example_id for c in unsolved} and chosen[0].right == 1
    printed = capsys.readouterr().out
    assert "4 questions hard yet solvable\n" in printed
    assert f"{len(unsolved)} questions that no sample solved, not the 99 asked for" in printed
    # As train_grpo.py makes its levels with --level-size 0.
    config = SelectionConfig(data=(str(data / "benchmark"),), out="", counts="")
    dataset = load_split(config, "train")
    questions = scorable(examples(dataset.dialogues), Scorer(dataset.schemas, Executor()))
    (level,) = curriculum_levels(questions, chosen, 0)
    assert sorted(q.id for q in level) == sorted(c.example_id for c in chosen)


def test_errors_are_one_sentence(data, tmp_path, monkeypatch, capsys):
    def refused(out, *further):
        with pytest.raises(SystemExit) as stop:
            config = read_options(SelectionConfig, "", options_of(data, out, *further))
            user_errors(hard_yet_solvable.main, config)
        assert stop.value.code == 2
        return capsys.readouterr().err

    monkeypatch.chdir(ROOT)
    before = (data / "counts.jsonl").read_bytes()
    assert "would replace the counts" in refused(data)
    assert (data / "counts.jsonl").read_bytes() == before
    assert "nothing to choose" in refused(tmp_path, "--balanced", 0, "--exploration", 0)
    assert not list(tmp_path.iterdir())
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(vars(SuccessCount("00000/0", 1, 6, "zoo"))) + "\n")
    assert "the curriculum is of other data: question 00000/0 is over zoo" in refused(
        tmp_path / "out", "--counts", other
    )
