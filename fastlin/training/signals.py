"""Ctrl-C and SIGTERM between steps: a run leaves a checkpoint before it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TRAINING: dict[Path, Signal] = {}


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
def interruptible(enabled: bool, together: bool = False, folder: Path | None = None) -> Iterator[Signal]:
    """Catch SIGINT and SIGTERM inside, in the main thread; `interrupt` reaches the run of a folder in any thread."""
    caught = Signal(together)
    if folder is not None:
        _TRAINING[folder] = caught
    # Only the main thread can handle signals. What a shell has set to be ignored in the background stays ignored.
    possible = enabled and threading.current_thread() is threading.main_thread()
    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if possible and signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, caught.handle) for number in heard}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _TRAINING.pop(folder, None)  # type: ignore[arg-type]


def interrupt(below: Path) -> bool:
    """Have the runs of this process in folders below a path stop with a checkpoint; returns whether there are any."""
    running = [caught for folder, caught in list(_TRAINING.items()) if folder.is_relative_to(below)]
    for caught in running:
        caught.caught = signal.SIGTERM
    return bool(running)
