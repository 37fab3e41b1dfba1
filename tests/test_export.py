"""Trajectories as chat messages give back what the model saw and wrote; other programs get the same ids."""

import json
from dataclasses import replace

import pytest
from conftest import GOLD, Tiny, environment_of, json_lines, make_episode, refusal, say, write_lines

from mtsql.agent.env import Environment, Episode, Limits
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.agent.trajectory import Stop, trajectory_record
from mtsql.config import user_errors
from mtsql.extras.export import main
from mtsql.recipes.mtsql_r1 import final_answer, tool_call, verdict
from mtsql.report.records import chat_record

THOUGHT, EMPTY_THOUGHT = "<think>\nHm.\n\nWho?\n</think>\n\n", "<think>\n\n</think>\n\n"
DRAFT = "Draft: all of them.\n" + tool_call(EXEC_SQL, "SELECT name, 'Zoë' FROM singer")
CHECK = verdict(EXEC_SQL, True) + "\n" + tool_call(MEMORY_RETRIEVE, GOLD)
ANSWER = verdict(MEMORY_RETRIEVE, True) + "\n" + final_answer(GOLD)


@pytest.fixture(params=["tiny", "qwen3"])
def either(request, tiny) -> Tiny:
    """With the tiny tokenizer, and with the real one of Qwen3."""
    if request.param == "tiny":
        return tiny
    return replace(tiny, tokens=ChatTokens(request.getfixturevalue("qwen3")))


def record_of(episode: Episode) -> dict:
    """The record, as another program reads it."""
    seen = (episode.recipe, episode.tokens, episode.executor, episode.limits, episode.tools)
    environment = Environment({"music": episode.schema}, *seen)
    return json.loads(json.dumps(chat_record(episode.trajectory, episode.example, environment)))


@pytest.mark.parametrize("thought", ["", THOUGHT])
@pytest.mark.parametrize("compact", [False, True])
def test_rendering_gives_back_the_text(either, compact, thought):
    episode = make_episode(either, history=True, compact=compact)
    texts = [thought + text for text in (DRAFT, CHECK, ANSWER)]
    assert [say(episode, text) for text in texts] == [True, True, False]
    record, tokenizer = record_of(episode), either.tokens.tokenizer
    roles = [m["role"] for m in record["messages"]]
    assert roles == ["system"] * (not compact) + ["user"] + ["assistant", "tool"] * 2 + ["assistant"]
    assert ("tools" in record) is not compact
    assert record["example_id"] == "00000/1"
    assert [m["content"] for m in record["messages"] if m["role"] == "assistant"] == texts
    rendered = tokenizer.apply_chat_template(record["messages"], tools=record.get("tools"), tokenize=False)
    said = tokenizer.decode(episode.trajectory.ids)
    if not thought:  # Qwen3's template puts an empty one into a last message that has none
        said = said.replace(ANSWER, EMPTY_THOUGHT + ANSWER)
    assert rendered == said + "\n"


def test_tool_messages_are_what_the_model_saw(either):
    """An observation that was cut to the limit on tool tokens stands in the record as it was cut."""
    episode = make_episode(either, limits=Limits(max_tool_tokens=12), result_characters=10_000)
    say(episode, tool_call(EXEC_SQL, "SELECT name, country FROM singer UNION ALL SELECT 'a', 'b'"))
    content = record_of(episode)["messages"][-1]["content"]
    assert " ... " in content and either.tokens.count(content) <= 12
    seen = either.tokens.decode(episode.trajectory.segments[-1].ids)
    assert f"<tool_response>\n{content}\n</tool_response>" in seen


def test_messages_without_an_end_of_turn_or_an_answer(tiny):
    """After a stop string the end of turn is the environment's; what did not fit was never seen."""
    episode = make_episode(tiny)
    ids = tiny.tokens.message_ids(DRAFT)[:-1]
    assert episode.step(ids, [0.0] * len(ids), Stop.STOP_STRING) is not None
    assert record_of(episode)["messages"][-2]["content"] == DRAFT
    episode = make_episode(tiny, limits=Limits(max_response_tokens=len(ids) + 6))
    assert not say(episode, DRAFT)
    assert record_of(episode)["messages"][-1] == {"role": "assistant", "content": DRAFT}


# For other programs


@pytest.fixture
def exported(tiny: Tiny, tmp_path, capsys):
    """Two conversations, in the second of which the first message is not learned; a function that exports."""
    environment, played = environment_of(tiny, compact=False), []
    for learned in (True, False):
        episode = make_episode(tiny, compact=False)
        for text in (tool_call(EXEC_SQL, GOLD), verdict(EXEC_SQL, True) + final_answer(GOLD)):
            ids = tiny.tokens.message_ids(text)
            loss_mask = None if learned or "answer" in text else [0] * len(ids)
            episode.step(ids, [0.0] * len(ids), Stop.END_OF_TURN, loss_mask)
        played.append(episode.trajectory)
    decode, example = tiny.tokens.tokenizer.decode, make_episode(tiny).example
    write_lines(tmp_path / "trajectories.jsonl", (trajectory_record(t, decode) for t in played))
    write_lines(tmp_path / "chat.jsonl", (chat_record(t, example, environment) for t in played))

    def export(name: str, expect: int = 0, out: str = "out.jsonl"):
        """The rows that are written, or what is said instead."""
        arguments = [str(tmp_path / name), "--out", str(tmp_path / out)]
        if not expect:
            main(arguments)
            assert "conversations in" in capsys.readouterr().out
            return json_lines(tmp_path / out)
        said = refusal(capsys, user_errors, main, arguments)
        assert not (tmp_path / "out.jsonl").exists()
        return said

    return played, export, tmp_path


def test_ids_and_labels_are_ours_to_the_last_token(exported):
    played, export, _ = exported
    rows = export("trajectories.jsonl")
    for row, trajectory in zip(rows, played, strict=True):
        expected = [i if m else -100 for i, m in zip(trajectory.ids, trajectory.loss_mask, strict=True)]
        assert row == {"input_ids": trajectory.ids, "labels": expected}
    assert rows[0]["labels"] != rows[1]["labels"]


def test_what_cannot_be_learned_from_is_refused(exported):
    _, export, folder = exported
    assert "No such file" in export("none.jsonl", 2)
    assert "not a trajectory" in export("chat.jsonl", 2)
    assert f"{folder}: Is a directory" in export("trajectories.jsonl", 2, ".")
    assert "is the file to read; name another" in export("trajectories.jsonl", 2, "trajectories.jsonl")
    (folder / "circle").symlink_to("circle")
    assert "circle: Too many levels of symbolic links" in export("circle", 2)
    record = json.loads((folder / "trajectories.jsonl").read_text().splitlines()[0])
    for segment in record["segments"]:
        segment["loss_mask"] = [0] * len(segment["ids"])
    not_asked = record | {"segments": record["segments"][:1]}  # its prompt was too long
    write_lines(folder / "trajectories.jsonl", [not_asked])
    assert export("trajectories.jsonl", 0, "none.jsonl") == []
    write_lines(folder / "trajectories.jsonl", [record])
    assert "has loss mask 1" in export("trajectories.jsonl", 2)
