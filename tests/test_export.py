"""Trajectories for other programs: the same ids, and what cannot be said is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import GOLD, Tiny, environment_of, make_episode

from mtsql.agent.tools import EXEC_SQL
from mtsql.agent.trajectory import Stop, trajectory_record
from mtsql.config import user_errors
from mtsql.extras.export import main
from mtsql.extras.teacher import read_teacher
from mtsql.recipes.mtsql_r1_prompts import final_answer, tool_call, verdict
from mtsql.report.records import chat_record


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
    write(
        tmp_path / "trajectories.jsonl", *(trajectory_record(t, tiny.tokens.tokenizer.decode) for t in played)
    )
    write(tmp_path / "chat.jsonl", *(chat_record(t, make_episode(tiny).example, environment) for t in played))

    def export(name: str, form: str, expect: int = 0, out: str = "out.jsonl"):
        """The rows that are written, or what is said instead."""
        arguments = [str(tmp_path / name), "--format", form, "--out", str(tmp_path / out)]
        if not expect:
            main(arguments)
            assert "conversations in" in capsys.readouterr().out
            return [json.loads(line) for line in (tmp_path / out).read_text().splitlines()]
        with pytest.raises(SystemExit) as stop:
            user_errors(main, arguments)
        assert stop.value.code == expect and not (tmp_path / "out.jsonl").exists()
        return capsys.readouterr().err

    return played, export, tmp_path


def write(path: Path, *records: dict) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_ids_and_labels_are_ours_to_the_last_token(exported):
    played, export, _ = exported
    rows = export("trajectories.jsonl", "ids")
    for row, trajectory in zip(rows, played, strict=True):
        assert row["input_ids"] == trajectory.ids
        expected = [i if m else -100 for i, m in zip(trajectory.ids, trajectory.loss_mask, strict=True)]
        assert row["labels"] == expected
    assert rows[0]["labels"] != rows[1]["labels"]


def test_what_a_form_cannot_say_is_refused(exported):
    _, export, folder = exported
    assert "line 2: not all of it is to be learned" in export("chat.jsonl", "messages", 2)
    assert "does not exist" in export("none.jsonl", "messages", 2)
    assert "not a conversation" in export("trajectories.jsonl", "messages", 2)
    assert f"{folder} is a folder; name a file" in export("trajectories.jsonl", "ids", 2, ".")
    record = json.loads((folder / "trajectories.jsonl").read_text().splitlines()[0])
    for segment in record["segments"]:
        segment["loss_mask"] = [0] * len(segment["ids"])
    write(folder / "trajectories.jsonl", record)
    assert "has loss mask 1" in export("trajectories.jsonl", "ids", 2)
    for segment in record["segments"]:
        del segment["loss_mask"]
    write(folder / "trajectories.jsonl", record)
    assert "write trajectories.jsonl anew" in export("trajectories.jsonl", "ids", 2)


def test_calls_and_thoughts_that_stand_apart_are_part_of_the_text(exported):
    _, export, folder = exported
    call = {"name": EXEC_SQL, "arguments": json.dumps({"code": GOLD})}
    asked, seen = {"role": "user", "content": "Who?"}, {"role": "tool", "content": "Bruno"}
    pieces = [{"type": "thinking", "thinking": "Done."}, {"type": "text", "text": final_answer(GOLD)}]
    for wrong in ({"role": "assistant"}, {"role": "assistant", "content": [{"type": "image"}]}):
        write(folder / "chat.jsonl", {"messages": [asked, wrong]})
        assert "line 1: not a conversation" in export("chat.jsonl", "messages", 2)
    for one in ({"tool_calls": [{"id": "1", "type": "function", "function": call}]}, {"function_call": call}):
        said = {"role": "assistant", "content": None, "reasoning_content": "Draft.", **one}
        answer = {"role": "assistant", "content": pieces}
        write(
            folder / "chat.jsonl", {"messages": [asked, said, seen, answer], "tools": [{"type": "function"}]}
        )
        (row,) = export("chat.jsonl", "messages")
        texts = [m["content"] for m in row["messages"]]
        assert [m["role"] for m in row["messages"]] == ["user", "assistant", "tool", "assistant"]
        assert row["tools"] == [{"type": "function"}]
        assert texts[1] == f"<think>\nDraft.\n</think>\n\n{tool_call(EXEC_SQL, GOLD)}"
        assert texts[3] == f"<think>\nDone.\n</think>\n\n{final_answer(GOLD)}"
        assert read_teacher(folder / "chat.jsonl")[0].messages == [(texts[1], True), (texts[3], True)]
