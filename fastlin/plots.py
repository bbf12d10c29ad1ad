"""Pictures of what runs have left on disk."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlin._files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    "plain": "#1f77b4",
    "fine_tuned": "#ff7f0e",
    "joint": "#d62728",
    "shared_shift": "#9467bd",
    "decoupled": "#2ca02c",
    "scaled_heads": "#8c564b",
    "heads_lower_bound": "#7f7f7f",
}
# Curves are told apart without colour too, and where one nearly covers another.
_MARKERS = {
    "plain": "o",
    "fine_tuned": "s",
    "joint": "^",
    "shared_shift": "v",
    "decoupled": "D",
    "scaled_heads": "P",
    "heads_lower_bound": "X",
}
# Theory of a regime.
_REGIME_CURVES = {"fine-tune": "fine_tuned", "joint+heads": "decoupled"}
_DASHES = {"shared_shift": (0, (5, 1.5)), "scaled_heads": (0, (3, 1.5)), "heads_lower_bound": (0, (1, 1.5))}
# Relative differences below which two curves are one line to the eye, and below which they are rounding.
_ONE_LINE, _EQUAL = 2e-3, 1e-9
# A date would make every file differ from the last.
_METADATA = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}


def training(folder: Path) -> list[Path]:
    """Draw `summary.json` of a folder of trained cells: risk against steps; returns the paths of the pictures."""
    record = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    for cell in record["cells"]:
        lines = (folder / cell["folder"] / "records.jsonl").read_text(encoding="utf-8").splitlines()
        cell["records"] = [entry for entry in map(json.loads, lines) if "risk" in entry]
    return _save(training_figure(record), folder, "training")


def training_figure(record: dict[str, Any]) -> Figure:
    """Risk / E[y²] of trained cells against steps: the best trial, the spread of all, and the optimum."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    unit, lengths = record["normaliser"], sorted({cell["n"] for cell in record["cells"]})
    figure = Figure(figsize=(6.4 if len(lengths) == 1 else 4.2 * len(lengths), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, n in enumerate(lengths):
        axes = figure.add_subplot(1, len(lengths), panel + 1)
        for cell in record["cells"]:
            if cell["n"] == n:
                _draw_cell(axes, cell, unit)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(f"optimiser steps of {record['cells'][0]['batch']} sequences")
        axes.set_title(f"n = {n}", fontsize=10.5)
        axes.grid(alpha=0.25, which="both")
        axes.legend(frameon=False, fontsize=8.5)
    figure.axes[0].set_ylabel("population risk / E[y²]")
    model = record["cells"][0]["model"]
    parts = "best trial (line), all trials (band), closed form (dashes, and the distance from it)"
    title = f"{record['name']}, {model} model: {parts}"
    figure.suptitle(textwrap.fill(title, 70), fontsize=10.5, parse_math=False)
    return figure


def _draw_cell(axes: Axes, cell: dict[str, Any], unit: float) -> None:
    """Curves of one cell; a regime has the colour of its theory."""
    curve = _REGIME_CURVES.get(cell["regime"], cell["regime"])
    colour = _COLOURS.get(curve, "#17becf")
    steps, best, low, high = [], [], [], []
    for entry in cell["records"]:
        risks = [math.nan if risk is None else risk / unit for risk in entry["risk"]]
        there = [risk for risk in risks if not math.isnan(risk)]
        if there:
            steps.append(entry["step"])
            best.append(risks[cell["best_trial"]])
            low.append(min(there))
            high.append(max(there))
    label = cell["regime"]
    if cell["excess_percent"] is not None:
        label += f": {cell['excess_percent']:+.2f} %"
        axes.axhline(cell["theory"] / unit, color=colour, linestyle="--", linewidth=1)
    axes.plot(steps, best, color=colour, label=label, marker=_MARKERS.get(curve, "*"), markevery=0.12, markersize=5)
    axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)


def theory(folder: Path) -> list[Path]:
    """Draw `theory.json` of a folder; returns the paths of theory.png, theory.pdf and theory.svg beside it."""
    figure = theory_figure(json.loads((folder / "theory.json").read_text(encoding="utf-8")))
    return _save(figure, folder, "theory")


def _save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a picture as PNG, PDF and SVG."""
    import matplotlib

    paths = []
    for suffix, metadata in _METADATA.items():
        path = folder / f"{name}.{suffix}"
        with matplotlib.rc_context({"svg.hashsalt": "fastlin", "pdf.fonttype": 42}), replacing(path) as temporary:
            figure.savefig(temporary, dpi=200, metadata=metadata)
        paths.append(path)
    return paths


def theory_figure(record: dict[str, Any]) -> Figure:
    """The closed forms against the context length: lines over `record["line"]`, markers at the lengths asked for.

    The left axis is the risk / E[y²], the right one the risk. Curves that coincide are drawn once.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    unit, line = record["normaliser"], record["line"]
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    noted = {note["curve"]: note["text"] for note in line["notes"]}
    for keys, label in _groups(record):
        first = keys[0]
        axes.plot(
            line["n"],
            [math.nan if loss is None else loss / unit for loss in line["losses"][first]],
            label=textwrap.fill(label + "*" * any(key in noted for key in keys), 42),
            color=_COLOURS[first],
            linestyle=_DASHES.get(first, "-"),
            linewidth=1.6,
            marker=_MARKERS[first],
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
