"""The embedded model's start: copying heads, copying exercises, repair lessons."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conftest import GOLD, environment_of, make_episode
from torch import nn
from transformers import AutoTokenizer

from mtsql.agent.env import Limits
from mtsql.agent.trajectory import ActionType, Status
from mtsql.config import Data
from mtsql.errors import UserError
from mtsql.learn.model import set_learning_rate
from mtsql.recipes.mtsql_r1 import tool_call
from mtsql.task import load_split
from mtsql.toy.imitation import ImitationConfig, Muon, main
from mtsql.toy.scripted_agent import ATTENTIVE, copying_exercise, demonstrate, repair_exercise, repair_lesson
from mtsql.toy.tiny import tiny_qwen3


def test_the_tokenizer_has_no_word_of_the_unseen_themes(work):
    tokenizer = AutoTokenizer.from_pretrained(work / "imitation")
    asked = load_split(Data(data=(str(work / "benchmark"),), out=""), "test_themes")
    assert len({dialogue.db_id for dialogue in asked.dialogues}) == 6
    tables = [asked.schemas[dialogue.db_id].tables[0].name for dialogue in asked.dialogues]
    assert all(len(tokenizer.tokenize(f" {name.lower()}")) > 1 for name in tables)
    assert len(tokenizer.tokenize(" name")) == 1  # as words of train's schemas are


def test_wrong_options_are_refused(work, tmp_path):
    config = ImitationConfig(data=(str(tmp_path / "nowhere"),), out=str(tmp_path))
    for changed, problem in (
        ({"out": str(work / "imitation")}, "exists already; remove it or name another folder"),
        ({}, "nowhere has no train split"),
        ({"hidden": 48}, "--hidden should be a multiple of 96"),
        ({"layers": 1}, "--hidden should be a multiple of 96"),
    ):
        with pytest.raises(UserError, match=problem):
            main(replace(config, **changed))


def test_copying_exercise_marks_what_its_context_foretells():
    exercise = copying_exercise(list(range(1000)), 40, random.Random(0))
    ids, loss_mask = exercise.ids, exercise.loss_mask
    assert len(ids) == 80 and sum(loss_mask) > 20 and not any(loss_mask[:40])
    pairs = set(pairwise(ids[:40]))
    for place, bit in enumerate(loss_mask):
        assert not bit or (ids[place - 1], ids[place]) in pairs


def test_untrained_model_already_leans_to_copying(tiny):
    model = tiny_qwen3(tiny.tokens.tokenizer, hidden=192, layers=2, seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    once = torch.stack([torch.randperm(256, generator=generator)[:24] for _ in range(8)])  # (8, 24)
    ids = torch.cat([once, once], dim=1)  # (8, 48): the second half is known from the first
    with torch.no_grad():
        logits = model(ids).logits[:, 24:-1]  # (8, 23, vocabulary)
    right = logits.gather(-1, ids[:, 25:, None])[..., 0]  # (8, 23)
    better = (logits > right[..., None]).sum(-1).float()  # tokens that are preferred to the right one
    assert better.median() <= 3  # of 451; chance is 225


def test_repair_exercise_repeats_what_passed_and_changes_what_is_named(tiny):
    rng, seen = random.Random(0), set()
    words = [i for p, i in tiny.tokens.tokenizer.get_vocab().items() if p[0] == " " and p[1:].isalpha()]
    sql = re.compile(r"""(?:code": "|<answer_sql>)(.*?)(?:"}}|</answer_sql>)""")
    for _ in range(60):
        exercise = repair_exercise(tiny.tokens, words, 12, rng)
        before, after = (tiny.tokens.decode(s.ids) for s in exercise.segments)
        first, again = sql.search(before)[1], sql.search(after)[1]
        passed, error = "no_pass" not in before, re.search(r"column: (?:t\d\.)?(\S+)", before)
        changed = {a for a, b in zip(first.split(), again.split(), strict=True) if a != b}
        if error:
            assert changed <= {error[1]}
        else:
            assert (not changed) is passed and first.lower() == again.lower()
        seen.add((passed, bool(error), "<answer_sql>" in after))
    assert seen == {(True, False, True), (True, False, False), (False, False, False), (False, True, False)}


def mistake(kind: str, value: str) -> list[dict]:
    return [{"kind": kind, "query": GOLD.replace("france", value)}]


def test_repair_lesson_teaches_the_repair_and_nothing_else(tiny):
    environment, example = environment_of(tiny), make_episode(tiny).example
    assert repair_lesson(environment, example, [], random.Random(0)) == []
    (lesson,) = repair_lesson(environment, example, mistake("value_form", "France"), random.Random(0))
    assert [s.role for s in lesson.segments] == ["prompt", "model", "environment", "model"]
    assert not any(bit for s in lesson.segments[:3] for bit in s.loss_mask)
    taught = tiny.tokens.decode([i for i, bit in zip(lesson.ids, lesson.loss_mask, strict=True) if bit])
    assert taught.strip() == tool_call("exec_sql", GOLD).strip()


@pytest.mark.parametrize(
    ("kind", "value", "most", "interactions", "noticed"),
    [
        ("stale_value", "italy", 4, 4, [ActionType.M_VERIFY]),  # what the memory reveals takes all four
        ("value_form", "France", 4, 3, [ActionType.E_VERIFY]),  # what an empty result reveals three
        ("value_form", "France", 1, 1, [ActionType.E_VERIFY]),  # corrected, but not checked again
    ],
)
def test_attentive_agent_checks_again_what_it_corrected(tiny, kind, value, most, interactions, noticed):
    episode = make_episode(tiny, history=True, limits=Limits(max_interactions=most))
    trajectory = demonstrate(episode, mistake(kind, value), ATTENTIVE, random.Random(0))
    assert (trajectory.status, trajectory.answer_sql) == (Status.ANSWERED, GOLD)
    assert (trajectory.interactions, trajectory.off_protocol) == (interactions, int(most == 1))
    assert [a.type for a in trajectory.actions if a.passed is False] == noticed


@pytest.mark.parametrize("shape", [(24, 24), (48, 24), (24, 40)])
def test_muon_takes_the_steps_of_torchs_in_more_digits(shape):
    torch.manual_seed(0)
    start = torch.randn(shape) * 0.1
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    muon = Muon([ours])
    set_learning_rate(muon, 0.02)
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.01, adjust_lr_fn="original")
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        muon.step()
        reference.step()
    assert (ours - theirs).norm() < 0.02 * (theirs - start).norm()  # bfloat16 has two digits
