"""`fastlin status`: how far the panels of a folder are, read from disk, also while others work on them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fastlin.experiments import leases, workplaces
from fastlin.experiments.panel_files import outcome_of, panels_of
from fastlin.training.record import RECORDS

# Twice what workers let pass between signs of life.
_LONGEST_WAIT = 10.0
STATES = ("done", "running", "failed", "stopped", "waiting")


@dataclass(frozen=True)
class CellStatus:
    """A cell.

    Attributes
    ----------
    panel, key, state : str
        The state is one of STATES; "stopped" was begun, and nobody is at work on it.
    layers : int
    share : float
        Of its steps, at its last record.
    seconds : float or None
        That it took, or has taken so far.
    error : str or None
    worker : str or None
        Process and machine that are at work on it.
    """

    panel: str
    key: str
    state: str
    layers: int
    share: float
    seconds: float | None
    error: str | None
    worker: str | None = None


def cells(
    folder: Path, records: Sequence[Mapping[str, Any]] | None = None, silent: Set[Path] = frozenset()
) -> list[CellStatus]:
    """Every cell of the panels of a folder.

    Parameters
    ----------
    folder : Path
    records : sequence of mapping, optional
        Of the panels; read from the folder if not given.
    silent : set of Path
        Cells whose lease is known to be of nobody.
    """
    found = []
    for record in panels_of(folder) if records is None else records:
        for cell in record["cells"]:
            found.append(_cell(folder / "cells" / record["name"] / cell["key"], record, cell, silent))
    return found


def _cell(path: Path, record: Mapping[str, Any], cell: Mapping[str, Any], silent: Set[Path]) -> CellStatus:
    noted = cell if cell["row"] is not None else outcome_of(path) or cell
    about = {"panel": record["name"], "key": cell["key"], "layers": cell["layers"]}
    if noted["row"] is not None:
        return CellStatus(**about, state="done", share=1.0, seconds=noted["seconds"], error=None)
    lease = None if path in silent else leases.newest(path)
    begun = [workplaces.at(path, str(lease.get("token")))] if lease else [*workplaces.started(path), path]
    steps = record["asked"]["steps"]
    # A run that goes on from another counts its steps too.
    step = max(_step(place / RECORDS) for place in begun) - (cell.get("stretches", 1) - 1) * steps
    share = max(step, 0) / steps
    if lease is not None:
        worker = f"process {lease.get('pid', '?')} of {lease.get('host', '?')}"
        return CellStatus(
            **about, state="running", share=share, seconds=lease.get("seconds"), error=None, worker=worker
        )
    stopped = any(place.is_dir() for place in begun)
    state = "failed" if noted["error"] is not None else "stopped" if stopped else "waiting"
    return CellStatus(**about, state=state, share=share, seconds=None, error=noted["error"])


def silent_cells(folder: Path) -> set[Path]:
    """Cells whose workers are dead: known at once on this machine, of others after a wait for their signs of life."""
    found = [folder / "cells" / cell.panel / cell.key for cell in cells(folder) if cell.state == "running"]
    held = {path: leases.newest(path) or {} for path in found}
    known = {path: leases.alive(about) for path, about in held.items()}
    doubtful = [path for path in found if known[path] is None]
    if doubtful:
        # A lease that says nothing may have just been made.
        every = [held[path].get("every", 1.0) for path in doubtful]
        time.sleep(min(1.5 * max((s for s in every if isinstance(s, float)), default=0.0), _LONGEST_WAIT))
    dead = {path for path in found if known[path] is False}
    return dead | {path for path in doubtful if leases.newest(path) == held[path]}


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
    found = cells(folder, silent=silent_cells(folder))
    lines = [f"{'panel':10}" + "".join(f"{state:>9}" for state in STATES)]
    for panel in dict.fromkeys(cell.panel for cell in found):
        counts = [sum(cell.panel == panel and cell.state == state for cell in found) for state in STATES]
        lines.append(f"{panel:10}" + "".join(f"{count:>9}" for count in counts))
    for cell in found:
        if cell.state == "running":
            lines.append(f"running  {cell.panel} {cell.key}: {100 * cell.share:.0f} %, {cell.worker}")
        if cell.state == "failed":
            lines.append(f"failed   {cell.panel} {cell.key}: {cell.error}")
    ended = sum(cell.state in ("done", "failed") for cell in found)
    left = seconds_left(found)
    if ended == len(found):
        lines.append(f"all {ended} cells have ended")
    else:
        lines.append(f"{ended} of {len(found)} cells have ended; time left: {clock(left) if left else 'not known yet'}")
        if not any(cell.state == "running" for cell in found):
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
        found = cells(self._folder)
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
