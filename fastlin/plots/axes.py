"""Figures whose records list their axes: lines of theory, and points with standard errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastlin.plots.layout import add_below, add_title, key, mark_places, new_figure, plain_ticks
from fastlin.plots.style import Look, cycled, look, with_gaps
from fastlin.training.regimes import REGIMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Horizontal offset between the points of different curves, in units of x.
_ASIDE = 0.06


def axes_figure(record: dict[str, Any], *, style: str = "screen", caption: bool = False) -> Figure:
    """The axes of a record side by side, or below each other in a column, with one legend."""
    drawn = record["axes"]
    width, swept = 6.4 if len(drawn) < 2 else 4.8, any(one.get("ticks") for one in drawn)
    with new_figure(style, width, *[3.9] * max(len(drawn), 1), columns=max(len(drawn), 1)) as figure:
        kinds: dict[str, list[dict[str, Any]]] = {}
        for one, axes in zip(drawn, figure.axes, strict=False):
            _draw(axes, one)
            for curve in one["curves"]:
                kinds.setdefault(curve["label"], []).append(curve)
        entries = {
            label: key(
                _look(curves[0]),
                line=any(not curve["points"] or (not swept and _joined(curve, curves)) for curve in curves),
                points=any(curve["points"] for curve in curves),
            )
            for label, curves in kinds.items()
        }
        add_title(figure, record["title"])
        add_below(figure, entries, _meaning(record), record["caption"] if caption else ())
    return figure


def _meaning(record: dict[str, Any]) -> list[str]:
    """What points and lines are, where there are both."""
    points = {curve["points"] for one in record["axes"] for curve in one["curves"]}
    trained = "trained" if record.get("cells") else "sampled"
    return [f"Points: {trained}. Lines: closed form."] if len(points) > 1 else []


def _look(curve: dict[str, Any]) -> Look:
    """That of the regime which labels the curve, else that of its number."""
    return look(curve["label"]) if curve["label"] in REGIMES else cycled(curve["colour"])


def _joined(curve: dict[str, Any], others: list[dict[str, Any]]) -> bool:
    """Whether a line joins the points of a curve: those that have no line of theory."""
    return all(other["points"] or other["colour"] != curve["colour"] for other in others)


def _draw(axes: Axes, one: dict[str, Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    for curve in one["curves"]:
        shown, y = _look(curve), with_gaps(curve["y"])
        if not curve["points"]:
            axes.plot(curve["x"], y, **shown.line, label=curve["label"])
            continue
        error = [0.0 if value is None else value for value in curve["error"] or [None] * len(y)]
        joined = not one.get("ticks") and _joined(curve, one["curves"])  # in a sweep all lines are theory
        aside = _ASIDE * (curve["colour"] - 4) if joined and one["x_label"].endswith(" n") else 0.0
        kind = {**shown.line, **shown.points, "linestyle": shown.line["linestyle"] if joined else "none"}
        x = [x + aside for x in curve["x"]]
        axes.errorbar(x, y, yerr=error, **kind, linewidth=1, elinewidth=1, markersize=4, label=curve["label"])
    for x, number in one["marks"]:
        axes.axvline(x, color=cycled(number).colour, linestyle=(0, (4, 3)), linewidth=0.9, alpha=0.8)
    if one["logarithmic"]:
        axes.set_yscale("log")
        plain_ticks(axes)
    else:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if one["x_label"].endswith(" n"):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if one.get("ticks"):
        mark_places(axes, one["ticks"], one["scale"])
    axes.set(xlabel=one["x_label"], ylabel=one["y_label"])
    axes.set_title(one["title"], parse_math=False)
    axes.grid(True)
