"""A policy behind an address: token ids and chat messages, errors, cut messages, interruptions."""

import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from conftest import GOLD, ROOT, TOY, Tiny, environment_of, json_lines, make_episode, run, say
from tqdm import tqdm

from evaluate import Args as EvaluateArgs
from mtsql.agent.env import Episode
from mtsql.agent.rollout import Sampling, rollout
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import EXEC_SQL
from mtsql.agent.trajectory import Segment, Status, Trajectory
from mtsql.data.datasets import Dialogue, Example
from mtsql.errors import UserError
from mtsql.extras.http_client import Server, ServerError
from mtsql.extras.served import ServedPolicy, check_policy, find_protocol, play_served
from mtsql.learn.model import load_policy
from mtsql.learn.parallel import Processes
from mtsql.model_folder import load_tokenizer
from mtsql.recipes.mtsql_r1 import final_answer, verdict
from mtsql.report.records import AnswerLog
from mtsql.task import Task
from mtsql.toy.tiny import MODELS

GREEDY = Sampling(0.0, max_turn_tokens=120)
ASKED = {"name": EXEC_SQL, "arguments": json.dumps({"code": GOLD})}
CALL = {"id": "call-7", "type": "function", "function": ASKED}


def choice(message: dict, reason: str = "stop") -> dict:
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    return {"choices": [{"message": message, "finish_reason": reason}], "usage": usage}


def said(text: str, reason: str = "stop") -> dict:
    return choice({"role": "assistant", "content": text}, reason)


Reply = Callable[[str, dict], tuple]  # status, content (pieces come slowly), headers


@pytest.fixture
def serve(monkeypatch) -> Iterator[Callable[[Reply], tuple[Server, list[dict]]]]:
    """Starts a server whose answers are those of a function; gives it and the list of what it was sent."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    started = []

    def start(reply: Reply, **options: object) -> tuple[Server, list[dict]]:
        requests: list[dict] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                requests.append(body)
                status, content, *headers = reply(self.path, body)
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()
                for piece in content if isinstance(content, list) else [json.dumps(content).encode()]:
                    self.wfile.write(piece)
                    time.sleep(0.05 * isinstance(content, list))

            def log_message(self, *_):
                pass

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        started.append(http)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        how = {"pauses": (0.0, 0.0), "timeout": 20.0} | options
        return Server(f"http://127.0.0.1:{http.server_port}/v1", **how), requests

    yield start
    for http in started:
        http.shutdown()
        http.server_close()


def in_turn(*answers: tuple[int, dict] | dict) -> Reply:
    """These answers, one a request, the last one for ever."""
    waiting = list(answers)

    def reply(path: str, body: dict) -> tuple[int, dict]:
        answer = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return answer if isinstance(answer, tuple) else (200, answer)

    return reply


def policy_of(server: Server, protocol: str = "chat") -> ServedPolicy:
    return ServedPolicy(server, "teacher", protocol)


def about(tiny: Tiny, *questions: str) -> list[Episode]:
    """An episode for each of these questions."""
    episodes = [make_episode(tiny) for _ in questions]
    for number, (episode, question) in enumerate(zip(episodes, questions, strict=True)):
        episode.example = replace(episode.example, question=question)
        episode.trajectory.seed = number
    return episodes


@pytest.fixture
def ask(tiny, serve) -> Callable[..., tuple[Trajectory, list[dict]]]:
    """Plays an episode with a chat server of these answers; gives it and what the server was sent."""

    def play(*answers: dict | tuple, **options: object) -> tuple[Trajectory, list[dict]]:
        server, requests = serve(in_turn(*answers), **options)
        (trajectory,) = play_served(policy_of(server), [make_episode(tiny)], GREEDY, 1)
        return trajectory, requests

    return play


@pytest.fixture
def ask_three(tiny, serve) -> Callable[..., None]:
    """The second of three episodes, whose messages are these answers, ends alone without an answer."""

    def play(*answers: dict | tuple, protocol: str = "chat", **options: object) -> list[Trajectory]:
        policy = policy_of(serve(in_turn(*answers), **options)[0], protocol)
        played = play_served(policy, [make_episode(tiny) for _ in range(3)], GREEDY, 1, skip_refused=True)
        assert [t.status for t in played] == [Status.ANSWERED, Status.NO_ACTION, Status.ANSWERED]
        assert policy.costs["refused"] == 1
        return played

    return play


def test_chat_echoes_the_servers_message_and_answers_its_call(tiny, serve):
    thinking = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Draft it."}
    server, requests = serve(in_turn(choice(thinking), said(verdict(EXEC_SQL, True) + final_answer(GOLD))))
    policy, episode = policy_of(server), make_episode(tiny, compact=False)
    (trajectory,) = play_served(policy, [episode], GREEDY, 1)
    assert (trajectory.status, trajectory.answer_sql) == (Status.ANSWERED, GOLD)
    seen = trajectory.observations[0].text
    assert "Bruno" in seen and sum(trajectory.loss_mask) == 0
    first, second = requests
    assert first["tools"][0]["function"]["name"] == EXEC_SQL and first["temperature"] == 0.0
    answered = {"role": "tool", "tool_call_id": "call-7", "content": seen}
    assert second["messages"][-2:] == [thinking, answered]
    assert "Draft it." in tiny.tokens.decode(trajectory.segments[1].ids)
    assert policy.costs == {"requests": 2, "refused": 0, "prompt_tokens": 10, "completion_tokens": 4}
    warm = replace(GREEDY, temperature=0.6, top_p=0.95)
    for policy.own_temperature, asked in ((False, (0.6, 0.95)), (True, (None, None))):
        play_served(policy, [make_episode(tiny)], warm, 1)
        assert (requests[-1].get("temperature"), requests[-1].get("top_p")) == asked


ARGUMENTS = ("", '{"code": "SELECT', '{"code": "\\ud800"}', "\ud800", '{"code": ' + "[" * 2_000, None)
UNREADABLE = [{"name": EXEC_SQL, "arguments": text} for text in ARGUMENTS]


@pytest.mark.parametrize("function", [*UNREADABLE, {"name": EXEC_SQL}, {"arguments": "{}"}])
def test_a_call_that_nobody_can_read_is_the_policys_mistake(tiny, serve, function):
    long, call = Sampling(0.0, max_turn_tokens=4_000), {"id": "1", "type": "function", "function": function}
    alone, behind = ({"content": "\ud800", "tool_calls": calls} for calls in ([call], [CALL, call]))
    server, _ = serve(in_turn(choice(alone), choice(behind), said(final_answer(GOLD))))
    first, second = play_served(policy_of(server), [make_episode(tiny) for _ in range(2)], long, 1)
    assert first.status is Status.MALFORMED_CALL and first.sampled_length > 0
    assert second.status is Status.ANSWERED  # the first call counts, as in process
    assert "Bruno" in second.observations[0].text


def test_after_ctrl_c_only_messages_on_their_way_are_waited_for(tiny, serve, monkeypatch):
    asked, go_on = threading.Event(), threading.Event()

    def reply(path: str, body: dict) -> tuple[int, dict]:
        if "quick" in body["messages"][-1]["content"]:
            return 200, said(final_answer(GOLD))
        asked.set()
        go_on.wait(10)
        return 200, choice({"role": "assistant", "content": None, "tool_calls": [CALL]})

    def interrupt(*_: object) -> None:
        asked.wait(10)
        threading.Timer(0.2, go_on.set).start()  # by then play_served waits
        raise KeyboardInterrupt

    server, requests = serve(reply)
    monkeypatch.setattr(tqdm, "update", interrupt)
    slow, *quick = about(tiny, "slow", *["quick"] * 50)
    with pytest.raises(KeyboardInterrupt):
        play_served(policy_of(server), [slow, *quick], GREEDY, 2)
    assert len(requests) < 50 and slow.trajectory.messages == 1 and slow.trajectory.status is None


def test_a_line_break_before_a_call_is_not_doubled(tiny, ask):
    """Servers leave it in the text when they take the call out."""
    looked = {"role": "assistant", "content": verdict(EXEC_SQL, True) + "\n", "tool_calls": [CALL]}
    trajectory, requests = ask(choice(looked), said(final_answer(GOLD)))
    text = tiny.tokens.decode(trajectory.segments[1].ids)
    assert text.startswith(verdict(EXEC_SQL, True) + "\n<tool_call>\n{")
    assert requests[1]["messages"][1]["content"] == verdict(EXEC_SQL, True)
    assert trajectory.answer_sql == GOLD


def test_a_cut_message_is_not_read_and_a_busy_server_is_asked_again(ask):
    trajectory, requests = ask((503, {}), (429, {}), said(final_answer(GOLD), "length"))
    assert trajectory.status is Status.OUT_OF_TOKENS and len(requests) == 3


def test_a_server_that_does_not_answer_is_one_sentence_without_the_key(ask):
    with pytest.raises(ServerError, match=r'cannot be read, IndexError: .* \{"choices": \[\]\}'):
        ask({"choices": []})
    with pytest.raises(ServerError, match=r"HTTP 401, .*wrong key \*\*\*") as error:
        ask((401, {"error": "wrong key sk-123"}), key="sk-123")
    assert "sk-123" not in str(error.value) + repr(Server("http://h/v1", "sk-123"))


@pytest.mark.parametrize("status", [400, 500])
def test_an_episode_that_the_server_refuses_does_not_stop_the_others(tiny, serve, tmp_path, status, capsys):
    """Nor is it asked again when the command goes on; what it was refused for is said."""

    def reply(path: str, body: dict) -> tuple[int, dict]:
        long = "too long" in json.dumps(body)
        return (status, {"error": "context length"}) if long else (200, said(final_answer(GOLD)))

    server, requests = serve(reply)
    policy, path = policy_of(server), tmp_path / "answers.jsonl"
    episodes, log = about(tiny, "too long", "short", "short", "too long"), AnswerLog(path, {})
    for episode in episodes:
        episode.told = log.add
    trajectories = play_served(policy, episodes, GREEDY, 1, skip_refused=True)
    ends = [Status.NO_ACTION, Status.ANSWERED, Status.ANSWERED, Status.NO_ACTION]
    assert [t.status for t in trajectories] == ends
    assert policy.costs["refused"] == 2
    assert "question 00000/1 ends without an answer: http" in capsys.readouterr().out
    assert set(AnswerLog(path, {}).answers) == {0, 1, 2, 3}
    with pytest.raises(ServerError, match="context length"):  # in a dialogue, whose user is told why
        play_served(policy, about(tiny, "too long"), GREEDY, 1)
    with pytest.raises(ServerError, match="context length"):  # it has refused them all
        play_served(policy_of(server), about(tiny, *["too long"] * 4), GREEDY, 1, skip_refused=True)
    asked, many = len(requests), about(tiny, *["too long"] * 80)
    with pytest.raises(ServerError, match="context length"):  # nor does it go on for ever
        play_served(policy, many, GREEDY, 1, skip_refused=True)
    assert len(requests) - asked <= 18 * 3 and many[0].trajectory.status is None


BAD = {  # answers with status 200 but for the last
    "error": {"error": {"code": 502, "message": "upstream"}}, "page": [b"<html>"], "nothing": {},
    "no message": {"choices": [{"message": None}]}, "pieces": choice({"content": [{"type": "image"}]}),
    "no function": choice({"tool_calls": [{"function": None}]}), "number": choice({"content": 7}),
    "broken off": {"choices": [{"message": {"content": "SEL"}, "finish_reason": "error"}]},
    "drips": [b" "] * 20, "gateway": (504, {}),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_one_bad_answer_is_asked_for_again_or_ends_its_own_question(ask, ask_three, bad):
    good = said(final_answer(GOLD)) | {"usage": "many"}
    assert ask(bad, good, timeout=0.6)[0].answer_sql == GOLD
    ask_three(good, bad, bad, bad, good, timeout=0.6)


@pytest.mark.parametrize("ids", [["1", "2"], [1.0, 2.0], [-1, 2], [1, 2**40], [1], [], None, 7])
def test_ids_that_are_none_end_their_own_question(tiny, serve, ask_three, ids):
    def sampled(ids: object, logprobs: list) -> dict:
        return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}]}

    answer, bad = tiny.tokens.message_ids(final_answer(GOLD)), sampled(ids, [-0.5, -0.5])
    good = sampled(answer, [None, float("nan"), *[-0.5] * (len(answer) - 2)])
    played = ask_three(good, bad, bad, bad, good, protocol="tokens")
    assert played[0].segments[1].loss_mask[:3] == (0, 0, 1)  # what has no log-probability is not learned
    for reply, protocol in ((good, "tokens"), (bad, "chat")):
        assert find_protocol(serve(in_turn(reply))[0], "any", tiny.tokens) == protocol


def test_thoughts_in_pieces(tiny, ask):
    thought = [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}]
    answer = {"content": [*thought, {"type": "text", "text": final_answer(GOLD)}]}
    trajectory, _ = ask(choice(answer))
    text = tiny.tokens.decode(trajectory.segments[1].ids)
    assert trajectory.answer_sql == GOLD and text.startswith("<think>\nHm.\n</think>\n\n<answer")


def test_only_fields_of_the_protocol_are_sent_back(ask):
    """As a server wants that refuses its own other fields."""
    own = {"annotations": [], "reasoning": None, "refusal": None, "audio": None, "function_call": None}
    given = {"role": "model", "content": "", "tool_calls": [CALL | {"index": 0}], **own}
    trajectory, requests = ask(choice(given), said(final_answer(GOLD)))
    sent = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert trajectory.answer_sql == GOLD and requests[1]["messages"][1] == sent
    no_id = {"content": None, "tool_calls": [{"function": ASKED} for _ in range(2)]}
    _, requests = ask(choice(no_id), said(final_answer(GOLD)))
    called, *answered = requests[1]["messages"][-3:]
    names = [call["id"] for call in called["tool_calls"]]
    assert names == [message["tool_call_id"] for message in answered] and len(set(names)) == 2


def test_a_server_that_names_a_pause_gets_it(ask):
    began = time.monotonic()
    date = formatdate(time.time() + 2, usegmt=True)
    busy = [(429, {}, ("Retry-After", value)) for value in ("1", date)]
    trajectory, _ = ask(*busy, said(final_answer(GOLD)), pauses=())
    assert trajectory.answer_sql == GOLD and time.monotonic() - began > 1.5
    with pytest.raises(ServerError, match="HTTP 429"):  # longer than anybody waits
        ask((429, {}, ("Retry-After", "7000")))
    assert time.monotonic() - began < 10


def test_an_address_with_a_password_is_refused_without_showing_it():
    for address in ("http://user:hunter2@127.0.0.1:9/v1", "http://hunter2@h", "http://h/v1?key=hunter2"):
        with pytest.raises(UserError, match="without a password") as error:
            Server(address)
        assert "hunter2" not in str(error.value)
    with pytest.raises(UserError, match="--address localhost should be like"):
        Server("localhost")
    for address in ("http://[::1", "http://a..b/v1", "http://\u212a/v1", f"http://{'a' * 70}/v1"):
        with pytest.raises(ServerError, match="gave no answer"):
            Server(address, pauses=()).post("", {}, dict)


@pytest.mark.parametrize("status", [401, 403, 404, 429, 503])
def test_a_server_that_refuses_for_good_stops_the_others(ask_three, status):
    good = said(final_answer(GOLD))
    with pytest.raises(ServerError, match=f"HTTP {status}"):
        ask_three(good, (status, {}), good, pauses=())


def test_a_server_that_wants_the_limits_newer_name_gets_it(tiny, serve):
    def reply(path: str, body: dict) -> tuple[int, dict]:
        if "max_tokens" in body:
            problem = "Unsupported parameter: 'max_tokens' is not supported with this model. "
            return 400, {"error": {"message": problem + "Use 'max_completion_tokens' instead."}}
        return 200, said(final_answer(GOLD))

    server, requests = serve(reply)
    played = play_served(policy_of(server), [make_episode(tiny) for _ in range(3)], GREEDY, 1)
    assert [t.status for t in played] == [Status.ANSWERED] * 3
    limits = [{name: limit for name, limit in body.items() if name.startswith("max_")} for body in requests]
    assert limits == [{"max_tokens": 120}] + [{"max_completion_tokens": 120}] * 3


class ModelServer:
    """What vLLM's /completions does with token ids, and a chat server with messages, by `generate`."""

    def __init__(self, folder: str) -> None:
        self.model, self.tokens = load_policy(folder).eval(), ChatTokens(load_tokenizer(folder))
        self.lock = threading.Lock()

    def render(self, body: dict) -> list[int]:
        """As servers do: tags in the text of a message are tags."""
        how = {"tools": body.get("tools"), "add_generation_prompt": True, "return_dict": False}
        return self.tokens.tokenizer.apply_chat_template(body["messages"], **how)

    def __call__(self, path: str, body: dict) -> tuple[int, dict]:
        chat = path.endswith("/chat/completions")
        prompt = self.render(body) if chat else body["prompt"]
        how = {"do_sample": False, "max_new_tokens": body["max_tokens"], "output_logits": True}
        how |= {"eos_token_id": list(self.tokens.end_of_turn_ids), "return_dict_in_generate": True}
        with self.lock:
            output = self.model.generate(torch.tensor([prompt]), **how)
        ids = output.sequences[0, len(prompt) :].tolist()
        logprobs = [logits[0].log_softmax(-1)[i].item() for logits, i in zip(output.logits, ids, strict=True)]
        reason = "stop" if ids[-1] in self.tokens.end_of_turn_ids else "length"
        if chat:
            return 200, said(self.tokens.decode(ids), reason)
        answer = {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}
        return 200, {"choices": [answer]}


def test_a_served_policy_is_the_one_in_process(tiny, serve):
    """By token ids with its log-probabilities, by chat with the same ids."""
    folder = str(ROOT / MODELS / "seed0")
    stub = ModelServer(folder)
    server, _ = serve(stub)
    assert find_protocol(server, "tiny", stub.tokens) == "tokens"
    environment = environment_of(replace(tiny, tokens=stub.tokens))
    questions = ("How many singers are there?", "names", "Who is the oldest?", "Where are they from?")
    places = [make_episode(tiny, history).example for history in (False, True)]
    places += [replace(place, question=text) for text in questions for place in places]

    def asked() -> list[Episode]:
        """Many questions, since how many of the answers can be compared depends on the processor."""
        return [episode for example in places for episode in environment.episodes(example, [0])]

    def is_its_text(segment: Segment) -> bool:
        """Whether a message's text gives its tokens again: not if it was cut, or is spelt oddly."""
        text = stub.tokens.decode(segment.ids)
        return segment.role != "model" or stub.tokens.message_ids(text) == list(segment.ids)

    here = rollout(load_policy(folder), stub.tokens, asked(), GREEDY, 4)
    there, chatted = (play_served(policy_of(server, how), asked(), GREEDY, 2) for how in ("tokens", "chat"))
    for ours, theirs in zip(here, there, strict=True):
        assert (ours.ids, ours.loss_mask, ours.status) == (theirs.ids, theirs.loss_mask, theirs.status)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    same = [pair for pair in zip(here, chatted, strict=True) if all(map(is_its_text, pair[0].segments))]
    assert same and not any(sum(theirs.loss_mask) for theirs in chatted)
    assert all((ours.ids, ours.status) == (theirs.ids, theirs.status) for ours, theirs in same)


def test_a_server_without_token_ids_is_asked_by_chat(tiny, serve):
    no_ids, missing, busy = (serve(in_turn(reply))[0] for reply in (said("x"), (404, {}), (429, {})))
    assert {find_protocol(server, "any", tiny.tokens) for server in (no_ids, missing)} == {"chat"}
    for server in (busy, Server("http://127.0.0.1:9/v1", pauses=())):  # where nothing is
        with pytest.raises(ServerError, match="gave no answer"):
            find_protocol(server, "any", tiny.tokens)
    with pytest.raises(ServerError, match="use --protocol chat"):
        play_served(policy_of(no_ids, "tokens"), [make_episode(tiny)], GREEDY, 1)


def test_predicted_history_goes_on_with_the_answers_that_were_kept(tiny, tmp_path):
    def turn(dialogue: str, i: int) -> Example:
        return Example(f"{dialogue}/{i}", dialogue, "music", i, f"question {i}", GOLD)

    dialogues = [Dialogue(d, "music", tuple(turn(d, i) for i in range(3))) for d in ("00000", "00001")]

    ids, batches = [f"{d.id}/{i}" for d in dialogues for i in range(3)], []

    def answer_until(most: float, log: AnswerLog | None = None, seeds=(3, 4), history="predicted") -> list:
        """Answers name the seed and the predicted SQL before them, so that a lost or another's would show."""
        numbers = itertools.count()

        def play(episodes: list, *_: object) -> None:
            batches.append([episode.example.id for episode in episodes])
            for episode in episodes:
                if next(numbers) == most:
                    raise KeyboardInterrupt
                before = str([turn.sql for turn in episode.example.history[-1:]]).replace("'", "")
                say(episode, final_answer(f"SELECT '{episode.trajectory.seed}, {before}'"))

        of = {"environment": environment_of(tiny, "none"), "processes": Processes(0, 1), "play": play}
        return Task.answer(SimpleNamespace(**of), dialogues, GREEDY, seeds, history, log=log)

    whole, path = answer_until(math.inf), tmp_path / "answers.jsonl"
    for most in (7, 3):  # then two are left, so a third must not be played
        with pytest.raises(KeyboardInterrupt):
            answer_until(most, AnswerLog(path, {}))
    with path.open("a") as file:
        file.write('{"cut')  # as a killed process leaves it
    resumed = answer_until(2, AnswerLog(path, {}))
    for place, seed in enumerate((3, 4)):
        (alone,) = answer_until(math.inf, seeds=(seed,))
        for answered in (whole[place], resumed[place]):
            assert [t.answer_sql for _, t in answered] == [t.answer_sql for _, t in alone]
            assert [e.history for e, _ in answered] == [e.history for e, _ in alone]
            assert [e.id for e, _ in answered] == ids
        assert all(t.answer_sql.count("SELECT") == 1 + e.turn_index for e, t in alone)
    batches.clear()
    assert answer_until(math.inf, seeds=()) == [] and not batches  # nothing is asked, nothing is made
    answer_until(math.inf, history="gold")
    assert batches == [[name for name in ids for _ in (3, 4)]]  # at once, those with one prompt together
    with pytest.raises(UserError, match="differs in temperature;"):
        AnswerLog(path, {"temperature": 1.0})


def test_a_policy_at_an_address_is_evaluated(work, serve, tmp_path):
    folder = work / "imitation"
    stub, asked = ModelServer(str(folder)), itertools.count(1)
    data = [*TOY, "--data", work / "benchmark", "--split", "test", "--dialogues", 2]

    def there(reply: Reply, out: str) -> tuple[list, list[dict]]:
        server, requests = serve(reply)
        named = ["--address", server.address, "--api-model", "tiny", "--tokenizer", folder]
        return [*named, "--concurrency", 1, "--out", tmp_path / out], requests

    def rows(out: str) -> str:
        return (tmp_path / out / "predictions.jsonl").read_text()

    run("evaluate.py", *data, "--model", folder, "--out", tmp_path / "here")
    given, requests = there(stub, "there")
    out = run("evaluate.py", *data, *given)
    assert "tiny at http://127.0.0.1" in out and "protocol tokens" in out
    assert rows("there") == rows("here")
    served = json.loads((tmp_path / "there" / "summary.json").read_text())["served_in_last_session"]
    assert served["requests"] == len(requests) - 1  # the first asked for the protocol
    assert not list((tmp_path / "there").glob(".answers_*"))

    half = len(requests) // 2
    given, again = there(lambda *of: (401, {}) if next(asked) == half else stub(*of), "again")
    assert "the same command goes on" in run("evaluate.py", *data, *given, expect=2)
    kept = (tmp_path / "again" / ".answers_0_0.jsonl").read_text().splitlines()
    assert len(kept) > 1  # the options, and what was answered
    run("evaluate.py", *data, *given)
    assert rows("again") == rows("here")
    assert len(again) < half + len(requests)  # what was answered was not asked again

    given, _ = there(stub, "taught")
    run("evaluate.py", *data, *given, "--split", "train", "--protocol", "chat")
    chats = json_lines(tmp_path / "taught" / "chat.jsonl")  # for train_sft.py --targets
    assert chats and all("weight" not in message for chat in chats for message in chat["messages"])
    with pytest.raises(UserError, match="give --model FOLDER"):
        check_policy(EvaluateArgs(data=(), out=""))
    with pytest.raises(UserError, match="needs --api-model"):
        check_policy(EvaluateArgs(data=(), out="", address="http://127.0.0.1:9"))
    with pytest.raises(UserError, match="not of --model"):
        check_policy(EvaluateArgs(data=(), out="", model="m", own_temperature=True))
