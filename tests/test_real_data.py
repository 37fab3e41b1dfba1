"""Real questions, the real tokenizer and full prompts: every recipe, well played and at random."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from conftest import ROOT
from decoders import SIZES
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

import evaluate
from evaluate import Args as EvaluateArgs
from mtsql.agent.env import Environment
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.trajectory import Status, Stop, Trajectory
from mtsql.config import read_options
from mtsql.data.datasets import Dataset, Example, examples
from mtsql.recipes import RECIPES
from mtsql.recipes.mtsql_r1_prompts import verdict
from mtsql.sql.score import Scorer
from mtsql.task import load_split, make_environment, reward_function

SHARED = ROOT.parent / "shared" / "data"
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
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not here")


def config_of(recipe: str, **options: object) -> EvaluateArgs:
    paper = [] if recipe == "mtsql_r1" else ["--config", f"configs/{recipe}.toml"]
    files = {"data": "spider/dev.json", "tables": "sparc/tables.json", "databases": "database"}
    given = {name: SHARED / path for name, path in files.items()} | {"model": "", "out": ""} | options
    return read_options(EvaluateArgs, "", [*paper, *(f"--{name}={value}" for name, value in given.items())])


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(SHARED / "tokenizer_qwen3")


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


def test_a_random_model_is_played_by_every_recipe(tokenizer, tmp_path, capsys):
    shape = SIZES | {"vocab_size": len(tokenizer), "max_position_embeddings": 16384}
    Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **shape)).save_pretrained(tmp_path / "random")
    tokenizer.save_pretrained(tmp_path / "random")
    for file in ("spider/dev.json", "sparc/tables.json"):
        rows = [row for row in json.loads((SHARED / file).read_text()) if row["db_id"] == "concert_singer"]
        (tmp_path / Path(file).name).write_text(json.dumps(rows))
    given = {"data": tmp_path, "tables": tmp_path / "tables.json", "model": tmp_path / "random"}
    given |= {"dialogues": 4, "max-turn-tokens": 12, "rows": 4}
    for name in RECIPES:
        evaluate.main(config_of(name, out=tmp_path / name, **given))
        assert json.loads((tmp_path / name / "summary.json").read_text())["questions"] == 4
        records = list(map(json.loads, (tmp_path / name / "predictions.jsonl").read_text().splitlines()))
        assert [r["example_id"] for r in records] == [f"0000{i}/0" for i in range(4)]
        assert all(r["sampled_tokens"] for r in records) and "EX" in capsys.readouterr().out
