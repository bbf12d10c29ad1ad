"""The closed forms of a CONFIG.toml against the context length, as a table, CSV, JSON and a record for pictures."""

from __future__ import annotations

import csv
import io
import json
import math
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fastlin import theory
from fastlin._files import replacing
from fastlin._info import info
from fastlin._threads import one_thread
from fastlin.data.sources import TaskMixture
from fastlin.settings import Config


class Curve(NamedTuple):
    """A closed form, under the name that people read."""

    label: str
    optimum: Callable[[TaskMixture, int], theory.Optimum | theory.Bound]


# From the highest loss to the lowest: no curve is above the one before it.
CURVES = {
    "plain": Curve("plain", theory.plain),
    "fine_tuned": Curve("fine-tuned", theory.fine_tuned),
    "joint": Curve("joint", theory.joint),
    "shared_shift": Curve("shared shift", theory.shared_shift),
    "decoupled": Curve("decoupled", theory.decoupled),
    "scaled_heads": Curve("scaled heads", theory.scaled_heads),
    "heads_lower_bound": Curve("lower bound", theory.heads_lower_bound),
}
# Those that pictures of trained models may have besides.
DRAWN = {**CURVES, "one_prompt": Curve("one prompt", theory.one_prompt)}
# A line through this many points is smooth on paper.
_LINE_POINTS = 150


@dataclass(frozen=True)
class Note:
    """What is to be said of values of a curve: that they are not attained, not sure, or not there.

    Attributes
    ----------
    curve, text : str
    n : list of int
        The context lengths that it is true of.
    """

    curve: str
    text: str
    n: list[int]


@dataclass(frozen=True)
class Losses:
    """Losses of every curve at some context lengths.

    Attributes
    ----------
    n : list of int
    losses : dict
        Curve to its population losses, one for each of `n`: the infimum where no finite parameters attain it,
        None where float64 does not hold what the closed form needs.
    notes : list of Note
    """

    n: list[int]
    losses: dict[str, list[float | None]]
    notes: list[Note]


def evaluate(mixture: TaskMixture, lengths: Sequence[int]) -> Losses:
    """Every curve at every context length."""
    losses: dict[str, list[float | None]] = {key: [] for key in CURVES}
    said: dict[tuple[str, str], list[int]] = {}
    with one_thread():
        for key, curve in CURVES.items():
            for n in lengths:
                value, remarks = loss(curve, mixture, n)
                losses[key].append(value)
                for text in remarks:
                    said.setdefault((key, text), []).append(n)
    return Losses(list(lengths), losses, [Note(key, text, n) for (key, text), n in said.items()])


def loss(curve: Curve, mixture: TaskMixture, n: int) -> tuple[float | None, list[str]]:
    """The loss, and what is to be said of it."""
    remarks = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = float(curve.optimum(mixture, n))
        except theory.NotAttained as error:
            value = error.infimum
            remarks.append(f"not attained, the infimum is shown: {error.reason}")
        except RuntimeError as error:  # torch's LinAlgError, for numbers of absurd size
            return None, [f"cannot be computed: {error}"]
    if not math.isfinite(value):
        return None, [f"cannot be computed: the closed form gives {value}"]
    return value, remarks + [str(warning.message) for warning in caught]


def compute(config: Config, *, line: bool) -> dict[str, Any]:
    """The record of a config, ready for JSON.

    Parameters
    ----------
    config : Config
    line : bool
        Whether to add the losses between the context lengths, from which pictures have their smooth lines.

    Returns
    -------
    dict
        name, description, normaliser E[y²], labels of the curves; n, and losses, normalised (losses / E[y²]) and
        notes at these; line, with its own n, losses and notes, or None; config, the fields that it is made from;
        versions.
    """
    unit = theory.normaliser(config.mixture)
    at = evaluate(config.mixture, config.context_lengths)
    return {
        "name": config.name,
        "description": config.description,
        "normaliser": unit,
        "labels": {key: curve.label for key, curve in CURVES.items()},
        **asdict(at),
        "normalised": {key: [_ratio(loss, unit) for loss in losses] for key, losses in at.losses.items()},
        "line": asdict(evaluate(config.mixture, line_lengths(config.context_lengths))) if line else None,
        "config": config.values,
        "versions": info()["versions"],
    }


def _ratio(loss: float | None, unit: float) -> float | None:
    return None if loss is None else loss / unit


def line_lengths(lengths: Sequence[int]) -> list[int]:
    """All integers between the first and the last context length; or, when they are too many, some of each size."""
    first, last = lengths[0], lengths[-1]
    if last - first < _LINE_POINTS:
        return list(range(first, last + 1))
    start = max(first, 1)
    ratio = (last / start) ** (1 / (_LINE_POINTS - 1))
    spread = {round(start * ratio**i) for i in range(_LINE_POINTS)}
    return sorted({n for n in spread if first <= n <= last} | set(lengths))


def as_json(record: dict[str, Any]) -> str:
    """The record as JSON."""
    return json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def as_csv(record: dict[str, Any]) -> str:
    """A row for each context length: losses, losses / E[y²], and which of the curves have a note."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["n", *CURVES, *(f"{key}_normalised" for key in CURVES), "noted"])
    for i, n in enumerate(record["n"]):
        noted = [note["curve"] for note in record["notes"] if n in note["n"]]
        values = [record[kind][key][i] for kind in ("losses", "normalised") for key in CURVES]
        writer.writerow([n, *values, " ".join(noted)])
    return text.getvalue()


def as_table(record: dict[str, Any]) -> str:
    """Two tables for people, of the losses and of the losses / E[y²], and what is to be said of them."""
    lines = [record["name"] + (f": {record['description']}" if record["description"] else "")]
    lines += _block(record, "losses", "population risk")
    lines += _block(record, "normalised", f"population risk / E[y²], where E[y²] = {record['normaliser']:.10g}")
    shared: dict[tuple[str, str], list[str]] = {}
    for note in record["notes"]:
        where = ", ".join(map(str, note["n"]))
        shared.setdefault((where, note["text"]), []).append(record["labels"][note["curve"]])
    for (where, text), labels in shared.items():
        lines += ["", textwrap.fill(f"* {', '.join(labels)} at n = {where}: {text}", 80, subsequent_indent="  ")]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _block(record: dict[str, Any], kind: str, title: str) -> list[str]:
    """Lines of one table; seven columns of eleven fit a terminal of 80."""
    values = [value for key in CURVES for value in record[kind][key] if value is not None]
    largest = max(values, default=0.0)
    # A common number of decimals aligns the points, unless it would cost the smallest value its digits.
    aligned = 1e-3 < largest < 1e6 and 1e-3 * largest < min(values)
    form = f".{5 - math.floor(math.log10(largest))}f" if aligned else "#.5g"
    width = max(len(str(record["n"][-1])), 2)
    words = [label.split(" ") for label in record["labels"].values()]
    heads = [" " * (width + 1) + "".join(f"{word[0] if len(word) > 1 else '':>10} " for word in words)]
    heads += [f"{'n':>{width}} " + "".join(f"{word[-1]:>10} " for word in words)]
    rows = []
    for i, n in enumerate(record["n"]):
        noted = {note["curve"] for note in record["notes"] if n in note["n"]}
        numbers = [(key, record[kind][key][i]) for key in CURVES]
        texts = [(key, "-" if number is None else format(number, form)) for key, number in numbers]
        cells = [f"{text:>10}{'*' if key in noted else ' '}" for key, text in texts]
        rows.append(f"{n:>{width}} " + "".join(cells))
    return ["", title, *heads, *rows]


def write(record: dict[str, Any], out: Path) -> list[Path]:
    """Write `theory.json` and `theory.csv` into the folder `out`; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "theory.json", out / "theory.csv"]
    for path, text in zip(paths, (as_json(record), as_csv(record)), strict=True):
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return paths
