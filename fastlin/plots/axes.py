"""Figures whose records say what is drawn: axes side by side, lines of theory and points with standard errors."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

from fastlin.plots.style import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart by people who do not see all colours (Okabe and Ito, with a grey for what others are compared with).
_COLOURS = ("#555555", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c564b", "#b0a000")
_MARKERS = "osD^v<>hp"
# Points without lines beside those of other curves, so that all are seen, in units of x.
_ASIDE = 0.06
_WIDTH, _HEIGHT, _LINE = 5.2, 4.2, 0.14  # inches
_CHARACTERS = 96  # of the caption in a line of one width


def axes_figure(record: dict[str, Any]) -> Figure:
    """The axes of a record side by side, with one legend and the caption below."""
    drawn = record["axes"]
    count = max(len(drawn), 1)
    text = "\n".join(textwrap.fill(sentence, _CHARACTERS * count) for sentence in record["caption"])
    figure = new_figure(_WIDTH * count + (1.2 if count == 1 else 0.0), _HEIGHT + _LINE * (text.count("\n") + 2))
    for place, one in enumerate(drawn):
        _draw(figure.add_subplot(1, count, place + 1), one)
    shown = {label: handle for axes in figure.axes for handle, label in zip(*_entries(axes), strict=True)}
    if len({frozenset(_entries(axes)[1]) for axes in figure.axes}) == 1:
        figure.legend(shown.values(), shown.keys(), loc="outside right center", frameon=False, fontsize=8.5)
    else:
        for axes in figure.axes:
            axes.legend(*_entries(axes), frameon=False, fontsize=8.5)
    figure.suptitle(record["title"], fontsize=11, parse_math=False)
    figure.supxlabel(text, fontsize=7.2, x=0.02, ha="left", parse_math=False)
    return figure


def _entries(axes: Axes) -> tuple[list[Any], list[str]]:
    """Legend entries of the axes; a line and its points are one."""
    found: dict[str, Any] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        found[label] = (found[label], handle) if label in found else handle
    return list(found.values()), list(found)


def _draw(axes: Axes, one: dict[str, Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    for curve in one["curves"]:
        colour, marker = (cycle[curve["colour"] % len(cycle)] for cycle in (_COLOURS, _MARKERS))
        y = [math.nan if value is None else value for value in curve["y"]]
        if not curve["points"]:
            style = (0, (4, 2)) if curve["dashed"] else "-"
            axes.plot(curve["x"], y, color=colour, linestyle=style, linewidth=1.4, label=curve["label"])
            continue
        error = [0.0 if value is None else value for value in curve["error"] or [None] * len(y)]
        alone = all(other["points"] or other["colour"] != curve["colour"] for other in one["curves"])
        aside = _ASIDE * (curve["colour"] - 4) if alone and one["x_label"].endswith(" n") else 0.0
        axes.errorbar(
            [x + aside for x in curve["x"]],
            y,
            yerr=error,
            color=colour,
            linestyle="-" if alone else "none",
            linewidth=0.9,
            marker=marker,
            markersize=4.5,
            markeredgecolor="white",
            markeredgewidth=0.5,
            elinewidth=1,
            capsize=2,
            label=curve["label"],
        )
    for place, colour in one["marks"]:
        axes.axvline(place, color=_COLOURS[colour % len(_COLOURS)], linestyle=(0, (4, 3)), linewidth=0.9, alpha=0.8)
    if one["logarithmic"]:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if one["x_label"].endswith(" n"):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(one["x_label"])
    axes.set_ylabel(one["y_label"])
    axes.set_title(one["title"], fontsize=10, parse_math=False)
    axes.grid(alpha=0.25, which="both" if one["logarithmic"] else "major")
