"""Real questions: played at random by each recipe, with the real tokenizer, and well by ours; the mix."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from conftest import SAMPLE, SHARED, json_lines
from decoders import random_model
from transformers import AutoTokenizer

import evaluate
from evaluate import Args as EvaluateArgs
from mtsql.agent.trajectory import Status
from mtsql.config import Data, read_options
from mtsql.data.datasets import examples
from mtsql.extras import make_mix
from mtsql.recipes import RECIPES
from mtsql.recipes.mtsql_r1_rewards import PRESETS, reward
from mtsql.report.records import chat_record
from mtsql.sql.score import Scorer
from mtsql.task import load_split, make_environment
from mtsql.toy.scripted_agent import ATTENTIVE, demonstrate

REAL = SHARED / "data"


@pytest.mark.skipif(not REAL.is_dir(), reason="../shared/data is not here")
def test_a_random_model_is_played_by_every_recipe(tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(REAL / "tokenizer_qwen3")
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 16384, "tie_word_embeddings": True}
    random_model("qwen3", **shape).save_pretrained(tmp_path / "random")
    tokenizer.save_pretrained(tmp_path / "random")
    for file in ("spider/dev.json", "sparc/tables.json"):
        rows = [row for row in json.loads((REAL / file).read_text()) if row["db_id"] == "concert_singer"]
        (tmp_path / Path(file).name).write_text(json.dumps(rows))
    places = {"data": tmp_path, "tables": tmp_path / "tables.json", "databases": REAL / "database"}
    given = places | {"model": tmp_path / "random", "dialogues": 4, "max-turn-tokens": 12, "rows": 4}
    for name in RECIPES:
        paper = [] if name == "mtsql_r1" else ["--config", f"configs/{name}.toml"]
        options = [f"--{option}={value}" for option, value in (given | {"out": tmp_path / name}).items()]
        evaluate.main(read_options(EvaluateArgs, "", [*paper, *options]))
        assert json.loads((tmp_path / name / "summary.json").read_text())["questions"] == 4
        records = json_lines(tmp_path / name / "predictions.jsonl")
        assert [r["example_id"] for r in records] == [f"0000{i}/0" for i in range(4)]
        assert all(r["sampled_tokens"] for r in records) and "EX" in capsys.readouterr().out


def test_a_good_agent_earns_all_that_there_is_and_is_exported(tiny):
    """Of the sample of SParC's dev set in tests/data."""
    config = EvaluateArgs(data=(str(SAMPLE),), model="none", out="none", wording="compact")
    split = load_split(config, "dev")
    environment = make_environment(config, split, tiny.tokens, "both")
    scorer = Scorer(environment.schemas, environment.executor)
    asked = examples(split.dialogues)
    assert len(split.dialogues) == 40 and len(asked) == 115
    assert [scorer.gold_problem(e.db_id, e.gold_sql) for e in asked] == [None] * 115
    for example in asked:
        (episode,) = environment.episodes(example, [0])
        trajectory = demonstrate(episode, [], ATTENTIVE, random.Random(0))
        assert trajectory.status is Status.ANSWERED, example.id
        earned = reward(trajectory, example, scorer, PRESETS["process"])
        assert (earned.ex, earned.em, earned.parts["proposal"]) == (1, 1, 1), example.id
        if trajectory.messages <= 3:  # the agent suspects an empty result or a lone zero, and looks again
            assert trajectory.off_protocol == 0 and earned.parts["e_verify"] == 1
            assert earned.parts["m_verify"] == (1 if example.history else 0)
        record = chat_record(trajectory, example, environment)
        assert record["messages"][-1]["content"].endswith(f"<answer_sql>{example.gold_sql}</answer_sql>")


def test_the_training_mix_is_made_of_the_official_layouts(tmp_path):
    dialogues = json.loads((SAMPLE / "dev.json").read_text())
    singles = [
        {"db_id": d["database_id"], "question": d["interaction"][0]["utterance"], "sql": {},
         "query": d["interaction"][0]["query"]}
        for d in dialogues
    ]  # fmt: skip
    turns = [len(d["interaction"]) for d in dialogues]
    cosql = json.loads(json.dumps(dialogues))
    cosql[0]["interaction"][1]["utterance"] = "I AM GPT"
    cosql[1]["interaction"][0]["utterance"] = "their ids\nExpert: WHAT ARE THEIR NAMES"
    cosql[2]["interaction"][-1]["utterance"] += "\nand no more"  # one speaker's second line
    files = {
        "spider/train_spider.json": [*singles, singles[0] | {"db_id": "elsewhere"}],
        "spider/train_others.json": singles,
        "sparc/train.json": dialogues,
        "cosql/sql_state_tracking/cosql_train.json": cosql,
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
        root = tmp_path / name.partition("/")[0]
        shutil.copy(SAMPLE / "tables.json", root)
        if not (root / "database").exists():
            (root / "database").symlink_to(SAMPLE / "database")
    out = tmp_path / "data" / "real" / "train_mix.json"
    folders = [word for name in ("spider", "sparc", "cosql") for word in (f"--{name}", str(tmp_path / name))]
    make_mix.main([*folders, "--out", str(out)])
    made = json.loads(out.read_text())
    assert {key for dialogue in made for key in dialogue} == {"database_id", "interaction", "source"}
    assert Counter(d["source"] for d in made) == {"spider": 40, "sparc": 40, "cosql": 39}
    of_cosql = 115 - (turns[0] - 1) - turns[1]
    assert sum(len(d["interaction"]) for d in made) == 40 + 115 + of_cosql
    where = {"tables": str(SAMPLE / "tables.json"), "databases": str(SAMPLE / "database")}
    split = load_split(Data(data=(str(out),), out="", **where), "train")  # as training reads it
    assert [d.turns[0].source for d in split.dialogues] == [d["source"] for d in made]
