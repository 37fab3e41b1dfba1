"""Ctrl-C ends a training run after the step at hand, so that its checkpoint is whole."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # the exit code of a training that is not done, as of any command after Ctrl-C


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
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        patience = " (for which torchrun waits --shutdown-timeout seconds)" if launched else ""
        what = f"finishing this step or collection{patience}, then saving"
        print(f"\ninterrupted: {what}; again to quit now", file=sys.stderr)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, previous)
