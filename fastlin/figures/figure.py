"""What every figure has: a name, cells to train, and when these have ended a caption and tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class FigureCell(ABC):
    """One training run of a figure; `key` is its name in the figure."""

    panel: str
    key: str
    place: float  # position on the axis
    layers: int
    after: str | None = None  # key of the cell that this one continues
    stretches: int = 1  # its steps, as a multiple of the effort's

    @abstractmethod
    def call(self) -> dict[str, Any]:
        """Arguments of `train` that depend on the cell."""

    @abstractmethod
    def row(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Row of the table, from the summary of the run."""


class Closing(NamedTuple):
    """What a figure writes when its cells have ended."""

    caption: list[str]
    csv: str
    table: str


class Figure(ABC):
    """A figure that `reproduce` can make: a panel, or a figure of another form."""

    name: str  # names its files
    title: str  # stands above the picture
    shallower: str | None = None
    """Name of the panel of the same setting with one layer less; risks here should not be above those there."""
    values: tuple[tuple[str, Any], ...] = ()  # names and values of training options that replace those of the preset

    @property
    def over_n(self) -> bool:
        """Whether `lengths` of `cells` replaces the places on the axis."""
        return False

    @abstractmethod
    def cells(self, lengths: Sequence[int] | None = None) -> Sequence[FigureCell]:
        """Training runs; `lengths` replaces the context lengths on the axis, where it has these."""

    @abstractmethod
    def kind(self, cells: Sequence[Any]) -> str:
        """Key of the effort in `SCALES`."""

    @abstractmethod
    def opening(self, cells: Sequence[Any]) -> dict[str, Any]:
        """Fields of the record before training."""

    @abstractmethod
    def closing(self, record: dict[str, Any], folder: Path, shallower: Mapping[str, Any] | None) -> Closing:
        """Caption, CSV and table of a record whose cells have ended; adds its own fields to the record."""
