"""A panel of a figure: models trained at places of an axis, beside their closed forms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlin import settings, theory
from fastlin._threads import one_thread
from fastlin.figures import curves, report
from fastlin.figures.figure import Closing, Figure, FigureCell
from fastlin.settings import Config
from fastlin.training.judge import LARGEST_SHARE, excess_percent
from fastlin.training.regimes import CLOSED_FORMS

# The axes that a panel can have, with their labels.
AXES = {"n": "context length n (examples)", "noise": "variance of the label noise σ²", "layers": "layers L"}
# Enough points for a smooth line.
_LINE_POINTS = 101


@dataclass(frozen=True)
class Series:
    """A model trained in one regime at every place of the axis."""

    regime: str
    model: str = "full"
    layers: int = 1  # layers of a stack; ignored where the axis is layers
    attention_heads: int = 1
    curve: str | None = None  # its closed form, a name of `fastlin.training.regimes.CLOSED_FORMS`


@dataclass(frozen=True)
class Panel(Figure):
    """Risk against an axis, with closed forms and a table."""

    name: str
    title: str
    setting: str  # one that ships, or the path of a file
    series: tuple[Series, ...]  # those of one model from the highest risk to the lowest, as theory predicts
    remarks: tuple[str, ...] = ()  # sentences of the caption: corrections of the theory, how the paper was read
    axis: str = "n"  # of AXES
    places: tuple[float, ...] = ()  # positions on the axis; by default the context lengths of the setting
    n: int | None = None  # context length, where the axis is not n
    also: tuple[str, ...] = ()  # closed forms to draw besides those of the series
    shallower: str | None = None
    values: tuple[tuple[str, float], ...] = ()

    @property
    def over_n(self) -> bool:
        return not self.places

    def cells(self, lengths: Sequence[int] | None = None) -> list[Cell]:
        setting = settings.load(self.setting)
        places = self.places or (lengths or setting.context_lengths)
        return [self._cell(setting, series, place) for series in self.series for place in places]

    def _cell(self, setting: Config, series: Series, place: float) -> Cell:
        setting, n, layers = self._at(setting, series.layers, place)
        heads = series.attention_heads
        model = "stack" if layers > 1 else series.model
        key = f"{series.regime}-{model}"
        key += (f"-L{layers}" if layers > 1 else "") + (f"-H{heads}" if heads > 1 else "")
        key += f"-n{n}" + (f"-noise{place:g}" if self.axis == "noise" else "")
        return Cell(self.name, key, place, setting, series.regime, model, layers, heads, n, series.curve)

    def _at(self, setting: Config, layers: int, place: float) -> tuple[Config, int, int]:
        """Setting, context length and layers at a place of the axis."""
        if self.axis == "n":
            return setting, int(place), layers
        assert self.n is not None
        return (setting.with_noise(place), self.n, layers) if self.axis == "noise" else (setting, self.n, int(place))

    def kind(self, cells: Sequence[Cell]) -> str:
        models = {cell.model for cell in cells}
        return next((kind for kind in ("softmax", "stack") if kind in models), "layer")

    def opening(self, cells: Sequence[Cell]) -> dict[str, Any]:
        return {
            "description": cells[0].setting.description,
            "axis": self.axis,
            "axis_label": AXES[self.axis],
            "shallower": self.shallower,
            "lines": self.lines(sorted({cell.place for cell in cells})),
            "remarks": list(self.remarks),
        }

    def closing(self, record: dict[str, Any], folder: Path, shallower: Mapping[str, Any] | None) -> Closing:
        return Closing(report.caption(record, shallower), report.as_csv(record), report.as_table(record))

    def lines(self, places: Sequence[float]) -> dict[str, Any]:
        """The closed forms over the axis: x, and the label and normalised risks of each curve."""
        setting = settings.load(self.setting)
        if self.axis == "n":
            x: list[float] = [float(n) for n in curves.line_lengths([int(place) for place in places])]
        else:
            first, last = places[0], places[-1]
            x = [first + (last - first) * i / (_LINE_POINTS - 1) for i in range(_LINE_POINTS)]
        names = dict.fromkeys([series.curve for series in self.series if series.curve] + list(self.also))
        return closed_forms(names, x, [self._at(setting, 1, place)[:2] for place in x])


def closed_forms(names: Iterable[str], x: Sequence[float], at: Sequence[tuple[Config, int]]) -> dict[str, Any]:
    """Closed forms over an axis: at each x a setting and a context length."""
    with one_thread():
        risks = {name: [_normalised(name, *place) for place in at] for name in names}
    labelled = {name: {"label": CLOSED_FORMS[name].label, "normalised": values} for name, values in risks.items()}
    return {"x": list(x), "curves": labelled}


def _normalised(name: str, setting: Config, n: int) -> float | None:
    loss, _ = curves.loss(CLOSED_FORMS[name], setting.mixture, n)
    return None if loss is None else loss / theory.normaliser(setting.mixture)


@dataclass(frozen=True, eq=False)
class Cell(FigureCell):
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

    def call(self) -> dict[str, Any]:
        sizes = {"layers": self.layers, "attention_heads": self.attention_heads}
        return {"mix": self.setting.mixture, "regime": self.regime, "n": self.n, "model": self.model, **sizes}

    def row(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        mixture = self.setting.mixture
        unit = theory.normaliser(mixture)
        optimum = None
        if self.curve is not None:
            with one_thread():
                optimum, _ = curves.loss(CLOSED_FORMS[self.curve], mixture, self.n)
        best = summary["best"]
        return {
            **{name: getattr(self, name) for name in ("regime", "model", "layers", "attention_heads", "n")},
            "noise_variance": mixture.noise_std**2,
            "risk": best,
            "risk_error": summary["best_error"],
            "normaliser": unit,
            "normalised": None if best is None else best / unit,
            "curve": self.curve,
            "theory": optimum,
            "theory_normalised": None if optimum is None else optimum / unit,
            "excess_percent": None if self.layers > 1 else excess_percent(best, optimum),
            **{name: summary[name] for name in ("min", "q25", "median", "q75", "max", "mean")},
            **{name: summary[name] for name in ("best_trial", "trials", "diverged", "tail", "typical", "typical_max")},
            "heavy_tail": summary["tail"] is not None and summary["tail"] > LARGEST_SHARE,
        }
