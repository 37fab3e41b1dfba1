"""Ctrl-C ends a training run after the step at hand, so that its checkpoint is whole."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Interruption:
    """Whether Ctrl-C was pressed."""

    asked = False

    def __bool__(self) -> bool:
        return self.asked


@contextmanager
def finish_step_on_interrupt() -> Iterator[Interruption]:
    """The first Ctrl-C is only noted; the second ends the process at once."""
    interruption = Interruption()

    def note(number: int, frame: object) -> None:
        if interruption.asked:
            raise KeyboardInterrupt
        interruption.asked = True
        print("\ninterrupted: finishing this step, then saving (again to quit now)", file=sys.stderr)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, previous)
