"""The adapter in models/ answers simple questions, where its base is there (python -m mtsql.pretrained)."""

from __future__ import annotations

import json

import pytest
from conftest import ROOT, Tiny
from safetensors import safe_open

from mtsql.agent.env import Environment, Limits
from mtsql.agent.rollout import Sampling, rollout
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import make_tools
from mtsql.agent.trajectory import Status
from mtsql.data.datasets import Example
from mtsql.learn.model import load_policy
from mtsql.model_folder import load_tokenizer
from mtsql.recipes.mtsql_r1 import MtsqlR1
from mtsql.recipes.prompt_options import PromptOptions
from mtsql.sql.score import Scorer

ADAPTER = ROOT / "models" / "smollm2-135m-sql"
BASE = ROOT / "models" / "smollm2-135m-instruct"
ASKED = {
    "How many singers are there?": "SELECT count(*) FROM singer",
    "List the names of all singers.": "SELECT name FROM singer",
    "What is the average age of all singers?": "SELECT avg(age) FROM singer",
    "Show the name of the oldest singer.": "SELECT name FROM singer ORDER BY age DESC LIMIT 1",
}


def test_it_is_small_and_names_its_base_by_a_relative_path():
    weights = ADAPTER / "adapter_model.safetensors"
    assert weights.stat().st_size <= 20e6
    config = json.loads((ADAPTER / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "../smollm2-135m-instruct"
    with safe_open(weights, "pt") as file:
        assert {str(file.get_slice(name).get_dtype()) for name in file.keys()} == {"BF16"}  # noqa: SIM118


@pytest.mark.skipif(not BASE.exists(), reason="needs its base (see its README)")
def test_it_answers_simple_questions(tiny: Tiny):
    policy, tokens = load_policy(ADAPTER), ChatTokens(load_tokenizer(ADAPTER))
    recipe = MtsqlR1(PromptOptions(compact=True))
    environment = Environment(
        {"music": tiny.schema}, recipe, tokens, tiny.executor, Limits(), make_tools("none")
    )
    asked = [Example("00000/0", "00000", "music", 0, text, gold, ()) for text, gold in ASKED.items()]
    episodes = [environment.episodes(example, [0])[0] for example in asked]
    answered = rollout(policy, tokens, episodes, Sampling(0.0, max_turn_tokens=60))
    assert {trajectory.status for trajectory in answered} == {Status.ANSWERED}
    scorer = Scorer(environment.schemas, tiny.executor)
    right = [scorer.ex("music", e.gold_sql, t.answer_sql) for e, t in zip(asked, answered, strict=True)]
    assert sum(right) >= 3, [trajectory.answer_sql for trajectory in answered]
