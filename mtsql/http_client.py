"""JSON over HTTP to a server that may be slow, busy or wrong."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from mtsql.errors import UserError

MAX_ANSWER_BYTES = 4_000_000


class ServerError(Exception):
    """The server gave no answer, or one in another form; `status` is HTTP's, 0 without any."""

    def __init__(self, problem: str, status: int = 0) -> None:
        super().__init__(problem)
        self.status = status


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible address, which ends before /chat/completions. The key is never shown."""

    address: str
    key: str = field(default="", repr=False)
    timeout: float = 120.0  # seconds
    pauses: tuple[float, ...] = (2.0, 10.0)  # seconds before each further try

    def post(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        """The object in its answer, {} for anything else. Raises ServerError if there is none."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        url = self.address.rstrip("/") + path
        request = urllib.request.Request(url, json.dumps(content).encode(), headers)
        opener = urllib.request.build_opener(_NoRedirect)
        status = 0
        for pause in (*self.pauses, None):
            try:
                with opener.open(request, timeout=self.timeout) as response:
                    return read_object(response.read(MAX_ANSWER_BYTES))
            except urllib.error.HTTPError as error:
                problem, status = f"HTTP {error.code}, {_body(error)}", error.code
                if error.code < 500 and error.code not in (408, 429):
                    break  # another try would be refused as well
            except (OSError, http.client.HTTPException) as error:
                problem, status = f"{getattr(error, 'reason', error)}", 0
            if pause is not None:
                time.sleep(pause)
        shown = problem.replace(self.key, "***") if self.key else problem
        raise ServerError(f"{url} gave no answer ({shown[:300]})", status)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirection is an error: it would take the key along to another address."""

    def redirect_request(self, *_: object) -> None:
        return None


def _body(error: urllib.error.HTTPError) -> str:
    try:
        return " ".join(error.read(2_000).decode(errors="replace").split())
    except (OSError, http.client.HTTPException):
        return error.reason


def read_object(text: str | bytes) -> dict[str, Any]:
    """A JSON object, empty for what is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_key(variable: str) -> str:
    """The key in an environment variable, "" if it is not set. Raises UserError if it cannot be sent."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"the environment variable {variable} holds characters that no key has")
    return key
