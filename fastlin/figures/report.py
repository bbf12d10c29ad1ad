"""What a panel says of its rows: the table as CSV and for people, and the caption."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

# Two risks are in the wrong order when they differ by more than both of these.
_STANDARD_ERRORS, _RELATIVE = 2.0, 0.005
_COLUMNS = (("regime", 12), ("model", 9), ("L", 3), ("H", 3), ("n", 4), ("σ²", 5), ("risk", 10), ("± s.e.", 9))
_NUMBERS = (("theory", 10), ("excess", 10), ("risk/E[y²]", 11), ("median", 10), ("max", 10), ("trials", 8))


def as_csv(record: Mapping[str, Any]) -> str:
    """A line for each cell that is done; the same bytes however often the run was stopped."""
    text = io.StringIO()
    rows = done(record)
    writer = csv.writer(text, lineterminator="\n")
    if rows:
        writer.writerow(["panel", *rows[0]])
        writer.writerows([record["name"], *row.values()] for row in rows)
    return text.getvalue()


def done(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the cells that are done."""
    return [cell["row"] for cell in record["cells"] if cell["row"] is not None]


def as_table(record: Mapping[str, Any]) -> str:
    """The table for people."""
    lines = ["".join(f"{name:>{width}}" for name, width in (*_COLUMNS, *_NUMBERS))]
    for row in done(record):
        texts = [
            row["regime"],
            row["model"],
            str(row["layers"]),
            str(row["attention_heads"]),
            str(row["n"]),
            f"{row['noise_variance']:.3g}",
        ]
        texts += [_text(row["risk"]), f"{row['risk_error']:.2g}" if row["risk_error"] else "exact"]
        texts += [_text(row["theory"]), "-" if row["excess_percent"] is None else f"{row['excess_percent']:+.3f} %"]
        texts += [_text(row[name]) for name in ("normalised", "median", "max")]
        texts += [f"{row['trials'] - row['diverged']}/{row['trials']}"]
        widths = [width for _, width in (*_COLUMNS, *_NUMBERS)]
        lines.append("".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True)))
    return "\n".join(lines) + "\n"


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def caption(record: Mapping[str, Any], shallower: Mapping[str, Any] | None) -> list[str]:
    """Sentences under the picture: what is drawn, what was found, how theory and the paper were read.

    Parameters
    ----------
    record : mapping
        Of a panel.
    shallower : mapping or None
        The record of the panel with a layer less.
    """
    asked, rows = record["asked"], done(record)
    values = "".join(f", {name} = {value:g}" for name, value in asked["values"].items())
    protocol = (
        f"{asked['trials']} trials × {asked['steps']:,} steps × batch {asked['batch']:,}, "
        f"preset {asked['preset']}{values}. "
        "Points: the best trial; bars: up to the worst. Lines: closed forms of one layer."
    )
    said = [protocol, *_accuracy(rows)]
    diverged = sum(row["diverged"] for row in rows)
    if diverged:
        said.append(f"{diverged} of {sum(row['trials'] for row in rows)} trials diverged.")
    heavy = [f"{_where(row)} ({row['risk']:.3g} ± {row['risk_error']:.2g})" for row in rows if row["heavy_tail"]]
    if heavy:
        said.append(
            f"Heavy tails, where the mean risk rests on few sequences and the crossed points are medians of batches: "
            f"{'; '.join(heavy)}."
        )
    missing = [cell["key"] for cell in record["cells"] if cell["row"] is None]
    if missing:
        said.append(f"Not there yet: {len(missing)} of {len(record['cells'])} cells.")
    said += [f"Order: {text}." for text in violations(record, shallower)]
    return said + list(record["remarks"])


def _accuracy(rows: list[dict[str, Any]]) -> Iterator[str]:
    """How far from their closed forms the models are, of each kind."""
    for model in dict.fromkeys(row["model"] for row in rows):
        excess = [row["excess_percent"] for row in rows if row["model"] == model and row["excess_percent"] is not None]
        if excess:
            yield f"Excess over theory, {model} model: {min(excess):+.2f} % to {max(excess):+.2f} %."


def violations(record: Mapping[str, Any], shallower: Mapping[str, Any] | None) -> list[str]:
    """Risks that are above those of a regime or a depth that should not be lower."""
    rows, found = done(record), []
    place = {cell["key"]: cell["place"] for cell in record["cells"]}
    at = {cell["key"]: cell["row"] for cell in record["cells"] if cell["row"] is not None}
    for key, row in at.items():
        same = [other for k, other in at.items() if place[k] == place[key] and _kind(other) == _kind(row)]
        # Series come from the highest risk to the lowest.
        found += [_pair(row, other) for other in same[: same.index(row)] if _above(row, other)]
        if record["axis"] == "layers":
            found += [
                _pair(row, other)
                for other in rows
                if (other["regime"], other["layers"]) == (row["regime"], row["layers"] - 1) and _above(row, other)
            ]
    for row in rows if shallower is not None else []:
        for other in done(shallower or {}):
            if (other["regime"], other["n"]) == (row["regime"], row["n"]) and _above(row, other):
                found.append(_pair(row, other))
    return found


def _kind(row: dict[str, Any]) -> tuple[str, int]:
    return row["model"], row["attention_heads"]


def _above(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a risk is above another by more than noise and training explain."""
    if row["risk"] is None or other["risk"] is None:
        return False
    gap = row["risk"] - other["risk"]
    error = (row["risk_error"] ** 2 + other["risk_error"] ** 2) ** 0.5
    return bool(gap > _STANDARD_ERRORS * error and gap > _RELATIVE * other["risk"])


def _pair(row: dict[str, Any], other: dict[str, Any]) -> str:
    percent = 100.0 * (row["risk"] / other["risk"] - 1.0)
    return f"{_where(row)} is {percent:.1f} % above {_where(other)}"


def _where(row: dict[str, Any]) -> str:
    return f"{row['regime']} {row['model']}{_sizes(row)} n={row['n']}"


def _sizes(row: Mapping[str, Any]) -> str:
    """Layers and attention heads where there are several."""
    letters = (("L", "layers"), ("H", "attention_heads"))
    return "".join(f" {letter}={row[name]}" for letter, name in letters if row[name] > 1)
