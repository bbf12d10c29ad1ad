"""Figures 1 to 3: optima of the paper's family in closed form, with sampled errors on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastlin.data.sources import FixedTask
from fastlin.figures.forgetting.axes import Axes, as_csv, as_dicts, distance, line, points
from fastlin.theory import forgetting
from fastlin.theory.forgetting import Family
from fastlin.training.evaluate import evaluate

SHOTS = "test shots n"
ERROR = "test error"
# Sequences in a batch, and batches, of the sampled points at each shot count.
_SAMPLES = {"quick": (4096, 16), "paper": (8192, 64)}


@dataclass(frozen=True)
class TheoryFigure:
    """A figure without training: closed forms, and the same predictors on sampled tokens.

    Attributes
    ----------
    name, title : str
    dimension : int
    noise_variance : float
    """

    name: str
    title: str
    dimension: int = 5
    noise_variance: float = 0.1
    shallower: ClassVar[str | None] = None
    values: ClassVar[tuple[tuple[str, Any], ...]] = ()
    remarks: ClassVar[tuple[str, ...]] = ()

    def cells(self, lengths: Sequence[int] | None = None) -> list[Any]:
        """Nothing is trained."""
        return []

    def kind(self, cells: Sequence[Any]) -> str:
        """Which effort of a scale is meant."""
        return "forgetting"

    def opening(self, cells: Sequence[Any]) -> dict[str, Any]:
        """What the record says before the figure is made."""
        return {"axes": [], "remarks": list(self.remarks)}

    def closing(
        self, record: dict[str, Any], folder: Path, shallower: Mapping[str, Any] | None
    ) -> tuple[list[str], str, str]:
        """Caption, CSV and table."""
        asked = record["asked"]
        axes = self.axes(*_SAMPLES[asked["scale"]], asked["seed"])
        record["axes"] = as_dicts(axes)
        batch, batches = _SAMPLES[asked["scale"]]
        far = max(distance(one) for one in axes)
        sampled = f"Points: {batches} batches of {batch:,} sampled sequences at each n, with standard errors"
        said = [f"Lines: closed forms. {sampled}; the farthest is {far:.1f} standard errors from its line."]
        record["table"] = self.table(axes)
        return [*said, *self.remarks], as_csv(self.name, axes), record["table"]

    def axes(self, batch: int, batches: int, seed: int) -> list[Axes]:
        """The figure as data."""
        raise NotImplementedError

    def table(self, axes: Sequence[Axes]) -> str:
        """Theory and samples side by side, where there are both."""
        lines = [f"{'curve':>16}{'n':>6}{'theory':>12}{'sampled':>12}{'± s.e.':>10}"]
        for one in axes:
            theory = {curve.label: dict(zip(curve.x, curve.y, strict=True)) for curve in one.curves if not curve.points}
            for curve in one.curves:
                for x, y, error in zip(curve.x, curve.y, curve.error or [], strict=False):
                    there = theory[curve.label].get(x)
                    lines.append(f"{curve.label:>16}{x:>6.0f}{there or 0:>12.5f}{y or 0:>12.5f}{error or 0:>10.5f}")
        return "\n".join(lines) + "\n"

    def task(self, d: int) -> FixedTask:
        """The first unit vector of R^d."""
        return FixedTask(torch.eye(d, dtype=torch.float64)[0], self.noise_variance**0.5, bias=True)


def _both(
    label: str, family: Family, task: FixedTask, last: int, every: int, colour: int, sample: tuple[int, int, int]
) -> list[Any]:
    """The closed form over 0..last shots, and sampled errors at some of them."""
    batch, batches, seed = sample
    n = torch.arange(last + 1)
    shots = list(range(0, last + 1, every))
    found = evaluate(family, task, shots, exact=False, batch=batch, batches=batches, seed=seed)
    theory = forgetting.error(family, task.theta, n, task.feature_cov, task.noise_std**2)
    drawn = points(label, shots, found.error[:, 0], found.standard_error[:, 0], colour)
    return [line(label, n.tolist(), theory, colour), drawn]


@dataclass(frozen=True)
class Pretrained(TheoryFigure):
    """Figure 1: n-shot error of the pretrained optimum, and the shots at which it begins to beat none."""

    name: str = "ff1"
    title: str = "Figure 1: when few shots beat none"
    noise_variance: float = 0.0
    shots: int = 1000
    dimensions: tuple[int, ...] = (6, 11, 16, 21)
    remarks: ClassVar[tuple[str, ...]] = (
        "Pretrained at m = 1000 shots, no noise, tests on a task of norm one. Dashes: n = d − 1, beyond which few "
        "shots beat none in the limit of many pretraining shots.",
    )

    def axes(self, batch: int, batches: int, seed: int) -> list[Axes]:
        """Errors over 0..20 shots for each dimension."""
        curves, marks = [], []
        for colour, d in enumerate(self.dimensions):
            family = forgetting.pretrained(d, self.shots)
            curves += _both(f"d = {d}", family, self.task(d), 20, 2, colour, (batch, batches, seed))
            marks.append((float(forgetting.threshold_shots(self.task(d).theta)), colour))
        return [Axes("pretrained optimum", SHOTS, ERROR, curves, marks=marks)]


@dataclass(frozen=True)
class FullTuning(TheoryFigure):
    """Figure 2: full fine-tuning, whose free scalar changes few-shot errors and never repairs them."""

    name: str = "ff2"
    title: str = "Figure 2: full fine-tuning forgets, whatever w is"
    scalars: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
    remarks: ClassVar[tuple[str, ...]] = (
        "d = 5, σ² = 0.1 and the tuned task θ0 of norm one are our reading. For every w the error at n = 0 is σ², and "
        "tends to ‖θ0‖² + σ² for many shots.",
    )

    def axes(self, batch: int, batches: int, seed: int) -> list[Axes]:
        """Errors over 0..40 shots for each scalar."""
        task = self.task(self.dimension)
        curves = []
        for colour, w in enumerate(self.scalars):
            family = forgetting.fully_tuned(task.theta, w)
            curves += _both(f"w = {w:g}", family, task, 40, 4, colour, (batch, batches, seed))
        return [Axes("fully fine-tuned optimum, task θ0", SHOTS, ERROR, curves, logarithmic=True)]


@dataclass(frozen=True)
class ValueTuning(TheoryFigure):
    """Figure 3: value-only fine-tuning keeps few-shot errors, best with a scalar that depends on n."""

    name: str = "ff3"
    title: str = "Figure 3: fine-tuning the value matrix alone"
    scalars: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    remarks: ClassVar[tuple[str, ...]] = (
        "d = 5, σ² = 0.1 and the tuned task θ0 of norm one are our reading. Every w has the same error at zero shots, "
        "σ² + 2‖θ0‖²/(d+4). Right: w*(n) of a task, and w̄(n) of the average over the sphere; w = 1 is the least "
        "update, and what gradient descent leaves.",
    )

    def axes(self, batch: int, batches: int, seed: int) -> list[Axes]:
        """Errors over 0..40 shots for each scalar, and the best scalars."""
        task, d, s2 = self.task(self.dimension), self.dimension, self.noise_variance
        curves = []
        for colour, w in enumerate(self.scalars):
            family = forgetting.value_tuned(task.theta, w)
            curves += _both(f"w = {w:g}", family, task, 40, 4, colour, (batch, batches, seed))
        n = torch.arange(1, 41)
        shots = n.tolist()
        average = forgetting.average_scalar(d, n, noise_var=s2, task_cov=torch.eye(d, dtype=torch.float64) / d)
        best = [
            line("w*(n) of θ0", shots, _best(task, 1.0, n), 5),
            line("w*(n) of −θ0", shots, _best(task, -1.0, n), 6),
            line("w̄(n), all tasks", shots, average, 7),
        ]
        return [
            Axes("value-only optimum, task θ0", SHOTS, ERROR, curves, logarithmic=True),
            Axes("the best scalar", SHOTS, "w", best),
        ]


def _best(task: FixedTask, cosine: float, n: Tensor) -> Tensor:
    other = task.at_cosine(cosine).theta
    return forgetting.best_scalar(task.theta, other, n, task.feature_cov, task.noise_std**2)
