"""Closed forms against the context length."""

from __future__ import annotations

import itertools
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlin.plots.layout import add_below, add_title, key, mark_places, new_figure
from fastlin.plots.style import look, read_record, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Relative differences that the eye does not see, and that are rounding.
_ONE_LINE, _EQUAL = 2e-3, 1e-9
_CAPTION = "Lines: population risk of the closed-form optima at every n; markers: the context lengths of the setting."


def theory(folder: Path, *, style: str = "screen", caption: bool = False) -> list[Path]:
    """Draw `theory.json` of a folder; returns the paths of theory.png, theory.pdf and theory.svg beside it."""
    record = read_record(folder, "theory")
    return save(theory_figure(record, style=style, caption=caption), folder, "theory")


def theory_figure(record: dict[str, Any], *, style: str = "screen", caption: bool = False) -> Figure:
    """The closed forms against the context length: lines over `record["line"]`, markers at the context lengths.

    The left axis is risk / E[y²], the right axis risk. Curves that coincide are drawn once. What a star at a label
    means stands below the picture, with or without a caption.
    """
    unit, line = record["normaliser"], record["line"]
    with new_figure(style, 6.4, 4.0) as figure:
        (axes,) = figure.axes
        noted = {note["curve"]: note["text"] for note in line["notes"]}
        asked = [line["n"].index(n) for n in record["n"]]
        entries = {}
        for keys, label in _groups(record):
            shown = look(keys[0])
            risks = [math.nan if loss is None else loss / unit for loss in line["losses"][keys[0]]]
            label = textwrap.fill(label + "*" * any(name in noted for name in keys), 42)
            axes.plot(line["n"], risks, label=label, markevery=asked, **{**shown.points, **shown.line})
            entries[label] = key(shown)
        _scale_lengths(axes, record["n"])
        _scale_risk(axes, record)
        axes.grid(True)
        title = record["name"] + (f": {record['description']}" if record["description"] else "")
        add_title(axes, title)
        below = [f"* {text}" for text in dict.fromkeys(noted.values())]
        add_below(figure, entries, sentences=[*below, *([_CAPTION] if caption else [])])
    return figure


def _groups(record: dict[str, Any]) -> list[tuple[list[str], str]]:
    """Curves that look like one line, grouped, each group with its label; curves are sorted by loss."""
    losses: dict[str, list[float | None]] = record["line"]["losses"]
    groups: list[list[str]] = []
    for name in losses:
        if groups and _gap(losses[groups[-1][0]], losses[name]) <= _ONE_LINE:
            groups[-1].append(name)
        else:
            groups.append([name])
    labelled = []
    for keys in groups:
        label = record["labels"][keys[0]]
        for before, name in itertools.pairwise(keys):
            label += f" {'=' if _gap(losses[before], losses[name]) <= _EQUAL else '≈'} {record['labels'][name]}"
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
    mark_places(axes, lengths)


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
