"""Questions for RL by Equation 13 of SQL-Trail, and that GRPO trains on exactly those."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from conftest import GOLD, QUESTION, write_lines

from mtsql.data.datasets import Example
from mtsql.errors import UserError
from mtsql.extras.hard_yet_solvable import Args, choose, main, score
from mtsql.learn.curriculum import SuccessCount, curriculum_levels, read_counts


def test_equation_13():
    rights = {0: 1.0, 1: 1 / 6, 2: 1 / 3, 5: 5 / 6, 6: 1.0}
    assert {right: score(SuccessCount("q", right, 6, "zoo")) for right in rights} == rights
    assert score(SuccessCount("never sampled", 0, 0, "zoo")) == 1.0


def test_the_hardest_that_can_be_solved_then_the_hardest_that_cannot():
    shares = {"a": (1, 6), "b": (5, 6), "c": (1, 12), "d": (3, 6), "all": (6, 6), "unsampled": (0, 0)}
    unsolved = {"u": "easy", "v": "extra", "w": "medium", "x": "hard", "y": "unread"}
    counts = [SuccessCount(name, *share, "zoo", "medium") for name, share in shares.items()]
    counts += [SuccessCount(name, 0, 6, "zoo", hardness) for name, hardness in unsolved.items()]

    def names(balanced: int, exploration: int) -> tuple[str, str]:
        parts = choose(counts, balanced, exploration, random.Random(0))
        return tuple(" ".join(count.example_id for count in part) for part in parts)

    assert names(3, 2) == ("c a d", "v x")
    assert names(4, 5) == names(700, 327) == ("c a d b", "v x w u y")  # what is there
    assert names(0, 1) == ("", "v")


def test_ties_are_broken_by_the_seed():
    counts = [SuccessCount(str(i), i % 2, 6, "zoo", "extra") for i in range(40)]
    first, again, other = (choose(counts, 5, 5, random.Random(seed)) for seed in (0, 0, 1))
    assert first == again
    assert all(set(one) != set(two) for one, two in zip(first, other, strict=True))
    assert all(c.right == 1 for c in first[0]) and all(c.right == 0 for c in first[1])


def test_grpo_trains_on_the_chosen_questions(tmp_path, capsys):
    counts = [SuccessCount(f"{number:05d}/0", number % 7, 6, "music", "easy") for number in range(28)]
    path = write_lines(tmp_path / "counts.jsonl", map(vars, counts))
    config = Args(counts=str(path), out=str(tmp_path / "chosen"), balanced=6, exploration=99)
    main(config)
    chosen = read_counts(tmp_path / "chosen" / "counts.jsonl")
    assert [c.right for c in chosen] == [1] * 4 + [2] * 2 + [0] * 4
    assert "6 of 6 questions that are hard yet solvable, 4 of 99 that no" in capsys.readouterr().out
    questions = [Example(c.example_id, c.example_id[:5], "music", 0, QUESTION, GOLD, ()) for c in counts]
    (level,) = curriculum_levels(questions, chosen, 0)  # as train_grpo.py does with --level-size 0
    assert sorted(q.id for q in level) == sorted(c.example_id for c in chosen)
    for changed, problem in (
        ({"out": str(tmp_path)}, "would replace the counts"),
        ({"balanced": 0, "exploration": 0}, "nothing to choose"),
    ):
        with pytest.raises(UserError, match=problem):
            main(replace(config, **changed))
    assert read_counts(path) == counts
