"""The embedded benchmark, the models in models/toy, and how such a model begins."""

import csv
import hashlib
import json
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest
import torch
from conftest import GOLD, ROOT, TOY, environment_of, make_episode, run
from torch import nn
from transformers import AutoTokenizer

from mtsql.agent.env import Limits
from mtsql.agent.trajectory import ActionType, Status
from mtsql.config import Data, from_toml
from mtsql.data.datasets import examples, load_dataset
from mtsql.errors import UserError
from mtsql.learn.model import set_learning_rate
from mtsql.recipes.mtsql_r1 import final_answer, tool_call
from mtsql.sql.execute import Executor
from mtsql.sql.score import Scorer
from mtsql.task import load_split
from mtsql.toy import benchmark as toy
from mtsql.toy.database import KEPT, themes
from mtsql.toy.imitation import ImitationConfig, Muon, main
from mtsql.toy.scripted_agent import ATTENTIVE, copying_exercise, demonstrate, repair_exercise, repair_lesson
from mtsql.toy.tiny import MODELS, tiny_qwen3


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    """All of it but five sixths of train, which would take a minute more."""
    folder = tmp_path_factory.mktemp("toy") / "benchmark"
    train = {words: (databases // 6, each) for words, (databases, each) in toy.SPLITS["train"].items()}
    toy.write_benchmark(folder, seed=0, splits=toy.SPLITS | {"train": train})
    return folder


def load(benchmark, split):
    return load_dataset([(benchmark / f"{split}.json", benchmark / "tables.json", benchmark / "database")])


@pytest.fixture(scope="module")
def train(benchmark):
    return load(benchmark, "train")


def test_sizes(benchmark, train):
    lengths = Counter(len(dialogue.turns) for dialogue in train.dialogues)
    assert lengths.keys() == {1, 2, 3, 4, 5} and lengths.total() >= 1000
    for split, least in (("dev", 150), ("test", 400), ("test_themes", 400)):
        asked = examples(load(benchmark, split).dialogues)
        assert len(asked) >= least and not {e.db_id for e in asked} & {d.db_id for d in train.dialogues}
    for schema in train.schemas.values():
        assert 2 <= len(schema.tables) <= 4
        assert all(t.primary_keys for t in schema.tables) and any(t.foreign_keys for t in schema.tables)


def test_same_seed_same_bytes(tmp_path):
    parts = {"train": {"known": (4, 5), "invented": (2, 5)}, "dev": {"known": (2, 2)}}
    parts |= {"test_themes": {"unseen": (2, 2)}}
    first, same = tmp_path / "a", tmp_path / "b"
    for folder in (first, same):
        toy.write_benchmark(folder, seed=1, splits=parts)
    files = [path.relative_to(first) for path in first.rglob("*.*")]
    assert len(files) == 15
    assert all((first / file).read_bytes() == (same / file).read_bytes() for file in files)
    made = (first / f"{name}.json" for name in ("tables", "train", "dev", "test_themes"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in made)).hexdigest()
    assert digest.startswith("2acea88b"), "the models in models/toy have learned another benchmark"
    with pytest.raises(UserError, match="exists already"):
        toy.write_benchmark(first, seed=1)


def words_of(theme):
    """The nouns and the values of a theme's entities, in lower case; numbers and "number of" aside."""
    columns = [column for entity in theme for column in entity.columns]
    texts = [f"{entity.singular} {entity.plural}" for entity in theme]
    texts += [text for column in columns for text in (*column.names, *column.phrases, *column.values)]
    return set(" ".join(texts).lower().split()) - set(KEPT)


def test_no_word_of_the_unseen_themes_stands_in_train(benchmark, train):
    known_words = " ".join(turn.question for d in train.dialogues for turn in d.turns).lower()
    named = set().union(*map(words_of, themes(unseen=True).values()))
    assert not named & set(re.findall(r"[a-z]+", known_words))
    asked = load(benchmark, "test_themes")
    known, unseen = ({e.gold_sql for e in examples(d.dialogues)} for d in (train, asked))
    assert not known & unseen


def test_gold_runs_is_not_empty_and_parses_and_hardness_is_as_sparcs(benchmark, train):
    scorer, asked = Scorer(train.schemas, Executor()), examples(train.dialogues)
    for example in asked[::2] + examples(load(benchmark, "test_themes").dialogues)[::2]:
        result = scorer.executor.execute(train.schemas[example.db_id].path, example.gold_sql)
        assert result.status == "rows", (example.gold_sql, result)
        assert any(value is not None for row in result.rows for value in row)
    counts = Counter(scorer.hardness(e.db_id, e.gold_sql) for e in asked)
    assert not counts["unread"]
    for hardness, sparc in (("easy", 0.40), ("medium", 0.37), ("hard", 0.12), ("extra", 0.11)):
        assert counts[hardness] / len(asked) == pytest.approx(sparc, abs=0.06)
    everything = "\n".join(e.gold_sql for e in asked)
    parts = "JOIN,GROUP BY,HAVING,ORDER BY,LIMIT 1,NOT IN (SELECT,> (SELECT avg,INTERSECT,EXCEPT,UNION,!="
    for part in parts.split(","):
        assert everything.count(part) >= 10, part


def test_mistakes_change_the_answer(benchmark, train):
    executor, kinds = Executor(), set()
    wrong = json.loads((benchmark / "scripted_mistakes.json").read_text())
    for dialogue, turns in list(zip(train.dialogues, wrong, strict=True))[:300]:
        path = train.schemas[dialogue.db_id].path
        for turn, found in zip(dialogue.turns, turns, strict=True):
            gold = executor.execute(path, turn.gold_sql)
            for mistake in found:
                result = executor.execute(path, mistake["query"])
                assert result.rows != gold.rows
                assert (result.status == "error") == (mistake["kind"] == "misnamed_column")
                kinds.add(mistake["kind"])
    assert kinds == {"lost_constraint", "stale_value", "value_form", "look_alike", "misnamed_column"}


# The shipped models answer questions over new databases, and training improves them


SHIPPED = sorted(path.name for path in (ROOT / MODELS).glob("seed*"))


def make_benchmark(folder, **splits):
    """A benchmark of another seed than the models' own."""
    toy.write_benchmark(folder, seed=toy.MODELS_SEED + 100, splits=splits)
    return folder


def evaluate(model, data, split, out):
    """The summary of greedy answers without tools."""
    asked = ["--data", data, "--split", split, "--tools", "none", "--sampled-runs", 0]
    run("evaluate.py", *TOY, *asked, "--model", model, "--out", out)
    return json.loads((out / "summary.json").read_text())


def test_models_that_are_made_anew_learn_as_the_shipped_ones_did():
    settings = [from_toml(ROOT / f"configs/{name}.toml", ImitationConfig) for name in ("toy", "toy_suite")]
    assert settings[0] == settings[1] and SHIPPED
    for name in SHIPPED:
        made = json.loads((ROOT / MODELS / name / "run.json").read_text())["config"]
        now = json.loads(json.dumps(vars(ImitationConfig(**settings[0], data=("",), out=""))))
        kept = made.keys() & now.keys() - {"data", "out", "seed"}  # some are constants now
        # Nothing was an empty list where it is an empty text today.
        assert {key: made[key] or None for key in kept} == {key: now[key] or None for key in kept}, name


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_knows_its_sql(name, tmp_path):
    data = make_benchmark(tmp_path / "data", train={"known": (1, 1)}, test={"known": (10, 2)})
    summary = evaluate(ROOT / MODELS / name, data, "test", tmp_path / "e")
    assert summary["questions"] >= 30 and summary["ex"]["mean"] >= 0.85 and summary["em"]["mean"] >= 0.9


def test_fine_tuning_teaches_what_it_shows(tmp_path):
    """On themes that no shipped model has seen: it answers less than half of the questions.

    Greedy answers repeat bit by bit, so that training without an effect gains nothing at all.
    """
    themes = make_benchmark(tmp_path / "data", train={"unseen": (4, 2)})
    given = ["--targets", "gold", "--tools", "none", "--questions", 0, "--epochs", 8, "--learning-rate", 1e-3]
    model = ROOT / MODELS / "seed0"
    run("train_sft.py", *TOY, "--data", themes, "--model", model, *given, "--out", tmp_path / "sft")
    before = evaluate(model, themes, "train", tmp_path / "before")
    after = evaluate(tmp_path / "sft" / "policy", themes, "train", tmp_path / "after")
    for metric in ("ex", "em"):
        assert after[metric]["mean"] >= before[metric]["mean"] + 0.2, metric


def test_grpo_raises_the_reward_of_the_questions_that_it_asks(tmp_path):
    """Eight questions in each step: without an effect steps differ by 0.09 (one standard deviation)."""
    themes = make_benchmark(tmp_path / "data", train={"unseen": (8, 2)})
    options = ["--tools", "none", "--rewards", "outcome", "--learning-rate", 1e-3, "--out", tmp_path / "grpo"]
    options += ["--questions", 8, "--steps", 8, "--prompts-per-step", 8, "--samples-per-prompt", 8]
    run("train_grpo.py", *TOY, "--data", themes, "--model", ROOT / MODELS / "seed0", *options)
    rewards = [float(r["reward"]) for r in csv.DictReader((tmp_path / "grpo" / "metrics.csv").open())]
    assert fmean(rewards[-3:]) >= rewards[0] + 0.35


# A new model's start: copying heads, copying exercises, repair lessons


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


@pytest.mark.parametrize("most", [2, 4])  # interactions; after the first two the agent can only answer
@pytest.mark.parametrize("kind, value, seen", [("value_form", "France", 1), ("stale_value", "italy", 2)])
def test_repair_lesson_teaches_the_repair_and_nothing_else(tiny, kind, value, seen, most):
    environment = environment_of(tiny, limits=Limits(max_interactions=most))
    example = make_episode(tiny, history=True).example
    assert repair_lesson(environment, example, [], random.Random(0)) == []
    (lesson,) = repair_lesson(environment, example, mistake(kind, value), random.Random(0))
    assert [s.role for s in lesson.segments] == ["prompt", *["model", "environment"] * seen, "model"]
    assert not any(bit for s in lesson.segments[:-1] for bit in s.loss_mask)
    taught = tiny.tokens.decode([i for i, bit in zip(lesson.ids, lesson.loss_mask, strict=True) if bit])
    repair = tool_call("exec_sql", GOLD) if seen < most else final_answer(GOLD)
    assert taught.strip() == repair.strip()


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
