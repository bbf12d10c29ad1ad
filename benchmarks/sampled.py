"""Rows of the table for the ops that draw their data: time, memory, and what a normal costs.

Contenders draw other numbers, so that they are checked by what does not depend on them: the op against eager on the
data that it drew, in float64, and every peer's loss against the op's, both averaged over calls, in standard errors.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastlin as fl
from benchmarks.rows import Line, Ratio, Result, Session, Verdict, Within
from fastlin import _extension
from fastlin.bench import jax_peers, peers, sampled_peers
from fastlin.bench.cases import Shape, parameters_of
from fastlin.bench.checks import WrongResultError
from fastlin.bench.sampled_peers import OP_CALLS, PEER_CALLS, agree, check_op, losses
from fastlin.bench.timing import Contender, interleave

PEERS: dict[str, tuple[Callable[[Shape, dict[str, Tensor]], Callable[[], Any]], int]] = {
    "eager": (sampled_peers.eager, 1),
    "compiled": (partial(sampled_peers.eager, compiled=True), 1),
    "graphed": (partial(sampled_peers.eager, compiled=True, mode="reduce-overhead"), 1),
    "eager, linear": (partial(sampled_peers.eager, model=peers.linear_stack), 1),
    "JAX": (jax_peers.drawn, jax_peers.STEPS),
}
"""Peers by name, with the steps of one call."""


@dataclass(frozen=True)
class SampledRace:
    """A row that times the op, at several shapes, against peers.

    Attributes
    ----------
    name, work : str
        For the command line; for the table.
    shapes : mapping
        Of the op's entrants, by their name; the first is "op", and the peers have its shape.
    peers : mapping
        Names of the peers, each with whether it runs the trials one by one: it then has no R.
    bars : tuple
    rounds : int
    calls : int
        As in `rows.Race`.
    backends : mapping
        By which a shape is run, where it is not the one under test.
    """

    name: str
    work: str
    shapes: Mapping[str, Shape]
    peers: Mapping[str, bool]
    bars: tuple[Ratio | Within, ...]
    rounds: int = 15
    calls: int = 1
    backends: Mapping[str, str] = field(default_factory=dict)

    def run(self, session: Session) -> Result:
        """Check, time, and compare with the bars."""
        result = Result(self.name)
        session.progress(f"{self.name}: checks")
        contenders: list[Contender] = []
        first = replace(self.shapes["op"], B=session.batch)
        of_op: list[float] | None = None
        for label in (*self.shapes, *self.peers):
            try:
                if label in self.shapes:
                    shape, backend = replace(self.shapes[label], B=session.batch), self.backends.get(label)
                    backend = backend or session.backend
                    result.errors[label] = check_op(shape, backend, session.device)
                    call = sampled_peers.op(shape, parameters_of(shape, session.device), backend)
                    of_op = of_op or losses(call, shape.R or 1, OP_CALLS)
                else:
                    call = self._peer(label, first, of_op, session.device)
            except Exception as error:  # whatever keeps a contender from running is what its line says
                result.failures[label] = f"{type(error).__name__}: {error}".splitlines()[0]
                result.wrong |= isinstance(error, WrongResultError)
                continue
            every = 1 if session.quick or label in self.shapes else 3
            contenders.append(Contender(label, call, every, self.calls if self.calls > 1 else None))
        timings = interleave(
            contenders,
            2 if session.quick else self.rounds,
            session.reset if self.calls == 1 else None,
            stopwatch=session.stopwatch,
            seconds=60.0,
            progress=lambda done, of: session.progress(f"{self.name}: round {done} of {of}"),
        )
        for label, timing in timings.items():
            steps = PEERS[label][1] if label in PEERS else 1
            result.timings[label] = replace(timing, seconds=tuple(s / steps for s in timing.seconds))
        session.limits.again(1 if session.quick else 7)
        result.lines = [bar.line(self.work, result, first, session.limits) for bar in self.bars]
        return result

    def _peer(self, label: str, shape: Shape, of_op: list[float] | None, device: str) -> Callable[[], Any]:
        """A peer's step, when its typical loss is the op's; one that runs trials one by one has the first trial."""
        values, make = parameters_of(shape, device), PEERS[label][0]
        if self.peers[label] and shape.R is not None:
            return make(replace(shape, R=None), {name: x[0].detach().requires_grad_() for name, x in values.items()})
        torch.manual_seed(0)
        step = make(shape, values)
        if of_op is not None:
            agree(losses(step, shape.R or 1, PEER_CALLS), of_op)
        return step


@dataclass(frozen=True)
class Normals:
    """A row that times normals on one thread, written to a buffer that stays in the cache."""

    name: str
    limit: float

    def run(self, session: Session) -> Result:
        """Median of many short stretches."""
        result = Result(self.name)
        out = torch.empty(512, 64)
        fill = _extension.loaded().fill_normal
        set_name = fl.info()["instruction_set"]
        stretches = []
        for step in range(20 if session.quick else 2000):
            start = time.perf_counter()
            fill(out.data_ptr(), *out.shape, "float32", 1, step, 0, 0, 0, instruction_set=set_name, threads=1)
            stretches.append(time.perf_counter() - start)
        if not abs(float(out.std()) - 1) < 0.05:
            raise RuntimeError(f"normals of standard deviation {float(out.std()):.3g}")
        each = statistics.median(stretches) / out.numel()
        verdict: Verdict = "ok" if each <= self.limit else "misses"
        bar = f"<= {1e9 * self.limit:g} ns each per core"
        measured = f"{1e9 * each:.2f} ns (fill_normal, float32, 128 KB)"
        result.lines = [Line("normals", measured, bar, verdict, each, self.limit)]
        return result
