"""Text tables that fit the terminal, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from typing import Any, NamedTuple

Cells = Iterable[object]
UNLIMITED = 1 << 16
"""Width of a pipe or a file."""
_NO_BREAK = "\u00a0"


def terminal_width(descriptor: int = 1) -> int:
    """Width of the terminal of stdout, or of another file descriptor; the variable COLUMNS replaces it."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    with suppress(OSError):
        return os.get_terminal_size(descriptor).columns or UNLIMITED
    return UNLIMITED


def wrapped(text: str, width: int, indent: str = "", split_words: bool = False) -> str:
    """Lines of a paragraph, all but the first indented; "n = 10", "1.5 %" and "fine-tune" stay whole."""
    whole = re.sub(r" (?=%)|(?<= =) | (?== )", _NO_BREAK, text)
    lines = textwrap.wrap(whole, width, subsequent_indent=indent, break_long_words=split_words, break_on_hyphens=False)
    return "\n".join(lines).replace(_NO_BREAK, " ")


def html(title: str, facts: Mapping[str, object]) -> str:
    """A small table for notebooks, a row for each fact."""
    texts = [[escape(str(text)) for text in fact] for fact in facts.items()]
    rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in texts)
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"


class Columns(NamedTuple):
    """Columns of a text table: their names, and their widths, negative for cells that are aligned to the left.

    Where the table is wider than the terminal, the columns of `drops` are left out, from its first on.
    """

    widths: Mapping[str, int]
    drops: Sequence[str] = ()

    def kept(self, width: int) -> list[str]:
        """Names of the columns in a table that is at most `width` wide."""
        names, drops = list(self.widths), iter(self.drops)
        while sum(abs(self.widths[name]) for name in names) > width and (drop := next(drops, None)) is not None:
            names.remove(drop)
        return names

    def line(self, cells: Cells, width: int) -> str:
        """A row; `cells` are those of all columns."""
        kept = self.kept(width)
        shown = [cell for name, cell in zip(self.widths, cells, strict=True) if name in kept]
        return align(shown, [self.widths[name] for name in kept])

    def left_out(self, width: int, before: int = 0) -> str:
        """A line about the columns left out, with so many characters before them; nothing if there are none."""
        kept = self.kept(width - before)
        missing = [name for name in self.widths if name not in kept]
        return f"{wrapped(f'not shown in {width} columns: ' + ', '.join(missing), width, '  ')}\n" if missing else ""

    def text(self, rows: Iterable[Cells], width: int = UNLIMITED) -> str:
        """The table with its heading."""
        lines = "".join(f"{self.line(cells, width)}\n" for cells in (self.widths, *rows))
        return lines + self.left_out(width)


def align(cells: Cells, widths: Sequence[int]) -> str:
    """A row of text: each cell fills the width of its column, to the right, or to the left where it is negative."""
    return "".join(
        f"{cell!s:>{width}}" if width > 0 else f"{cell!s:{-width}}" for cell, width in zip(cells, widths, strict=True)
    )


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
