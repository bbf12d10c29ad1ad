"""What a row of the table is: contenders that are checked, then timed against each other, and their bars.

A row is run in a `Session` and gives a `Result`, whose lines are those of the table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch

from fastlin.bench import cases, checks, peers
from fastlin.bench.cases import Case, Loss, Shape
from fastlin.bench.machine import Limits
from fastlin.bench.probe import Probe
from fastlin.bench.timing import (
    Contender,
    Stopwatch,
    Timing,
    in_units,
    interleave,
    last_level_cache,
    show,
)
from fastlin.bench.work import multiply_adds

_LEAST_CACHE = 1 << 25
Verdict = Literal["ok", "misses", "not measured", "no bar"]


@dataclass(frozen=True)
class Session:
    """What all rows of a run share.

    Attributes
    ----------
    backend : str
        The one under test.
    threads, batch, memory_batch : int
        Of every row; of the timed rows; of the row that measures memory.
    widths : tuple of int
        That the sweep over m visits.
    quick : bool
        Whether two rounds are enough.
    limits : Limits
    reset : callable or None
        As in `timing.interleave`.
    progress : callable
        Told what is being done.
    device : str
        Of the timed rows.
    stopwatch : callable or None
        As in `timing.interleave`.
    """

    backend: str
    threads: int
    batch: int
    memory_batch: int
    widths: tuple[int, ...]
    quick: bool
    limits: Limits
    reset: Callable[[], None] | None
    progress: Callable[[str], None]
    device: str = "cpu"
    stopwatch: Stopwatch | None = None


@dataclass(frozen=True)
class Line:
    """One line of the table; value and limit are in the unit that `measured` and `bar` name, or None."""

    work: str
    measured: str
    bar: str
    verdict: Verdict
    value: float | None = None
    limit: float | None = None


@dataclass
class Result:
    """What a row found.

    Attributes
    ----------
    name : str
    lines : list of Line
    timings : dict
        By contender.
    errors : dict
        Relative errors of each contender's loss and gradients.
    failures : dict
        Why a contender was not timed.
    wrong : bool
        Whether one was not timed for its results.
    details : list of dict
        More numbers, for a table of their own.
    """

    name: str
    lines: list[Line] = field(default_factory=list)
    timings: dict[str, Timing] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    wrong: bool = False
    details: list[dict[str, Any]] = field(default_factory=list)


class Row(Protocol):
    """A row of the table."""

    @property
    def name(self) -> str:
        """By which the command line selects it."""

    def run(self, session: Session) -> Result:
        """Check, time, and compare with the bars."""


LOSSES: dict[str, Callable[[str, str], Loss]] = {
    "op": peers.op,
    "reference": lambda op, backend: peers.literal(op),
    "query row": lambda op, backend: peers.query_row,
    "query row, one product": lambda op, backend: peers.query_row_one_product,
    "compiled query row": lambda op, backend: peers.compiled_query_row(),
    "graphed query row": lambda op, backend: peers.compiled(peers.query_row, "reduce-overhead"),
    "linear stack": lambda op, backend: peers.linear_stack,
    "compiled linear stack": lambda op, backend: peers.compiled(peers.linear_stack, None),
    "graphed linear stack": lambda op, backend: peers.compiled(peers.linear_stack, "reduce-overhead"),
}
"""Losses of the contenders, given the op's name and the backend under test. "read", z.sum(), is the one without."""


@dataclass(frozen=True)
class Entrant:
    """A contender of a race: its kind, precision, threads and backend (None: the session's), turns and tokens.

    The kind is a name in LOSSES, whose step is timed, or "graph", the op's step as one CUDA graph; "read", which sums
    z; "call", the op's call alone, in which it makes its gradients; "autograd", torch.autograd.grad of one sum, which
    is what torch takes for itself. A contender with `fresh` tokens finds others in each call, from memory, as training
    on data that come from elsewhere does. One with `tasks` has a problem of its own with as many.
    """

    kind: str
    every: int = 1
    dtype: torch.dtype = torch.float32
    threads: int | None = None
    backend: str | None = None
    fresh: bool = False
    tasks: int | None = None


@dataclass(frozen=True)
class Ratio:
    """A bar for the time of `slow` over that of `fast`; without limit it is only shown."""

    slow: str
    fast: str
    sense: Literal[">=", "<="]
    limit: float | None
    of: str

    def line(self, work: str, result: Result, shape: Shape, limits: Limits) -> Line:
        """The bar's line of the table."""
        bar = "" if self.limit is None else f"{self.sense} {self.limit:g}x {self.of}"
        missing = _not_timed(work, bar, result, (self.slow, self.fast))
        if missing is not None:
            return missing
        slow, fast = result.timings[self.slow], result.timings[self.fast]
        value = slow.median / fast.median
        measured = f"{value:.3g}x: {self.slow} {show(slow)}, {self.fast} {show(fast)}"
        if self.limit is None:
            return Line(work, f"{measured} ({self.of})", bar, "no bar", value)
        met = value >= self.limit if self.sense == ">=" else value <= self.limit
        return Line(work, measured, bar, "ok" if met else "misses", value, self.limit)


@dataclass(frozen=True)
class Within:
    """A bar for the time of one contender; with `peak`, for a core of that many FLOP/s and in proportion for others.

    Without seconds the time is only shown.
    """

    entrant: str
    seconds: float | None = None
    peak: float | None = None

    def line(self, work: str, result: Result, shape: Shape, limits: Limits) -> Line:
        """The bar's line of the table."""
        limit = self.seconds
        bar = "" if limit is None else f"<= {in_units(limit)}"
        if self.peak is not None and limit is not None:
            limit *= self.peak / limits.flops_per_core
            bar += f" at {self.peak / 1e9:g} GFLOP/s a core, so <= {in_units(limit)} here"
        missing = _not_timed(work, bar, result, (self.entrant,))
        if missing is not None:
            return missing
        timing = result.timings[self.entrant]
        measured = show(timing)
        if self.peak is not None:
            share = 2 * multiply_adds(shape) / timing.median / limits.flops
            measured += f", {100 * share:.0f} % of the measured peak"
        if limit is None:
            return Line(work, f"{measured} ({self.entrant})", bar, "no bar", timing.median)
        return Line(work, measured, bar, "ok" if timing.median <= limit else "misses", timing.median, limit)


@dataclass(frozen=True)
class Race:
    """A row that times contenders on one problem.

    Attributes
    ----------
    name, work : str
        For the command line; for the table.
    shape : Shape
        Its B is the session's unless `batch` is given.
    entrants : mapping
        By the name that bars use.
    bars : tuple
    rounds : int
    calls : int
        Calls in a row that are timed as one. More than one are calls whose state is their own: nothing is reset. One
        leaves their number to `timing.interleave`.
    """

    name: str
    work: str
    shape: Shape
    entrants: Mapping[str, Entrant]
    bars: tuple[Ratio | Within, ...]
    rounds: int = 25
    calls: int = 1
    batch: int | None = None

    def run(self, session: Session) -> Result:
        """Check, time, and compare with the bars."""
        shape = replace(self.shape, B=self.batch or session.batch)
        result = race(self.name, shape, self.entrants, self.rounds, session, calls=self.calls)
        if any(isinstance(bar, Within) and bar.peak is not None for bar in self.bars):
            session.limits.again(1 if session.quick else 7)
        result.lines = [bar.line(self.work, result, shape, session.limits) for bar in self.bars]
        return result


def race(
    name: str,
    shape: Shape,
    entrants: Mapping[str, Entrant],
    rounds: int,
    session: Session,
    *,
    calls: int = 1,
    seconds: float = 20.0,
    scores: int = checks.AFFORDABLE_SCORES,
) -> Result:
    """Check all entrants on one problem, or on one for each number of tasks, and time those that are right.

    Parameters
    ----------
    name : str
    shape : Shape
    entrants, rounds, calls
        As in `Race`.
    session : Session
    seconds : float
        After which rounds are cut short, so that a slow backend or a busy machine does not hold up the other rows.
    scores : int
        What the reference may do in the check.
    """
    result = Result(name)
    session.progress(f"{name}: checks")
    problems: dict[int, tuple[Case, checks.Gate]] = {}
    contenders: list[Contender] = []
    for label, entrant in entrants.items():
        torch.set_num_threads(entrant.threads or session.threads)
        K = entrant.tasks or shape.K
        if K not in problems:
            case = cases.make(replace(shape, K=K), device=session.device)
            problems[K] = case, checks.Gate.of(case, scores)
        case, gate = problems[K]
        try:
            call = _call(entrant, case, entrant.backend or session.backend)
            found = call()
            if entrant.kind == "graph" or entrant.kind in LOSSES:
                result.errors[label] = gate.check(label, found)
        except Exception as error:  # whatever keeps a contender from running is what its line says
            result.failures[label] = f"{type(error).__name__}: {error}".splitlines()[0]
            result.wrong |= isinstance(error, checks.WrongResultError)
            continue
        before = None if entrant.threads is None else partial(_on_threads, entrant.threads, call)
        every = 1 if session.quick else entrant.every
        contenders.append(Contender(label, call, every, calls if calls > 1 else None, before))
    problems.clear()
    if contenders:
        del case, gate
        reset = session.reset if calls == 1 else None
        rounds = 2 if session.quick else rounds
        result.timings = interleave(
            contenders,
            rounds,
            reset,
            stopwatch=session.stopwatch,
            seconds=seconds,
            progress=lambda done, of: session.progress(f"{name}: round {done} of {of}"),
        )
    torch.set_num_threads(session.threads)
    return result


def _call(entrant: Entrant, case: Case, backend: str) -> Callable[[], Any]:
    case = case if entrant.dtype == case.dtype else case.to(entrant.dtype)
    of = _calls(entrant.kind, case.shape.op, backend)
    if not entrant.fresh:
        return of(case)
    z = case.data["z"]
    # Each thread may have a last level of its own, and Linux does not tell of it everywhere.
    caches = torch.get_num_threads() * max(last_level_cache(), _LEAST_CACHE)
    copies = 1 + math.ceil(2 * caches / z.nbytes)
    turns = itertools.cycle([of(replace(case, data={**case.data, "z": z.clone()})) for _ in range(copies)])
    return lambda: next(turns)()


def _calls(kind: str, op: str, backend: str) -> Callable[[Case], Callable[[], Any]]:
    """What a kind of contender calls for a case."""
    if kind == "read":
        return lambda case: case.data["z"].sum
    if kind == "autograd":
        return _autograd
    loss = LOSSES["op" if kind in ("call", "graph") else kind](op, backend)
    if kind == "call":
        return lambda case: partial(loss, *case.arguments)
    if kind == "graph":
        return lambda case: peers.captured(case.step(loss))
    return lambda case: case.step(loss)


def _autograd(case: Case) -> Callable[[], Any]:
    leaf = next(iter(case.parameters.values()))
    return lambda: torch.autograd.grad(leaf.sum(), leaf)


def _on_threads(threads: int, call: Callable[[], Any]) -> None:
    """Change the number of threads, and let a call start those that are new."""
    torch.set_num_threads(threads)
    call()


@dataclass(frozen=True)
class Workspace:
    """A row that measures the memory of a call beyond inputs and outputs; its B is `times` the session's."""

    name: str
    shape: Shape
    limit: int
    times: int = 1

    def run(self, session: Session) -> Result:
        """Measure in a fresh process."""
        result = Result(self.name)
        session.progress(f"{self.name}: a process of its own")
        shape = replace(self.shape, B=self.times * session.memory_batch)
        work = f"workspace of {shape.op}, B = {shape.B:,}, n = {shape.n}"
        bar = f"<= {self.limit / 1e6:g} MB beyond inputs and outputs"
        try:
            with Probe() as probe:
                found = probe.measure(shape, f"fastlin:{session.backend}", "float32", session.threads)["memory"]
        except RuntimeError as error:
            result.failures["op"] = str(error)
            result.lines = [Line(work, str(error), bar, "not measured")]
            return result
        verdict: Verdict = "ok" if found <= self.limit else "misses"
        result.lines = [Line(work, f"{found / 1e6:.1f} MB", bar, verdict, found / 1e6, self.limit / 1e6)]
        return result


def _not_timed(work: str, bar: str, result: Result, labels: tuple[str, ...]) -> Line | None:
    """The line of a bar whose contenders were not all timed, or None."""
    for label in labels:
        if label in result.failures:
            return failed(work, bar, label, result.failures[label])
    return None


def failed(work: str, bar: str, label: str, why: str) -> Line:
    """A peer that cannot run leaves the op unmeasured; an op that cannot run has missed its bar."""
    verdict: Verdict = "misses" if label.split(", ")[0] == "op" and bar else "not measured"
    return Line(work, f"{label}: {why}", bar, verdict)
