"""Real questions, the real tokenizer, full prompts: played by the scripted agent and by a random model."""

from __future__ import annotations

import json
import random
from statistics import fmean

import pytest
import torch
from conftest import ROOT, run
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from evaluate import EvaluateConfig
from mtsql.agent.tokens import ChatTokens
from mtsql.data.datasets import examples
from mtsql.learn.logprobs import token_batch, token_logprobs
from mtsql.learn.loss import sft_loss
from mtsql.learn.selection import make_embedder, select_trajectories
from mtsql.recipes.mtsql_r1 import PRESETS
from mtsql.recipes.mtsql_r1_rewards import reward
from mtsql.report.chat import chat_record
from mtsql.sql.score import Scorer
from mtsql.task import load_split, make_environment
from mtsql.toy.scripted_agent import ATTENTIVE, demonstrate

SHARED = ROOT.parent / "shared" / "data"
QUESTIONS = 110
FILES = {"sparc": "sparc/dev.json", "cosql": "cosql/cosql_train.json"}
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not here")


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizer_qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
        max_position_embeddings=16384,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model, ChatTokens(tokenizer)


def options(dataset: str) -> dict[str, str]:
    return {
        "data": str(SHARED / FILES[dataset]),
        "tables": str(SHARED / dataset / "tables.json"),
        "databases": str(SHARED / "database"),
    }


@pytest.mark.parametrize("dataset", FILES)
def test_a_good_agent_is_paid_kept_exported_and_learned(dataset, random_model):
    _, model, tokens = random_model
    config = EvaluateConfig(
        model="", out="", allow_missing=True, **{name: (path,) for name, path in options(dataset).items()}
    )
    split = load_split(config, "dev")
    environment = make_environment(config, split, tokens, "both")
    scorer = Scorer(environment.schemas, environment.executor)
    asked = examples(split.dialogues)
    rng = random.Random(0)
    asked = [e for e in rng.sample(asked, 2 * QUESTIONS) if scorer.gold_problem(e.db_id, e.gold_sql) is None]
    embed = make_embedder(model, tokens)
    kept = []
    for example in asked[:QUESTIONS]:
        (episode,) = environment.episodes(example, [0])
        trajectory = demonstrate(episode, [], ATTENTIVE, rng)
        assert trajectory.prompt_length <= config.max_prompt_tokens
        assert trajectory.status == "answered", example.id
        rewards = reward(trajectory, example, scorer, PRESETS["process"])
        assert (rewards.ex, rewards.em, rewards.parts["proposal"]) == (1, 1, 1), example.id
        if trajectory.messages <= 3:  # the agent suspects an empty result or a lone zero, and looks again
            assert trajectory.off_protocol == 0 and rewards.parts["e_verify"] == 1
            assert rewards.parts["m_verify"] == (1 if example.history else 0)
        kept += select_trajectories([trajectory], False, embed, rng)
        record = chat_record(trajectory, example, environment)
        assert record["messages"][-1]["content"].endswith(f"<answer_sql>{example.gold_sql}</answer_sql>")
    assert len(kept) == QUESTIONS
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        batch = kept[:6]
        inputs = token_batch([[t] for t in batch], "packed", torch.device("cpu"), "sdpa")
        logprobs, _ = token_logprobs(model, inputs)
        loss = sft_loss(logprobs, sum(t.sampled_length for t in batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize(("dataset", "script"), [("sparc", "evaluate.py"), ("cosql", "train_sft.py")])
def test_a_random_model_is_played_on_full_prompts(dataset, script, random_model, tmp_path):
    folder, *_ = random_model
    some = tmp_path / "train.json"
    some.write_text(json.dumps(json.loads((SHARED / FILES[dataset]).read_text())[:60]))
    command = [script, "--model", folder, "--allow-missing", "--max-turn-tokens", 16, "--rows", 32]
    command += [f"--{name}={value}" for name, value in (options(dataset) | {"data": some}).items()]
    command += ["--out", tmp_path / "out"]
    if script == "evaluate.py":
        run(*command, "--dialogues", 48)
        lines = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
        assert len(lines) > 100 and fmean(json.loads(line)["sampled_tokens"] for line in lines) > 1
    else:
        small = ["--questions", 104, "--samples-per-question", 1, "--rounds", 1]
        out = run(*command, *small, expect=2)
        assert "0 of 104 rollouts right" in out and "there is nothing to learn from" in out
