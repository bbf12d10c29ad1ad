"""The claims of the paper on task-specific prompts, checked by closed forms, samples and training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastlin._info import info
from fastlin.figures.claims import attention, closed
from fastlin.figures.claims.entry import Cells, Claim, Number, entries
from fastlin.figures.claims.report import as_csv, as_json, as_markdown, line, write
from fastlin.figures.curves import line_lengths
from fastlin.settings import load

__all__ = ["Cells", "Claim", "Number", "as_csv", "as_json", "as_markdown", "compute", "line", "write"]

EFFORT = "claims"
"""Key of the effort in `SCALES`."""
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
    """Check all claims; returns the record, ready for JSON, whose picture is that of `fastlin.plots.claims_figure`.

    Trained cells are in the folder cells/claims of `out`: reads those that have ended, resumes those that were stopped.
    Random problems, starts and samples use the seed of `train`. Calls `report` with each entry as soon as it is
    checked; `line` formats it.
    """
    cells = Cells(out / "cells" / "claims", trials, steps, batch, seed)
    checked = entries(_claims(cells), report)
    return {
        "paper": "Provable Benefits of Task-Specific Prompts for In-context Learning (arXiv 2503.02102)",
        "training": {"trials": trials, "steps": steps, "batch": batch, "seed": seed},
        "claims": checked,
        "picture": closed.picture(load("2c"), line_lengths([1, 100_000])),
        "versions": info()["versions"],
    }


def _claims(cells: Cells) -> list[Callable[[], Claim]]:
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
