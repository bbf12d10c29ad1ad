"""`fastlin theory`: the closed forms of a CONFIG.toml against the context length, as table, CSV, JSON and picture."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastlin import theory
from fastlin._files import write_texts
from fastlin._info import info
from fastlin._tables import UNLIMITED, Columns, csv_text, number, wrapped
from fastlin._tables import as_json as as_json
from fastlin._threads import one_thread
from fastlin.data.sources import TaskMixture
from fastlin.settings import Config
from fastlin.training.regimes import CLOSED_FORMS, ClosedForm

# From the highest loss to the lowest: no curve is above the one before it.
_ORDER = ("plain", "fine_tuned", "joint", "shared_shift", "decoupled", "scaled_heads", "heads_lower_bound")
CURVES = {name: CLOSED_FORMS[name] for name in _ORDER}
# The columns that a narrow terminal drops first: those of no regime, then those of plain predictors.
_DROPS = ("heads_lower_bound", "scaled_heads", "shared_shift", "fine_tuned", "plain")
# Width of text below a table.
_TEXT = 80
# Enough points for a smooth line.
_LINE_POINTS = 150


def evaluate(mixture: TaskMixture, lengths: Sequence[int]) -> dict[str, Any]:
    """Population losses of every curve, and notes on curves at some of the context lengths n.

    A loss is the infimum where no finite parameters attain it, and None where the closed form fails in float64.
    """
    losses: dict[str, list[float | None]] = {key: [] for key in CURVES}
    notes: dict[tuple[str, str], list[int]] = {}
    with one_thread():
        for key, curve in CURVES.items():
            for n in lengths:
                value, remarks = loss(curve, mixture, n)
                losses[key].append(value)
                for text in remarks:
                    notes.setdefault((key, text), []).append(n)
    described = [{"curve": key, "text": text, "n": at} for (key, text), at in notes.items()]
    return {"n": list(lengths), "losses": losses, "notes": described}


def loss(curve: ClosedForm, mixture: TaskMixture, n: int) -> tuple[float | None, list[str]]:
    """The loss of a closed form, and remarks on it."""
    remarks = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = float(curve.optimum(mixture, n))
        except theory.NotAttained as error:
            value = error.infimum
            remarks.append(f"not attained, the infimum is shown: {error.reason}")
        except RuntimeError as error:  # torch's LinAlgError, for extremely large numbers
            return None, [f"cannot be computed: {error}"]
    if not math.isfinite(value):
        return None, [f"cannot be computed: the closed form gives {value}"]
    return value, remarks + [str(warning.message) for warning in caught]


def compute(config: Config, *, line: bool) -> dict[str, Any]:
    """The record of a config, ready for JSON.

    It has losses and notes at the context lengths n, losses / E[y²] as `normalised`, E[y²] as `normaliser`, and with
    `line` also losses between the context lengths, for smooth lines in pictures.
    """
    unit = theory.normaliser(config.mixture)
    at_lengths = evaluate(config.mixture, config.context_lengths)
    losses = at_lengths["losses"].items()
    return {
        "name": config.name,
        "description": config.description,
        "normaliser": unit,
        "labels": {key: curve.label for key, curve in CURVES.items()},
        **at_lengths,
        "normalised": {key: [None if loss is None else loss / unit for loss in curve] for key, curve in losses},
        "line": evaluate(config.mixture, line_lengths(config.context_lengths)) if line else None,
        "config": config.values,
        "versions": info()["versions"],
    }


def line_lengths(lengths: Sequence[int]) -> list[int]:
    """Every integer from the first to the last context length; if these are too many, integers in equal ratios."""
    first, last = lengths[0], lengths[-1]
    if last - first < _LINE_POINTS:
        return list(range(first, last + 1))
    start = max(first, 1)
    ratio = (last / start) ** (1 / (_LINE_POINTS - 1))
    spread = {round(start * ratio**i) for i in range(_LINE_POINTS)}
    return sorted({n for n in spread if first <= n <= last} | set(lengths))


def as_csv(record: dict[str, Any]) -> str:
    """A row for each context length: losses, losses / E[y²], and the curves that have a note."""
    rows = []
    for i, n in enumerate(record["n"]):
        values = [record[kind][key][i] for kind in ("losses", "normalised") for key in CURVES]
        rows.append([n, *values, " ".join(note["curve"] for note in record["notes"] if n in note["n"])])
    return csv_text(["n", *CURVES, *(f"{key}_normalised" for key in CURVES), "noted"], rows)


def as_table(record: dict[str, Any], width: int = UNLIMITED) -> str:
    """Two text tables, of the losses and of the losses / E[y²], with notes and a legend."""
    columns = _columns(record)
    lines = [wrapped(record["name"] + (f": {record['description']}" if record["description"] else ""), width)]
    lines += _block(record, columns, "losses", "population risk", width)
    lines += _block(record, columns, "normalised", "population risk / E[y²]", width)
    room = min(width, _TEXT)
    shared: dict[tuple[str, str], list[str]] = {}
    for note in record["notes"]:
        where = ", ".join(map(str, note["n"]))
        shared.setdefault((where, note["text"]), []).append(record["labels"][note["curve"]])
    for (where, text), labels in shared.items():
        lines += ["", wrapped(f"* {', '.join(labels)} at n = {where}: {text}", room, "  ")]
    shown = {key: curve for key, curve in CURVES.items() if curve.label in columns.kept(width)}
    meanings = {
        "n": "examples in the context",
        "E[y²]": f"{record['normaliser']:.10g}, the risk of the prediction zero",
    }
    meanings |= {curve.label: curve.meaning for curve in shown.values()}
    lines += ["", *(wrapped(f"{label:14}{meaning}", room, " " * 14) for label, meaning in meanings.items())]
    renamed = [f"{curve.label} is {key}" for key, curve in shown.items() if curve.label.replace(" ", "_") != key]
    lines.append(wrapped(f"In fl.theory, CSV and JSON: {', '.join(renamed)}.", room))
    return "\n".join(line.rstrip() for line in lines) + "\n" + columns.left_out(width)


def _columns(record: dict[str, Any]) -> Columns:
    """Seven columns of 11 characters fit a terminal of 80."""
    labels = [curve.label for curve in CURVES.values()]
    drops = [CURVES[key].label for key in _DROPS]
    return Columns({"n": max(len(str(record["n"][-1])), 2) + 1, **dict.fromkeys(labels, 11)}, drops)


def _block(record: dict[str, Any], columns: Columns, kind: str, title: str, width: int) -> list[str]:
    values = [value for key in CURVES for value in record[kind][key] if value is not None]
    largest = max(values, default=0.0)
    # A fixed number of decimals aligns the points, unless the smallest value would lose digits.
    aligned = 1e-3 < largest < 1e6 and 1e-3 * largest < min(values)
    form = f".{5 - math.floor(math.log10(largest))}f" if aligned else "#.5g"
    words = [re.split(r" |(?=\+)", curve.label) for curve in CURVES.values()]
    lines = [
        columns.line(["", *(f"{word[0] if len(word) > 1 else ''} " for word in words)], width),
        columns.line(["n ", *(f"{word[-1]} " for word in words)], width),
    ]
    for i, n in enumerate(record["n"]):
        noted = {note["curve"] for note in record["notes"] if n in note["n"]}
        cells = [f"{number(record[kind][key][i], form)}{'*' if key in noted else ' '}" for key in CURVES]
        lines.append(columns.line([f"{n} ", *cells], width))
    return ["", title, *lines]


def write(record: dict[str, Any], out: Path) -> list[Path]:
    return write_texts(out, {"theory.json": as_json(record), "theory.csv": as_csv(record)})
