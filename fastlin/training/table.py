"""`fastlin train`: train every regime at every context length of a CONFIG.toml, and tabulate the results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from fastlin import theory
from fastlin._checks import choice
from fastlin._files import FileError, read_json, write_text
from fastlin._tables import Columns, number, terminal_width
from fastlin.data.sources import TaskMixture
from fastlin.settings import Config
from fastlin.training.config import RunConfig
from fastlin.training.judge import excess_percent
from fastlin.training.record import RUN
from fastlin.training.regimes import REGIMES, Regime, named
from fastlin.training.run import Run, load, train

SUMMARY = "summary.json"
_QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}
_RISKS = ("theory", "best", "excess", "min", "q25", "median", "q75", "mean", "trials")
COLUMNS = Columns(
    {"regime": 12, "n": 6, **dict.fromkeys(_RISKS, 10), "excess": 11},
    drops=("min", "q25", "q75", "mean", "median", "trials", "theory"),
)


def regimes(text: str) -> list[str]:
    """Regimes of a comma-separated text; "all" is those of the study on prompts, since others want a target."""
    prompts = [name for name, row in REGIMES.items() if row.study == "prompts"]
    names = prompts if text == "all" else [name.strip() for name in text.split(",")]
    return [choice("regime", name, REGIMES) for name in dict.fromkeys(names)]


def train_cells(
    config: Config,
    names: Sequence[str | Regime],
    out: Path,
    resume: bool,
    report: Any,
    watch: Callable[[str], Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train regimes at every context length of a config; returns the contents of `out`/summary.json.

    Each cell has a folder in `out`; summary.json keeps the cells of earlier calls. With `resume`, cells that have ended
    are read. `report` is called with the row of each cell when it ends. `watch` makes the callback of a cell, a
    context manager, from the cell's name. Other options are those of `train`.
    """
    cells, given = _earlier_cells(out), options.pop("callback", None)
    for regime in map(named, names):
        for n in config.context_lengths:
            folder = f"{regime.name}-n{n}"
            with nullcontext(given) if watch is None else watch(folder) as callback:
                run = train(config.mixture, regime, n, out=out / folder, resume=resume, callback=callback, **options)
            row = {"regime": regime.name, "n": n, "folder": folder, **summary(run)}
            report(row)
            cells[folder] = row
            write_text(out / SUMMARY, json.dumps(_described(config, cells), indent=1) + "\n")
    return _described(config, cells)


def _described(config: Config, cells: dict[str, Any]) -> dict[str, Any]:
    normaliser = theory.normaliser(config.mixture)
    about = {"name": config.name, "description": config.description, "normaliser": normaliser}
    return {**about, "cells": list(cells.values())}


class Summary(Struct, frozen=True):
    """The part of summary.json that is read again; each cell is a row of the table."""

    cells: list[dict[str, Any]]


def holds_runs(folder: Path) -> bool:
    """Whether a folder is one of `fastlin train`, or of a run."""
    return (folder / SUMMARY).exists() or (folder / RUN).exists()


def read(folder: Path) -> dict[str, Any]:
    """The contents of summary.json, or what it would be for the folder of one run."""
    if not (folder / RUN).exists():
        path = folder / SUMMARY
        return {**read_json(path, dict), "cells": list(_earlier_cells(folder).values())}
    run = load(folder)
    config = RunConfig.restore(run.config)
    unit = None
    if config is not None and isinstance(config.mix, TaskMixture):
        unit = theory.normaliser(config.mix)
    row = {"regime": run.config["regime"]["name"], "n": run.config["n"], "folder": ".", **summary(run)}
    return {"name": folder.name, "normaliser": unit, "cells": [row]}


def _earlier_cells(out: Path) -> dict[str, Any]:
    path = out / SUMMARY
    if not path.exists():
        return {}
    rows = read_json(path, Summary).cells
    if not all(isinstance(row.get("folder"), str) for row in rows):
        raise FileError(f"{path}: damaged, or not a file of fastlin: a cell has no folder")
    return {row["folder"]: row for row in rows}


def summary(run: Run) -> dict[str, Any]:
    """Risk of the best trial, and its distribution over the trials that did not diverge."""
    risk = run.risk[torch.isfinite(run.risk)]
    shares = torch.tensor(list(_QUANTILES.values()), dtype=risk.dtype)
    quantiles = risk.quantile(shares).tolist() if len(risk) else [None] * len(_QUANTILES)
    best, optimum = float(run.risk[run.best]), None if run.theory is None else float(run.theory)

    def of_best(values: Tensor) -> float | None:
        return float(values[run.best]) if math.isfinite(best) else None

    return {
        "trials": len(run.risk),
        "diverged": len(run.diverged),
        "best_trial": run.best,
        "best": of_best(run.risk),
        "best_error": of_best(run.risk_error),
        "tail": of_best(run.tail),
        "typical": of_best(run.typical),
        "typical_max": float(run.typical[torch.isfinite(run.risk)].max()) if len(risk) else None,
        **dict(zip(_QUANTILES, quantiles, strict=True)),
        "mean": float(risk.mean()) if len(risk) else None,
        "theory": optimum,
        "excess_percent": excess_percent(best, optimum),
        "model": run.config["model"],
        "batch": run.config["batch"],
        "seconds": run.seconds,
    }


def heading(before: int = 0) -> str:
    """The first line of the table of cells, with room for so many characters before it."""
    return COLUMNS.line(COLUMNS.widths, terminal_width() - before)


def line(row: dict[str, Any], before: int = 0) -> str:
    """A cell in the table: risks, excess of the best trial, and trials that did not diverge."""
    numbers = [row[name] for name in ("min", "q25", "median", "q75", "mean")]
    excess = "-" if row["excess_percent"] is None else f"{row['excess_percent']:+.3f} %"
    trials = f"{row['trials'] - row['diverged']}/{row['trials']}"
    texts = [row["regime"], row["n"], number(row["theory"]), number(row["best"]), excess, *map(number, numbers), trials]
    return COLUMNS.line(texts, terminal_width() - before)
