"""Progress line of a run: time left, steps and sequences per second, loss of the best trial and its excess."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from fastlin._tables import Columns, terminal_width
from fastlin.training.judge import excess_percent

_SECONDS = 0.25
# Parts of the line, in the order in which a narrow terminal drops them.
_DROPS = ("sequences", "rate", "steps", "loss", "left")


class Progress:
    """A live line from step `done` to `steps`; with `enabled=None`, only when standard error is a terminal."""

    def __init__(self, enabled: bool | None, name: str, done: int, steps: int) -> None:
        self._bar: Any = None
        self._name, self._first, self._steps = name, done, steps
        self._shown, self._start = 0.0, time.monotonic()
        if sys.stderr.isatty() if enabled is None else enabled:
            from tqdm import tqdm

            self._bar = tqdm(bar_format="{desc}", dynamic_ncols=True, file=sys.stderr)

    def show(self, step: int, sequences: int, records: list[dict[str, Any]], optimum: float | None) -> None:
        """Update the line, at most once in 0.25 s."""
        if self._bar is None or (time.monotonic() - self._shown < _SECONDS and step < self._steps):
            return
        self._shown = time.monotonic()
        rate = (step - self._first) / max(self._shown - self._start, 1e-9)
        parts = {
            "run": f"{self._name} {100 * step / self._steps:3.0f} %",
            "steps": f"{step}/{self._steps} steps",
            "left": f"{clock((self._steps - step) / max(rate, 1e-9))} left",
            "rate": f"{rate:.0f} steps/s",
            "sequences": f"{sequences * rate / 1e6:.2f}M seq/s",
            "loss": _best(records, optimum),
        }
        # tqdm leaves the last column free.
        columns = Columns({name: len(text) + 2 for name, text in parts.items()}, _DROPS)
        self._bar.set_description_str(", ".join(filter(None, map(parts.get, columns.kept(terminal_width(2))))))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


def clock(seconds: float) -> str:
    """A time as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _best(records: list[dict[str, Any]], optimum: float | None) -> str:
    last = next((record for record in reversed(records) if "loss" in record), None)
    losses = [loss for loss in (last or {}).get("loss", []) if loss is not None]
    if last is None or not losses:
        return ""
    text = f"loss {min(losses):.5g}"
    risks = [risk for risk in last["risk"] if risk is not None]
    percent = excess_percent(min(risks, default=None), optimum)
    return text if percent is None else f"{text} ({percent:+.2f} %)"
