"""`fastlin status`: how far the panels of a folder are, read from disk, also while they are trained."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fastlin.figures.panel_files import outcome_of, panels_of
from fastlin.training.record import RECORDS

STATES = ("done", "started", "failed", "waiting")


@dataclass(frozen=True)
class CellStatus:
    """A cell.

    Attributes
    ----------
    panel, key, state : str
        The state is one of STATES; "started" has a folder and no outcome: it is being trained, or was stopped.
    layers : int
    progress : float
        Fraction of its steps that are done, at its last record.
    seconds : float or None
        That it took.
    error : str or None
    """

    panel: str
    key: str
    state: str
    layers: int
    progress: float
    seconds: float | None
    error: str | None


def cells(folder: Path) -> list[CellStatus]:
    """Every cell of the panels of a folder."""
    return [_cell(folder, record, cell) for record in panels_of(folder) for cell in record["cells"]]


def _cell(folder: Path, record: Mapping[str, Any], cell: Mapping[str, Any]) -> CellStatus:
    path = folder / "cells" / record["name"] / cell["key"]
    about: dict[str, Any] = {"panel": record["name"], "key": cell["key"], "layers": cell["layers"]}
    found = None if cell["row"] is not None else outcome_of(path)
    if cell["row"] is not None or (found is not None and found.row is not None):
        seconds = cell["seconds"] if found is None else found.seconds
        return CellStatus(**about, state="done", progress=1.0, seconds=seconds, error=None)
    steps = record["asked"]["steps"]
    # A run that continues another counts its steps too.
    step = _step(path / RECORDS) - (cell.get("stretches", 1) - 1) * steps
    error = None if found is None else found.error
    state = "failed" if error is not None else "started" if path.is_dir() else "waiting"
    return CellStatus(**about, state=state, progress=max(step, 0) / steps, seconds=None, error=error)


def _step(path: Path) -> int:
    """The step of a run's last record."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # half written, or damaged
    return 0


def seconds_left(found: Sequence[CellStatus]) -> float | None:
    """Time left at the pace of the cells that are done, of the same panel if any is; None: not known."""
    paces: dict[str | None, list[float]] = {}
    for cell in found:
        if cell.state == "done" and cell.seconds:
            # Layers cost about the same each.
            for key in (cell.panel, None):
                paces.setdefault(key, []).append(cell.seconds / cell.layers)
    total = 0.0
    for cell in found:
        if cell.state in ("started", "waiting"):
            pace = paces.get(cell.panel) or paces.get(None)
            if pace is None:
                return None
            total += (1.0 - cell.progress) * cell.layers * sum(pace) / len(pace)
    return total / max(sum(cell.state == "started" for cell in found), 1)


def as_text(folder: Path) -> str:
    """Panels with their cells' states; those started and failed by name; and the time left."""
    found = cells(folder)
    lines = [f"{'panel':10}" + "".join(f"{state:>9}" for state in STATES)]
    for panel in dict.fromkeys(cell.panel for cell in found):
        counts = [sum(cell.panel == panel and cell.state == state for cell in found) for state in STATES]
        lines.append(f"{panel:10}" + "".join(f"{count:>9}" for count in counts))
    for cell in found:
        if cell.state == "started":
            lines.append(f"started  {cell.panel} {cell.key}: {100 * cell.progress:.0f} %")
        if cell.state == "failed":
            lines.append(f"failed   {cell.panel} {cell.key}: {cell.error}")
    ended = sum(cell.state in ("done", "failed") for cell in found)
    left = seconds_left(found)
    if ended == len(found):
        lines.append(f"all {ended} cells have ended")
    else:
        lines.append(f"{ended} of {len(found)} cells have ended; time left: {clock(left) if left else 'not known yet'}")
        lines.append("if no command is training them, rerun `fastlin reproduce` to resume")
    return "\n".join(lines) + "\n"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Line:
    """A live line of the cells of a folder on a terminal; elsewhere a line of text for each cell that has ended.

    Parameters
    ----------
    folder : Path
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._shown = folder, 0.0
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(bar_format="{desc}", file=sys.stderr, dynamic_ncols=True)

    def show(self) -> None:
        """Show how far the cells are, once a second."""
        if self._bar is None or time.monotonic() - self._shown < 1.0:
            return
        self._shown = time.monotonic()
        found = cells(self._folder)
        ended = sum(cell.state in ("done", "failed") for cell in found)
        running = ", ".join(f"{cell.key} {100 * cell.progress:.0f} %" for cell in found if cell.state == "started")
        left = seconds_left(found)
        text = f"{ended}/{len(found)} cells [{clock(left) if left is not None else '?'} left] {running}"
        self._bar.set_description_str(text)

    def ended(self, record: Mapping[str, Any], cell: Mapping[str, Any]) -> None:
        """Print what became of a cell."""
        cells_ended = sum(entry["state"] in ("done", "failed") for entry in record["cells"])
        text = f"{record['name']} {cells_ended}/{len(record['cells'])} {cell['key']}: "
        row = cell["row"]
        if row is None:
            text += f"failed: {cell['error']}"
        else:
            text += f"risk {row['risk']:.5g}" if row["risk"] is not None else "every trial diverged"
            text += "" if row["excess_percent"] is None else f" ({row['excess_percent']:+.2f} %)"
            text += f", {cell['seconds']:.1f} s"
        if self._bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
