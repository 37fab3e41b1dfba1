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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tqdm import tqdm

from mtsql.agent.env import Episode
from mtsql.agent.rollout import Sampling
from mtsql.agent.tokens import ChatTokens, call_text, message_text
from mtsql.agent.trajectory import Stop, Trajectory
from mtsql.config import Common, Served, idle_options
from mtsql.errors import UserError, printable
from mtsql.extras.http_client import UNREADABLE, Server, ServerError, read_key
from mtsql.task import Task, begin_questions, begin_task

SEEDS = 2**31  # servers take so many
SECONDS = 600.0  # for one message, which may be long
LIMITS = ("max_tokens", "max_completion_tokens")  # names of a message's limit: the usual, OpenAI's newer one
CANNOT = (200, 400, 404, 405, 422)  # what a server answers that has no such address or option
# No server, key, account, address or room: no fault of one request. All else is what one question has met.
FOR_ALL = (0, 401, 402, 403, 404, 429, 503)
REFUSED_IN_A_ROW = 16  # episodes, with none played to its end in between: then all requests have a fault
FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")  # of a message, that are sent back
Message: TypeAlias = tuple[list[int], list[float], Stop, list[int]]  # the arguments of Episode.step


@dataclass
class Costs:
    """What the server was asked for; tokens are its own count, `refused` counts episodes.

    `refusal` is what the server said to the last of them.
    """

    requests: int = 0
    refused: int = 0
    refusal: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, answer: dict[str, Any]) -> None:
        """Count one answer of the server."""
        usage = answer.get("usage")
        with self.lock:
            self.requests += 1
            for name in ("prompt_tokens", "completion_tokens"):
                count = usage.get(name) if isinstance(usage, dict) else 0
                setattr(self, name, getattr(self, name) + (count if type(count) is int else 0))

    def sentence(self) -> str:
        """The three in words."""
        return (
            f"{self.requests:,} requests, {self.prompt_tokens:,} tokens of prompts "
            f"and {self.completion_tokens:,} of messages"
        )


@dataclass
class ServedPolicy:
    """The model named `model` at `server`; `protocol` is "tokens" or "chat".

    With `own_temperature` it is asked without temperature and top_p. `limit_name` becomes the newer one of
    LIMITS once the server has asked for it.
    """

    server: Server
    model: str
    protocol: str
    tokens: ChatTokens
    own_temperature: bool = False
    costs: Costs = field(default_factory=Costs)
    limit_name: str = LIMITS[0]

    def play(self, episode: Episode, sampling: Sampling, stopped: threading.Event | None = None) -> None:
        """Play an episode to its end, or until `stopped` is set.

        Raises ServerError for no answer, or one in another form.
        """
        turns = TokenTurns(episode) if self.protocol == "tokens" else ChatTurns(episode, sampling)
        stopped, suffix = stopped or threading.Event(), []
        while suffix is not None and not stopped.is_set():
            suffix = episode.step(*self._ask(turns, sampling, stopped))

    def _ask(self, turns: TokenTurns | ChatTurns, sampling: Sampling, stopped: threading.Event) -> Message:
        """The next message of an episode."""
        episode = turns.episode
        limit = min(sampling.max_turn_tokens, episode.remaining_tokens())
        seed = (episode.trajectory.seed + episode.trajectory.messages) % SEEDS
        asked = {"model": self.model, "seed": seed, self.limit_name: limit} | turns.request()
        if not self.own_temperature:
            asked |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        if sampling.stop_strings:
            asked["stop"] = list(sampling.stop_strings)

        def read(answer: dict[str, Any]) -> Message:
            self.costs.add(answer)
            return turns.read(_first_choice(answer), limit)

        try:
            return self.server.post(turns.path, asked, read, stopped)
        except ServerError as error:
            if error.status != 400 or LIMITS[0] not in asked or LIMITS[1] not in str(error):
                raise
        self.limit_name = LIMITS[1]
        return self._ask(turns, sampling, stopped)


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
        cut = choice.get("finish_reason") == "length" or len(ids) > limit
        stop = Stop.END_OF_TURN if ids[-1] in self.ends else Stop.LIMIT if cut else Stop.STOP_STRING
        return ids, logprobs, stop, loss_mask


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
        said, text = _message(choice)
        text, stop = self._put_back_stop(text, choice.get("finish_reason"))
        ids = self.episode.tokens.message_ids(text)
        if stop is Stop.STOP_STRING:
            ids = ids[:-1]  # the end of turn was not sampled
        if len(ids) > limit:
            stop = Stop.LIMIT
        self.said.append(said)
        return ids, [0.0] * len(ids), stop, [0] * len(ids)

    def _put_back_stop(self, text: str, reason: str | None) -> tuple[str, Stop]:
        """A message with the stop string that the server took off, and why it is over."""
        if reason == "length":
            return text, Stop.LIMIT
        parse = self.episode.recipe.parse
        if parse(text).problem is not None:
            for string in self.stop_strings:
                if parse(text + string).problem is None:
                    return text + string, Stop.STOP_STRING
        return text, Stop.END_OF_TURN


def _first_choice(answer: dict[str, Any]) -> dict[str, Any]:
    try:
        choice = dict(answer["choices"][0])
    except (LookupError, TypeError, ValueError):
        raise ValueError("it holds no choices[0]") from None
    if choice.get("error") or choice.get("finish_reason") == "error":
        raise ValueError(f"it broke off: {choice.get('error')}")
    return choice


def _sampled(choice: dict[str, Any]) -> tuple[list[int], list[float], list[int]]:
    """Ids, log-probabilities and loss mask of a choice; a token without log-probability is not learned."""
    ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
    logprobs = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(ids, list) or not isinstance(logprobs, list) or not 0 < len(ids) == len(logprobs):
        raise ValueError("it holds no token ids with log-probabilities; use --protocol chat")
    if any(type(i) is not int or not 0 <= i < SEEDS for i in ids):
        raise ValueError("its token_ids are not all ids; use --protocol chat")
    known = [type(value) in (int, float) and math.isfinite(value) for value in logprobs]
    values = [float(value) if ok else 0.0 for value, ok in zip(logprobs, known, strict=True)]
    return ids, values, list(map(int, known))


def _message(choice: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A server's message as it is sent back, and as text, its thoughts first."""
    try:
        said = {name: choice["message"][name] for name in FIELDS if choice["message"].get(name)}
        said = {"role": "assistant", "content": None} | said
        if "tool_calls" in said:
            said["tool_calls"] = [_plain_call(*numbered) for numbered in enumerate(said["tool_calls"])]
            # Servers leave the line break before a call in the text, and chat templates write another one.
            if isinstance(said["content"], str):
                said["content"] = said["content"].removesuffix("\n")
        text = message_text(said, _readable_call)
        return said, text.encode(errors="replace").decode()  # half a surrogate pair is no text
    except UNREADABLE:
        raise ValueError("it holds no message that can be read") from None


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
    asked = {"model": model, "prompt": tokens.message_ids("SELECT 1"), "max_tokens": 1}
    try:
        answer = server.post(TokenTurns.path, asked | {"return_token_ids": True, "logprobs": 0})
        _sampled(_first_choice(answer))
        return "tokens"
    except ServerError as error:
        if error.status not in CANNOT:
            raise
    except UNREADABLE:
        pass
    return "chat"


def play_served(
    policy: ServedPolicy,
    episodes: Sequence[Episode],
    sampling: Sampling,
    concurrency: int,
    title: str = "",
    skip_refused: bool = False,
) -> list[Trajectory]:
    """Play all episodes, `concurrency` at once; returns trajectories in the same order.

    Raises ServerError when an episode's request has failed for good; those that run are finished first.
    After Ctrl-C they are not: only the messages on their way are waited for. With `skip_refused` an episode
    for a message of which the server has no answer that can be read, while it has for others, ends without
    an answer (NO_ACTION).
    """
    stopped = threading.Event()
    refused: list[Episode] = []
    answers = policy.costs.requests > 0

    def give_up() -> None:
        for episode in refused:
            episode.give_up()
        policy.costs.refused += len(refused)
        refused.clear()

    bar = tqdm(total=len(episodes), desc=title, unit="question", disable=not title)
    with bar, ThreadPoolExecutor(concurrency) as pool:
        futures = {pool.submit(policy.play, episode, sampling, stopped): episode for episode in episodes}
        try:
            for done, future in enumerate(as_completed(futures), 1):
                try:
                    future.result()
                    answers = True
                    give_up()
                except ServerError as error:
                    refused.append(futures[future])
                    none = done == len(futures) and not answers
                    its_own = skip_refused and error.status not in FOR_ALL
                    if not its_own or none or len(refused) > REFUSED_IN_A_ROW:
                        raise
                    policy.costs.refusal = str(error)
                bar.update()
        except BaseException as error:  # what waits is not asked
            if not isinstance(error, Exception):
                stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    give_up()
    return [episode.trajectory for episode in episodes]


def begin_answers(config: Common, split: str) -> Task:
    """The questions of a split and the policy that answers them: --model's, or the one at --address.

    Raises UserError unless one of the two is given, and for an address that is none or does not answer.
    """
    check_policy(config)
    for sentence in idle_policy(config):
        print(sentence)
    if config.model:
        return begin_task(config, split)
    questions = begin_questions(config, split, config.tokenizer)
    served = served_policy(config, questions["tokens"])

    def play(episodes: Sequence[Episode], sampling: Sampling, title: str = "") -> object:
        refused = served.costs.refused
        try:
            return play_served(served, episodes, sampling, config.concurrency, title, skip_refused=True)
        except ServerError as error:
            raise UserError(f"{error}; what was answered is kept, and the same command goes on") from None
        finally:
            if found := served.costs.refused - refused:
                why = printable(served.costs.refusal)
                print(f"{found:,} episode(s) end without an answer, since the server refused theirs: {why}")

    about = {"protocol": served.protocol}
    return Task(**questions, policy=None, play=play, about=about, costs=served.costs)


def check_policy(config: Served) -> None:
    """Raise UserError unless --model is given, or --address with what it needs."""
    if bool(config.model) == bool(config.address):
        raise UserError("give --model FOLDER, or --address URL with --api-model NAME")
    if config.address and not (config.api_model and config.tokenizer):
        raise UserError("--address needs --api-model NAME and --tokenizer FOLDER")


def idle_policy(config: Common) -> list[str]:
    """A sentence for each option that does nothing: of an address beside --model, or the other way round."""
    of_address = ("api_model", "protocol", "tokenizer", "concurrency", "own_temperature")
    of_model = ("dtype", "quantise", "rows")
    why, names = ("--model is here", of_address) if config.model else ("--address is the policy", of_model)
    return idle_options(config, dict.fromkeys(names, why))


def served_policy(config: Served, tokens: ChatTokens) -> ServedPolicy:
    """The policy at --address. Raises UserError if nothing answers there."""
    server = Server(config.address, read_key(), timeout=SECONDS)
    protocol = config.protocol
    if protocol == "auto":
        try:
            protocol = find_protocol(server, config.api_model, tokens)
        except ServerError as error:
            raise UserError(str(error)) from None
    print(f"{config.api_model} at {config.address}, protocol {protocol}")
    if protocol == "chat" and not tokens.thinking:
        print("--thinking off does nothing over --protocol chat: the server writes the prompt; set it there")
    return ServedPolicy(server, config.api_model, protocol, tokens, config.own_temperature)
