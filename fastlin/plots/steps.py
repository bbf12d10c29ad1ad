"""Risk of trained cells against steps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlin.plots.layout import add_below, add_title, key, leftmost, new_figure, plain_ticks
from fastlin.plots.style import look, save
from fastlin.training import table
from fastlin.training.judge import below_theory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def training(folder: Path, *, style: str = "screen", caption: bool = False) -> list[Path]:
    """Draw risk against steps, of a folder of `fastlin train` or of one run; returns the paths of the pictures."""
    record = table.read(folder)
    for cell in record["cells"]:
        lines = (folder / cell["folder"] / "records.jsonl").read_text(encoding="utf-8").splitlines()
        cell["records"] = [entry for entry in map(json.loads, lines) if "risk" in entry]
    return save(training_figure(record, style=style, caption=caption), folder, "training")


def training_figure(record: dict[str, Any], *, style: str = "screen", caption: bool = False) -> Figure:
    """Risk / E[y²] of trained cells against steps: the best trial, the spread of all, and the optimum."""
    unit, lengths = record["normaliser"] or 1.0, sorted({cell["n"] for cell in record["cells"]})
    alone, risk = len(lengths) == 1, "population risk" + " / E[y²]" * (record["normaliser"] is not None)
    with new_figure(style, 6.4 if alone else 4.2, *[3.8] * len(lengths), columns=3) as figure:
        entries = {}
        for axes, n in zip(figure.axes, lengths, strict=True):
            for cell in record["cells"]:
                if cell["n"] == n:
                    label = _draw_cell(axes, cell, unit, excess=alone)
                    entries[label] = key(look(cell["regime"])._replace(dashes=None))
            axes.set(xscale="log", yscale="log", xlabel=f"optimiser steps of {record['cells'][0]['batch']} sequences")
            axes.set_title(f"n = {n}")
            axes.grid(True)
            plain_ticks(axes)
            axes.set_ylabel(risk if leftmost(axes) else "")
        add_title(figure, f"{record['name']}, {record['cells'][0]['model']} model")
        meaning = f"Lines: best trial. Bands: all trials. Dashes: closed form{', with the excess over it' * alone}."
        sentences = [_excesses(record)] if caption else []
        if caption or alone:
            sentences += below_theory(cell["excess_percent"] for cell in record["cells"])
        add_below(figure, entries, [meaning], sentences)
    return figure


def _excesses(record: dict[str, Any]) -> str:
    cells = [cell for cell in record["cells"] if cell["excess_percent"] is not None]
    found = (f"{cell['regime']} at n = {cell['n']} {cell['excess_percent']:+.2f} %" for cell in cells)
    return f"Excess over the closed form: {', '.join(found) or 'none known'}."


def _draw_cell(axes: Axes, cell: dict[str, Any], unit: float, *, excess: bool) -> str:
    """Best trial, band of all trials and closed form; returns the label, with the excess where it is asked for."""
    shown = look(cell["regime"])
    steps, best, low, high = [], [], [], []
    for entry in cell["records"]:
        risks = [math.nan if risk is None else risk / unit for risk in entry["risk"]]
        finite = [risk for risk in risks if not math.isnan(risk)]
        if finite:
            steps.append(entry["step"])
            best.append(risks[cell["best_trial"]])
            low.append(min(finite))
            high.append(max(finite))
    label = str(cell["regime"])
    if cell["excess_percent"] is not None:
        label += f": {cell['excess_percent']:+.2f} %" * excess
        axes.axhline(cell["theory"] / unit, color=shown.colour, linestyle="--", linewidth=1)
    axes.plot(steps, best, label=label, markevery=0.12, **shown.points)
    axes.fill_between(steps, low, high, color=shown.colour, alpha=0.2, linewidth=0)
    return label
