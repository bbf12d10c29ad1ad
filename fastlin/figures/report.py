"""The table of a panel, as CSV and as text, and its caption."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from fastlin._tables import UNLIMITED, Columns, csv_text, markdown, number, wrapped
from fastlin.training.judge import below_theory

# Two risks are in the wrong order when they differ by more than both of these.
_STANDARD_ERRORS, _RELATIVE = 2.0, 0.005
POINTS = "Points: the best trial; bars: up to the worst. Lines: closed forms of one layer."
_COLUMNS = Columns(
    {
        **{"regime": 12, "model": 9, "L": 3, "H": 3, "n": 4, "σ²": 5, "risk": 10, "± s.e.": 9},
        **{"theory": 10, "excess": 11, "risk/E[y²]": 11, "median": 10, "max": 10, "trials": 8},
    },
    drops=("max", "median", "risk/E[y²]", "± s.e.", "trials", "theory"),
)


def own_table(
    widths: Mapping[str, int], rows: Iterable[Iterable[str]], drops: Sequence[str] = (), notes: Sequence[str] = ()
) -> dict[str, Any]:
    """The `table` of a record that is not a panel: `_tables.Columns`, rows, and notes below."""
    return {"widths": dict(widths), "drops": list(drops), "rows": [list(row) for row in rows], "notes": list(notes)}


def as_csv(record: Mapping[str, Any]) -> str:
    """A line for each cell that is done; the same bytes however often the run was stopped."""
    rows = done(record)
    return csv_text(["panel", *rows[0]], ([record["name"], *row.values()] for row in rows)) if rows else ""


def done(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [cell["row"] for cell in record["cells"] if cell["row"] is not None]


def as_table(record: Mapping[str, Any], width: int = UNLIMITED) -> str:
    """The table of a figure that has its own, else that of a panel, with notes below."""
    own = record.get("table")
    if own is not None:
        table, notes = Columns(own["widths"], own["drops"]).text(own["rows"], width), own["notes"]
    else:
        table = _COLUMNS.text(map(_texts, done(record)), width)
        notes = below_theory(row["excess_percent"] for row in done(record))
    return table + "".join(f"{wrapped(note, width)}\n" for note in notes)


def as_markdown(record: Mapping[str, Any], field: str | None = None) -> str:
    """The table in Markdown; its first column is a field that the rows have, where one is given."""
    first = [] if field is None else [field]
    rows = ([*(str(row[name]) for name in first), *_texts(row)] for row in done(record))
    return markdown([*first, *_COLUMNS.widths], rows, len(_COLUMNS.widths) - 2)


def _texts(row: Mapping[str, Any]) -> list[str]:
    excess = row["excess_percent"]
    return [
        *(str(row[name]) for name in ("regime", "model", "layers", "attention_heads", "n")),
        f"{row['noise_variance']:.3g}",
        number(row["risk"]),
        f"{row['risk_error']:.2g}" if row["risk_error"] else "exact",
        number(row["theory"]),
        "-" if excess is None else f"{excess:+.3f} %",
        *(number(row[name]) for name in ("normalised", "median", "max")),
        f"{row['trials'] - row['diverged']}/{row['trials']}",
    ]


def caption(record: Mapping[str, Any], shallower: Mapping[str, Any] | None) -> list[str]:
    """Sentences below the picture: the training, the results, and how theory and the paper were read.

    `shallower` is the record of the panel with one layer less.
    """
    sentences = [f"{effort(record['asked'])} {POINTS}", *findings(record)]
    sentences += [f"Order: {text}." for text in violations(record, shallower)]
    return sentences + list(record["remarks"])


def effort(asked: Mapping[str, Any]) -> str:
    """The training; a list of values where a sweep has several."""
    trials, steps, batch, preset = (_listed(asked[name]) for name in ("trials", "steps", "batch", "preset"))
    values = "".join(f", {name} = {_listed(value)}" for name, value in asked["values"].items())
    return f"{trials} trials × {steps} steps × batch {batch}, preset {preset}{values}."


def _listed(value: Any) -> str:
    if isinstance(value, list):
        return " | ".join(map(_listed, value))
    return f"{value:,}" if type(value) is int else f"{value:g}" if type(value) is float else str(value)


def findings(record: Mapping[str, Any]) -> list[str]:
    """Sentences on the accuracy of the cells, and on trials and cells that failed."""
    rows = done(record)
    sentences = [*_accuracy(rows)]
    diverged = sum(row["diverged"] for row in rows)
    if diverged:
        sentences.append(f"{diverged} of {sum(row['trials'] for row in rows)} trials diverged.")
    heavy = [f"{_where(row)} ({row['risk']:.3g} ± {row['risk_error']:.2g})" for row in rows if row["heavy_tail"]]
    if heavy:
        sentences.append(
            "Heavy tails: a few sequences dominate the mean risk, so crossed points show medians of batches: "
            f"{'; '.join(heavy)}."
        )
    missing = sum(cell["row"] is None for cell in record["cells"])
    if missing:
        sentences.append(f"Missing: {missing} of {len(record['cells'])} cells.")
    return sentences


def _accuracy(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The range of the excess over theory, for each kind of model."""
    for model in dict.fromkeys(row["model"] for row in rows):
        excess = [row["excess_percent"] for row in rows if row["model"] == model and row["excess_percent"] is not None]
        if excess:
            yield f"Excess over theory, {model} model: {min(excess):+.2f} % to {max(excess):+.2f} %."
    yield from below_theory(row["excess_percent"] for row in rows)


def violations(record: Mapping[str, Any], shallower: Mapping[str, Any] | None) -> list[str]:
    """Risks that are above those of a weaker regime or of a smaller depth."""
    rows, texts = done(record), []
    place = {cell["key"]: cell["place"] for cell in record["cells"]}
    by_key = {cell["key"]: cell["row"] for cell in record["cells"] if cell["row"] is not None}
    for key, row in by_key.items():
        same = [other for k, other in by_key.items() if place[k] == place[key] and _kind(other) == _kind(row)]
        # Series are sorted from the highest risk to the lowest.
        texts += [_pair(row, other) for other in same[: same.index(row)] if _above(row, other)]
        if record["axis"] == "layers":
            texts += [
                _pair(row, other)
                for other in rows
                if (other["regime"], other["layers"]) == (row["regime"], row["layers"] - 1) and _above(row, other)
            ]
    shallow_rows = [] if shallower is None else done(shallower)
    pairs = [(row, other) for row in rows for other in shallow_rows if _above(row, other)]
    at = itemgetter("regime", "n")
    return texts + [_pair(row, other) for row, other in pairs if at(row) == at(other)]


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
    sizes = (("L", "layers"), ("H", "attention_heads"))
    several = "".join(f" {letter}={row[name]}" for letter, name in sizes if row[name] > 1)
    return f"{row['regime']} {row['model']}{several} n={row['n']}"
