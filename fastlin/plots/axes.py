"""Figures whose records list their axes: lines of theory, and points with standard errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastlin.plots.style import add_caption, add_title, edged, new_figure, place_ticks, with_gaps, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# For colour-blind readers too (Okabe and Ito); grey is the baseline.
_COLOURS = ("#555555", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c564b", "#b0a000")
_MARKERS = "osD^v<>hp"
# Horizontal offset between the points of different curves, in units of x.
_ASIDE = 0.06
_WIDTH, _HEIGHT, _LINE = 5.2, 4.2, 0.14  # inches
_CHARACTERS = 96  # in a line of the caption, for each of the axes


def axes_figure(record: dict[str, Any]) -> Figure:
    """The axes of a record side by side, with one legend where all have the same entries, and the caption below."""
    drawn = record["axes"]
    count = max(len(drawn), 1)
    text = wrapped(record["caption"], _CHARACTERS * count)
    figure = new_figure(_WIDTH * count + (1.2 if count == 1 else 0.0), _HEIGHT + _LINE * (text.count("\n") + 2))
    for i, one in enumerate(drawn):
        _draw(figure.add_subplot(1, count, i + 1), one)
    shown = {label: handle for axes in figure.axes for handle, label in zip(*_entries(axes), strict=True)}
    if len({frozenset(_entries(axes)[1]) for axes in figure.axes}) == 1:
        figure.legend(shown.values(), shown.keys(), loc="outside right center", frameon=False, fontsize=8.5)
    else:
        for axes in figure.axes:
            axes.legend(*_entries(axes), frameon=False, fontsize=8.5)
    add_title(figure, record["title"], 11)
    add_caption(figure, text)
    return figure


def _entries(axes: Axes) -> tuple[list[Any], list[str]]:
    """Legend entries of the axes; a line and its points share one."""
    handles: dict[str, Any] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        handles[label] = (handles[label], handle) if label in handles else handle
    return list(handles.values()), list(handles)


def _draw(axes: Axes, one: dict[str, Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    for curve in one["curves"]:
        colour, marker = (cycle[curve["colour"] % len(cycle)] for cycle in (_COLOURS, _MARKERS))
        y = with_gaps(curve["y"])
        if not curve["points"]:
            style = (0, (4, 2)) if curve["dashed"] else "-"
            axes.plot(curve["x"], y, color=colour, linestyle=style, linewidth=1.4, label=curve["label"])
            continue
        error = [0.0 if value is None else value for value in curve["error"] or [None] * len(y)]
        # Where ticks are given, as in a sweep, all lines are theory.
        alone = not one.get("ticks") and all(o["points"] or o["colour"] != curve["colour"] for o in one["curves"])
        aside = _ASIDE * (curve["colour"] - 4) if alone and one["x_label"].endswith(" n") else 0.0
        lines: dict[str, Any] = {"color": colour, "linestyle": "-" if alone else "none", "linewidth": 0.9}
        bars: dict[str, Any] = {"yerr": error, "elinewidth": 1, "capsize": 2, "label": curve["label"]}
        axes.errorbar([x + aside for x in curve["x"]], y, **edged(marker, 4.5, 0.5), **lines, **bars)
    for x, colour in one["marks"]:
        axes.axvline(x, color=_COLOURS[colour % len(_COLOURS)], linestyle=(0, (4, 3)), linewidth=0.9, alpha=0.8)
    if one["logarithmic"]:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if one["x_label"].endswith(" n"):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if one.get("ticks"):
        place_ticks(axes, one["ticks"], one["scale"])
    axes.set(xlabel=one["x_label"], ylabel=one["y_label"])
    axes.set_title(one["title"], fontsize=10, parse_math=False)
    axes.grid(alpha=0.25, which="both" if one["logarithmic"] else "major")
