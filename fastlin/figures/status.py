"""`fastlin status`: the progress of the panels of a folder, read from disk, also while cells train."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlin._files import read_json
from fastlin._tables import UNLIMITED, Columns, terminal_width, wrapped
from fastlin.figures.panel_files import ENDED, outcome_of, panels_of, run_folder
from fastlin.training import table
from fastlin.training.judge import BELOW_THEORY, below_theory
from fastlin.training.progress import clock
from fastlin.training.record import RECORDS, RESULT, RUN, RunFile

STATES = ("done", "started", "failed", "waiting")
_COLUMNS = Columns({"panel": -10, **dict.fromkeys(STATES, 9)}, drops=("waiting", "started"))


@dataclass(frozen=True)
class CellStatus:
    panel: str
    key: str
    state: str  # one of STATES; a "started" cell has a folder and no outcome: a process trains it, or stopped
    layers: int
    progress: float  # fraction of its steps, at its last record
    seconds: float | None  # training time of a cell that is done
    error: str | None


def cells(folder: Path) -> list[CellStatus]:
    records = panels_of(folder, empty=table.holds_runs(folder))
    if not records:
        return _without_a_record(folder)
    return [_cell(folder, record, cell) for record in records for cell in record["cells"]]


def _without_a_record(folder: Path) -> list[CellStatus]:
    """The cells of summary.json of an earlier version, or the run whose folder it is."""
    about: dict[str, Any] = {"layers": 1, "error": None}
    if (folder / RUN).exists() and not (folder / RESULT).exists():
        steps = read_json(folder / RUN, RunFile).config["steps"]
        progress = _step(folder / RECORDS) / steps
        return [CellStatus(folder.parent.name, folder.name, "started", progress=progress, seconds=None, **about)]
    rows = table.read(folder)["cells"]
    names = [row["folder"] if row["folder"] != "." else folder.name for row in rows]
    done: dict[str, Any] = {"state": "done", "progress": 1.0, **about}
    return [CellStatus(folder.name, key, seconds=row["seconds"], **done) for key, row in zip(names, rows, strict=True)]


def _cell(folder: Path, record: Mapping[str, Any], cell: Mapping[str, Any]) -> CellStatus:
    path = run_folder(folder, record, cell["key"])
    about: dict[str, Any] = {"panel": record["name"], "key": cell["key"], "layers": cell["layers"]}
    outcome = None if cell["row"] is not None else outcome_of(path)
    if cell["row"] is not None or (outcome is not None and outcome.row is not None):
        seconds = cell["seconds"] if outcome is None else outcome.seconds
        return CellStatus(**about, state="done", progress=1.0, seconds=seconds, error=None)
    steps = cell.get("steps") or record["asked"]["steps"]
    # The step count of a run that continues another includes the first run's steps.
    step = _step(path / RECORDS) - (cell.get("stretches", 1) - 1) * steps
    error = None if outcome is None else outcome.error
    state = "failed" if error is not None else "started" if path.is_dir() else "waiting"
    return CellStatus(**about, state=state, progress=max(step, 0) / steps, seconds=None, error=error)


def _step(path: Path) -> int:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # partly written, or damaged
    return 0


def seconds_left(statuses: Sequence[CellStatus]) -> float | None:
    """Time left at the mean pace of the cells that are done, those of the same panel if any; None before the first."""
    paces: dict[str | None, list[float]] = {}
    for cell in statuses:
        if cell.state == "done" and cell.seconds:
            # Each layer costs about the same.
            for key in (cell.panel, None):
                paces.setdefault(key, []).append(cell.seconds / cell.layers)
    total = 0.0
    for cell in statuses:
        if cell.state in ("started", "waiting"):
            pace = paces.get(cell.panel) or paces.get(None)
            if pace is None:
                return None
            total += (1.0 - cell.progress) * cell.layers * sum(pace) / len(pace)
    return total / max(sum(cell.state == "started" for cell in statuses), 1)


def as_text(folder: Path, width: int = UNLIMITED) -> str:
    """How many cells of each panel are in each state, the started and failed cells, and the time left."""
    statuses = cells(folder)
    counts = Counter((cell.panel, cell.state) for cell in statuses)
    panels = dict.fromkeys(cell.panel for cell in statuses)
    rows = [[panel, *(counts[panel, state] for state in STATES)] for panel in panels]
    lines = []
    for cell in statuses:
        if cell.state in ("started", "failed"):
            state = f"{100 * cell.progress:.0f} %" if cell.state == "started" else cell.error
            lines.append(f"{cell.state:8} {cell.panel} {cell.key}: {state}")
    ended = sum(cell.state in ENDED for cell in statuses)
    lines.append(progress(statuses))
    if ended < len(statuses):
        train = any(record.get("runs") for record in panels_of(folder, empty=True)) or table.holds_runs(folder)
        command = "`fastlin train` with --resume" if train else "`fastlin reproduce`"
        lines.append(f"if no command is training them, rerun {command} to resume")
    return _COLUMNS.text(rows, width) + "".join(f"{wrapped(line, width, '  ')}\n" for line in lines)


def progress(statuses: Sequence[CellStatus]) -> str:
    """How many cells have ended, and the time left."""
    ended = sum(cell.state in ENDED for cell in statuses)
    if ended == len(statuses):
        return f"all {ended} cells have ended"
    left = seconds_left(statuses)
    return f"{ended} of {len(statuses)} cells have ended; time left: {clock(left) if left else 'not known yet'}"


class Line(AbstractContextManager["Line"]):
    """A live progress line on a terminal; elsewhere one line of text for each cell that has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._shown, self._explained = folder, 0.0, False
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(bar_format="{desc}", file=sys.stderr, dynamic_ncols=True)

    def show(self) -> None:
        """Update the progress line, at most once a second."""
        if self._bar is None or time.monotonic() - self._shown < 1.0:
            return
        self._shown = time.monotonic()
        statuses = cells(self._folder)
        ended = sum(cell.state in ENDED for cell in statuses)
        left = seconds_left(statuses)
        running = [f"{cell.key} {100 * cell.progress:.0f} %" for cell in statuses if cell.state == "started"]
        counts = (
            f"{ended}/{len(statuses)} cells, {'?' if left is None else clock(left)} left, {len(running)} in training"
        )
        parts = list(dict.fromkeys([counts, *running]))
        shown = Columns({part: len(part) + 2 for part in parts}, parts[:0:-1]).kept(terminal_width(2))
        self._bar.set_description_str(", ".join(shown))

    def ended(self, record: Mapping[str, Any], cell: Mapping[str, Any]) -> None:
        cells_ended = sum(entry["state"] in ENDED for entry in record["cells"])
        text = f"{record['name']} {cells_ended}/{len(record['cells'])} {cell['key']}: "
        row = cell["row"]
        if row is None:
            text += f"failed: {cell['error']}"
        else:
            text += f"risk {row['risk']:.5g}" if row["risk"] is not None else "every trial diverged"
            text += "" if row["excess_percent"] is None else f" (excess {row['excess_percent']:+.2f} %)"
            text += f", {cell['seconds']:.1f} s"
            if not self._explained and below_theory([row["excess_percent"]]):
                text += f"\n{wrapped(BELOW_THEORY, terminal_width(2))}"
                self._explained = True
        if self._bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __exit__(self, *error: object) -> None:
        self.close()
