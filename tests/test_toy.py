"""The embedded benchmark: deterministic, in SParC's format, and hard in the ways it claims."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter

import pytest

from mtsql.data.datasets import examples, load_dataset
from mtsql.errors import UserError
from mtsql.sql.execute import Executor
from mtsql.sql.score import Scorer
from mtsql.toy import benchmark as toy
from mtsql.toy.database import KEPT, themes


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    """All of it but five sixths of train, which would take a minute more."""
    folder = tmp_path_factory.mktemp("toy") / "benchmark"
    train = {words: (databases // 6, each) for words, (databases, each) in toy.SPLITS["train"].items()}
    toy.write_benchmark(folder, seed=0, splits=toy.SPLITS | {"train": train})
    return folder


def load(benchmark, split):
    return load_dataset(benchmark / f"{split}.json", benchmark / "tables.json", benchmark / "database")


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
    texts += [text for column in columns for text in (*column.phrases, *column.values)]
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
    assert not any(scorer.gold_problem(e.db_id, e.gold_sql) for e in asked[:1000])
    counts = Counter(scorer.hardness(e.db_id, e.gold_sql) for e in asked)
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
