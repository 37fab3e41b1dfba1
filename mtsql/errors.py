"""What a user got wrong, how a terminal may show it, and a time limit on what cannot be stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

Result = TypeVar("Result")


class UserError(ValueError):
    """Wrong input; the message is one sentence for the user, who gets it with exit code 2.

    Any other exception is a defect, ours or a student's, and keeps its traceback; but for what the system
    says of a file.
    """


@contextmanager
def loading(problem: str) -> Iterator[None]:
    """While the block hands a file to a library, whatever that raises becomes a UserError of one sentence.

    Each has exceptions of its own for what is cut, noise, a pointer of Git LFS or another's weights.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        said = " ".join(str(error).split("\n\n")[0].split()[:40]).split(". ")[0].rstrip(".")
        raise UserError(f"{problem} ({type(error).__name__}: {said})") from error


def printable(text: str) -> str:
    """The text with control characters made visible, so that no database or server steers the terminal."""
    keep = "\n\t"
    return "".join(c if c in keep or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


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
