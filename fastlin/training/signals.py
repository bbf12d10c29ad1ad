"""SIGINT and SIGTERM take effect between steps, after a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TRAINING: dict[Path, Signal] = {}


class Signal:
    """A signal that was caught, if any.

    A second signal raises at once, unless processes train together: those must stop at the same step, and their
    launcher repeats a signal that the terminal has already sent to all of them.
    """

    def __init__(self, together: bool = False) -> None:
        self.caught: int | None = None  # by this process
        self.heard: int | None = None  # by any of several processes, as of the last step
        self._together = together

    @property
    def stop(self) -> int | None:
        """The signal that ends the run before the next step."""
        return self.heard if self._together else self.caught

    def handle(self, number: int, frame: Any) -> None:
        """Handler of signal.signal: store the signal, which the loop checks between steps."""
        again = self.caught is not None
        self.caught = number
        if again and not self._together:
            self.raise_if_caught()

    def raise_if_caught(self) -> None:
        """End as the signal would have ended the process."""
        _raise(self.stop)

    def raise_at_the_end(self) -> None:
        """The same after the last step, where a signal that only this process caught counts too."""
        _raise(self.heard or self.caught)


def _raise(number: int | None) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number is not None:
        raise SystemExit(128 + number)


@contextmanager
def interruptible(enabled: bool, together: bool = False, folder: Path | None = None) -> Iterator[Signal]:
    """Catch SIGINT and SIGTERM, in the main thread; `interrupt` reaches the run of a folder in any thread."""
    caught = Signal(together)
    if folder is not None:
        _TRAINING[folder] = caught
    # Only the main thread can handle signals. A signal that a shell ignores for background jobs stays ignored.
    possible = enabled and threading.current_thread() is threading.main_thread()
    handled = [n for n in (signal.SIGINT, signal.SIGTERM) if possible and signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, caught.handle) for number in handled}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _TRAINING.pop(folder, None)  # type: ignore[arg-type]


def interrupt(below: Path) -> bool:
    """Stop the runs of this process in folders below a path, with a checkpoint; returns whether there are any."""
    running = [caught for folder, caught in list(_TRAINING.items()) if folder.is_relative_to(below)]
    for caught in running:
        caught.caught = signal.SIGTERM
    return bool(running)
