"""Text to token ids and back, for one Hugging Face tokenizer with a chat template.

Token in, token out: a prompt is rendered and encoded once, what the model samples is kept as it was
sampled, and only the new suffix (end of turn, observation, generation prompt) is encoded after it.
For Qwen3's template with thinking on, the ids built this way equal those of a full render as long as
the template keeps the thinking of earlier messages; where it would strip it, we keep it.
"""

from __future__ import annotations

import json
import re
from functools import cached_property

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

PRIVATE_USE = range(0xE000, 0xF900)
USER_TEXT, MODEL_TEXT, TOOL_TEXT = "question-7319", "answer-7319", "observation-7319"


class ChatTokens:
    """Everything the agent needs from a tokenizer.

    `thinking` is handed to the chat template as `enable_thinking`. Raises ValueError for a tokenizer
    without a chat template or without any end-of-turn token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thinking: bool = True) -> None:
        if not tokenizer.chat_template:
            raise ValueError(f"The tokenizer in {tokenizer.name_or_path!r} has no chat template.")
        self.tokenizer = tokenizer
        self.thinking = thinking
        # Runs of blanks are ordinary text that some tokenizers keep among their added tokens.
        added = [text for text in tokenizer.get_added_vocab() if len(text.strip()) > 1]
        self._control = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self._control_start = re.compile(f"(.)(?<={'|^'})" if not added else _starts(added), re.S)
