"""The judge of wrong predictions, against a small server on this machine."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import GOLD, QUESTION

from mtsql.config import DataOptions, read_options, user_errors
from mtsql.errors import UserError
from mtsql.experiments.judge import (
    Judge,
    JudgeConfig,
    judge_predictions,
    main,
    parse_kinds,
    read_wrong,
)
from mtsql.extras.http_client import Server, ServerError
from mtsql.task import load_split

KEY = "sk-secret-of-the-test"
FIRST = "SELECT count(*) FROM singer"


class StubServer:
    """Answers with the given (status, text) in turn, the last one for ever; keeps what it was sent."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.requests: list[dict] = []
        self.keys: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                assert self.path == "/v1/chat/completions"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, text = answers[min(len(outer.requests), len(answers) - 1)]
                outer.requests.append(body)
                outer.keys.append(self.headers["Authorization"])
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def judge(self, **changes) -> Judge:
        return Judge(Server(self.address, **{"pauses": (0.0, 0.0), "timeout": 10.0, **changes}), "referee")


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    started: list[StubServer] = []

    def start(*answers: tuple[int, str]) -> StubServer:
        started.append(StubServer(*answers))
        return started[-1]

    yield start
    for server in started:
        server.http.shutdown()
        server.http.server_close()


def said(text: str) -> tuple[int, str]:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


def kinds(*names: str) -> tuple[int, str]:
    return said(json.dumps({"errors": names}))


@pytest.fixture
def evaluated(tiny, tmp_path):
    """A split of two dialogues and the records of its four answers, three of them wrong."""
    turns = [{"utterance": "How many singers?", "query": FIRST}, {"utterance": QUESTION, "query": GOLD}]
    dialogue = {"database_id": "music", "interaction": turns}
    (tmp_path / "dev.json").write_text(json.dumps([dialogue, dialogue]))
    rows = [
        {
            "example_id": name,
            "db_id": "music",
            "gold": gold,
            "predicted": predicted,
            "ex": ex,
            "errors": errors,
        }
        for name, gold, predicted, ex, errors in (
            ("00000/0", FIRST, "SELECT id FROM singer", 0, ["aggregation"]),
            ("00000/1", GOLD, "SELECT name FROM singer", 0, ["constraint"]),
            ("00001/0", FIRST, FIRST, 1, []),
            ("00001/1", GOLD, None, 0, ["execution"]),
        )
    ]
    path = tmp_path / "predictions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataOptions(
        data=(str(tmp_path / "dev.json"),),
        out="",
        tables=(str(tiny.folder / "tables.json"),),
        databases=(str(tiny.folder / "database"),),
    )
    return path, load_split(config, "dev"), config


def options(path, config, out):
    """The command line but for the address."""
    given = {"predictions": path, "data": config.data[0], "tables": config.tables[0], "out": out}
    given |= {"databases": config.databases[0], "judge": "referee", "key-variable": "MY_KEY"}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_command_judges_and_prints_shares_but_not_the_key(
    evaluated, serve, tmp_path, monkeypatch, capsys
):
    path, _, config = evaluated
    server = serve(
        kinds("aggregation", "constraint"),
        said('<think>{"errors": ["other"]} no</think>\n```json\n{"errors": ["constraint"]}\n```'),
        kinds("execution"),
    )
    monkeypatch.setenv("MY_KEY", KEY + "\n")
    out = tmp_path / "judged.jsonl"
    words = [*options(path, config, out), "--address", server.address]
    main(read_options(JudgeConfig, "", words))
    records = lines_of(out)
    assert [r["example_id"] for r in records] == ["00000/0", "00000/1", "00001/1"]
    assert [r["kinds"] for r in records] == [["constraint", "aggregation"], ["constraint"], ["execution"]]
    assert server.keys == [f"Bearer {KEY}"] * 3
    assert {r["temperature"] for r in server.requests} == {0.0} and server.requests[0]["model"] == "referee"
    second = server.requests[1]["messages"][0]["content"]
    for part in (
        "create table singer",
        f"1. How many singers?\n   {FIRST}",
        QUESTION,
        GOLD,
        "prediction runs.",
    ):
        assert part in second
    assert "first question" in server.requests[0]["messages"][0]["content"]
    assert "does not run" in server.requests[2]["messages"][0]["content"]
    shown = capsys.readouterr()
    table = dict(line.split(maxsplit=1) for line in shown.out.splitlines())
    assert "3 wrong predictions judged, 0 unjudged" in shown.out
    assert table["constraint"].split() == ["66.7", "%", "33.3", "%"]
    assert table["aggregation"].split() == ["33.3", "%", "33.3", "%"]
    assert "the same kinds           66.7 %" in shown.out
    assert KEY not in shown.out + shown.err + out.read_text()


def test_other_forms_are_unjudged_and_asked_again_last(evaluated, serve, tmp_path):
    path, dataset, _ = evaluated
    wrong, out = read_wrong(path, dataset), tmp_path / "judged.jsonl"
    server = serve(said("I think it is constraint."), kinds("constraint"), (200, "<html>"))
    records = judge_predictions(server.judge(), wrong, dataset, out)
    assert [r["kinds"] for r in records] == [None, ["constraint"], None]
    assert "not a JSON object" in records[0]["unjudged"] and records[0]["answer"].startswith("I think")
    assert "choices[0]" in records[2]["unjudged"]
    again = serve(kinds("other"))
    records = judge_predictions(again.judge(), wrong, dataset, out)
    assert [(r["example_id"], r["kinds"]) for r in records] == [
        ("00000/1", ["constraint"]), ("00000/0", ["other"]), ("00001/1", ["other"]),
    ]  # fmt: skip
    assert lines_of(out) == records and len(again.requests) == 2


def test_a_failing_server_is_tried_three_times(serve):
    server = serve((500, "overloaded"), (429, "slow down"), kinds("join_path"))
    assert parse_kinds(server.judge().ask("?")) == ["join_path"] and len(server.requests) == 3
    server = serve((503, "down"), (503, "down"), (503, "down"), kinds("join_path"))
    with pytest.raises(ServerError, match="HTTP 503, down"):
        server.judge().ask("?")
    assert len(server.requests) == 3


def test_a_refusal_is_not_repeated_and_hides_the_key(serve):
    server = serve((401, f"wrong key {KEY}"))
    with pytest.raises(ServerError) as error:
        server.judge(key=KEY).ask("?")
    assert len(server.requests) == 1 and "HTTP 401, wrong key ***" in str(error.value)
    server = serve((302, ""))
    with pytest.raises(ServerError, match="HTTP 302"):
        server.judge(key=KEY).ask("?")
    assert len(server.requests) == 1


def test_a_run_that_stops_goes_on_where_it_stopped(evaluated, serve, tmp_path, monkeypatch):
    path, dataset, _ = evaluated
    wrong, out = read_wrong(path, dataset), tmp_path / "judged.jsonl"
    server = serve(kinds("aggregation"), (400, "context too long"))
    monkeypatch.setattr("mtsql.experiments.judge.MAX_FAILURES", 2)
    with pytest.raises(UserError, match=r"2 requests in a row failed: .*context too long.*goes on"):
        judge_predictions(server.judge(), wrong, dataset, out)
    assert [r["kinds"] for r in lines_of(out)] == [["aggregation"], None, None]
    with out.open("a") as file:
        file.write('{"example_id": "00000/1", "kin')  # as a killed process leaves it
    again = serve(kinds("constraint"), kinds("execution"))
    records = judge_predictions(again.judge(), wrong, dataset, out)
    assert [r["kinds"] for r in records] == [["aggregation"], ["constraint"], ["execution"]]
    assert len(again.requests) == 2 and lines_of(out) == records
    assert judge_predictions(again.judge(), wrong, dataset, out, limit=1) == records
    assert len(again.requests) == 2


def test_limit_and_unreachable_server(evaluated, serve, tmp_path):
    path, dataset, _ = evaluated
    wrong, out = read_wrong(path, dataset), tmp_path / "judged.jsonl"
    server = serve(kinds("aggregation"))
    assert len(judge_predictions(server.judge(), wrong, dataset, out, limit=1)) == 1
    closed = Judge(Server("http://127.0.0.1:9/v1", pauses=(0.0, 0.0), timeout=5.0), "referee")
    with pytest.raises(ServerError, match="gave no answer"):
        closed.ask("?")


@pytest.mark.parametrize(
    "answer",
    [
        "", "constraint", "[]", "{}", '{"errors": []}', '{"errors": "constraint"}', '{"errors": ["WHERE"]}',
        '{"errors": [["constraint"]]}', '{"errors": ["constraint"]} because', "null", "[" * 100_000,
    ],
)  # fmt: skip
def test_answers_of_another_form(answer):
    with pytest.raises(ServerError):
        parse_kinds(answer)


def test_wrong_input_is_one_sentence(evaluated, tmp_path, monkeypatch, capsys):
    path, dataset, config = evaluated
    wrong, out = read_wrong(path, dataset), tmp_path / "judged.jsonl"
    judged = {
        "example_id": "00000/0",
        "predicted": "SELECT id FROM singer",
        "kinds": ["other"],
        "model": "another",
    }
    out.write_text(json.dumps(judged) + "\n")
    with pytest.raises(UserError, match="judgements by another"):
        judge_predictions(Judge(Server(""), "referee"), wrong, dataset, out)
    out.write_text(json.dumps({**judged, "predicted": "SELECT 1"}) + "\n")
    with pytest.raises(UserError, match="something else"):
        judge_predictions(Judge(Server(""), "another"), wrong, dataset, out)
    row = json.loads(path.read_text().splitlines()[0])
    for change, message in (
        ({"gold": "SELECT 1"}, "line 1: 00000/0 is not a question"),
        ({"errors": None}, "line 1: no field 'errors'"),
        ({"ex": 1}, "no wrong prediction"),
        ({"gold_problem": "does not run"}, "no wrong prediction"),
    ):
        path.write_text(json.dumps({**row, **change}) + "\n")
        with pytest.raises(UserError, match=message):
            read_wrong(path, dataset)
    path.write_text("{\n")
    with pytest.raises(UserError, match="line 1"):
        read_wrong(path, dataset)
    with pytest.raises(UserError, match="is not a file"):
        read_wrong(path.with_name("nowhere.jsonl"), dataset)
    path.write_text(json.dumps(row) + "\n")
    monkeypatch.setenv("MY_KEY", "sk\nsecret")
    for address, message in (("http://localhost:1/v1", "MY_KEY"), ("file:///etc", "--address file:///etc")):
        with pytest.raises(SystemExit) as stopped:
            words = [*options(path, config, out), "--address", address]
            user_errors(main, read_options(JudgeConfig, "", words))
        shown = capsys.readouterr().err
        assert stopped.value.code == 2 and message in shown and "secret" not in shown
