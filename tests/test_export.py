"""Trajectories for other programs: the same ids, and what cannot be said is refused."""

from __future__ import annotations

import json

import pytest
from conftest import GOLD, Tiny, make_episode

from mtsql.agent.env import Environment, Limits
from mtsql.agent.tools import EXEC_SQL, make_tools
from mtsql.agent.trajectory import Stop, trajectory_record
from mtsql.config import user_errors
from mtsql.extras.export import main
from mtsql.extras.teacher import read_teacher
from mtsql.recipes.mtsql_r1 import MtsqlR1
from mtsql.recipes.mtsql_r1_prompts import final_answer, tool_call, verdict
from mtsql.recipes.prompt_options import PromptOptions
from mtsql.report.records import chat_record


@pytest.fixture
def exported(tiny: Tiny, tmp_path, capsys):
    """Two conversations, in the second of which the first message is not learned; a function that exports."""
    environment = Environment(
        {"music": tiny.schema},
        MtsqlR1(PromptOptions(False, 40)),
        tiny.tokens,
        tiny.executor,
        Limits(),
        make_tools("both"),
    )
    played = []
    for learned in (True, False):
        episode = make_episode(tiny, compact=False)
        for text in (tool_call(EXEC_SQL, GOLD), verdict(EXEC_SQL, True) + final_answer(GOLD)):
            ids = tiny.tokens.message_ids(text)
            loss_mask = None if learned or "answer" in text else [0] * len(ids)
            episode.step(ids, [0.0] * len(ids), Stop.END_OF_TURN, loss_mask)
        played.append(episode.trajectory)
    rows = {
        "trajectories": [trajectory_record(t, tiny.tokens.tokenizer.decode) for t in played],
        "chat": [chat_record(t, make_episode(tiny).example, environment) for t in played],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def export(name: str, form: str, out: str, expect: int = 0):
        arguments = [str(tmp_path / name), "--format", form, "--out", str(tmp_path / out)]
        if expect:
            with pytest.raises(SystemExit) as stop:
                user_errors(main, arguments)
            assert stop.value.code == expect
        else:
            main(arguments)
        said = capsys.readouterr()
        path = tmp_path / out
        rows = [json.loads(x) for x in path.read_text().splitlines()] if path.is_file() else []
        return rows, said.out + said.err

    return played, export, tmp_path


def test_ids_and_labels_are_ours_to_the_last_token(exported):
    played, export, _ = exported
    rows, said = export("trajectories.jsonl", "ids", "ids.jsonl")
    assert "2 conversations" in said
    for row, trajectory in zip(rows, played, strict=True):
        assert row["input_ids"] == trajectory.ids
        expected = [i if m else -100 for i, m in zip(trajectory.ids, trajectory.loss_mask, strict=True)]
        assert row["labels"] == expected
    assert rows[0]["labels"] != rows[1]["labels"]


def test_what_a_form_cannot_say_is_refused(exported):
    _, export, folder = exported
    assert "line 2: not all of it is to be learned" in export("chat.jsonl", "messages", "m.jsonl", 2)[1]
    assert not (folder / "m.jsonl").exists()
    assert "does not exist" in export("none.jsonl", "messages", "m.jsonl", 2)[1]
    assert "not a conversation" in export("trajectories.jsonl", "llamafactory", "m", 2)[1]
    assert not (folder / "m").exists()
    assert f"{folder} is a folder; name a file" in export("trajectories.jsonl", "ids", ".", 2)[1]
    assert "stands where it needs a folder" in export("trajectories.jsonl", "ids", "chat.jsonl/ids", 2)[1]


def test_messages_and_llamafactory(exported):
    _, export, folder = exported
    first = (folder / "chat.jsonl").read_text().splitlines()[0]
    (folder / "chat.jsonl").write_text(first + "\n")
    (row,), _ = export("chat.jsonl", "messages", "m.jsonl")
    assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert row["tools"][0]["function"]["name"] == EXEC_SQL
    export("chat.jsonl", "llamafactory", "factory")
    info = json.loads((folder / "factory" / "dataset_info.json").read_text())["mtsql"]
    (line,) = (folder / "factory" / info["file_name"]).read_text().splitlines()
    row = json.loads(line)
    assert set(info["columns"].values()) == row.keys()
    assert {m[info["tags"]["role_tag"]] for m in row["messages"]} <= set(info["tags"].values())
    assert json.loads(row["tools"])[0]["function"]["name"] == EXEC_SQL


def test_calls_and_thoughts_that_stand_apart_are_part_of_the_text(exported):
    _, export, folder = exported
    call = {"name": EXEC_SQL, "arguments": json.dumps({"code": GOLD})}
    asked, seen = {"role": "user", "content": "Who?"}, {"role": "tool", "content": "Bruno"}
    pieces = [{"type": "thinking", "thinking": "Done."}, {"type": "text", "text": final_answer(GOLD)}]
    for one in ({"tool_calls": [{"id": "1", "type": "function", "function": call}]}, {"function_call": call}):
        said = {"role": "assistant", "content": None, "reasoning_content": "Draft.", **one}
        record = {"messages": [asked, said, seen, {"role": "assistant", "content": pieces}]}
        (folder / "chat.jsonl").write_text(json.dumps(record) + "\n")
        for form in ("messages", "llamafactory"):
            out = f"{form}{len(list(folder.iterdir()))}"
            rows, _ = export("chat.jsonl", form, out)
            if form == "llamafactory":
                rows = [json.loads((folder / out / "mtsql.jsonl").read_text())]
            texts = [m["content"] for m in rows[0]["messages"]]
            assert texts[1] == f"<think>\nDraft.\n</think>\n\n{tool_call(EXEC_SQL, GOLD)}"
            assert texts[3] == f"<think>\nDone.\n</think>\n\n{final_answer(GOLD)}"
            assert read_teacher(folder / "chat.jsonl")[0].messages == [(texts[1], True), (texts[3], True)]
    for wrong in ({"role": "assistant"}, {"role": "assistant", "content": [{"type": "image"}]}):
        (folder / "chat.jsonl").write_text(json.dumps({"messages": [asked, wrong]}) + "\n")
        assert "line 1: not a conversation" in export("chat.jsonl", "messages", "wrong", 2)[1]


def test_nothing_is_overwritten_or_silently_empty(exported):
    _, export, folder = exported
    (folder / "factory").mkdir()
    (folder / "factory" / "dataset_info.json").write_text("{}")
    first = (folder / "chat.jsonl").read_text().splitlines()[0]
    (folder / "chat.jsonl").write_text(first + "\n")
    assert "a folder of its own" in export("chat.jsonl", "llamafactory", "factory", 2)[1]
    record = json.loads((folder / "trajectories.jsonl").read_text().splitlines()[0])
    for segment in record["segments"]:
        segment["loss_mask"] = [0] * len(segment["ids"])
    (folder / "trajectories.jsonl").write_text(json.dumps(record) + "\n")
    assert "has loss mask 1" in export("trajectories.jsonl", "ids", "x.jsonl", 2)[1]
    for segment in record["segments"]:
        del segment["loss_mask"]
    (folder / "trajectories.jsonl").write_text(json.dumps(record) + "\n")
    assert "write trajectories.jsonl anew" in export("trajectories.jsonl", "ids", "x.jsonl", 2)[1]
