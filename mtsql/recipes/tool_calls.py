"""Tool calls in Qwen3's format, as recipes read them."""

from __future__ import annotations

import json

from mtsql.agent.env import ModelMessage
from mtsql.agent.trajectory import Status


def read_call(text: str, argument: str) -> ModelMessage | None:
    """The first tool call in `text`: its name as `tool`, its string `argument` as `sql`; None without any.

    The problem is MALFORMED_CALL if the call has no end or is not JSON, or if its name or argument is
    missing or no text. Other arguments are not read.
    """
    _, opened, rest = text.partition("<tool_call>")
    if not opened:
        return None
    call, closed, _ = rest.partition("</tool_call>")
    try:
        content = json.loads(call) if closed else None
        tool, sql = content["name"], content["arguments"][argument]
        if isinstance(tool, str) and isinstance(sql, str) and sql.strip():
            (tool + sql).encode()  # half a surrogate pair is JSON but no text
            return ModelMessage(tool=tool, sql=sql.strip())
    except (KeyError, TypeError, ValueError, RecursionError):
        pass  # JSON errors are ValueErrors, and so is a number of too many digits
    return ModelMessage(problem=Status.MALFORMED_CALL)
