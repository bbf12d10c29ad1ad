"""The claims of the paper on task-specific prompts, each beside what is computed and trained here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastlin._info import info
from fastlin.figures.claims import attention, closed
from fastlin.figures.claims.entry import Cells, Claim, Number
from fastlin.figures.claims.report import as_csv, as_json, as_markdown, line, write
from fastlin.figures.curves import line_lengths
from fastlin.settings import load

__all__ = ["Cells", "Claim", "Number", "as_csv", "as_json", "as_markdown", "compute", "line", "write"]

_RANDOM_PROBLEMS = 500


def compute(
    out: Path,
    *,
    trials: int,
    steps: int,
    batch: int,
    seed: int = 0,
    report: Callable[[dict[str, Any]], object] = lambda entry: None,
) -> dict[str, Any]:
    """The record of all claims, ready for JSON.

    Parameters
    ----------
    out : Path
        Trained cells are in its folder cells/claims: those that have ended are read, those that were stopped go on.
    trials, steps, batch, seed : int
        Of the trained cells; the seed is also that of random problems, starts and samples.
    report : callable
        Called with each entry as soon as it is there; `line` makes a line of it.

    Returns
    -------
    dict
        training, versions; claims, each with name, statement, finding, verdict, holds and numbers; picture, with what
        `fastlin.plots.claims` draws.
    """
    cells = Cells(out / "cells" / "claims", trials, steps, batch, seed)
    entries = []
    for find in _claims(cells):
        entry = asdict(find())
        for number in entry["numbers"]:
            # A risk is infinite when all trials diverged; JSON has no such number.
            number["value"] = number["value"] if math.isfinite(number["value"]) else None
        entries.append(entry)
        report(entry)
    return {
        "paper": "Provable Benefits of Task-Specific Prompts for In-context Learning (arXiv 2503.02102)",
        "training": {"trials": trials, "steps": steps, "batch": batch, "seed": seed},
        "claims": entries,
        "picture": closed.picture(load("2c"), line_lengths([1, 100_000])),
        "versions": info()["versions"],
    }


def _claims(cells: Cells) -> list[Callable[[], Claim]]:
    """The claims in the report's order, each to be called."""
    a, b, c, d = map(load, ("2a", "2b", "2c", "2d"))
    problems = [*closed.shipped_problems(), *closed.random_problems(_RANDOM_PROBLEMS, cells.seed)]
    return [
        lambda: closed.ordering(problems),
        lambda: closed.rates(c),
        lambda: attention.zero_means(b, cells),
        lambda: closed.prompts([a, c, d]),
        lambda: attention.assumption(a, cells),
        lambda: attention.proposition(attention.counterexample(), load("A1d"), seed=cells.seed),
        lambda: attention.bound_reached([a, c, d], cells),
    ]
