"""A panel of a figure: what is trained at which places of an axis, and the closed forms beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlin import settings, theory
from fastlin._threads import one_thread
from fastlin.figures import curves, report
from fastlin.settings import Config
from fastlin.training.judge import LARGEST_SHARE

# What a panel's axis may be, and how it is labelled.
AXES = {
    "n": "context length n (examples)",
    "noise": "variance of the label noise σ²",
    "layers": "layers L",
}
# A line through this many points is smooth on paper.
_LINE_POINTS = 60


@dataclass(frozen=True)
class Series:
    """A model trained in one regime at every place of the axis.

    Attributes
    ----------
    regime, model : str
    layers : int
        Of a stack; on an axis of layers the axis decides.
    attention_heads : int
    curve : str or None
        The closed form that it is set beside, a name of `curves.DRAWN`.
    """

    regime: str
    model: str = "full"
    layers: int = 1
    attention_heads: int = 1
    curve: str | None = None


@dataclass(frozen=True)
class Panel:
    """A picture with its table.

    Attributes
    ----------
    name, title : str
    setting : str
        A setting that ships.
    series : tuple of Series
        Those of one model from the highest risk to the lowest, as theory has it.
    remarks : tuple of str
        What the caption says: where theory had to be corrected, which reading of the paper was taken.
    axis : str
        "n", "noise" or "layers".
    places : tuple
        Of the axis; empty: the context lengths of the setting.
    n : int or None
        The context length, where the axis is another.
    also : tuple of str
        Closed forms that are drawn besides those of the series.
    shallower : str or None
        The panel of the same setting with a layer less: risks here should not be above those there.
    values : tuple of pairs
        Names and values of the protocol, in place of the preset's.
    """

    name: str
    title: str
    setting: str
    series: tuple[Series, ...]
    remarks: tuple[str, ...] = ()
    axis: str = "n"
    places: tuple[float, ...] = ()
    n: int | None = None
    also: tuple[str, ...] = ()
    shallower: str | None = None
    values: tuple[tuple[str, float], ...] = ()

    def cells(self, lengths: Sequence[int] | None = None) -> list[Cell]:
        """What is to be trained.

        Parameters
        ----------
        lengths : sequence of int, optional
            In place of the setting's context lengths, on an axis of these.
        """
        setting = settings.load(self.setting)
        places = self.places or (lengths or setting.context_lengths)
        return [self._cell(setting, series, place) for series in self.series for place in places]

    def _cell(self, setting: Config, series: Series, place: float) -> Cell:
        setting, n, layers = self._at(setting, series.layers, place)
        deep = f"-L{layers}" if layers > 1 else ""
        deep += f"-H{series.attention_heads}" if series.attention_heads > 1 else ""
        noise = f"-noise{place:g}" if self.axis == "noise" else ""
        model = "stack" if layers > 1 else series.model
        key = f"{series.regime}-{model}{deep}-n{n}{noise}"
        heads = series.attention_heads
        return Cell(self.name, key, place, setting, series.regime, model, layers, heads, n, series.curve)

    def _at(self, setting: Config, layers: int, place: float) -> tuple[Config, int, int]:
        """Setting, context length and layers at a place of the axis."""
        if self.axis == "n":
            return setting, int(place), layers
        assert self.n is not None
        if self.axis == "noise":
            return setting.with_noise(place), self.n, layers
        return setting, self.n, int(place)

    def kind(self, cells: Sequence[Cell]) -> str:
        """Which effort the cells take."""
        models = {cell.model for cell in cells}
        return next((kind for kind in ("softmax", "stack") if kind in models), "layer")

    def opening(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """What the panel's record says before anything is trained."""
        return {
            "description": cells[0].setting.description,
            "axis": self.axis,
            "axis_label": AXES[self.axis],
            "shallower": self.shallower,
            "lines": self.lines(sorted({cell.place for cell in cells})),
            "remarks": list(self.remarks),
        }

    def closing(
        self, record: dict[str, Any], folder: Path, shallower: Mapping[str, Any] | None
    ) -> tuple[list[str], str, str]:
        """Caption, CSV and table of a record whose cells have ended."""
        return report.caption(record, shallower), report.as_csv(record), report.as_table(record)

    def lines(self, places: Sequence[float]) -> dict[str, Any]:
        """The closed forms over the axis: x, and for each curve its label and normalised risks."""
        setting = settings.load(self.setting)
        if self.axis == "n":
            x: list[float] = [float(n) for n in curves.line_lengths([int(place) for place in places])]
        else:
            first, last = places[0], places[-1]
            x = [first + (last - first) * i / (_LINE_POINTS - 1) for i in range(_LINE_POINTS)]
        names = dict.fromkeys([series.curve for series in self.series if series.curve] + list(self.also))
        found = {}
        with one_thread():
            for name in names:
                risks = [_normalised(name, *self._at(setting, 1, place)[:2]) for place in x]
                found[name] = {"label": curves.DRAWN[name].label, "normalised": risks}
        return {"x": x, "curves": found}


def _normalised(name: str, setting: Config, n: int) -> float | None:
    loss, _ = curves.loss(curves.DRAWN[name], setting.mixture, n)
    return None if loss is None else loss / theory.normaliser(setting.mixture)


@dataclass(frozen=True, eq=False)
class Cell:
    """One training run of a panel.

    Attributes
    ----------
    panel, key : str
        Names of the panel and, among its cells, of this one.
    place : float
        On the panel's axis.
    setting : Config
    regime, model : str
    layers, attention_heads, n : int
    curve : str or None
    """

    panel: str
    key: str
    place: float
    setting: Config
    regime: str
    model: str
    layers: int
    attention_heads: int
    n: int
    curve: str | None

    after = None
    """No run to go on from."""
    stretches = 1
    """How many times the effort's steps it counts."""

    def call(self) -> dict[str, Any]:
        """Arguments of `train` that the cell decides."""
        sizes = {"layers": self.layers, "attention_heads": self.attention_heads}
        return {"mix": self.setting.mixture, "regime": self.regime, "n": self.n, "model": self.model, **sizes}

    def row(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """A line of the table: where the cell is, its risk, its closed form and the distance from it."""
        mixture = self.setting.mixture
        unit = theory.normaliser(mixture)
        optimum = None
        if self.curve is not None:
            with one_thread():
                optimum, _ = curves.loss(curves.DRAWN[self.curve], mixture, self.n)
        best = summary["best"]
        excess = None if best is None or not optimum or self.layers > 1 else 100.0 * (best / optimum - 1.0)
        return {
            "regime": self.regime,
            "model": self.model,
            "layers": self.layers,
            "attention_heads": self.attention_heads,
            "n": self.n,
            "noise_variance": mixture.noise_std**2,
            "risk": best,
            "risk_error": summary["best_error"],
            "normaliser": unit,
            "normalised": None if best is None else best / unit,
            "curve": self.curve,
            "theory": optimum,
            "theory_normalised": None if optimum is None else optimum / unit,
            "excess_percent": excess,
            **{name: summary[name] for name in ("min", "lower_quartile", "median", "upper_quartile", "max", "mean")},
            **{name: summary[name] for name in ("best_trial", "trials", "diverged", "tail", "typical", "typical_max")},
            "heavy_tail": summary["tail"] is not None and summary["tail"] > LARGEST_SHARE,
        }
