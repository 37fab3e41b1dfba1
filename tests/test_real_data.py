"""Real questions: each recipe well played and at random, on full prompts with the real tokenizer; the mix."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from conftest import SAMPLE, SHARED, json_lines
from decoders import random_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import evaluate
from evaluate import Args as EvaluateArgs
from mtsql.agent.env import Environment
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.trajectory import Status, Stop, Trajectory
from mtsql.config import Data, read_options
from mtsql.data.datasets import Dataset, Example, examples
from mtsql.extras import make_mix
from mtsql.recipes import RECIPES
from mtsql.recipes.mtsql_r1 import verdict
from mtsql.recipes.mtsql_r1_rewards import PRESETS, reward
from mtsql.report.records import chat_record
from mtsql.sql.score import Scorer
from mtsql.task import load_split, make_environment, reward_function
from mtsql.toy.scripted_agent import ATTENTIVE, demonstrate

REAL = SHARED / "data"
QUESTIONS = 25
FIRST_THOUGHT = "The question names what to select; I run the query to see whether the result looks right."
SECOND_THOUGHT = "The result has the columns that were asked for, and nothing else."
# What a right answer in the right form earns, by hand.
HIGHEST = {
    "mtsql_r1": 2.0,  # EX 1 + EM 1: the weights of proposals and verdicts are 0 by default
    "skyrl_sql": 1.0,  # section 4.1: a valid format and a right result
    "sql_trail": 11.0,  # Equation 12: 5 + 2 + 1 + 1 + 1 + 1 with every r = 1; two messages are quick enough
    "mtir_sql": 1.2,  # Equations 5 to 7: R_f 0.1 + R_e 0.1 + R_r 1
}
with_shared_data = pytest.mark.skipif(not REAL.is_dir(), reason="../shared/data is not here")


def config_of(recipe: str, **options: object) -> EvaluateArgs:
    paper = [] if recipe == "mtsql_r1" else ["--config", f"configs/{recipe}.toml"]
    files = {"data": "spider/dev.json", "tables": "sparc/tables.json", "databases": "database"}
    given = {name: REAL / path for name, path in files.items()} | {"model": "", "out": "none"} | options
    return read_options(EvaluateArgs, "", [*paper, *(f"--{name}={value}" for name, value in given.items())])


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(REAL / "tokenizer_qwen3")


@pytest.fixture(scope="module")
def spider() -> tuple[Dataset, list[Example]]:
    dataset = load_split(config_of("skyrl_sql"), "dev")
    return dataset, random.Random(0).sample(examples(dataset.dialogues), QUESTIONS)


def messages_of(name: str, environment: Environment, sql: str) -> list[str]:
    """A good agent's two messages: a query, then the same as the answer."""
    tag = "reasoning" if name == "sql_trail" else "think"
    first, second = (f"<{tag}>\n{text}\n</{tag}>\n\n" for text in (FIRST_THOUGHT, SECOND_THOUGHT))
    seen = verdict("exec_sql", True) if name == "mtsql_r1" else ""
    return [first + environment.recipe.call(sql), second + seen + environment.recipe.answer(sql)]


def play(environment: Environment, example: Example, messages: list[str]) -> tuple[Trajectory, list]:
    """The episode and the ids that were said: up to a stop string, else with the end of turn."""
    (episode,) = environment.episodes(example, [0])
    stops = environment.recipe.stop_strings
    said = [environment.tokens.message_ids(text)[: -1 if stops else None] for text in messages]
    for text, ids in zip(messages, said, strict=True):
        assert not stops or text.endswith(stops)
        episode.step(ids, [-0.5] * len(ids), Stop.STOP_STRING if stops else Stop.END_OF_TURN)
    return episode.trajectory, said


@with_shared_data
@pytest.mark.parametrize("name", RECIPES)
def test_a_good_agent_earns_the_most(name, tokenizer, spider):
    dataset, asked = spider
    config, tokens = config_of(name), ChatTokens(tokenizer)
    environment = make_environment(config, dataset, tokens, config.tools)
    rewards = reward_function(config, tokens, Scorer(dataset.schemas, environment.executor))
    control = set(tokenizer.get_added_vocab().values())
    for example in asked:
        messages = messages_of(name, environment, example.gold_sql)
        trajectory, said = play(environment, example, messages)
        assert (trajectory.status, trajectory.off_protocol) == (Status.ANSWERED, 0), example.id
        assert trajectory.messages == 2 and trajectory.answer_sql == example.gold_sql.strip()
        earned = rewards(trajectory, example)
        assert (earned.ex, earned.total) == (1, pytest.approx(HIGHEST[name], abs=1e-12)), example.id

        prompt, first, given, second = trajectory.segments
        assert len(prompt.ids) <= config.max_prompt_tokens
        assert [list(first.ids), list(second.ids)] == said
        assert trajectory.loss_mask == [int(s.role == "model") for s in trajectory.segments for _ in s.ids]

        (observation,) = trajectory.observations
        assert (observation.tool, observation.sql) == ("exec_sql", example.gold_sql.strip())
        assert observation.outcome in ("ok", "null") and observation.text in tokens.decode(given.ids)
        recipe = environment.recipe
        empty = tokens.observation_suffix("", not recipe.stop_strings, recipe.observation_role)
        assert [i for i in given.ids if i in control] == [i for i in empty if i in control]


@with_shared_data
def test_a_random_model_is_played_by_every_recipe(tokenizer, tmp_path, capsys):
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 16384, "tie_word_embeddings": True}
    random_model("qwen3", **shape).save_pretrained(tmp_path / "random")
    tokenizer.save_pretrained(tmp_path / "random")
    for file in ("spider/dev.json", "sparc/tables.json"):
        rows = [row for row in json.loads((REAL / file).read_text()) if row["db_id"] == "concert_singer"]
        (tmp_path / Path(file).name).write_text(json.dumps(rows))
    given = {"data": tmp_path, "tables": tmp_path / "tables.json", "model": tmp_path / "random"}
    given |= {"dialogues": 4, "max-turn-tokens": 12, "rows": 4}
    for name in RECIPES:
        evaluate.main(config_of(name, out=tmp_path / name, **given))
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
