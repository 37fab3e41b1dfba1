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

from mtsql.errors import UserError, within

MAX_ANSWER_BYTES = 4_000_000
# What a reader raises that finds an answer in another form.
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
MAY_PASS = (0, 200, 408, 429)  # and all from 500: what another try may not meet again
ADDRESS = r"https?://[^/\s@?#]+(/[^\s?#]*)?"
Read = TypeVar("Read")


class ServerError(UserError):
    """The server gave no answer, or one in another form.

    `status` is HTTP's, 0 where nothing is there; an answer that takes too long has 408, one that
    breaks off 502. `pause` is the time in seconds that the server asks to wait before the next try.
    """

    def __init__(self, problem: str, status: int = 0, pause: float | None = None) -> None:
        super().__init__(problem)
        self.status, self.pause = status, pause


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible address, which ends before /chat/completions. The key is never shown.

    Once `stopped` is set, what has failed is not tried again.
    """

    address: str
    key: str = field(default="", repr=False)
    timeout: float = 600.0  # seconds for one try, its answer included: a message may be long
    pauses: tuple[float, ...] = (2.0, 10.0)  # seconds before each further try
    patience: float = 600.0  # seconds of waiting, in all tries, that the server may ask for
    stopped: threading.Event = field(default_factory=threading.Event, repr=False)

    def __post_init__(self) -> None:
        """Raise UserError for no address, and for one with a password, which messages would show."""
        if not re.fullmatch(ADDRESS, self.address):
            shown = "" if re.search("[@?]", self.address) else f" {self.address}"
            raise UserError(
                f"--address{shown} should be like http://localhost:8000/v1, without a password or a query"
            )

    def post(self, path: str, content: dict[str, Any], read: Callable[[dict[str, Any]], Read]) -> Read:
        """What `read` finds in the answer, an object ({} for anything else); asked again for what may pass.

        An answer may pass in which `read` finds another form and raises one of UNREADABLE. Raises ServerError
        if none comes, or none can be read.
        """
        url, pauses, patience = self.address.rstrip("/") + path, iter(self.pauses), self.patience
        while True:
            try:
                return self._try(url, content, read)
            except ServerError as error:
                problem = error
            passes = problem.status in MAY_PASS or problem.status >= 500
            pause = problem.pause or next(pauses, None)
            if not passes or pause is None or pause > patience or self.stopped.wait(pause):
                break
            patience -= pause
        shown = str(problem).replace(self.key, "***") if self.key else str(problem)
        raise ServerError(f"{url} gave no answer ({shown[:300]})", problem.status)

    def _try(self, url: str, content: dict[str, Any], read: Callable[[dict[str, Any]], Read]) -> Read:
        """What `read` finds in one answer; raises ServerError if none comes, or none can be read."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            request = urllib.request.Request(url, json.dumps(content).encode(), headers)
            status, pause, body = within(self.timeout, lambda: _exchange(request, self.timeout))
        except TimeoutError:
            raise ServerError(f"none within {self.timeout:g} s", 408) from None
        except (urllib.error.URLError, ValueError) as error:  # the latter for what is no name of a host
            raise ServerError(f"{getattr(error, 'reason', error)}") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{error or type(error).__name__}", 502) from None
        said = " ".join(body[:2_000].decode(errors="replace").split())
        if not 200 <= status < 300:
            raise ServerError(f"HTTP {status}, {said}", status, _pause(pause))
        try:
            return read(read_object(body))
        except UNREADABLE as error:
            raise ServerError(
                f"one that cannot be read, {type(error).__name__}: {error}: {said}", 200
            ) from None


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Takes answers of every status as they are: a redirection would take the key along elsewhere."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


def _exchange(request: urllib.request.Request, timeout: float) -> tuple[int, str | None, bytes]:
    """Status, Retry-After and body of one answer."""
    with urllib.request.build_opener(_AnyStatus).open(request, timeout=timeout) as response:
        return response.status, response.headers.get("Retry-After"), response.read(MAX_ANSWER_BYTES)


def _pause(value: str | None) -> float | None:
    """Seconds from Retry-After, a number or a date; at least one, so that nobody asks without end."""
    try:
        if value and re.fullmatch(r"[\d.]+", value):
            return max(1.0, float(value))
        return max(1.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def read_object(text: str | bytes) -> dict[str, Any]:
    """A JSON object, empty for what is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_key() -> str:
    """OPENAI_API_KEY of the environment, "" if it is not set. Raises UserError if it cannot be sent."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError("the environment variable OPENAI_API_KEY holds characters that no key has")
    return key
