"""Trained models on their closed forms: a panel of a figure."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastlin.plots.axes import axes_figure
from fastlin.plots.style import COLOURS, MARKERS, REGIME_CURVES, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Points of one model beside those of another, as a share of the axis, so that both are seen.
_ASIDE = 0.006
# Width of the picture in inches, and characters of the caption in a line of it.
_WIDTH, _CHARACTERS = 7.0, 128
_LINE = 0.135  # inches
# Of the axis: the size of half a marker.
_SEEN = 0.01


def panel(folder: Path, name: str) -> list[Path]:
    """Draw `NAME.json` of a folder of `fastlin reproduce`; returns the paths of the pictures."""
    record = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return save(axes_figure(record) if "axes" in record else panel_figure(record), folder, name)


def panel_figure(record: dict[str, Any]) -> Figure:
    """Risk / E[y²] against the panel's axis: the best trial with the spread of all, on the closed forms."""
    text = "\n".join(textwrap.fill(sentence, _CHARACTERS) for sentence in record["caption"])
    rows = [cell["row"] for cell in record["cells"] if cell["row"] is not None]
    parts = 2 if any(row["excess_percent"] is not None for row in rows) else 1
    figure = new_figure(_WIDTH, 3.2 + 1.2 * parts + _LINE * (text.count("\n") + 1))
    axes, *below = figure.subplots(parts, 1, sharex=True, squeeze=False, height_ratios=(3.2, 1.2)[:parts])[:, 0]
    _draw_lines(axes, record)
    _draw_points(axes, record)
    for lower in below:
        _draw_excess(lower, record)
    places = sorted({cell["place"] for cell in record["cells"]})
    last = figure.axes[-1]
    last.set_xticks(_apart(places), [f"{place:g}" for place in _apart(places)])
    last.set_xlabel(record["axis_label"])
    axes.set_ylabel("population risk / E[y²]")
    axes.set_ylim(*_limits(record))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8.5, ncols=2)
    axes.set_title(record["title"], fontsize=11, parse_math=False)
    figure.supxlabel(text, fontsize=7.2, x=0.02, ha="left", parse_math=False)
    return figure


def _draw_lines(axes: Axes, record: dict[str, Any]) -> None:
    """Closed forms of one layer; those of no series are dashed."""
    lines = record["lines"]
    deep = any(cell["row"]["layers"] > 1 for cell in record["cells"] if cell["row"] is not None)
    series = {cell["row"]["curve"] for cell in record["cells"] if cell["row"] is not None}
    for name, curve in lines["curves"].items():
        axes.plot(
            lines["x"],
            [math.nan if risk is None else risk for risk in curve["normalised"]],
            color=COLOURS.get(name, "#17becf"),
            linestyle="-" if name in series else (0, (5, 1.5)),
            linewidth=1.5,
            label=f"theory{', L = 1' if deep else ''}: {curve['label']}",
        )


class _Group(NamedTuple):
    """The points of a model in a regime."""

    x: list[float]  # beside those of other models, so that all are seen
    rows: list[dict[str, Any]]
    label: str
    style: dict[str, Any]


def _groups(record: dict[str, Any]) -> list[_Group]:
    """The cells that have a risk, by regime and model; points of all models but the full one are hollow."""
    found: dict[tuple[str, str, int], list[tuple[float, dict[str, Any]]]] = {}
    for cell in record["cells"]:
        row = cell["row"]
        if row is not None and row["risk"] is not None:
            found.setdefault((row["regime"], row["model"], row["attention_heads"]), []).append((cell["place"], row))
    # Regimes of one model stand on their own lines; those of stacks have none, and may coincide.
    kinds = {key: key if key[1] == "stack" else key[1:] for key in found}
    beside = list(dict.fromkeys(kinds.values()))
    span = max(record["lines"]["x"], default=1.0) - min(record["lines"]["x"], default=0.0) or 1.0
    groups = []
    for (regime, model, heads), points in found.items():
        curve = REGIME_CURVES.get(regime, regime)
        colour, filled = COLOURS.get(curve, "#17becf"), model in ("full", "stack")
        aside = _ASIDE * span * (2 * beside.index(kinds[regime, model, heads]) - len(beside) + 1)
        style = {
            "linestyle": "none",
            "marker": MARKERS.get(curve, "*") if model != "softmax" else "+x"[heads > 1],
            "markersize": 6.5 if filled else 8.5,
            "markerfacecolor": colour if filled else "none",
            "markeredgecolor": "white" if filled else colour,
            "markeredgewidth": 0.7 if filled else 1.3,
            "color": colour,
        }
        label = f"{regime}, {model}" + (f" L = {points[0][1]['layers']}" if _one_depth(points) else "")
        label += f" H = {heads}" if heads > 1 else ""
        groups.append(_Group([place + aside for place, _ in points], [row for _, row in points], label, style))
    return groups


def _draw_points(axes: Axes, record: dict[str, Any]) -> None:
    """The best trial of each cell, and a bar up to the worst where it is long enough to be seen."""
    _, top = _limits(record)
    for group in _groups(record):
        drawn = [_drawn(row) for row in group.rows]
        above = [row["typical_max"] / row["normaliser"] - y for row, y in zip(group.rows, drawn, strict=True)]
        seen = [(x, y, bar) for x, y, bar in zip(group.x, drawn, above, strict=True) if bar > _SEEN * top]
        if seen:
            x, y, bars = zip(*seen, strict=True)
            axes.errorbar(
                x, y, yerr=[[0.0] * len(bars), bars], fmt="none", color=group.style["color"], elinewidth=1, capsize=2.5
            )
        axes.plot(group.x, drawn, label=group.label, **group.style)
        crossed = [(x, y) for x, y, row in zip(group.x, drawn, group.rows, strict=True) if row["heavy_tail"]]
        if crossed:
            axes.plot(*zip(*crossed, strict=True), linestyle="none", marker="x", color="black", markersize=9, zorder=5)


def _drawn(row: dict[str, Any]) -> float:
    """The risk of the best trial or, when it rests on few sequences, what most batches have, over E[y²]."""
    return float(row["typical" if row["heavy_tail"] else "risk"]) / float(row["normaliser"])


def _draw_excess(axes: Axes, record: dict[str, Any]) -> None:
    """How far the best trial is above its closed form."""
    axes.axhline(0.0, color="black", linewidth=0.8)
    for group in _groups(record):
        axes.plot(
            group.x,
            [math.nan if row["excess_percent"] is None else row["excess_percent"] for row in group.rows],
            **{**group.style, "markersize": 0.8 * group.style["markersize"]},
        )
    axes.set_ylabel("excess (%)")
    axes.grid(alpha=0.25)


def _one_depth(points: list[tuple[float, dict[str, Any]]]) -> bool:
    return len({row["layers"] for _, row in points}) == 1 and points[0][1]["layers"] > 1


def _limits(record: dict[str, Any]) -> tuple[float, float]:
    """The risk axis: theory and the best trials; a spread beyond it is cut."""
    values = [risk for curve in record["lines"]["curves"].values() for risk in curve["normalised"] if risk is not None]
    rows = [cell["row"] for cell in record["cells"] if cell["row"] is not None and cell["row"]["risk"] is not None]
    values += [_drawn(row) for row in rows]
    return 0.0, 1.08 * max(values, default=1.0)


def _apart(places: list[float]) -> list[float]:
    """Places whose ticks do not touch."""
    span, shown = (places[-1] - places[0]) or 1.0, places[:1]
    for place in places[1:]:
        if place - shown[-1] >= 0.035 * span:
            shown.append(place)
    return shown
