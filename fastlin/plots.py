"""Pictures of what runs have left on disk."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from fastlin._files import replacing

_COLOURS = {"plain": "#1f77b4", "joint": "#d62728"}


def reduced(folder: Path) -> Path:
    """Draw the risk of `experiments.reduced` against steps, on the closed-form optima; returns the picture's path."""
    # Without a figure manager no display is needed, and none is opened.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    record = json.loads((folder / "record.json").read_text())
    with (folder / "loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    unit, setting = record["normaliser"], record["setting"]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for regime, result in record["result"].items():
        risk = [float(row[regime]) / unit for row in rows]
        label = f"{regime}: trained, ends {result['excess_percent']:.2f} % above its optimum"
        axes.plot(steps, risk, color=_COLOURS[regime], label=label)
        optimum = result["theory"] / unit
        axes.axhline(
            optimum, color=_COLOURS[regime], linestyle="--", linewidth=1, label=f"{regime}: optimum {optimum:.4f}"
        )
    axes.set_xscale("log")
    axes.set_xlabel(f"optimiser steps of {setting['batch']} sequences")
    axes.set_ylabel("population risk / E[y²]")
    axes.set_title(f"Reduced model, setting 2(c), n = {setting['n']}")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    path = folder / "loss.png"
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
    return path
