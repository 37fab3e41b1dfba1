"""A policy behind an address: the same episodes, whose messages a server writes.

Two protocols of OpenAI's form:
- tokens, /completions with token ids in and out (vLLM with return_token_ids): the prompt, every sampled id
  and its log-probability are exactly those of the server's policy.
- chat, /chat/completions with messages and tool schemas (any server): the server renders the prompt and reads
  the tool calls. Ids and log-probabilities are not known, so such messages have loss mask 0, and the ids of
  the given tokenizer only count tokens.
"""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tqdm import tqdm

from mtsql.agent.env import Episode
from mtsql.agent.rollout import Sampling
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.trajectory import Stop, Trajectory
from mtsql.config import Common, Served
from mtsql.errors import UserError, printable
from mtsql.extras.http_client import UNREADABLE, Server, ServerError, read_key
from mtsql.task import Task, begin_questions, begin_task

SEEDS = 2**31  # servers take so many
LIMITS = ("max_tokens", "max_completion_tokens")  # names of a message's limit: the usual, OpenAI's newer one
CANNOT = (400, 404, 405, 422)  # what a server answers that has no such address or option
# No server, key, account, address or room: no fault of one request. All else is what one question has met.
FOR_ALL = (0, 401, 402, 403, 404, 429, 503)
REFUSED_IN_A_ROW = 16  # episodes, with none played to its end in between: then all requests have a fault
COUNTED = ("requests", "refused", "prompt_tokens", "completion_tokens")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # a field of a message, or the type of a piece
FIELDS = ("content", "tool_calls", *THOUGHTS)  # of a message, that are sent back
Message: TypeAlias = tuple[list[int], list[float], Stop, list[int]]  # the arguments of Episode.step


@dataclass
class ServedPolicy:
    """The model named `model` at `server`; `protocol` is "tokens" or "chat".

    With `own_temperature` it is asked without temperature and top_p. `limit_name` becomes the newer one of
    LIMITS once the server has asked for it. Of COUNTED, tokens are the server's own count, `refused` counts
    episodes.
    """

    server: Server
    model: str
    protocol: str
    own_temperature: bool = False
    costs: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTED, 0)))
    limit_name: str = LIMITS[0]
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # of the costs

    def play(self, episode: Episode, sampling: Sampling) -> None:
        """Play an episode to its end, or until the server is `stopped`.

        Raises ServerError for no answer, or one in another form.
        """
        turns = TokenTurns(episode) if self.protocol == "tokens" else ChatTurns(episode, sampling)
        suffix: list[int] | None = []
        while suffix is not None and not self.server.stopped.is_set():
            suffix = episode.step(*self._ask(turns, sampling))

    def _ask(self, turns: TokenTurns | ChatTurns, sampling: Sampling) -> Message:
        """The next message of an episode."""
        trajectory = turns.episode.trajectory
        limit = min(sampling.max_turn_tokens, turns.episode.remaining_tokens())
        seed = (trajectory.seed + trajectory.messages) % SEEDS
        asked = {"model": self.model, "seed": seed, self.limit_name: limit} | turns.request()
        if not self.own_temperature:
            asked |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        if sampling.stop_strings:
            asked["stop"] = list(sampling.stop_strings)

        def read(answer: dict[str, Any]) -> Message:
            usage = answer.get("usage")  # which may be anything
            given = usage if isinstance(usage, dict) else {}
            with self.lock:
                self.costs.update({n: given[n] for n in COUNTED[2:] if type(given.get(n)) is int}, requests=1)
            return turns.read(_first_choice(answer), limit)

        try:
            return self.server.post(turns.path, asked, read)
        except ServerError as error:
            if error.status != 400 or LIMITS[0] not in asked or LIMITS[1] not in str(error):
                raise
        self.limit_name = LIMITS[1]
        return self._ask(turns, sampling)


class TokenTurns:
    """The messages of an episode as token ids."""

    path = "/completions"

    def __init__(self, episode: Episode) -> None:
        self.episode, self.ends = episode, episode.tokens.end_of_turn_ids

    def request(self) -> dict[str, Any]:
        """What to ask for. Without settings servers take the model's own; ours are those of a rollout."""
        return {
            "prompt": self.episode.trajectory.ids,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "return_token_ids": True,
            "logprobs": 0,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "stop_token_ids": list(self.ends),
        }

    def read(self, choice: dict[str, Any], limit: int) -> Message:
        """The message in an answer; raises one of UNREADABLE."""
        ids, logprobs, loss_mask = _sampled(choice)
        if ids[-1] in self.ends:
            return ids, logprobs, Stop.END_OF_TURN, loss_mask
        cut = choice.get("finish_reason") == "length" or len(ids) > limit
        return ids, logprobs, Stop.LIMIT if cut else Stop.STOP_STRING, loss_mask


class ChatTurns:
    """The messages of an episode as a chat: `said` holds the server's."""

    path = "/chat/completions"

    def __init__(self, episode: Episode, sampling: Sampling) -> None:
        self.episode, self.stop_strings = episode, sampling.stop_strings
        self.prompt, self.tools = episode.recipe.prompt(episode.example, episode.schema, episode.tools)
        self.said: list[dict[str, Any]] = []

    def request(self) -> dict[str, Any]:
        """What to ask for: the whole chat, each message of the server followed by what was observed."""
        messages = list(self.prompt)
        for said, seen in zip(self.said, self.episode.trajectory.observations, strict=True):
            messages += [said, *_observation(said, seen.text, self.episode.recipe.observation_role)]
        return {"messages": messages} | ({"tools": self.tools} if self.tools else {})

    def read(self, choice: dict[str, Any], limit: int) -> Message:
        """The message in an answer; raises one of UNREADABLE."""
        said, text = _message(choice["message"])
        stop, string = Stop.END_OF_TURN, self._stop_string(text)
        if choice.get("finish_reason") == "length":
            stop = Stop.LIMIT
        elif string:
            text, stop = text + string, Stop.STOP_STRING
        ids = self.episode.tokens.message_ids(text)
        if stop is Stop.STOP_STRING:
            ids = ids[:-1]  # the end of turn was not sampled
        if len(ids) > limit:
            stop = Stop.LIMIT
        self.said.append(said)
        return ids, [0.0] * len(ids), stop, [0] * len(ids)

    def _stop_string(self, text: str) -> str:
        """What the server took off the end of a message, "" where that ends without one."""
        parse = self.episode.recipe.parse
        if parse(text).problem is None:
            return ""
        return next((string for string in self.stop_strings if parse(text + string).problem is None), "")


def _first_choice(answer: dict[str, Any]) -> dict[str, Any]:
    choice = answer["choices"][0]
    if choice.get("error") or choice.get("finish_reason") == "error":
        raise ValueError("it broke off")
    return choice


def _sampled(choice: dict[str, Any]) -> tuple[list[int], list[float], list[int]]:
    """Ids, log-probabilities and loss mask of a choice; a token without log-probability is not learned."""
    ids, logprobs = choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("token_logprobs") or []
    all_ids = all(type(i) is int and 0 <= i < SEEDS for i in ids)
    if not all_ids or not 0 < len(ids) == len(logprobs):
        raise ValueError("no token ids with log-probabilities are there; use --protocol chat")
    known = [type(value) in (int, float) and math.isfinite(value) for value in logprobs]
    values = [float(value) if ok else 0.0 for value, ok in zip(logprobs, known, strict=True)]
    return ids, values, list(map(int, known))


def _message(given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A server's message as it is sent back, and as text, its thoughts first; raises one of UNREADABLE."""
    said = {"role": "assistant", "content": None} | {name: given[name] for name in FIELDS if given.get(name)}
    if "tool_calls" in said:
        said["tool_calls"] = [_plain_call(*numbered) for numbered in enumerate(said["tool_calls"])]
        # Servers leave the line break before a call in the text, and chat templates write another one.
        if isinstance(said["content"], str):
            said["content"] = said["content"].removesuffix("\n")
    text = message_text(said, _readable_call)
    return said, text.encode(errors="replace").decode()  # half a surrogate pair is no text


def message_text(message: dict, write_call: Callable[[dict], str] | None = None) -> str:
    """A chat message as text: thoughts, content, then its calls, as Qwen3's chat template writes them.

    Thoughts are a field of their own, or pieces of the content, which may be a list; its texts are joined.
    `write_call` is `call_text` if not given. Raises TypeError, KeyError or AttributeError for what is neither
    text nor calls, ValueError for arguments that are not JSON.
    """
    content = message.get("content") or []
    pieces = [{"text": content}] if isinstance(content, str) else content
    thoughts = [next((message[name] for name in THOUGHTS if message.get(name)), "")]
    thoughts += [p.get("text") or p[p["type"]] for p in pieces if p.get("type") in THOUGHTS]
    thought = "\n".join(message_text({"content": part}) for part in thoughts if part).strip()
    texts = [piece["text"] for piece in pieces if piece.get("type") not in THOUGHTS]
    texts += [(write_call or call_text)(call) for call in message.get("tool_calls") or ()]
    return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + "\n".join(texts)


def call_text(call: dict) -> str:
    """One of a message's `tool_calls` as Qwen3's chat template writes it; raises as `message_text`."""
    function = call.get("function", call)
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    rendered = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{rendered}\n</tool_call>"


def _plain_call(number: int, call: dict[str, Any]) -> dict[str, Any]:
    """A call with the fields of the protocol alone; what is missing is empty."""
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else json.dumps(arguments)
    function = {"name": function.get("name") or "", "arguments": arguments}
    return {"id": call.get("id") or f"call-{number}", "type": "function", "function": function}


def _readable_call(call: dict[str, Any]) -> str:
    """One call as text. What the policy wrote is left as it is where nobody can read it: its mistake."""
    try:
        text = call_text(call)
        text.encode()
        return text
    except (ValueError, RecursionError):  # no JSON, no text, or too deep
        return f"<tool_call>\n{call['function']['arguments']}\n</tool_call>"


def _observation(said: dict[str, Any], content: str, role: str) -> list[dict[str, Any]]:
    """What the environment answered: to each of a message's calls, or as the user's next message.

    A call that the server left in the text is answered as Qwen3's chat template writes a tool's message:
    servers refuse a tool's message that follows no call.
    """
    if calls := said.get("tool_calls"):
        return [{"role": "tool", "tool_call_id": call["id"], "content": content} for call in calls]
    if role == "tool":
        content = f"<tool_response>\n{content}\n</tool_response>"
    return [{"role": "user", "content": content}]


def find_protocol(server: Server, model: str, tokens: ChatTokens) -> str:
    """The protocol of a server: "tokens" if it takes and gives token ids, else "chat".

    Raises ServerError if it is not there.
    """

    def read(answer: dict[str, Any]) -> str:
        try:
            _sampled(_first_choice(answer))
            return "tokens"
        except UNREADABLE:
            return "chat"

    asked = {"model": model, "prompt": tokens.message_ids("SELECT 1"), "max_tokens": 1}
    try:
        return server.post(TokenTurns.path, asked | {"return_token_ids": True, "logprobs": 0}, read)
    except ServerError as error:
        if error.status in CANNOT:
            return "chat"
        raise


def play_served(
    policy: ServedPolicy,
    episodes: Sequence[Episode],
    sampling: Sampling,
    concurrency: int,
    title: str = "",
    skip_refused: bool = False,
) -> list[Trajectory]:
    """Play all episodes, `concurrency` at once; returns trajectories in the same order.

    Raises ServerError when an episode's request has failed for good. Then, and after Ctrl-C, only the
    messages on their way are waited for. With `skip_refused` an episode for a message of which the server has
    no answer that can be read, while it has for others, ends without an answer (NO_ACTION), which is said.
    """
    policy.server.stopped.clear()
    answers = policy.costs["requests"] > 0
    refused: list[tuple[Episode, ServerError]] = []  # since the server has last given a whole episode
    bar = tqdm(total=len(episodes), desc=title, unit="trajectory", disable=not title)
    with bar, ThreadPoolExecutor(concurrency) as pool:
        futures = {pool.submit(policy.play, episode, sampling): episode for episode in episodes}
        try:
            for future in as_completed(futures):
                error = future.exception()
                if error is None:
                    answers = True
                    _give_up(refused, policy.costs)
                elif skip_refused and _is_its_own(error) and len(refused) < REFUSED_IN_A_ROW:
                    refused.append((futures[future], error))
                else:
                    raise error
                bar.update()
        except BaseException:
            policy.server.stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    if refused and not answers:
        raise refused[-1][1]
    _give_up(refused, policy.costs)
    return [episode.trajectory for episode in episodes]


def _is_its_own(error: BaseException) -> bool:
    """Whether an episode's failure need not be that of all the others."""
    return isinstance(error, ServerError) and error.status not in FOR_ALL


def _give_up(refused: list[tuple[Episode, ServerError]], costs: Counter[str]) -> None:
    """End the episodes that the server refuses while it answers others, and forget them here."""
    for episode, error in refused:
        episode.give_up()
        tqdm.write(f"question {episode.example.id} ends without an answer: {printable(str(error))}")
    costs["refused"] += len(refused)
    refused.clear()


def begin_answers(config: Common, split: str) -> Task:
    """The questions of a split and the policy that answers them: --model's, or the one at --address.

    Raises UserError unless one of the two is given, and for an address that is none or does not answer.
    """
    check_policy(config)
    if config.model:
        return begin_task(config, split)
    questions = begin_questions(config, split, config.tokenizer)
    served = served_policy(config, questions["tokens"])

    def play(episodes: Sequence[Episode], sampling: Sampling, title: str = "") -> object:
        try:
            return play_served(served, episodes, sampling, config.concurrency, title, skip_refused=True)
        except ServerError as error:
            raise UserError(f"{error}; what was answered is kept, and the same command goes on") from None

    return Task(**questions, policy=None, play=play, costs=served.costs)


def check_policy(config: Served) -> None:
    """Raise UserError unless --model is given, or --address with what it needs."""
    if bool(config.model) == bool(config.address):
        raise UserError("give --model FOLDER, or --address URL with --api-model NAME")
    if config.model and config.own_temperature:
        raise UserError("--own-temperature is of a policy at --address, not of --model")
    if config.address and not (config.api_model and config.tokenizer):
        raise UserError("--address needs --api-model NAME and --tokenizer FOLDER")


def served_policy(config: Served, tokens: ChatTokens) -> ServedPolicy:
    """The policy at --address. Raises ServerError if nothing answers there."""
    server, protocol = Server(config.address, read_key()), config.protocol
    if protocol == "auto":
        protocol = find_protocol(server, config.api_model, tokens)
    print(f"{config.api_model} at {config.address}, protocol {protocol}")
    if protocol == "chat" and not tokens.thinking:
        print("--thinking off does nothing over --protocol chat: the server writes the prompt; set it there")
    return ServedPolicy(server, config.api_model, protocol, config.own_temperature)
