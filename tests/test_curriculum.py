"""The curriculum's levels and how steps are shared out among them; SQL-Trail's choice of questions."""

import json
import random
from dataclasses import replace

import pytest
from conftest import EXAMPLE, write_lines

from mtsql.errors import UserError
from mtsql.extras.hard_yet_solvable import Args, choose, main, score
from mtsql.learn.curriculum import SuccessCount, curriculum_levels, level_of_step, question_order, read_counts


def test_levels_go_from_easy_to_hard_and_leave_out_what_is_always_right():
    questions = [replace(EXAMPLE, id=name) for name in "abcdefg"]
    right = dict(zip("gfedcba", (0, 20, 7, 19, 7, 12, 1), strict=True))
    counts = [SuccessCount(name, of_20, 20, "music") for name, of_20 in right.items()]
    levels = curriculum_levels(questions, counts, 2)
    assert [[q.id for q in level] for level in levels] == [["d", "b"], ["e", "c"], ["a", "g"]]
    (one,) = curriculum_levels(questions, counts, 0)
    assert [q.id for q in one] == ["d", "b", "e", "c", "a", "g"]
    uncounted = curriculum_levels([*questions, replace(EXAMPLE, id="new")], counts[:1], 5)
    assert [[q.id for q in level] for level in uncounted] == [["g"]]
    useless = [SuccessCount("a", 20, 20, "music"), SuccessCount("elsewhere", 1, 20, "zoo")]
    with pytest.raises(ValueError, match="ever wrong"):
        curriculum_levels(questions, useless, 5)
    with pytest.raises(ValueError, match="question a is over zoo in it, but over music in --data"):
        curriculum_levels(questions, [SuccessCount("a", 3, 20, "zoo")], 5)


SHARES = [
    (6, (450, 450, 450), [2, 2, 2]), (72, (450, 450, 450, 74), [23, 23, 23, 3]), (10, (1,), [10]),
    (2, (5, 5, 5), [1, 1, 0]), (1, (5, 5, 5), [1, 0, 0]),
]  # fmt: skip


@pytest.mark.parametrize(("steps", "questions", "expected"), SHARES)
def test_steps_follow_the_questions_of_the_levels_in_order(steps, questions, expected):
    places = [level_of_step(step, steps, questions) for step in range(steps)]
    assert [sum(level == wanted for level, _ in places) for wanted in range(len(questions))] == expected
    assert places == [(level, place) for level, size in enumerate(expected) for place in range(size)]


def test_an_epoch_of_a_level_asks_every_question_once():
    asked = [i for step in range(3) for i in question_order(0, 12, 4, 1, step)]
    assert sorted(asked) == list(range(12))
    assert asked != [i for step in range(3) for i in question_order(0, 12, 4, 2, step)]
    assert asked != [i for step in range(3, 6) for i in question_order(0, 12, 4, 1, step)]


def test_counts_are_read_back_and_other_lines_are_named(tmp_path):
    counts = [SuccessCount("00000/0", 3, 8, "zoo"), SuccessCount("00000/1", 8, 8, "zoo")]
    path = write_lines(tmp_path / "counts.jsonl", map(vars, counts))
    assert read_counts(path) == counts
    good, few = vars(counts[0]), {"example_id": "a", "right": 3, "sampled": 8}
    wrong = [few | {"db_id": "zoo"} | bad for bad in ({"right": 9}, {"example_id": ["a"]}, {"hardness": "x"})]
    for line in ("no JSON", *map(json.dumps, [*wrong, few, {"example_id": "00000/2"}, 3])):
        path.write_text(f"{json.dumps(good)}\n{line}\n")
        with pytest.raises(ValueError, match="line 2: not a success count"):
            read_counts(path)
    write_lines(path, [vars(counts[0])] * 2)
    with pytest.raises(ValueError, match="line 2: question 00000/0 is counted twice"):
        read_counts(path)
    path.write_text("")  # all questions in one level is not what was asked for
    with pytest.raises(ValueError, match="holds no success count"):
        read_counts(path)


# Questions for RL by Equation 13 of SQL-Trail


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


def test_the_chosen_questions_are_one_level(tmp_path, capsys):
    counts = [SuccessCount(f"{number:05d}/0", number % 7, 6, "music", "easy") for number in range(28)]
    path = write_lines(tmp_path / "counts.jsonl", map(vars, counts))
    config = Args(counts=str(path), out=str(tmp_path / "chosen"), balanced=6, exploration=99)
    main(config)
    chosen = read_counts(tmp_path / "chosen" / "counts.jsonl")
    assert [c.right for c in chosen] == [1] * 4 + [2] * 2 + [0] * 4
    assert "6 of 6 questions that are hard yet solvable, 4 of 99 that no" in capsys.readouterr().out
    questions = [replace(EXAMPLE, id=count.example_id) for count in counts]
    (level,) = curriculum_levels(questions, chosen, 0)  # as train_grpo.py does with --level-size 0
    assert sorted(q.id for q in level) == sorted(c.example_id for c in chosen)
    with pytest.raises(UserError, match="would replace the counts"):
        main(replace(config, out=str(tmp_path)))
    with pytest.raises(UserError, match="nothing to choose"):
        main(replace(config, balanced=0, exploration=0))
    assert read_counts(path) == counts
