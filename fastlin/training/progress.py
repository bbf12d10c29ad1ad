"""A live line of a run: time left, steps and sequences a second, the best trial's loss and its excess over theory."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

_SECONDS = 0.25
# 80 columns hold it: the loss is the best trial's, the percentage its excess over the closed form.
_FORMAT = "{desc} {percentage:3.0f} % {n_fmt}/{total_fmt} [{remaining} left, {rate_fmt}{postfix}]"


class Progress:
    """The line; quiet unless asked for or the output is a terminal.

    Parameters
    ----------
    enabled : bool or None
        None: when standard error is a terminal.
    name : str
        What is trained.
    done, steps : int
        Steps done before, and in all.
    """

    def __init__(self, enabled: bool | None, name: str, done: int, steps: int) -> None:
        self._bar: Any = None
        self._shown, self._first, self._start = 0.0, done, time.monotonic()
        if sys.stderr.isatty() if enabled is None else enabled:
            from tqdm import tqdm

            self._bar = tqdm(
                total=steps,
                initial=done,
                unit="step",
                desc=name,
                bar_format=_FORMAT,
                dynamic_ncols=True,
                file=sys.stderr,
            )

    def show(self, step: int, sequences: int, records: list[dict[str, Any]], optimum: float | None) -> None:
        """Show where the run is, a few times a second."""
        if self._bar is None or (time.monotonic() - self._shown < _SECONDS and step < self._bar.total):
            return
        self._shown = time.monotonic()
        rate = sequences * (step - self._first) / max(self._shown - self._start, 1e-9)
        self._bar.set_postfix_str(f"{rate / 1e6:.2f}M seq/s{_best(records, optimum)}", refresh=False)
        self._bar.update(step - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()


def _best(records: list[dict[str, Any]], optimum: float | None) -> str:
    """The best trial's loss and excess at the last record."""
    last = next((record for record in reversed(records) if "loss" in record), None)
    losses = [loss for loss in (last or {}).get("loss", []) if loss is not None]
    if last is None or not losses:
        return ""
    text = f", loss {min(losses):.5g}"
    risks = [risk for risk in last["risk"] if risk is not None]
    if optimum and risks:
        text += f" ({100 * (min(risks) / optimum - 1):+.2f} %)"
    return text
