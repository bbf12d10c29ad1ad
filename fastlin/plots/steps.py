"""Risk of trained cells against steps."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlin.plots.style import add_title, look, new_figure, save
from fastlin.training import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ACROSS = 4  # context lengths in a row


def training(folder: Path) -> list[Path]:
    """Draw risk against steps, of a folder of `fastlin train` or of one run; returns the paths of the pictures."""
    record = table.read(folder)
    for cell in record["cells"]:
        lines = (folder / cell["folder"] / "records.jsonl").read_text(encoding="utf-8").splitlines()
        cell["records"] = [entry for entry in map(json.loads, lines) if "risk" in entry]
    return save(training_figure(record), folder, "training")


def training_figure(record: dict[str, Any]) -> Figure:
    """Risk / E[y²] of trained cells against steps: the best trial, the spread of all, and the optimum."""
    unit, lengths = record["normaliser"] or 1.0, sorted({cell["n"] for cell in record["cells"]})
    rows = math.ceil(len(lengths) / _ACROSS)
    across = math.ceil(len(lengths) / rows)
    figure = new_figure(6.4 if across == 1 else 4.2 * across, 4.4 + 3.6 * (rows - 1))
    for panel, n in enumerate(lengths):
        axes = figure.add_subplot(rows, across, panel + 1)
        for cell in record["cells"]:
            if cell["n"] == n:
                _draw_cell(axes, cell, unit)
        axes.set(xscale="log", yscale="log", xlabel=f"optimiser steps of {record['cells'][0]['batch']} sequences")
        axes.set_title(f"n = {n}", fontsize=10.5)
        axes.grid(alpha=0.25, which="both")
        axes.legend(frameon=False, fontsize=8.5)
        if panel % across == 0:
            axes.set_ylabel("population risk / E[y²]" if record["normaliser"] else "population risk")
    parts = "best trial (line), all trials (band), closed form (dashes; the legend has the excess over it)"
    title = f"{record['name']}, {record['cells'][0]['model']} model: {parts}"
    add_title(figure, textwrap.fill(title, 70), 10.5)
    return figure


def _draw_cell(axes: Axes, cell: dict[str, Any], unit: float) -> None:
    colour, marker = look(cell["regime"])
    steps, best, low, high = [], [], [], []
    for entry in cell["records"]:
        risks = [math.nan if risk is None else risk / unit for risk in entry["risk"]]
        finite = [risk for risk in risks if not math.isnan(risk)]
        if finite:
            steps.append(entry["step"])
            best.append(risks[cell["best_trial"]])
            low.append(min(finite))
            high.append(max(finite))
    label = cell["regime"]
    if cell["excess_percent"] is not None:
        label += f": {cell['excess_percent']:+.2f} %"
        axes.axhline(cell["theory"] / unit, color=colour, linestyle="--", linewidth=1)
    axes.plot(steps, best, color=colour, label=label, marker=marker, markevery=0.12, markersize=5)
    axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
