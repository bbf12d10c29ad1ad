"""`fastlin reproduce`: panels of figures, cell by cell, in a folder that a later call goes on with.

    DIR/2a.json                      what the panel is, its cells and what has become of them, its closed forms
    DIR/2a.csv                       the table
    DIR/2a.png, .pdf, .svg, .md      the picture, and its caption with the table
    DIR/cells/2a/KEY/                the run of a cell (`fastlin.training.record`)

One process at a time works in a folder. What is done is not done again, and a cell that was stopped goes on from its
checkpoint, so that the tables are the same however often the work was stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import filelock

from fastlin._files import replacing
from fastlin._info import info
from fastlin._tensors import FileError
from fastlin.data.philox import integer
from fastlin.experiments.farm import Order, Outcome, Trained, run
from fastlin.training.presets import PRESETS
from fastlin.training.regimes import choice

KIND, VERSION = "fastlin panel", 1
_LOCK = ".lock"
_FIELDS = ("name", "title", "shallower", "asked", "caption", "cells")
# Of a panel whose cells are points of it, and of a figure that is drawn as its record says.
_DRAWN = (("axis", "axis_label", "lines", "remarks"), ("axes",))
_CELL_FIELDS = ("key", "place", "layers", "state", "started", "seconds", "error", "warnings", "row")


@dataclass(frozen=True)
class Effort:
    """Trials, optimiser steps and batch of a cell."""

    trials: int
    steps: int
    batch: int


class Figure(Protocol):
    """What is reproduced: a panel, or a figure of another form."""

    @property
    def name(self) -> str:
        """Of its files."""

    @property
    def title(self) -> str:
        """Above the picture."""

    @property
    def shallower(self) -> str | None:
        """A panel that risks are compared with, if any."""

    @property
    def values(self) -> tuple[tuple[str, Any], ...]:
        """Values of the protocol in place of the preset's."""

    def cells(self, lengths: Sequence[int] | None = None) -> Sequence[Any]:
        """What is to be trained, each a `farm.Trained`, with the key of the cell that it goes on from, or None."""

    def kind(self, cells: Sequence[Any]) -> str:
        """Which effort of a scale is meant."""

    def opening(self, cells: Sequence[Any]) -> dict[str, Any]:
        """What its record says before anything is trained."""

    def closing(
        self, record: dict[str, Any], folder: Path, shallower: Mapping[str, Any] | None
    ) -> tuple[list[str], str, str]:
        """Caption, CSV and table of a record whose cells have ended."""


# By what a panel's cells are. quick: 42 cells of one layer in 80 s, 21 of three layers in 4 minutes, on two cores.
SCALES = {
    "quick": {
        "layer": Effort(4, 1500, 4096),
        "stack": Effort(4, 2000, 2048),
        "softmax": Effort(2, 1500, 1024),
        "claims": Effort(2, 1500, 4096),
        # Steps of a phase.
        "forgetting": Effort(5, 1000, 2000),
    },
    "paper": {
        **dict.fromkeys(("layer", "stack", "softmax", "claims"), Effort(50, 20_000, 8192)),
        "forgetting": Effort(5, 5000, 5000),
    },
}


@dataclass(frozen=True)
class Request:
    """How panels are to be made.

    Attributes
    ----------
    scale, preset : str
    seed : int
    jobs : int or None
        Processes; None is one for each thread.
    effort : Effort or None
        In place of the scale's.
    lengths : tuple of int or None
        In place of the setting's context lengths.
    """

    scale: str = "quick"
    preset: str = "tuned"
    seed: int = 0
    jobs: int | None = None
    effort: Effort | None = None
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        choice("scale", self.scale, SCALES)
        choice("preset", self.preset, PRESETS)
        integer("seed", self.seed, 1 << 64)
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"jobs: got {self.jobs}, wants an integer >= 1")

    def of(self, panel: Figure, cells: Sequence[Any]) -> dict[str, Any]:
        """What decides the numbers of a panel with these cells."""
        effort = self.effort or SCALES[self.scale][panel.kind(cells)]
        asked = {"scale": self.scale, "preset": self.preset, "seed": self.seed, **asdict(effort)}
        return {**asked, "values": dict(panel.values)}

    def claims(self, kind: str = "claims") -> dict[str, int]:
        """Options of `claims.compute`."""
        return {"seed": self.seed, **asdict(self.effort or SCALES[self.scale][kind])}


class Folder:
    """The folder of some panels, for whoever has it `locked`.

    Parameters
    ----------
    path : Path
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, dict[str, Any]] = {}
        self._figures: dict[str, Figure] = {}

    def open(self, panel: Figure, request: Request) -> list[Order]:
        """Begin a panel or take it up again; returns what is left to do."""
        cells = panel.cells(request.lengths)
        asked = request.of(panel, cells)
        held = read(self.path / f"{panel.name}.json") if (self.path / f"{panel.name}.json").exists() else None
        if held is None:
            record = _new_record(panel, cells, asked)
        else:
            record = held
            for name, value in asked.items():
                if held["asked"].get(name) != value:
                    raise FileError(
                        f"{self.path / panel.name}.json: was made with {name} = {held['asked'].get(name)!r}, "
                        f"this call has {value!r}; wants the same to go on, or another folder"
                    )
            if [cell["key"] for cell in held["cells"]] != [cell.key for cell in cells]:
                raise FileError(
                    f"{self.path / panel.name}.json: has other cells than this call; wants the same, or another folder"
                )
        for entry in record["cells"]:
            if entry["row"] is None:
                entry.update(state="waiting", error=None)
        self.records[panel.name], self._figures[panel.name] = record, panel
        self._save(panel.name)
        place = self.path / "cells" / panel.name
        options = {name: asked[name] for name in ("preset", "seed", "trials", "batch")}
        return [
            Order(
                cell,
                place / cell.key,
                {**options, "steps": asked["steps"] * cell.stretches, **asked["values"], "records": 20},
                None if cell.after is None else place / cell.after,
            )
            for cell, entry in zip(cells, record["cells"], strict=True)
            if entry["row"] is None
        ]

    def mark(self, cell: Trained, **values: Any) -> None:
        """Note what has become of a cell."""
        entry = next(entry for entry in self.records[cell.panel]["cells"] if entry["key"] == cell.key)
        entry.update(values)
        self._save(cell.panel)

    def finish(self, name: str) -> None:
        """Write the table and the caption of a panel."""
        record = self.records[name]
        other = record["shallower"]
        shallower = None if other is None else self.records.get(other) or _there(self.path / f"{other}.json")
        record["caption"], rows, table = self._figures[name].closing(record, self.path, shallower)
        self._save(name)
        _write(self.path / f"{name}.csv", rows)
        lines = "\n".join(f"- {sentence}" for sentence in record["caption"])
        text = f"# {record['title']}\n\n![{record['title']}]({name}.png)\n\n{lines}\n\n"
        _write(self.path / f"{name}.md", f"{text}```\n{table}```\n")

    def _save(self, name: str) -> None:
        _write(self.path / f"{name}.json", json.dumps(self.records[name], indent=1, ensure_ascii=False) + "\n")


def _there(path: Path) -> dict[str, Any] | None:
    return read(path) if path.exists() else None


def _new_record(panel: Figure, cells: Sequence[Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    entries: list[dict[str, Any]] = [
        {
            "key": cell.key,
            "place": cell.place,
            "layers": cell.layers,
            "stretches": cell.stretches,
            "state": "waiting",
            "started": None,
            "seconds": None,
            "error": None,
            "warnings": [],
            "row": None,
        }
        for cell in cells
    ]
    return {
        "kind": KIND,
        "version": VERSION,
        "name": panel.name,
        "title": panel.title,
        "shallower": panel.shallower,
        "asked": dict(asked),
        **panel.opening(cells),
        "caption": [],
        "cells": entries,
        "info": info(),
    }


def read(path: Path) -> dict[str, Any]:
    """The record of a panel."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["kind"] != KIND or record["version"] != VERSION:
            raise FileError(
                f"{path}: is a {record['kind']!r} of version {record['version']}, wants {KIND!r} of {VERSION}"
            )
        fields_of_kind = (*_FIELDS, *_DRAWN["axes" in record])
        for fields, part in ((fields_of_kind, record), *((_CELL_FIELDS, cell) for cell in record["cells"])):
            missing = [name for name in fields if name not in part]
            if missing:
                raise FileError(f"{path}: damaged, or not a file of fastlin: has no {missing[0]}")
    except FileError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileError(f"{path}: damaged, or not a file of fastlin: {error!r}") from None
    found: dict[str, Any] = record
    return found


def panels_of(folder: Path, *, empty: bool = False) -> list[dict[str, Any]]:
    """Records of the panels in a folder, in the order of their names; `empty` is whether there may be none."""
    if not folder.is_dir():
        raise FileError(f"{folder}: no such folder, wants one of `fastlin reproduce`")
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            records.append(read(path))
        except FileError:
            # Other records, such as claims.json, lie beside them; a panel that is damaged does not.
            if KIND in path.read_text(encoding="utf-8", errors="replace"):
                raise
    if not records and not empty:
        raise FileError(f"{folder}: holds no panel, wants a folder of `fastlin reproduce`")
    return records


def reproduce(
    panels: Sequence[Figure],
    out: Path,
    request: Request,
    *,
    drawn: Callable[[str], None],
    ended: Callable[[dict[str, Any], dict[str, Any]], None],
    tick: Callable[[], None],
) -> list[dict[str, Any]]:
    """Train what is not yet there, and write tables and captions.

    Parameters
    ----------
    panels : sequence of Panel
    out : Path
    request : Request
    drawn : callable
        Called with the name of a panel whose record and table are written, to draw it.
    ended : callable
        Called with the panel's record and the entry of a cell that has ended.
    tick : callable
        Called a few times a second.

    Returns
    -------
    list of dict
        The records of the panels.
    """
    with locked(out):
        folder = Folder(out)
        orders = [order for panel in panels for order in folder.open(panel, request)]
        left = {panel.name: sum(order.cell.panel == panel.name for order in orders) for panel in panels}

        def started(index: int) -> None:
            folder.mark(orders[index].cell, state="running", started=time.time())

        def over(index: int, outcome: Outcome) -> None:
            cell, found = orders[index].cell, outcome.summary
            values: dict[str, Any] = {"warnings": list(outcome.warnings), "error": outcome.error}
            if found is None:
                folder.mark(cell, state="failed", **values)
            else:
                folder.mark(cell, state="done", row=cell.row(found), seconds=found["seconds"], **values)
            record = folder.records[cell.panel]
            ended(record, next(entry for entry in record["cells"] if entry["key"] == cell.key))
            left[cell.panel] -= 1
            if not left[cell.panel]:
                folder.finish(cell.panel)
                drawn(cell.panel)

        for panel in panels:
            if not left[panel.name]:
                folder.finish(panel.name)
                drawn(panel.name)
        if orders:
            run(orders, request.jobs, started, over, tick)
        for panel in panels:
            # The panel with a layer less may have ended after this one.
            if panel.shallower is not None and orders:
                folder.finish(panel.name)
                drawn(panel.name)
        return list(folder.records.values())


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """The folder for one process, made when it is not there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise FileError(f"{out}: is a file, wants a folder") from None
    # Whoever asks whether somebody is at work holds the lock for a moment.
    lock = filelock.FileLock(out / _LOCK, timeout=1)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise FileError(f"{out}: another process is at work in this folder; wants another one, or patience") from None
    try:
        yield
    finally:
        lock.release()


def at_work(out: Path) -> bool:
    """Whether a process works in the folder."""
    if not (out / _LOCK).exists():
        return False
    lock = filelock.FileLock(out / _LOCK, timeout=0)
    try:
        lock.acquire()
    except (filelock.Timeout, PermissionError):
        return True
    lock.release()
    return False


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
