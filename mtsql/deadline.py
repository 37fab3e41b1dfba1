"""A limit on the time of a call that cannot be stopped from outside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def within(seconds: float, act: Callable[[], Result]) -> Result:
    """What `act` returns or raises; TimeoutError if it takes longer, and its thread is left to itself."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # all that `act` raises is the caller's
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError as error:
        raise (error if future.done() else TimeoutError(f"not done within {seconds:g} s")) from None
