"""Interleaved timing: in every round each contender runs once, so that a slow moment of the machine meets them all."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Stopwatch = Callable[[Callable[[], object], int], float]
"""Seconds of one call of something that is called that many times in a row."""

_IN_A_ROW = 1e-2
_MOST_IN_A_ROW = 100
_LONG = 0.1  # seconds after which a call has no use for the state that the one before it left
_FEWEST, _MOST = 3, 40  # runs of a contender in `timed`


@dataclass(frozen=True)
class Contender:
    """Something to time. Times are those of a step."""

    name: str
    call: Callable[[], object]
    before: Callable[[], object] | None = None  # runs before the timed section
    every: int = 1  # it runs in every so many rounds: slow ones run in fewer
    calls: int = 1  # in a row, timed as one
    steps: int = 1  # that a call makes


@dataclass(frozen=True)
class Timing:
    """Seconds of one step, one number for each round that the contender ran in."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third

    @property
    def spread(self) -> float:
        first, third = self.quartiles
        return (third - first) / self.median


def last_level_cache() -> int:
    """Bytes of the largest cache that Linux reports for the first core, or 0."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    unit = {"K": 1 << 10, "M": 1 << 20}
    return max((int(text[:-1]) * unit[text[-1]] for text in (path.read_text().strip() for path in sizes)), default=0)


def interleave(
    contenders: Sequence[Contender],
    rounds: int,
    *,
    reset: Callable[[], object] | None = None,
    stopwatch: Stopwatch | None = None,
) -> dict[str, Timing]:
    """Time contenders against each other; each has run before.

    In each round all contenders whose turn it is run once; the order rotates from round to round. `reset` runs before
    every timed section, after the contender's own `before`. The stopwatch None is the wall clock.
    """
    samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    with _no_collection():
        for i in range(rounds):
            first = i % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                if i % contender.every == 0:
                    for prepare in (contender.before, reset):
                        if prepare is not None:
                            prepare()
                    seconds = (stopwatch or wall_clock)(contender.call, contender.calls)
                    samples[contender.name].append(seconds / contender.steps)
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def wall_clock(call: Callable[[], object], calls: int) -> float:
    result: object = None
    start = time.perf_counter()
    for _ in range(calls):
        result = call()
    elapsed = time.perf_counter() - start
    del result  # what it holds is released after the clock has stopped
    return elapsed / calls


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


def timed(contenders: Sequence[Contender], seconds: float) -> dict[str, Timing]:
    """Time contenders against each other, each for about that many seconds, between 3 and 40 times."""
    # Short calls are timed in a row, for 10 ms, after as many that are not: so a loop calls them. On two cores the
    # first call after something else took 1.3 ms, the second 0.7 and the tenth 0.5 (prompt_loss with its gradients, n =
    # 50).
    ready, runs = [], {}
    for contender in contenders:
        if contender.before is not None:
            contender.before()
        once = max(wall_clock(contender.call, 1), 1e-7)
        if once < _IN_A_ROW:
            once = max(wall_clock(contender.call, 1), 1e-7)  # the first call found cold caches
        calls = max(1, min(math.ceil(_IN_A_ROW / once), _MOST_IN_A_ROW)) if seconds else 1
        runs[contender.name] = min(max(int(seconds / (2 * calls * once)), _FEWEST), _MOST)
        ready.append(replace(contender, calls=calls, before=warm(contender, calls if once < _LONG else 0)))
    rounds = max(runs.values(), default=0)
    return interleave([replace(one, every=max(1, rounds // runs[one.name])) for one in ready], rounds)


def warm(contender: Contender, calls: int) -> Callable[[], None]:
    """What runs before a contender is timed: its own `before`, then calls that are not timed."""

    def before() -> None:
        if contender.before is not None:
            contender.before()
        for _ in range(calls):
            contender.call()

    return before


def summary(timing: Timing) -> dict[str, Any]:
    return {
        "median": timing.median,
        "quartiles": list(timing.quartiles),
        "spread": timing.spread,
        "seconds": list(timing.seconds),
    }


def in_units(seconds: float) -> str:
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{1e9 * seconds:.3g} ns"
