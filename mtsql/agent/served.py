"""A policy behind an address: the same episodes, whose messages a server writes.

Two protocols of OpenAI's form:
- tokens, /completions with token ids in and out (vLLM with return_token_ids): the prompt, every sampled id
  and its log-probability are exactly those of the server's policy.
- chat, /chat/completions with messages and tool schemas (any server): the server renders the prompt and reads
  the tool calls. Ids and log-probabilities are not known, so such messages have loss mask 0, and the ids of
  the given tokenizer only count tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from mtsql.agent.env import Episode
from mtsql.agent.rollout import Sampling
from mtsql.agent.tokens import ChatTokens, call_text, message_text
from mtsql.agent.trajectory import Stop, Trajectory
from mtsql.http_client import Server, ServerError

SEEDS = 2**31  # servers take so many
SECONDS = 600.0  # for one message, which may be long
# Servers take a model's own settings where none are given; ours are those of the rollout here.
PLAIN = {"tokens": {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}, "chat": {"top_p": 1.0}}
LIMITS = ("max_tokens", "max_completion_tokens")  # names of a message's limit: the usual, OpenAI's newer one
CANNOT = (400, 404, 405, 422)  # what a server answers that has no such address or option
REFUSALS = (400, 413, 422, 500)  # what a server answers where one request has a fault, not all of them
REFUSED_IN_A_ROW = 16  # episodes, with none played to its end in between: then all requests have it


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
        usage = answer.get("usage") or {}
        with self.lock:
            self.requests += 1
            self.prompt_tokens += usage.get("prompt_tokens") or 0
            self.completion_tokens += usage.get("completion_tokens") or 0

    def sentence(self) -> str:
        """The three in words."""
        return (
            f"{self.requests:,} requests, {self.prompt_tokens:,} tokens of prompts "
            f"and {self.completion_tokens:,} of messages"
        )


@dataclass
class ServedPolicy:
    """The model named `model` at `server`; `protocol` is "tokens" or "chat".

    `limit_name` becomes the newer one of LIMITS once the server has asked for it.
    """

    server: Server
    model: str
    protocol: str
    tokens: ChatTokens
    costs: Costs = field(default_factory=Costs)
    limit_name: str = LIMITS[0]

    def play(self, episode: Episode, sampling: Sampling, stopped: threading.Event | None = None) -> None:
        """Play an episode to its end, or until `stopped` is set.

        Raises ServerError for no answer, or one in another form.
        """
        play = self._play_tokens if self.protocol == "tokens" else self._play_chat
        play(episode, sampling, stopped or threading.Event())

    def _ask(
        self, path: str, episode: Episode, sampling: Sampling, content: dict[str, Any]
    ) -> tuple[dict[str, Any], int]:
        """The first choice of the server's answer, and the most tokens that its message may have."""
        limit = min(sampling.max_turn_tokens, episode.remaining_tokens())
        seed = (episode.trajectory.seed + episode.trajectory.messages) % SEEDS
        asked = {"model": self.model, "temperature": sampling.temperature, "seed": seed}
        asked |= PLAIN[self.protocol]
        if sampling.stop_strings:
            asked["stop"] = list(sampling.stop_strings)
        answer = self._post(path, asked | content, limit)
        self.costs.add(answer)
        try:
            choice = answer["choices"][0]
            return dict(choice), limit
        except (LookupError, TypeError, ValueError):
            raise ServerError(f"the answer of {self.server.address}{path} holds no choices[0]") from None

    def _post(self, path: str, content: dict[str, Any], limit: int) -> dict[str, Any]:
        """The server's answer; asked again with the other name of the limit if the server wants that."""
        name = self.limit_name
        try:
            return self.server.post(path, content | {name: limit})
        except ServerError as error:
            if error.status != 400 or name != LIMITS[0] or LIMITS[1] not in str(error):
                raise
        self.limit_name = LIMITS[1]
        return self.server.post(path, content | {self.limit_name: limit})

    def _play_tokens(self, episode: Episode, sampling: Sampling, stopped: threading.Event) -> None:
        exact = {
            "return_token_ids": True,
            "logprobs": 0,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "stop_token_ids": list(self.tokens.end_of_turn_ids),
        }
        suffix: list[int] | None = []
        while suffix is not None and not stopped.is_set():
            prompt = {"prompt": episode.trajectory.ids}
            choice, limit = self._ask("/completions", episode, sampling, prompt | exact)
            ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
            if not ids or logprobs is None or len(ids) != len(logprobs):
                raise ServerError(
                    f"{self.server.address} returns no token ids with log-probabilities; use --protocol chat"
                )
            suffix = episode.step(ids, logprobs, self._stop_of_ids(ids, choice, limit))

    def _stop_of_ids(self, ids: list[int], choice: dict[str, Any], limit: int) -> Stop:
        if ids[-1] in self.tokens.end_of_turn_ids:
            return Stop.END_OF_TURN
        cut = choice.get("finish_reason") == "length" or len(ids) > limit
        return Stop.LIMIT if cut else Stop.STOP_STRING

    def _play_chat(self, episode: Episode, sampling: Sampling, stopped: threading.Event) -> None:
        recipe = episode.recipe
        messages, tools = recipe.prompt(episode.example, episode.schema, episode.tools)
        messages, offered = list(messages), {"tools": tools} if tools else {}
        suffix: list[int] | None = []
        while suffix is not None and not stopped.is_set():
            choice, limit = self._ask(
                "/chat/completions", episode, sampling, {"messages": messages} | offered
            )
            try:
                said = _before_calls(choice.get("message"))
                text = _with_thoughts(said)
            except (TypeError, LookupError, AttributeError):
                raise ServerError(f"{self.server.address} answers with no message that can be read") from None
            text, stop = _put_back_stop(text, choice, episode, sampling.stop_strings)
            ids = self.tokens.message_ids(text)
            if stop is Stop.STOP_STRING:
                ids = ids[:-1]  # the end of turn was not sampled
            if len(ids) > limit:
                stop = Stop.LIMIT
            suffix = episode.step(ids, [0.0] * len(ids), stop, [0] * len(ids))
            if suffix is not None:
                messages += [said, *_observation(said, episode)]


def _before_calls(said: dict[str, Any]) -> dict[str, Any]:
    """A server's message without the line break between its text and its calls.

    Servers leave it in the text when they take the calls out, and chat templates write another one.
    """
    content = said.get("content")
    if said.get("tool_calls") and isinstance(content, str):
        return {**said, "content": content.removesuffix("\n")}
    return said


def _with_thoughts(said: dict[str, Any]) -> str:
    """A server's message as text, its thoughts first, which servers return apart."""
    thoughts = said.get("reasoning_content") or said.get("reasoning") or ""
    content = message_text({"content": said.get("content")})
    texts = ([content] if content else []) + [_readable_call(call) for call in said.get("tool_calls") or ()]
    text = (f"<think>\n{thoughts.strip()}\n</think>\n\n" if thoughts else "") + "\n".join(texts)
    return text.encode(errors="replace").decode()  # half a surrogate pair is no text


def _readable_call(call: dict[str, Any]) -> str:
    """One call as text. What the policy wrote is left as it is where nobody can read it: its mistake."""
    try:
        text = call_text(call)
        text.encode()
        return text
    except (ValueError, RecursionError):  # no JSON, no text, or too deep
        return f"<tool_call>\n{call['function']['arguments']}\n</tool_call>"


def _put_back_stop(
    text: str, choice: dict[str, Any], episode: Episode, stop_strings: Sequence[str]
) -> tuple[str, Stop]:
    """A message with the stop string that the server took off, and why it is over."""
    if choice.get("finish_reason") == "length":
        return text, Stop.LIMIT
    if episode.recipe.parse(text).problem is not None:
        for string in stop_strings:
            if episode.recipe.parse(text + string).problem is None:
                return text + string, Stop.STOP_STRING
    return text, Stop.END_OF_TURN


def _observation(said: dict[str, Any], episode: Episode) -> list[dict[str, Any]]:
    """What the environment answered: to each of a message's calls, or as the user's next message.

    A call that the server left in the text is answered as Qwen3's chat template writes a tool's message:
    servers refuse a tool's message that follows no call.
    """
    content = episode.trajectory.observations[-1].text
    calls = said.get("tool_calls") or ()
    if not calls:
        if episode.recipe.observation_role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        return [{"role": "user", "content": content}]
    return [{"role": "tool", "tool_call_id": call.get("id", ""), "content": content} for call in calls]


def find_protocol(server: Server, model: str, tokens: ChatTokens) -> str:
    """The protocol of a server: "tokens" if it takes and gives token ids, else "chat".

    Raises ServerError if it is not there.
    """
    prompt = {
        "prompt": tokens.message_ids("SELECT 1"),
        "max_tokens": 1,
        "return_token_ids": True,
        "logprobs": 0,
    }
    try:
        choice = server.post("/completions", {"model": model, **prompt})["choices"][0]
        return "tokens" if choice.get("token_ids") and choice.get("logprobs") else "chat"
    except (LookupError, TypeError, AttributeError):
        return "chat"
    except ServerError as error:
        if error.status not in CANNOT:
            raise
        return "chat"


def play_served(
    policy: ServedPolicy,
    episodes: Sequence[Episode],
    sampling: Sampling,
    concurrency: int,
    progress: Callable[[int, int, dict[str, float]], None] | None = None,
    skip_refused: bool = False,
) -> list[Trajectory]:
    """Play all episodes, `concurrency` at once; returns trajectories in the same order.

    Raises ServerError when an episode's request has failed for good; those that run are finished first.
    After Ctrl-C they are not: only the messages on their way are waited for. With `skip_refused` an episode
    of which the server refuses a message, while it answers others, ends without an answer (NO_ACTION).
    """
    stopped = threading.Event()
    refused: list[Episode] = []
    answers = policy.costs.requests > 0

    def give_up() -> None:
        for episode in refused:
            episode.give_up()
        policy.costs.refused += len(refused)
        refused.clear()

    with ThreadPoolExecutor(concurrency) as pool:
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
                    its_own = skip_refused and error.status in REFUSALS
                    if not its_own or none or len(refused) > REFUSED_IN_A_ROW:
                        raise
                    policy.costs.refusal = str(error)
                if progress is not None:
                    progress(done, len(episodes), {"requests": policy.costs.requests})
        except BaseException as error:  # what waits is not asked
            if not isinstance(error, Exception):
                stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    give_up()
    return [episode.trajectory for episode in episodes]
