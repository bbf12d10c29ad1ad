"""A figure as data: axes with curves, for pictures and tables."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Curve:
    """A line of theory, or points that were sampled or trained.

    Attributes
    ----------
    label : str
        Curves of one name in all axes share a place in the legend.
    x, y : list of float
    error : list of float or None
        Standard errors of y.
    points : bool
        Whether it is drawn as points, or as a line.
    colour : int
        Curves of one colour belong together.
    dashed : bool
    """

    label: str
    x: list[float]
    y: list[float | None]
    error: list[float | None] | None = None
    points: bool = False
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Axes:
    """A coordinate system with curves.

    Attributes
    ----------
    title, x_label, y_label : str
    curves : list of Curve
    logarithmic : bool
        In y.
    marks : list of pairs
        Places on the x axis that get a vertical line, and the colours of the curves they belong to.
    """

    title: str
    x_label: str
    y_label: str
    curves: list[Curve] = field(default_factory=list)
    logarithmic: bool = False
    marks: list[tuple[float, int]] = field(default_factory=list)


def line(label: str, x: Iterable[float], y: Tensor, colour: int, *, dashed: bool = False) -> Curve:
    """Theory over x."""
    return Curve(label, [float(value) for value in x], _numbers(y), colour=colour, dashed=dashed)


def points(label: str, x: Iterable[float], y: Tensor, error: Tensor, colour: int) -> Curve:
    """What was sampled or trained, with standard errors."""
    return Curve(label, [float(value) for value in x], _numbers(y), _numbers(error), points=True, colour=colour)


def _numbers(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def as_dicts(axes: Sequence[Axes]) -> list[dict[str, Any]]:
    """The axes in values that JSON has."""
    return [asdict(one) for one in axes]


def as_csv(name: str, axes: Sequence[Axes]) -> str:
    """A line for each number of each curve."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["figure", "axes", "curve", "kind", "x", "y", "standard_error"])
    for one in axes:
        for curve in one.curves:
            errors = curve.error or [None] * len(curve.x)
            for x, y, error in zip(curve.x, curve.y, errors, strict=True):
                writer.writerow([name, one.title, curve.label, "points" if curve.points else "theory", x, y, error])
    return text.getvalue()


def distance(axes: Axes) -> float:
    """The largest distance of points from the line of their colour, in standard errors; 0 without both."""
    lines = {curve.colour: dict(zip(curve.x, curve.y, strict=True)) for curve in axes.curves if not curve.points}
    found = 0.0
    for curve in axes.curves:
        if curve.points and curve.error is not None and curve.colour in lines:
            for x, y, error in zip(curve.x, curve.y, curve.error, strict=True):
                there = lines[curve.colour].get(x)
                if y is not None and error and there is not None:
                    found = max(found, abs(y - there) / error)
    return found
