"""Text to token ids and back, for one Hugging Face tokenizer with a chat template.

Token in, token out: a prompt is rendered and encoded once, the ids that the model samples are kept, and
only the new suffix (end of turn, observation, generation prompt) is encoded after them. For Qwen3's template
with thinking on, the ids built this way equal those of a full render wherever the template keeps the thinking
of earlier messages; where it would strip it, we keep it. `families` finds prompts that begin alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from mtsql.agent.tools import TOOLS
from mtsql.errors import UserError, loading, within

if TYPE_CHECKING:  # importing it takes seconds, which --help can do without
    from transformers import PreTrainedTokenizerBase

# Cuts a control token's text in what is rendered: half of a character, which no text that can be encoded has.
MARK = "\udc00"
MODEL_TEXT, TOOL_TEXT, SYSTEM_TEXT = "answer-7319", "observation-7319", "system-7319"
ASKED = [{"role": "user", "content": "question-7319"}]
RENDER_SECONDS = 20.0  # a template needs some milliseconds, and may loop
OPENED, OPENING_IDS = re.compile(r"<think>\s*\Z"), 8  # a thought that the prompt opens, and its most ids

# What Qwen3's chat template writes at the end of the system message.
TOOLS_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
WORTH_SHARING = 64  # tokens, below which a copy in the cache saves nothing


class ChatTokens:
    """Everything the agent needs from a tokenizer.

    `thinking` is handed to the chat template as `enable_thinking`. Raises UserError for a tokenizer
    without a chat template or without an end-of-turn token, and for a template that fails or does not end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thinking: bool = True) -> None:
        if not tokenizer.chat_template:
            raise UserError(f"The tokenizer in {tokenizer.name_or_path!r} has no chat template.")
        self.tokenizer = tokenizer
        self.thinking = thinking
        self._refusal = f"the chat template of {tokenizer.name_or_path!r} does not take the messages"
        # Some tokenizers keep runs of blanks among their added tokens: those are ordinary text.
        control = [text for text in tokenizer.get_added_vocab() if len(text.strip()) > 1]
        alternatives = "|".join(re.escape(text) for text in control) or r"(?!)"
        self._control_start = re.compile(rf"(?={alternatives})(.)", re.DOTALL)

        added_ids = set(tokenizer.get_added_vocab().values())
        with loading(self._refusal):
            tail = within(RENDER_SECONDS, self._render_tail)
            if ASKED[0]["content"] not in self._render(ASKED, None):  # as one that takes lists of pieces
                raise ValueError("it drops what the user says")
        ends = [i for i in self.encode(tail)[:1] if i in added_ids]
        ends += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        if not ends:
            raise UserError(f"The tokenizer in {tokenizer.name_or_path!r} has no end-of-turn token.")
        self.end_of_turn_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))  # the template's is the first
        self._end_text: str = tokenizer.convert_ids_to_tokens(ends[0])

    def prompt_ids(self, messages: list[dict], tools: list[dict] | None) -> list[int]:
        """Ids of the rendered chat, generation prompt included.

        Nothing in the messages' contents becomes a control token. If no content holds the text of one, the
        ids are those of the plain render. A chat template that knows no tools gets the schemas `tools` in
        the system message, one that knows no system message has that before the user's.
        """
        return self.encode(self.prompt_text(messages, tools))

    def prompt_text(self, messages: list[dict], tools: list[dict] | None) -> str:
        """The rendered chat, with marks where its contents hold the text of a control token."""
        messages = [{**message, "content": self._guard(message["content"])} for message in messages]
        if tools and not self._template_writes_tools:
            messages, tools = messages_with_tools(messages, tools), None
        if messages[0]["role"] == "system" and not self._template_writes_system:
            system, user, *rest = messages
            messages = [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *rest]
        return self._render(messages, tools)

    def observation_suffix(self, text: str, sampled_end_of_turn: bool, role: str = "tool") -> list[int]:
        """Ids to append after a model message, so that the model can answer the observation `text`.

        They close the model's turn (with the end-of-turn token first, unless it was sampled), hold `text`
        as a message and open the next turn. The message is a tool's, or the user's with `role` "user" or if
        the chat template knows no tools. Raises UserError if the template allows neither.
        """
        frame = self._frames.get(role) or self._frames.get("user")
        if frame is None:
            raise UserError(
                f"The chat template of {self.tokenizer.name_or_path!r} cannot follow a model message "
                "with an observation."
            )
        before, after = frame
        ids = self.encode(self._end_text + before + self._guard(text) + after)  # an end may swallow blanks
        return ids[1:] if sampled_end_of_turn else ids

    def message_ids(self, text: str, whole: bool = True) -> list[int]:
        """Ids of a model message given as text, control tokens included, and its end of turn.

        Behind a prompt that opens a thought, a `whole` text loses its own <think>, or closes the thought if
        it has none; without `whole` it stays as sampled.
        """
        if whole and self._opens_thought:
            text = text.removeprefix("<think>\n") if "</think>" in text else f"\n</think>\n\n{text}"
        return [*self.encode(text), self.end_of_turn_ids[0]]

    @cached_property
    def _opens_thought(self) -> bool:
        """Whether the generation prompt ends in <think>, as DeepSeek-R1's and Qwen3-Thinking's do."""
        return bool(OPENED.search(self._render(ASKED, None)))

    def with_opening(self, text: str, before: Sequence[int]) -> str:
        """A model message with the start of its thought, where the ids `before` it have opened that."""
        opened = OPENED.search(self.decode(before[-OPENING_IDS:]))
        return f"<think>\n{text}" if opened and not text.lstrip().startswith("<think>") else text

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, control tokens included, but for those that a mark cuts."""
        pieces = text.split(MARK)
        return [i for piece in pieces for i in self.tokenizer.encode(piece, add_special_tokens=False)]

    def count(self, text: str) -> int:
        """Length of `text` in tokens."""
        return len(self.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` with its control tokens visible, without a final end of turn."""
        kept = list(ids[:-1]) if len(ids) and ids[-1] in self.end_of_turn_ids else list(ids)
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @cached_property
    def _template_writes_tools(self) -> bool:
        """Whether a tool's name, which stands nowhere else, is rendered."""
        return TOOLS[0].name in self._render(ASKED, [TOOLS[0].schema])

    @cached_property
    def _template_writes_system(self) -> bool:
        """Whether it knows a system message: Gemma's refuses it, others drop it."""
        try:
            return SYSTEM_TEXT in self._render([{"role": "system", "content": SYSTEM_TEXT}, *ASKED], None)
        except UserError:
            return False

    @cached_property
    def _frames(self) -> dict[str, tuple[str, str]]:
        """By role, what the template writes before and after an observation, the end of turn excluded.

        A role that the template does not know is not there.
        """
        frames, end = {}, self._end_text
        for role in ("user", "tool"):
            with suppress(UserError):
                tail = self._render_tail([{"role": role, "content": TOOL_TEXT}])
                if tail.startswith(end) and tail.count(TOOL_TEXT) == 1:
                    before, after = tail[len(end) :].split(TOOL_TEXT)
                    frames[role] = (before, after)
        return frames

    def _render_tail(self, after: Sequence[dict] = ()) -> str:
        """What the template writes after the content of a model message, "" if it drops the content."""
        messages = [*ASKED, {"role": "assistant", "content": MODEL_TEXT}, *after]
        rendered = self._render(messages, None, opened=bool(after))
        _, found, tail = rendered.rpartition(MODEL_TEXT)
        return tail if found else ""

    def _render(self, messages: list[dict], tools: list[dict] | None, opened: bool = True) -> str:
        """The chat as text, the next turn `opened` or not. Raises UserError for what the template refuses."""
        how = {"add_generation_prompt": opened, "enable_thinking": self.thinking}
        with loading(self._refusal):
            return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **how)

    def _guard(self, text: str) -> str:
        """`text` with a mark after the first character of each control token's text."""
        return self._control_start.sub(rf"\1{MARK}", text)


def messages_with_tools(messages: list[dict], tools: list[dict] | None) -> list[dict]:
    """The messages with the schemas `tools` in Qwen3's words at the end of the system's, or in a new one."""
    if not tools:
        return messages
    text = TOOLS_TEXT.format(schemas="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages[0]["role"] == "system":
        text = f"{messages[0]['content']}\n\n{text}"
        messages = messages[1:]
    return [{"role": "system", "content": text}, *messages]


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of tokens with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def families(sequences: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
    """Sequences that begin alike, as (number of tokens that they share, their places in `sequences`).

    Each is in exactly one family, and a family of several shares at least WORTH_SHARING tokens. What its
    members go on with may have families of its own: behind a system message, those of each database.
    """
    found: list[tuple[int, list[int]]] = []
    for place in sorted(range(len(sequences)), key=lambda i: tuple(sequences[i])):
        if found:
            shared, places = found[-1]
            common = shared_length(sequences[places[0]][:shared], sequences[place])
            if common >= WORTH_SHARING:
                found[-1] = (common, [*places, place])
                continue
        found.append((len(sequences[place]), [place]))
    return found
