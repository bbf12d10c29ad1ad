"""Closed forms against the context length."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlin.plots.style import COLOURS, MARKERS, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DASHES = {"shared_shift": (0, (5, 1.5)), "scaled_heads": (0, (3, 1.5)), "heads_lower_bound": (0, (1, 1.5))}
# Relative differences below which two curves are one line to the eye, and below which they are rounding.
_ONE_LINE, _EQUAL = 2e-3, 1e-9


def theory(folder: Path) -> list[Path]:
    """Draw `theory.json` of a folder; returns the paths of theory.png, theory.pdf and theory.svg beside it."""
    figure = theory_figure(json.loads((folder / "theory.json").read_text(encoding="utf-8")))
    return save(figure, folder, "theory")


def theory_figure(record: dict[str, Any]) -> Figure:
    """The closed forms against the context length: lines over `record["line"]`, markers at the lengths asked for.

    The left axis is the risk / E[y²], the right one the risk. Curves that coincide are drawn once.
    """
    unit, line = record["normaliser"], record["line"]
    figure = new_figure(6.4, 4.4)
    axes = figure.add_subplot()
    noted = {note["curve"]: note["text"] for note in line["notes"]}
    for keys, label in _groups(record):
        first = keys[0]
        axes.plot(
            line["n"],
            [math.nan if loss is None else loss / unit for loss in line["losses"][first]],
            label=textwrap.fill(label + "*" * any(key in noted for key in keys), 42),
            color=COLOURS[first],
            linestyle=_DASHES.get(first, "-"),
            linewidth=1.6,
            marker=MARKERS[first],
            markersize=6,
            markeredgecolor="white",
            markeredgewidth=0.7,
            markevery=[line["n"].index(n) for n in record["n"]],
        )
    _scale_lengths(axes, record["n"])
    _scale_risk(axes, record)
    title = record["name"] + (f": {record['description']}" if record["description"] else "")
    axes.set_title(textwrap.fill(title, 70), fontsize=10.5, parse_math=False)
    axes.legend(frameon=False, fontsize=9)
    axes.grid(alpha=0.25)
    if noted:
        texts = "\n".join(textwrap.fill(f"* {text}", 100) for text in dict.fromkeys(noted.values()))
        figure.supxlabel(texts, fontsize=7.5, x=0.02, ha="left", parse_math=False)
    return figure


def _groups(record: dict[str, Any]) -> list[tuple[list[str], str]]:
    """Curves that are one line to the eye, each group with its label; curves come in the order of their losses."""
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
            # No-break spaces keep the bracket on one line.
            label += f" (to\u00a0{100 * _gap(losses[keys[0]], losses[keys[-1]]):.2g}\u00a0%)"
        labelled.append((keys, label))
    return labelled


def _gap(first: list[float | None], second: list[float | None]) -> float:
    """The largest relative difference of two curves, infinite where one of them has a gap."""
    largest = 0.0
    for a, b in zip(first, second, strict=True):
        if a is None or b is None:
            return math.inf
        largest = max(largest, abs(a - b) / max(abs(a), abs(b), math.ulp(0.0)))
    return largest


def _scale_lengths(axes: Axes, lengths: list[int]) -> None:
    """Axis of the context lengths, logarithmic for more than a factor of 20, with ticks where there is room."""
    axes.set_xlabel("context length n (examples)")
    logarithmic = lengths[-1] > 20 * lengths[0] and lengths[-1] > 20
    if logarithmic:
        # Linear up to 1, so that n = 0 has a place.
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
    """Axes of the risk, normalised and raw; logarithmic for more than a factor of 100."""
    unit = record["normaliser"]
    losses = [loss for curve in record["line"]["losses"].values() for loss in curve if loss is not None]
    if 0 < 100 * min(losses, default=0.0) < max(losses, default=0.0):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("population risk / E[y²]")
    raw = axes.secondary_yaxis("right", functions=(lambda y: y * unit, lambda y: y / unit))
    raw.set_ylabel("population risk (units of y²)")
