"""The row of a whole cell of the paper: a stretch of the training loop, against its kernel and optimiser, and peers.

A stretch of the loop has its share of what the loop does besides: records with the exact risk, the check of the loss,
schedules. Peers train one trial: they would run the cell's trials one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fastlin as fl
from benchmarks import peers, sampled_peers
from benchmarks.cases import Shape
from benchmarks.checks import WrongResultError
from benchmarks.rows import Line, Ratio, Result, Session, in_units
from benchmarks.sampled_peers import Step
from benchmarks.timing import Contender, interleave
from fastlin.experiments.plan import Plan
from fastlin.training.loop import Loop

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Cell:
    """A row that times training steps of a cell and states the cell's time.

    Attributes
    ----------
    name : str
    n, trials, steps : int
        Of the cell; the batch is the session's.
    seconds, peak : float
        Bar of the whole cell at that many FLOP/s a core.
    overhead : float
        Bar of the loop's time over that of its kernel and optimiser.
    records : int
        Of the cell.
    rounds : int
    """

    name: str
    n: int
    trials: int
    steps: int
    seconds: float
    peak: float
    overhead: float
    records: int = 100
    rounds: int = 7

    def run(self, session: Session) -> Result:
        """Time stretches of the loop and of its peers in turn."""
        result = Result(self.name)
        session.progress(f"{self.name}: checks")
        stretch = 4 if session.quick else self.steps // self.records
        shape = Shape("sampled_loss", B=session.batch, n=self.n, R=self.trials)
        mix = sampled_peers.source(shape)
        plan = self._plan(mix, session, stretch)
        one = replace(shape, R=None)
        contenders = [
            Contender("op, loop", lambda: self._loop(plan)),
            Contender("op, kernel and optimiser", _bare(plan, stretch)),
            Contender("eager query row", _peer(one, sampled_peers.tokens, peers.query_row), every=3),
            Contender("authors' form", _peer(one, sampled_peers.tokens, peers.literal("prompt_loss")), every=3),
        ]
        try:
            _check(plan, self._loop(plan), stretch)
        except WrongResultError as error:
            result.failures["op, loop"], result.wrong = str(error), True
            return result
        timings = interleave(
            contenders,
            2 if session.quick else self.rounds,
            None,
            seconds=120.0,
            progress=lambda done, of: session.progress(f"{self.name}: round {done} of {of}"),
        )
        for label, timing in timings.items():
            steps = stretch if label.startswith("op") else 1
            result.timings[label] = replace(timing, seconds=tuple(s / steps for s in timing.seconds))
        session.limits.again(1 if session.quick else 7)
        result.lines = self._lines(result, shape, session, stretch)
        return result

    def _plan(self, mix: fl.TaskMixture, session: Session, steps: int) -> Plan:
        return Plan.of(
            mix,
            "joint",
            self.n,
            target=None,
            model="full",
            layers=1,
            attention_heads=1,
            prompt_tokens=1,
            trials=self.trials,
            seed=0,
            records=1,
            preset="paper",
            values={"steps": steps, "batch": session.batch, "start_attention": 0.01, "start_heads": 0.01},
            dtype=torch.float32,
            device="cpu",
            backend=session.backend,
        )

    def _loop(self, plan: Plan) -> Loop:
        loop = Loop(plan.job(progress=False))
        loop.run()
        return loop

    def _lines(self, result: Result, shape: Shape, session: Session, stretch: int) -> list[Line]:
        work = f"a cell: {self.trials} trials, {self.steps:,} steps of {session.batch}, n = {self.n}"
        limit = self.seconds * self.peak / session.limits.flops_per_core
        bar = f"<= {self.seconds:g} s at {self.peak / 1e9:g} GFLOP/s a core, so <= {limit:.3g} s here"
        seconds = self.steps * result.timings["op, loop"].median
        measured = f"{in_units(seconds)}, from stretches of {stretch} steps"
        lines = [Line(work, measured, bar, "ok" if seconds <= limit else "misses", seconds, limit)]
        overhead = Ratio("op, loop", "op, kernel and optimiser", "<=", self.overhead, "kernel and optimiser alone")
        lines.append(overhead.line(work, result, shape, session.limits))
        for label in ("eager query row", "authors' form"):
            each = result.timings[label].median * self.trials * self.steps
            ratio = each / seconds
            text = f"{each / 3600:.3g} h in {label}, {ratio:.3g}x, extrapolated from single steps of one trial"
            lines.append(Line(work, text, "", "no bar", ratio))
        return lines


def _bare(plan: Plan, steps: int) -> Callable[[], Any]:
    """The cell's kernel calls, gradients and fused Adam on the ops' own parameters, in the shortest loop."""
    with torch.no_grad():
        forms = {name: form.clone() for name, form in plan.model().forms().items() if form is not None}
    mix: Any = plan.sources["mix"]

    def call() -> None:
        leaves = [form.clone().requires_grad_() for form in forms.values()]
        optimiser = torch.optim.Adam(leaves, lr=plan.protocol.lr, fused=True)
        for step in range(steps):
            loss, _ = fl.sampled_loss(
                mix, plan.n, plan.protocol.batch, *leaves, seed=plan.seed, step=step, backend=plan.backend
            )
            optimiser.zero_grad()
            torch.autograd.backward(loss.sum())
            optimiser.step()

    return call


def _peer(shape: Shape, draw: Callable[..., Any], loss: Callable[..., Any]) -> Step:
    """A training step of one trial: tokens, loss, gradients, Adam."""
    means = sampled_peers.source(shape).means.to(torch.float32)
    leaves = [0.01 * torch.randn(size) for size in ((shape.K, 1, shape.m), (shape.m, shape.m), (shape.K, shape.m))]
    for leaf in leaves:
        leaf.requires_grad_()
    optimiser = torch.optim.Adam(leaves, lr=1e-3)

    def call() -> tuple[Tensor, ...]:
        value = loss(*draw(shape, means), *leaves)
        value = value[0] if isinstance(value, tuple) else value
        optimiser.zero_grad()
        torch.autograd.backward(value)
        optimiser.step()
        return (value.detach(),)

    return call


def _check(plan: Plan, loop: Loop, steps: int) -> None:
    """The loop's parameters are those of plain torch on the ops, to float32's rounding over a stretch."""
    with torch.no_grad():
        leaves = [raw.clone() for raw in plan.model().parameters()]
    for leaf in leaves:
        leaf.requires_grad_()
    optimiser = torch.optim.Adam(leaves, lr=plan.protocol.lr)
    mix: Any = plan.sources["mix"]
    W, v, p = leaves
    for step in range(steps):
        heads = v[:, None].expand(-1, mix.K, -1)
        loss, _ = fl.sampled_loss(
            mix, plan.n, plan.protocol.batch, p, W, heads, seed=plan.seed, step=step, backend=plan.backend
        )
        optimiser.zero_grad()
        torch.autograd.backward(loss.sum())
        optimiser.step()
    for name, leaf in zip(("W", "v", "p"), leaves, strict=True):
        found = getattr(loop.job.model, name)
        error = float((found - leaf).detach().abs().max() / leaf.detach().abs().max())
        if not error < 1e-3:
            raise WrongResultError(f"{name} differs from plain torch by {error:.2g}")
