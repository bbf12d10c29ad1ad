"""Figures 1 to 3: closed forms of the paper's optima, with errors on sampled tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlin.data.sources import FixedTask
from fastlin.figures import report
from fastlin.figures.forgetting.axes import ERROR, SHOTS, Axes, AxesFigure, distance, line, points
from fastlin.figures.forgetting.regimes import Setting
from fastlin.theory import forgetting
from fastlin.theory.forgetting import Family
from fastlin.training.evaluate import evaluate

# Sequences in a batch, and batches, of the sampled points at each shot count.
_SAMPLES = {"quick": (4096, 16), "paper": (8192, 64)}


@dataclass(frozen=True)
class TheoryFigure(AxesFigure):
    """A figure without training: closed forms, and the same predictors on sampled tokens."""

    name: str
    title: str
    axes: Callable[..., list[Axes]]  # called with batch, batches and seed of the samples
    remarks: tuple[str, ...]

    def result(self, record: dict[str, Any], folder: Path) -> tuple[list[Axes], list[str], dict[str, Any]]:
        asked = record["asked"]
        batch, batches = _SAMPLES[asked["scale"]]
        axes = self.axes(batch=batch, batches=batches, seed=asked["seed"])
        farthest = max(distance(one) for one in axes)
        caption = (
            f"Lines: closed forms. Points: {batches} batches of {batch:,} sampled sequences at each n, with standard "
            f"errors; the farthest is {farthest:.1f} standard errors from its line."
        )
        return axes, [caption, *self.remarks], _comparison(axes)


def _comparison(axes: Sequence[Axes]) -> dict[str, Any]:
    rows = []
    for one in axes:
        theory = {curve.label: dict(zip(curve.x, curve.y, strict=True)) for curve in one.curves if not curve.points}
        for curve in one.curves:
            for x, y, error in zip(curve.x, curve.y, curve.error or [], strict=False):
                numbers = (theory[curve.label].get(x), y, error)
                rows.append([curve.label, f"{x:.0f}", *(f"{number or 0:.5f}" for number in numbers)])
    return report.own_table({"curve": 16, "n": 6, "theory": 12, "sampled": 12, "± s.e.": 10}, rows)


def _both(
    label: str, family: Family, task: FixedTask, last: int, every: int, colour: int, sample: Mapping[str, Any]
) -> list[Any]:
    """The closed form over 0..last shots, and sampled errors at some of them."""
    n = torch.arange(last + 1)
    shots = list(range(0, last + 1, every))
    sampled = evaluate(family, task, shots, exact=False, **sample)
    theory = forgetting.error(family, task.theta, n, task.feature_cov, task.noise_std**2)
    drawn = points(label, shots, sampled.error[:, 0], sampled.standard_error[:, 0], colour)
    return [line(label, n.tolist(), theory, colour), drawn]


def _by_scalar(family: Callable[..., Family], scalars: Sequence[float], sample: Mapping[str, Any]) -> list[Any]:
    task, curves = Setting().task, []
    for colour, w in enumerate(scalars):
        curves += _both(f"w = {w:g}", family(task.theta, w), task, 40, 4, colour, sample)
    return curves


def _pretrained(**sample: int) -> list[Axes]:
    curves, marks = [], []
    for colour, d in enumerate((6, 11, 16, 21)):
        task = Setting(d, 0.0).task
        curves += _both(f"d = {d}", forgetting.pretrained(d, 1000), task, 20, 2, colour, sample)
        marks.append((float(forgetting.threshold_shots(task.theta)), colour))
    return [Axes("pretrained optimum", SHOTS, ERROR, curves, marks=marks)]


def _full_tuning(**sample: int) -> list[Axes]:
    curves = _by_scalar(forgetting.fully_tuned, (0.3, 1.0, 3.0, 10.0, 30.0, 100.0), sample)
    return [Axes("fully fine-tuned optimum, task θ0", SHOTS, ERROR, curves, logarithmic=True)]


def _value_tuning(**sample: int) -> list[Axes]:
    curves = _by_scalar(forgetting.value_tuned, (0.2, 0.4, 0.6, 0.8, 1.0), sample)
    setting, task, n = Setting(), Setting().task, torch.arange(1, 41)
    moment = setting.known["task_cov"]
    scalars = {
        "w*(n) of θ0": _best_scalar(task, 1.0, n),
        "w*(n) of −θ0": _best_scalar(task, -1.0, n),
        "w̄(n), all tasks": forgetting.average_scalar(task.d, n, noise_var=setting.noise_variance, task_cov=moment),
    }
    best = [line(label, n.tolist(), w, colour) for colour, (label, w) in enumerate(scalars.items(), 5)]
    return [
        Axes("value-only optimum, task θ0", SHOTS, ERROR, curves, logarithmic=True),
        Axes("the best scalar", SHOTS, "w", best),
    ]


def _best_scalar(task: FixedTask, cosine: float, n: Tensor) -> Tensor:
    return forgetting.best_scalar(task.theta, task.at_cosine(cosine).theta, n, task.feature_cov, task.noise_std**2)


_READING = "d = 5, σ² = 0.1 and the tuned task θ0 of norm one are our reading."
THEORY_FIGURES = (
    TheoryFigure(
        "ff1",
        "Figure 1: when few shots beat none",
        _pretrained,
        (
            "Pretrained at m = 1000 shots without noise, tested on a task of norm one. Vertical dashes: n = d − 1, "
            "above which few shots beat none in the limit of many pretraining shots.",
        ),
    ),
    TheoryFigure(
        "ff2",
        "Figure 2: full fine-tuning forgets, whatever w is",
        _full_tuning,
        (f"{_READING} For every w the error is σ² at n = 0, and tends to ‖θ0‖² + σ² for many shots.",),
    ),
    TheoryFigure(
        "ff3",
        "Figure 3: fine-tuning the value matrix alone",
        _value_tuning,
        (
            f"{_READING} Every w has the same error at zero shots, σ² + 2‖θ0‖²/(d+4). Right: w*(n) is best for one "
            "task, w̄(n) for the average over the sphere; w = 1 is the smallest update, and gradient descent keeps it.",
        ),
    ),
)
