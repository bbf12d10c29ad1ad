"""A figure as data: axes with curves, for pictures and tables."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fastlin._tables import csv_text
from fastlin.figures import report
from fastlin.figures.figure import Closing, Figure
from fastlin.training.outcome import finite_or_none

SHOTS = "test shots n"
ERROR = "test error"


@dataclass(frozen=True)
class PlottedCurve:
    """A line of theory, or points that were sampled or trained, with standard errors."""

    label: str  # curves with the same label share a legend entry
    x: list[float]
    y: list[float | None]
    error: list[float | None] | None = None
    points: bool = False  # whether to draw points or a line
    colour: int = 0  # points belong to the line of their colour


@dataclass(frozen=True)
class Axes:
    """A coordinate system with curves; the y axis may be logarithmic."""

    title: str
    x_label: str
    y_label: str
    curves: list[PlottedCurve] = field(default_factory=list)
    logarithmic: bool = False
    marks: list[tuple[float, int]] = field(default_factory=list)
    """Vertical lines: x, and the colour of the curve that it belongs to."""


def line(label: str, x: Iterable[float], y: Tensor, colour: int) -> PlottedCurve:
    return PlottedCurve(label, [float(value) for value in x], finite_or_none(y), colour=colour)


def points(label: str, x: Iterable[float], y: Tensor, error: Tensor, colour: int) -> PlottedCurve:
    return PlottedCurve(label, [float(value) for value in x], finite_or_none(y), finite_or_none(error), True, colour)


def as_dicts(axes: Sequence[Axes]) -> list[dict[str, Any]]:
    return [asdict(one) for one in axes]


def as_csv(name: str, axes: Sequence[Axes]) -> str:
    rows = [
        [name, one.title, curve.label, "points" if curve.points else "theory", x, y, error]
        for one in axes
        for curve in one.curves
        for x, y, error in zip(curve.x, curve.y, curve.error or [None] * len(curve.x), strict=True)
    ]
    return csv_text(["figure", "axes", "curve", "kind", "x", "y", "standard_error"], rows)


def distance(axes: Axes) -> float:
    """The largest distance of points from the line of their colour, in standard errors; 0 without points or lines."""
    lines = {curve.colour: dict(zip(curve.x, curve.y, strict=True)) for curve in axes.curves if not curve.points}
    largest = 0.0
    for curve in axes.curves:
        if curve.points and curve.error is not None and curve.colour in lines:
            for x, y, error in zip(curve.x, curve.y, curve.error, strict=True):
                expected = lines[curve.colour].get(x)
                if y is not None and error and expected is not None:
                    largest = max(largest, abs(y - expected) / error)
    return largest


class AxesFigure(Figure):
    """A figure whose record lists the axes to draw; a subclass without `cells` trains nothing."""

    remarks: tuple[str, ...] = ()  # sentences of the caption

    def cells(self, lengths: Sequence[int] | None = None) -> list[Any]:
        return []

    def kind(self, cells: Sequence[Any]) -> str:
        return "forgetting"

    def opening(self, cells: Sequence[Any]) -> dict[str, Any]:
        return {"axes": [], "remarks": list(self.remarks)}

    def closing(self, record: dict[str, Any], folder: Path, shallower: Mapping[str, Any] | None) -> Closing:
        axes, caption, table = self.result(record, folder)
        record["axes"], record["table"] = as_dicts(axes), table
        return Closing(caption, as_csv(self.name, axes), report.as_table(record))

    @abstractmethod
    def result(self, record: dict[str, Any], folder: Path) -> tuple[list[Axes], list[str], dict[str, Any]]:
        """Axes, caption and `report.own_table` of a record whose cells have ended."""
