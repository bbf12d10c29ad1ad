"""Ctrl-C and SIGTERM between steps: a run leaves a checkpoint before it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Signal:
    """What came, if anything did.

    A second signal ends at once, but where processes train together: these stop at the same step, and whoever started
    them repeats a signal that a terminal has sent to all.

    Attributes
    ----------
    caught : int or None
        What this process has had.
    heard : int or None
        What any of several processes has had, by the last step.
    """

    def __init__(self, together: bool = False) -> None:
        self.caught: int | None = None
        self.heard: int | None = None
        self._together = together

    @property
    def stop(self) -> int | None:
        """The signal that ends the run before the next step, if there is one."""
        return self.heard if self._together else self.caught

    def handle(self, number: int, frame: Any) -> None:
        """Note the signal; the loop looks at it between steps."""
        again = self.caught is not None
        self.caught = number
        if again and not self._together:
            self.raise_if_caught()

    def raise_if_caught(self) -> None:
        """End as the signal would have ended the process."""
        _raise(self.stop)

    def raise_at_the_end(self) -> None:
        """The same, where processes do nothing together any more: what this one alone has had counts too."""
        _raise(self.heard or self.caught)


def _raise(number: int | None) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number is not None:
        raise SystemExit(128 + number)


@contextmanager
def interruptible(enabled: bool, together: bool = False) -> Iterator[Signal]:
    """Catch SIGINT and SIGTERM inside; only the main thread can, others leave signals as they are."""
    caught = Signal(together)
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield caught
        return
    # What a shell had ignored for a command in the background stays so.
    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, caught.handle) for number in heard}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the main thread as Ctrl-C does; others leave signals as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
