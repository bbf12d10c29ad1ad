"""The row of a whole cell of the paper: a stretch of the training loop, against its kernel and optimiser, and peers.

A stretch of the loop has its share of what the loop does besides: records with the exact risk, the check of the loss,
schedules. Peers train one trial: they would run the cell's trials one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.rows import Line, Ratio, Result, Session
from fastlin.bench import end_to_end, peers, sampled_peers
from fastlin.bench.cases import Loss, Shape, parameters_of
from fastlin.bench.checks import WrongResultError
from fastlin.bench.contenders import Call
from fastlin.bench.timing import Contender, in_units, interleave


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
        config = end_to_end.cell_config(shape, stretch, session.backend)
        contenders = [
            Contender("op, loop", lambda: end_to_end.loop(config)),
            Contender("op, kernel and optimiser", end_to_end.bare(config, stretch)),
            Contender("eager query row", _peer(shape, peers.query_row), every=3),
            Contender("authors' form", _peer(shape, peers.literal("prompt_loss")), every=3),
        ]
        try:
            end_to_end.check_loop(config, end_to_end.loop(config), stretch)
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


def _peer(shape: Shape, loss: Loss) -> Call:
    """A training step of one trial."""
    one = replace(shape, R=None)
    leaves = parameters_of(one)
    return end_to_end.training_step(sampled_peers.eager(one, leaves, model=loss), [*leaves.values()])
