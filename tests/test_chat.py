"""Trajectories as chat messages give back what the model saw and wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import GOLD, Tiny, make_episode, say
from transformers import AutoTokenizer

from mtsql.agent.env import Environment, Episode, Limits
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.agent.trajectory import Stop
from mtsql.recipes.mtsql_r1_prompts import tool_call, verdict
from mtsql.report.records import chat_record

QWEN3 = Path(__file__).parents[2] / "shared" / "data" / "tokenizer_qwen3"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
ANSWER = f"{verdict(MEMORY_RETRIEVE, True)}\n<answer_sql>{GOLD}</answer_sql>"
CALLS = [
    "Draft: all of them.\n" + tool_call(EXEC_SQL, "SELECT name, 'Zoë' FROM singer"),
    verdict(EXEC_SQL, True) + "\n" + tool_call(MEMORY_RETRIEVE, GOLD),
]


@pytest.fixture(params=["tiny", "qwen3"])
def either(request, tiny) -> Tiny:
    """With the tiny tokenizer, and with the real one of Qwen3."""
    if request.param == "tiny":
        return tiny
    if not QWEN3.exists():
        pytest.skip(f"needs the real Qwen3 tokenizer in {QWEN3}")
    return replace(tiny, tokens=ChatTokens(AutoTokenizer.from_pretrained(QWEN3)))


def record_of(episode: Episode) -> dict:
    """The record, as another program reads it."""
    environment = Environment(
        {"music": episode.schema}, episode.recipe, episode.tokens, episode.executor, episode.limits,
        episode.tools,
    )  # fmt: skip
    return json.loads(json.dumps(chat_record(episode.trajectory, episode.example, environment)))


def rendered(episode: Episode, record: dict) -> str:
    return episode.tokens.tokenizer.apply_chat_template(
        record["messages"], tools=record.get("tools"), tokenize=False
    )


def text_of(episode: Episode) -> str:
    return episode.tokens.tokenizer.decode(episode.trajectory.ids)


@pytest.mark.parametrize("compact", [False, True])
def test_rendering_gives_back_the_text(either, compact):
    episode = make_episode(either, history=True, compact=compact)
    assert all(say(episode, call) for call in CALLS) and not say(episode, ANSWER)
    record = record_of(episode)
    roles = [m["role"] for m in record["messages"]]
    assert roles == ["system"] * (not compact) + ["user"] + ["assistant", "tool"] * 2 + ["assistant"]
    assert ("tools" in record) is not compact
    assert record["example_id"] == "00000/1"
    assert [m["content"] for m in record["messages"] if m["role"] == "assistant"] == [*CALLS, ANSWER]
    # Qwen3's template puts an empty thought into a last message that has none.
    assert rendered(episode, record) == text_of(episode).replace(ANSWER, EMPTY_THOUGHT + ANSWER) + "\n"


def test_rendering_gives_back_thinking(either):
    episode = make_episode(either, history=True, compact=False)
    for message in CALLS:
        say(episode, f"<think>\nHm.\n\nWho?\n</think>\n\n{message}")
    say(episode, f"<think>\nDone.\n</think>\n\n{ANSWER}")
    assert rendered(episode, record_of(episode)) == text_of(episode) + "\n"


def test_tool_messages_are_what_the_model_saw(either):
    """An observation that was cut to the limit on tool tokens stands in the record as it was cut."""
    limits = Limits(max_tool_tokens=12)
    episode = make_episode(either, limits=limits, result_characters=10_000)
    say(episode, tool_call(EXEC_SQL, "SELECT name, country FROM singer UNION ALL SELECT 'a', 'b'"))
    content = record_of(episode)["messages"][-1]["content"]
    assert " ... " in content and either.tokens.count(content) <= 12
    seen = either.tokens.decode(episode.trajectory.segments[-1].ids)
    assert f"<tool_response>\n{content}\n</tool_response>" in seen


def test_messages_without_an_end_of_turn_or_an_answer(tiny):
    """After a stop string the end of turn is the environment's; what did not fit was never seen."""
    episode = make_episode(tiny)
    ids = tiny.tokens.message_ids(CALLS[0])[:-1]
    assert episode.step(ids, [0.0] * len(ids), Stop.STOP_STRING) is not None
    assert [m["content"] for m in record_of(episode)["messages"]][-2] == CALLS[0]
    room = len(tiny.tokens.message_ids(CALLS[0])) + 5
    episode = make_episode(tiny, limits=Limits(max_response_tokens=room))
    assert not say(episode, CALLS[0])
    assert record_of(episode)["messages"][-1] == {"role": "assistant", "content": CALLS[0]}
