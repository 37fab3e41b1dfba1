"""JSON over HTTP to a server that may be slow, busy or wrong."""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mtsql.deadline import within
from mtsql.errors import UserError

MAX_ANSWER_BYTES = 4_000_000
# What a reader raises that finds an answer in another form.
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
MAY_PASS = (0, 200, 408, 429)  # and all from 500: what another try may not meet again
ADDRESS = r"https?://[^/\s@?#]+(/[^\s?#]*)?"
Read = TypeVar("Read")


class ServerError(Exception):
    """The server gave no answer, or one in another form.

    `status` is HTTP's, 0 where nothing is there; an answer that takes too long has 408, one that
    breaks off 502. `pause` is the time in seconds that the server asks to wait before the next try.
    """

    def __init__(self, problem: str, status: int = 0, pause: float | None = None) -> None:
        super().__init__(problem)
        self.status, self.pause = status, pause


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible address, which ends before /chat/completions. The key is never shown."""

    address: str
    key: str = field(default="", repr=False)
    timeout: float = 120.0  # seconds for one try, its answer included
    pauses: tuple[float, ...] = (2.0, 10.0)  # seconds before each further try
    patience: float = 600.0  # seconds of waiting, in all tries, that the server may ask for

    def __post_init__(self) -> None:
        """Raise UserError for no address, and for one with a password, which messages would show."""
        if not re.fullmatch(ADDRESS, self.address):
            shown = "" if re.search("[@?]", self.address) else f" {self.address}"
            raise UserError(
                f"--address{shown} should be like http://localhost:8000/v1, without a password or a query"
            )

    def post(
        self,
        path: str,
        content: dict[str, Any],
        read: Callable[[dict[str, Any]], Read] = lambda answer: answer,
        stopped: threading.Event | None = None,
    ) -> Read:
        """What `read` finds in the answer, an object ({} for anything else); asked again for what may pass.

        An answer may pass in which `read` finds another form and raises one of UNREADABLE. Raises ServerError
        if none comes, if none can be read, and when `stopped` is set.
        """
        stopped, pauses, waited = stopped or threading.Event(), iter(self.pauses), 0.0
        while True:
            try:
                return read(self._ask(path, content))
            except ServerError as error:
                problem = error
            except UNREADABLE as error:
                problem = ServerError(f"its answer cannot be read: {error}", 200)
            passes = problem.status in MAY_PASS or problem.status >= 500
            pause = next(pauses, None) if problem.pause is None else problem.pause
            if not passes or pause is None:
                break
            waited += pause
            if waited > self.patience or stopped.wait(pause):
                break
        shown = str(problem).replace(self.key, "***") if self.key else str(problem)
        url = self.address.rstrip("/") + path
        raise ServerError(f"{url} gave no answer ({shown[:300]})", problem.status)

    def _ask(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        """The object in one answer, {} for anything else. Raises ServerError, also for an error inside it."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        url = self.address.rstrip("/") + path
        request = urllib.request.Request(url, json.dumps(content).encode(), headers)
        try:
            status, pause, body = within(self.timeout, lambda: _exchange(request, self.timeout))
        except TimeoutError:
            raise ServerError(f"none within {self.timeout:g} s", 408) from None
        if not 200 <= status < 300:
            said = " ".join(body[:2_000].decode(errors="replace").split())
            raise ServerError(f"HTTP {status}, {said}", status, _pause(pause))
        answer = read_object(body)
        error = answer.get("error")
        if error and "choices" not in answer:  # what gateways say with status 200
            code = str(error.get("code")) if isinstance(error, dict) else ""
            raise ServerError(json.dumps(error), int(code) if re.fullmatch("[45][0-9][0-9]", code) else 200)
        return answer


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Takes answers of every status as they are: a redirection would take the key along elsewhere."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


def _exchange(request: urllib.request.Request, timeout: float) -> tuple[int, str | None, bytes]:
    """Status, Retry-After and body of one answer."""
    try:
        with urllib.request.build_opener(_AnyStatus).open(request, timeout=timeout) as response:
            return response.status, response.headers.get("Retry-After"), response.read(MAX_ANSWER_BYTES)
    except urllib.error.URLError as error:
        raise ServerError(f"{error.reason}") from None
    except TimeoutError:
        raise  # of one piece, as of the whole
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"{error or type(error).__name__}", 502) from None


def _pause(value: str | None) -> float | None:
    """Seconds from Retry-After, a number or a date; at least one, so that nobody asks without end."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    return max(1.0, seconds)


def read_object(text: str | bytes) -> dict[str, Any]:
    """A JSON object, empty for what is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_key(variable: str = "OPENAI_API_KEY") -> str:
    """The key in an environment variable, "" if it is not set. Raises UserError if it cannot be sent."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"the environment variable {variable} holds characters that no key has")
    return key
