"""Progress bar of a run: time left, steps and sequences per second, loss of the best trial and its excess."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from fastlin.training.judge import excess_percent

_SECONDS = 0.25
# Fits 80 columns.
_FORMAT = "{desc} {percentage:3.0f} % {n_fmt}/{total_fmt} [{remaining} left, {rate_fmt}{postfix}]"


class Progress:
    """A tqdm bar from step `done` to `steps`; with `enabled=None`, only when standard error is a terminal."""

    def __init__(self, enabled: bool | None, name: str, done: int, steps: int) -> None:
        self._bar: Any = None
        self._shown, self._first, self._start = 0.0, done, time.monotonic()
        if sys.stderr.isatty() if enabled is None else enabled:
            from tqdm import tqdm

            place: dict[str, Any] = {"bar_format": _FORMAT, "dynamic_ncols": True, "file": sys.stderr}
            self._bar = tqdm(total=steps, initial=done, unit="step", desc=name, **place)

    def show(self, step: int, sequences: int, records: list[dict[str, Any]], optimum: float | None) -> None:
        """Update the bar, at most once in 0.25 s."""
        if self._bar is None or (time.monotonic() - self._shown < _SECONDS and step < self._bar.total):
            return
        self._shown = time.monotonic()
        rate = sequences * (step - self._first) / max(self._shown - self._start, 1e-9)
        self._bar.set_postfix_str(f"{rate / 1e6:.2f}M seq/s{_best(records, optimum)}", refresh=False)
        self._bar.update(step - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _best(records: list[dict[str, Any]], optimum: float | None) -> str:
    last = next((record for record in reversed(records) if "loss" in record), None)
    losses = [loss for loss in (last or {}).get("loss", []) if loss is not None]
    if last is None or not losses:
        return ""
    text = f", loss {min(losses):.5g}"
    risks = [risk for risk in last["risk"] if risk is not None]
    percent = excess_percent(min(risks, default=None), optimum)
    return text if percent is None else f"{text} ({percent:+.2f} %)"
