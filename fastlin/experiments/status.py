"""`fastlin status`: how far the panels of a folder are, read from disk, also while a process works on them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fastlin.experiments.reproduce import at_work, panels_of

STATES = ("done", "running", "failed", "stopped", "waiting")


@dataclass(frozen=True)
class CellStatus:
    """A cell.

    Attributes
    ----------
    panel, key, state : str
        The state is one of STATES; "stopped" has a checkpoint or nothing, and nobody at work on it.
    layers : int
    share : float
        Of its steps, at its last record.
    seconds : float or None
        That it took, or has taken so far.
    error : str or None
    """

    panel: str
    key: str
    state: str
    layers: int
    share: float
    seconds: float | None
    error: str | None


def cells(
    folder: Path, records: Sequence[Mapping[str, Any]] | None = None, working: bool | None = None
) -> list[CellStatus]:
    """Every cell of the panels of a folder.

    Parameters
    ----------
    folder : Path
    records : sequence of mapping, optional
        Of the panels; read from the folder if not given.
    working : bool, optional
        Whether a process is at work in the folder; found out if not given.
    """
    working = at_work(folder) if working is None else working
    found = []
    for record in panels_of(folder) if records is None else records:
        steps = record["asked"]["steps"]
        for cell in record["cells"]:
            path = folder / "cells" / record["name"] / cell["key"]
            state = cell["state"]
            if state == "running" and not working:
                state = "stopped"
            if state == "waiting" and not working and path.is_dir():
                state = "stopped"
            share, seconds = 1.0, cell["seconds"]
            if state != "done":
                # A run that goes on from another counts its steps too.
                skipped = (cell.get("stretches", 1) - 1) * steps
                share = max(_step(path / "records.jsonl") - skipped, 0) / steps
                seconds = time.time() - cell["started"] if state == "running" else None
            found.append(CellStatus(record["name"], cell["key"], state, cell["layers"], share, seconds, cell["error"]))
    return found


def _step(path: Path) -> int:
    """The step of a run's last record."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue  # half written
    return 0


def seconds_left(found: Sequence[CellStatus]) -> float | None:
    """Time left at the pace of the cells that are done, of the same panel if any is; None: not known."""
    working = max(sum(cell.state == "running" for cell in found), 1)
    paces: dict[str | None, list[float]] = {}
    for cell in found:
        if cell.seconds and (cell.state == "done" or cell.share > 0.1):
            # Layers cost about the same each.
            for key in (cell.panel, None):
                paces.setdefault(key, []).append(cell.seconds / cell.share / cell.layers)
    total = 0.0
    for cell in found:
        if cell.state in ("running", "waiting", "stopped"):
            pace = paces.get(cell.panel) or paces.get(None)
            if pace is None:
                return None
            total += (1.0 - cell.share) * cell.layers * sum(pace) / len(pace)
    return total / working


def as_text(folder: Path) -> str:
    """Panels with their cells' states; those running and failed by name; and the time left."""
    working = at_work(folder)
    found = cells(folder, working=working)
    lines = [f"{'panel':10}" + "".join(f"{state:>9}" for state in STATES)]
    for panel in dict.fromkeys(cell.panel for cell in found):
        counts = [sum(cell.panel == panel and cell.state == state for cell in found) for state in STATES]
        lines.append(f"{panel:10}" + "".join(f"{count:>9}" for count in counts))
    for cell in found:
        if cell.state == "running":
            lines.append(f"running  {cell.panel} {cell.key}: {100 * cell.share:.0f} %")
        if cell.state == "failed":
            lines.append(f"failed   {cell.panel} {cell.key}: {cell.error}")
    ended = sum(cell.state in ("done", "failed") for cell in found)
    left = seconds_left(found)
    if ended == len(found):
        lines.append(f"all {ended} cells have ended")
    else:
        lines.append(f"{ended} of {len(found)} cells have ended; time left: {clock(left) if left else 'not known yet'}")
        if not working:
            lines.append("nobody is at work here: the same `fastlin reproduce` goes on")
    return "\n".join(lines) + "\n"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Line:
    """A live line of the work in a folder on a terminal; elsewhere a line of text for each cell that has ended.

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
        """Show where the work is, once a second."""
        if self._bar is None or time.monotonic() - self._shown < 1.0:
            return
        self._shown = time.monotonic()
        found = cells(self._folder, working=True)
        ended = sum(cell.state in ("done", "failed") for cell in found)
        running = ", ".join(f"{cell.key} {100 * cell.share:.0f} %" for cell in found if cell.state == "running")
        left = seconds_left(found)
        text = f"{ended}/{len(found)} cells [{clock(left) if left is not None else '?'} left] {running}"
        self._bar.set_description_str(text)

    def ended(self, record: Mapping[str, Any], cell: Mapping[str, Any]) -> None:
        """Say what has become of a cell."""
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
