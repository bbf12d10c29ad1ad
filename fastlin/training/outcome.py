"""The outcome of a run: measured after the last step, written to result.json, read back as tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastlin.training.loop import Loop
from fastlin.training.record import Result

# What stands for a number that is not finite, which JSON does not have.
_MISSING = {"risk": torch.inf, "risk_error": torch.nan, "tail": torch.nan, "typical": torch.inf}


@torch.no_grad()
def measure(loop: Loop) -> dict[str, Any]:
    """Fields of `Result` but `records`; sets the parameters of diverged trials to NaN."""
    model, judge, prompts = loop.model, loop.judge, loop.config.regime.prompts
    risk, _ = judge.current(model, prompts)
    for trial in (~torch.isfinite(risk)).nonzero()[:, 0].tolist():
        # A trial that diverges in the last step has no later loss that would show it.
        loop.diverged.setdefault(trial, loop.step)
    for raw in model.parameters():
        raw[list(loop.diverged)] = torch.nan
    estimate, best = judge.final(model, prompts)
    numbers = {name: finite_or_none(values) for name, values in estimate._asdict().items()}
    theory = None if judge.optimum is None else float(judge.optimum)
    diverged = list(loop.diverged.items())
    return {**numbers, "best": best, "theory": theory, "diverged": diverged, "seconds": loop.seconds}


def estimates(result: Result) -> dict[str, Tensor]:
    """Fields of `judge.Estimate` from a result, each (R,) in float64."""
    return {name: _row(getattr(result, name), missing) for name, missing in _MISSING.items()}


def history(records: list[dict[str, Any]], trials: int) -> dict[str, Tensor]:
    """`Run.history` from the lines of records.jsonl."""
    rows = [record for record in records if "loss" in record]
    columns: dict[str, Tensor] = {name: torch.tensor([row[name] for row in rows]) for name in ("step", "phase")}
    columns["lr"] = torch.tensor([row["lr"] for row in rows], dtype=torch.float64)
    for name in ("loss", "risk", "risk_error"):
        # An exact risk has no error in the records.
        lines = [_row(row.get(name, [0.0] * trials), _MISSING.get(name, torch.inf)) for row in rows]
        columns[name] = torch.stack(lines) if lines else torch.empty(0, trials, dtype=torch.float64)
    return columns


def finite_or_none(values: Tensor) -> list[float | None]:
    """Numbers as JSON has them."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _row(values: list[float | None], missing: float) -> Tensor:
    return torch.tensor([missing if value is None else value for value in values], dtype=torch.float64)
