"""Risk of trained cells against steps."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlin.plots.style import COLOURS, MARKERS, REGIME_CURVES, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def training(folder: Path) -> list[Path]:
    """Draw `summary.json` of a folder of trained cells: risk against steps; returns the paths of the pictures."""
    record = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    for cell in record["cells"]:
        lines = (folder / cell["folder"] / "records.jsonl").read_text(encoding="utf-8").splitlines()
        cell["records"] = [entry for entry in map(json.loads, lines) if "risk" in entry]
    return save(training_figure(record), folder, "training")


def training_figure(record: dict[str, Any]) -> Figure:
    """Risk / E[y²] of trained cells against steps: the best trial, the spread of all, and the optimum."""
    unit, lengths = record["normaliser"], sorted({cell["n"] for cell in record["cells"]})
    figure = new_figure(6.4 if len(lengths) == 1 else 4.2 * len(lengths), 4.4)
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
    curve = REGIME_CURVES.get(cell["regime"], cell["regime"])
    colour = COLOURS.get(curve, "#17becf")
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
    axes.plot(steps, best, color=colour, label=label, marker=MARKERS.get(curve, "*"), markevery=0.12, markersize=5)
    axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
