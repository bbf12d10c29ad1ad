"""`fastlin train`: every regime at every context length of a CONFIG.toml, for a table and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

from fastlin import theory
from fastlin._files import FileError, read_json, replacing
from fastlin.settings import Config
from fastlin.training.checks import choice
from fastlin.training.regimes import REGIMES
from fastlin.training.run import Run, train

SUMMARY = "summary.json"
_COLUMNS = ("regime", "n", "theory", "best", "excess", "min", "quartile", "median", "quartile", "mean", "trials")


def regimes(text: str) -> list[str]:
    """Names of regimes that a text lists with commas; "all" is all of those on prompts: others want a target."""
    prompts = [name for name, row in REGIMES.items() if row.study == "prompts"]
    names = prompts if text == "all" else [name.strip() for name in text.split(",")]
    return [choice("regime", name, REGIMES) for name in dict.fromkeys(names)]


def train_cells(
    config: Config, names: Sequence[str], out: Path, resume: bool, report: Any, **options: Any
) -> dict[str, Any]:
    """Train every regime at every context length of a config; returns what is in `out`/summary.json.

    Parameters
    ----------
    config : Config
    names : sequence of str
        Of regimes.
    out : Path
        Of a folder for each cell, and of summary.json, which keeps the cells that were there before.
    resume : bool
        Resume what is there; cells that have ended are read.
    report : callable
        Called with each cell's row as soon as it has ended.
    **options
        Of `train`.
    """
    kept = _kept(out)
    for regime in names:
        for n in config.context_lengths:
            folder = f"{regime}-n{n}"
            run = train(config.mixture, regime, n, out=out / folder, resume=resume, **options)
            row = {"regime": regime, "n": n, "folder": folder, **summary(run)}
            report(row)
            kept[folder] = row
            with replacing(out / SUMMARY) as temporary:
                temporary.write_text(json.dumps(_described(config, kept), indent=1) + "\n", encoding="utf-8")
    return _described(config, kept)


def _described(config: Config, cells: dict[str, Any]) -> dict[str, Any]:
    normaliser = theory.normaliser(config.mixture)
    about = {"name": config.name, "description": config.description, "normaliser": normaliser}
    return {**about, "cells": list(cells.values())}


class Summary(Struct, frozen=True):
    """summary.json, as far as it is read again; each cell is a row of the table."""

    cells: list[dict[str, Any]]


def _kept(out: Path) -> dict[str, Any]:
    """Cells of a summary that is there, by their folders."""
    path = out / SUMMARY
    if not path.exists():
        return {}
    rows = read_json(path, Summary).cells
    if not all(isinstance(row.get("folder"), str) for row in rows):
        raise FileError(f"{path}: damaged, or not a file of fastlin: a cell has no folder")
    return {row["folder"]: row for row in rows}


def summary(run: Run) -> dict[str, Any]:
    """Risk over the trials that did not diverge, and of the one that was chosen."""
    risk = run.risk[torch.isfinite(run.risk)]
    shares = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=risk.dtype)
    least, low, median, high, most = risk.quantile(shares).tolist() if len(risk) else [None] * 5
    best = float(run.risk[run.best])
    optimum = None if run.theory is None else float(run.theory)
    return {
        "trials": len(run.risk),
        "diverged": len(run.diverged),
        "best_trial": run.best,
        "best": best if math.isfinite(best) else None,
        "best_error": float(run.risk_error[run.best]) if math.isfinite(best) else None,
        "tail": float(run.tail[run.best]) if math.isfinite(best) else None,
        "typical": float(run.typical[run.best]) if math.isfinite(best) else None,
        "typical_max": float(run.typical[torch.isfinite(run.risk)].max()) if len(risk) else None,
        "min": least,
        "lower_quartile": low,
        "median": median,
        "upper_quartile": high,
        "max": most,
        "mean": float(risk.mean()) if len(risk) else None,
        "theory": optimum,
        "excess_percent": 100.0 * (best / optimum - 1.0) if optimum and math.isfinite(best) else None,
        "model": run.config["model"],
        "batch": run.config["batch"],
        "seconds": run.seconds,
    }


def heading() -> str:
    """The first line of the table of cells."""
    return "".join(f"{name:>{_width(i)}}" for i, name in enumerate(_COLUMNS))


def line(row: dict[str, Any]) -> str:
    """A cell in the table: risks; excess of the best trial over the optimum in percent; trials that did not diverge."""
    numbers = [row[name] for name in ("min", "lower_quartile", "median", "upper_quartile", "mean")]
    excess = "-" if row["excess_percent"] is None else f"{row['excess_percent']:.3f} %"
    trials = f"{row['trials'] - row['diverged']}/{row['trials']}"
    texts = [row["regime"], str(row["n"]), _text(row["theory"]), _text(row["best"]), excess]
    texts += [*map(_text, numbers), trials]
    return "".join(f"{text:>{_width(i)}}" for i, text in enumerate(texts))


def _width(column: int) -> int:
    return 12 if column == 0 else 6 if column == 1 else 10


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"
