"""Text tables with aligned columns, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any

Cells = Iterable[object]


def align(cells: Cells, widths: Sequence[int]) -> str:
    """A row of text: each cell fills the width of its column, to the right, or to the left where it is negative."""
    return "".join(
        f"{cell!s:>{width}}" if width > 0 else f"{cell!s:{-width}}" for cell, width in zip(cells, widths, strict=True)
    )


def table(heading: Cells, rows: Iterable[Cells], widths: Sequence[int]) -> str:
    return "".join(f"{align(cells, widths)}\n" for cells in (heading, *rows))


def number(value: float | None, form: str = ".5g") -> str:
    """`value` in a format; a dash for None."""
    return "-" if value is None else format(value, form)


def csv_text(heading: Cells, rows: Iterable[Cells]) -> str:
    """CSV with line feeds. A float has all its digits, None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heading, *rows])
    return text.getvalue()


def as_json(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def markdown(heading: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """A table in Markdown; its last columns, so many as are `numbers`, are aligned to the right."""
    rules = ["---"] * (len(heading) - numbers) + ["---:"] * numbers
    lines = [heading, rules, *([cell.replace("|", "\\|") for cell in cells] for cells in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
