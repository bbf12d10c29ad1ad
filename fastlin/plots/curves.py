"""Closed forms against the context length."""

from __future__ import annotations

import itertools
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlin.plots.style import add_caption, edged, new_figure, read_record, save, wrapped
from fastlin.training.regimes import CLOSED_FORMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Relative differences that the eye does not see, and that are rounding.
_ONE_LINE, _EQUAL = 2e-3, 1e-9


def theory(folder: Path) -> list[Path]:
    """Draw `theory.json` of a folder; returns the paths of theory.png, theory.pdf and theory.svg beside it."""
    return save(theory_figure(read_record(folder, "theory")), folder, "theory")


def theory_figure(record: dict[str, Any]) -> Figure:
    """The closed forms against the context length: lines over `record["line"]`, markers at the context lengths.

    The left axis is risk / E[y²], the right axis risk. Curves that coincide are drawn once.
    """
    unit, line = record["normaliser"], record["line"]
    figure = new_figure(6.4, 4.4)
    axes = figure.add_subplot()
    noted = {note["curve"]: note["text"] for note in line["notes"]}
    asked = [line["n"].index(n) for n in record["n"]]
    for keys, label in _groups(record):
        first, form = keys[0], CLOSED_FORMS[keys[0]]
        dashes = "-" if form.dashes is None else (0, form.dashes)
        lines: dict[str, Any] = {"linestyle": dashes, "linewidth": 1.6, "color": form.colour}
        risks = [math.nan if loss is None else loss / unit for loss in line["losses"][first]]
        text = textwrap.fill(label + "*" * any(key in noted for key in keys), 42)
        axes.plot(line["n"], risks, label=text, markevery=asked, **edged(form.marker, 6, 0.7), **lines)
    _scale_lengths(axes, record["n"])
    _scale_risk(axes, record)
    title = record["name"] + (f": {record['description']}" if record["description"] else "")
    axes.set_title(textwrap.fill(title, 70), fontsize=10.5, parse_math=False)
    axes.legend(frameon=False, fontsize=9)
    axes.grid(alpha=0.25)
    if noted:
        add_caption(figure, wrapped((f"* {text}" for text in dict.fromkeys(noted.values())), 100), 7.5)
    return figure


def _groups(record: dict[str, Any]) -> list[tuple[list[str], str]]:
    """Curves that look like one line, grouped, each group with its label; curves are sorted by loss."""
    losses: dict[str, list[float | None]] = record["line"]["losses"]
    groups: list[list[str]] = []
    for key in losses:
        if groups and _gap(losses[groups[-1][0]], losses[key]) <= _ONE_LINE:
            groups[-1].append(key)
        else:
            groups.append([key])
    labelled = []
    for keys in groups:
        label = record["labels"][keys[0]]
        for before, key in itertools.pairwise(keys):
            label += f" {'=' if _gap(losses[before], losses[key]) <= _EQUAL else '≈'} {record['labels'][key]}"
        if "≈" in label:
            # No-break spaces keep the parenthesis on one line.
            label += f" (to\u00a0{100 * _gap(losses[keys[0]], losses[keys[-1]]):.2g}\u00a0%)"
        labelled.append((keys, label))
    return labelled


def _gap(first: list[float | None], second: list[float | None]) -> float:
    """The largest relative difference of two curves; infinite where a value is missing."""
    largest = 0.0
    for a, b in zip(first, second, strict=True):
        if a is None or b is None:
            return math.inf
        largest = max(largest, abs(a - b) / max(abs(a), abs(b), math.ulp(0.0)))
    return largest


def _scale_lengths(axes: Axes, lengths: list[int]) -> None:
    """Axis of the context lengths: logarithmic beyond a factor of 20, with ticks where there is room."""
    axes.set_xlabel("context length n (examples)")
    logarithmic = lengths[-1] > 20 * lengths[0] and lengths[-1] > 20
    if logarithmic:
        # Linear up to 1, to show n = 0.
        axes.set_xscale("symlog", linthresh=1, linscale=0.4) if lengths[0] == 0 else axes.set_xscale("log")
    places = [math.log(max(n, 0.5)) if logarithmic else float(n) for n in lengths]
    span = places[-1] - places[0] or 1.0
    shown, end = [], -math.inf
    for n, place in zip(lengths, places, strict=True):
        half = (0.01 + 0.008 * len(str(n))) * span
        if place - half >= end:
            shown.append(n)
            end = place + half
    axes.set_xticks(shown, [str(n) for n in shown])
    axes.set_xticks([], minor=True)


def _scale_risk(axes: Axes, record: dict[str, Any]) -> None:
    """Axes of the risk, normalised and raw: logarithmic beyond a factor of 100."""
    unit = record["normaliser"]
    losses = [loss for curve in record["line"]["losses"].values() for loss in curve if loss is not None]
    if 0 < 100 * min(losses, default=0.0) < max(losses, default=0.0):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("population risk / E[y²]")
    raw = axes.secondary_yaxis("right", functions=(lambda y: y * unit, lambda y: y / unit))
    raw.set_ylabel("population risk (units of y²)")
