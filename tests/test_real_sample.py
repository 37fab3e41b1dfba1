"""The sample of SParC's dev set in tests/data: a good agent earns all that there is."""

from __future__ import annotations

import random

import pytest
from conftest import ROOT

from mtsql.agent.trajectory import Status
from mtsql.config import EvaluateConfig, read_options
from mtsql.data.datasets import examples
from mtsql.questions import load_split, make_environment
from mtsql.recipes.mtsql_r1 import PRESETS
from mtsql.recipes.mtsql_r1_rewards import reward
from mtsql.sql.score import Scorer
from mtsql.toy.scripted_agent import ATTENTIVE, demonstrate

SPARC = ROOT / "tests" / "data" / "sparc"


@pytest.mark.parametrize("wording", ["paper", "compact"])
def test_a_good_agent_earns_all_that_there_is(tiny, wording):
    config = read_options(
        EvaluateConfig, "", [f"--data={SPARC}", "--model=none", "--out=none", f"--wording={wording}"]
    )
    split = load_split(config, "dev")
    environment = make_environment(config, split, tiny.tokens, "both")
    scorer = Scorer(environment.schemas, environment.executor)
    asked = examples(split.dialogues)
    assert len(split.dialogues) == 40 and len(asked) == 115
    assert [scorer.gold_problem(e.db_id, e.gold_sql) for e in asked] == [None] * 115
    played = 0
    for example in asked:
        (episode,) = environment.episodes(example, [0])
        trajectory = episode.trajectory
        if trajectory.status is None:
            trajectory = demonstrate(episode, [], ATTENTIVE, random.Random(0))
        if trajectory.status is Status.OUT_OF_TOKENS:  # the tiny tokenizer makes long prompts
            continue
        assert trajectory.status is Status.ANSWERED, example.id
        rewards = reward(trajectory, example, scorer, PRESETS["process"])
        assert (rewards.ex, rewards.em, rewards.parts["proposal"]) == (1, 1, 1), example.id
        played += 1
    assert played >= 100
