"""Ctrl-C and SIGTERM between steps: a run leaves a checkpoint before it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Signal:
    """What came, if anything did; a second signal ends at once."""

    def __init__(self) -> None:
        self.caught: int | None = None

    def handle(self, number: int, frame: Any) -> None:
        """Note the signal; the loop looks at it between steps."""
        again = self.caught is not None
        self.caught = number
        if again:
            self.raise_if_caught()

    def raise_if_caught(self) -> None:
        """End as the signal would have ended the process."""
        if self.caught == signal.SIGINT:
            raise KeyboardInterrupt
        if self.caught is not None:
            raise SystemExit(128 + self.caught)


@contextmanager
def interruptible(enabled: bool) -> Iterator[Signal]:
    """Catch SIGINT and SIGTERM inside; only the main thread can, others leave signals as they are."""
    caught = Signal()
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
