"""Interleaved timing: in every round each contender runs once, so that a slow moment of the machine meets them all."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Stopwatch = Callable[[Callable[[], object], int], float]
"""Seconds of one call of something that is called that many times in a row."""

FEWEST_ROUNDS = 5
"""Rounds that are run however long they take."""

_SHORT = 5e-4  # seconds; calls that are shorter are timed several in a row
_LONG = 0.1  # after which a call has no use for the state that the one before it left
_FEWEST, _MOST = 3, 40  # runs of a contender in `timed`


@dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes
    ----------
    name : str
    call : callable
    every : int
        It runs in every `every`-th round: the slow ones run in fewer.
    calls : int or None
        Calls in a row that are timed as one; None leaves it to `interleave`.
    before : callable or None
        Runs before the timed section, untimed.
    """

    name: str
    call: Callable[[], object]
    every: int = 1
    calls: int | None = None
    before: Callable[[], object] | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, one number for each round that the contender ran in."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median over rounds."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile over rounds."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        first, third = self.quartiles
        return (third - first) / self.median


@dataclass
class ColdCache:
    """Brings the machine to the same state before every timed call: nothing of the case in cache, no thread at work.

    A contender would otherwise find the tokens in the cache or not depending on who ran before it. One thread passes
    over a buffer of twice the last-level cache, for at least 15 ms: OpenMP's threads spin for 9 ms after a parallel
    region, on a core that a contender with other threads would want.
    """

    seconds: float = 0.015
    buffer: np.ndarray[tuple[int], np.dtype[np.uint8]] = field(
        default_factory=lambda: np.zeros(max(2 * last_level_cache(), 1 << 26), np.uint8)
    )

    def __call__(self) -> None:
        """Pass over the buffer."""
        end = time.perf_counter() + self.seconds
        self.buffer += 1
        while time.perf_counter() < end:
            self.buffer += 1


def last_level_cache() -> int:
    """Bytes of the largest cache that Linux reports for the first core, or 0."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    unit = {"K": 1 << 10, "M": 1 << 20}
    return max((int(text[:-1]) * unit[text[-1]] for text in (path.read_text().strip() for path in sizes)), default=0)


def interleave(
    contenders: Sequence[Contender],
    rounds: int,
    reset: Callable[[], None] | None,
    *,
    stopwatch: Stopwatch | None = None,
    seconds: float = math.inf,
    have_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Timing]:
    """Time contenders against each other.

    Parameters
    ----------
    contenders : sequence of Contender
    rounds : int
        In each, all contenders whose turn it is run once; the order rotates from round to round.
    reset : callable or None
        Runs before every timed section, after the contender's own `before`. None: as many calls of the contender
        itself, untimed, so that it finds the state that a loop of it leaves; and of those that do not say how many
        calls are timed as one, as many as `calls_in_a_row` says, where the clock is the wall clock.
    stopwatch : callable or None
        None: the wall clock.
    seconds : float
        After which no round is begun, when FEWEST_ROUNDS are done.
    have_run : bool
        Whether the contenders have made what a first call makes; else each runs once.
    progress : callable
        Told the number of rounds done and to do.

    Returns
    -------
    dict
        A Timing for each contender's name.
    """
    in_loops = reset is None and stopwatch is None
    stopwatch = stopwatch or wall_clock
    samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    calls: dict[str, int] = {}
    for contender in contenders:
        if contender.before is not None:
            contender.before()
        if not have_run:
            contender.call()
        calls[contender.name] = contender.calls or (calls_in_a_row(contender.call) if in_loops else 1)
    end = time.monotonic() + seconds
    with _no_collection():
        for i in range(rounds):
            if i >= FEWEST_ROUNDS and time.monotonic() > end:
                break
            first = i % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                if i % contender.every == 0:
                    samples[contender.name].append(_time(contender, calls[contender.name], reset, stopwatch))
            progress(i + 1, rounds)
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def calls_in_a_row(call: Callable[[], object]) -> int:
    """As many as take 10 ms, at most 100: what a loop finds that calls nothing else. The call has run before.

    On two cores, the first call after something else took 1.3 ms, the second 0.7 and the tenth 0.5, whatever the other
    thing was (prompt_loss with its gradients, n = 50).
    """
    return max(1, min(math.ceil(1e-2 / max(wall_clock(call, 1), 1e-7)), 100))


def _time(contender: Contender, calls: int, reset: Callable[[], object] | None, stopwatch: Stopwatch) -> float:
    if contender.before is not None:
        contender.before()
    if reset is not None:
        reset()
    else:
        for _ in range(calls):
            contender.call()
    return stopwatch(contender.call, calls)


def wall_clock(call: Callable[[], object], calls: int) -> float:
    """The `Stopwatch` of the CPU."""
    if calls == 1:
        start = time.perf_counter()
        result = call()
        elapsed = time.perf_counter() - start
        del result  # what it holds is released after the clock has stopped
        return elapsed
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def timed(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, Timing]:
    """Time contenders against each other, each for about that many seconds, between 3 and 40 times.

    A contender of less than 0.1 s runs once, untimed, before it is timed: it finds its threads and the cache as it
    leaves them itself.
    """
    if not calls:
        return {}
    contenders, runs = [], {}
    for label, call in calls.items():
        once = wall_clock(call, 1)
        repeated = max(1, min(math.ceil(_SHORT / max(once, 1e-7)), 200)) if seconds else 1
        runs[label] = min(max(int(seconds / (2 * repeated * once)), _FEWEST), _MOST)
        contenders.append((label, call, repeated, call if once < _LONG else None))
    rounds = max(runs.values())
    return interleave(
        [
            Contender(label, call, every=max(1, rounds // runs[label]), calls=repeated, before=warm)
            for label, call, repeated, warm in contenders
        ],
        rounds,
        lambda: None,
        have_run=True,
    )


def summary(timing: Timing, steps: int) -> dict[str, Any]:
    """Median, quartiles and all times of a step."""
    first, third = timing.quartiles
    return {
        "median": timing.median / steps,
        "quartiles": [first / steps, third / steps],
        "spread": timing.spread,
        "seconds": [value / steps for value in timing.seconds],
    }


def in_units(seconds: float) -> str:
    """A time with three digits."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{1e6 * seconds:.3g} µs"


def show(timing: Timing) -> str:
    """Median and interquartile spread."""
    return f"{in_units(timing.median)} (±{100 * timing.spread:.0f} %)"
