"""`fastlin reproduce`: panels of figures, cell by cell, in a folder that a later call goes on with.

    DIR/2a.json                      what the panel is, its cells and what has become of them, its closed forms
    DIR/2a.csv                       the table
    DIR/2a.png, .pdf, .svg, .md      the picture, and its caption with the table
    DIR/cells/2a/KEY/                the run of a cell that has ended (`fastlin.training.record`)
    DIR/cells/2a/KEY.json            what became of a cell: its row of the table, or the error that ended it
    DIR/cells/2a/.KEY.*              who is at work on it, and where (`leases`, `workplaces`)

Any number of calls, on any number of machines that see the folder, share its cells. What is done is not done again, and
a cell that was stopped goes on from its checkpoint, so that the tables are the same however many worked on them and
however often the work was stopped. What became of a cell is written once, by whoever trained it; the file of a panel
only gathers it, so that it does not matter who writes that last.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import filelock

from fastlin._files import replacing, write_json
from fastlin._info import info
from fastlin._tensors import FileError
from fastlin.data.philox import integer
from fastlin.experiments import leases
from fastlin.experiments.farm import SIGN_SECONDS, Order, Outcome, Trained, run
from fastlin.experiments.panel_files import KIND, VERSION, outcome_of, outcome_path, read
from fastlin.training.presets import PRESETS
from fastlin.training.regimes import choice


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


# Who has less patience takes over what others are at work on, and they from him, for ever.
LEAST_PATIENCE = 2 * SIGN_SECONDS


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
    shard : tuple of int or None
        (i, N): the i-th of N shares of the cells, from 0, and nothing else; None is whatever no other call works on.
    patience : float
        Seconds without a sign of life after which a cell of another call is taken over; `LEAST_PATIENCE` at least.
    """

    scale: str = "quick"
    preset: str = "tuned"
    seed: int = 0
    jobs: int | None = None
    effort: Effort | None = None
    lengths: tuple[int, ...] | None = None
    shard: tuple[int, int] | None = None
    patience: float = 180.0

    def __post_init__(self) -> None:
        choice("scale", self.scale, SCALES)
        choice("preset", self.preset, PRESETS)
        integer("seed", self.seed, 1 << 64)
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"jobs: got {self.jobs}, wants an integer >= 1")
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            raise ValueError(f"shard: got {self.shard[0]}/{self.shard[1]}, wants I/N with 0 <= I < N")
        if not (self.patience >= LEAST_PATIENCE and math.isfinite(self.patience)):
            raise ValueError(f"patience: got {self.patience}, wants a number of seconds >= {LEAST_PATIENCE:g}")

    def of(self, panel: Figure, cells: Sequence[Any]) -> dict[str, Any]:
        """What decides the numbers of a panel with these cells."""
        effort = self.effort or SCALES[self.scale][panel.kind(cells)]
        asked = {"scale": self.scale, "preset": self.preset, "seed": self.seed, **asdict(effort)}
        return {**asked, "values": dict(panel.values)}

    def claims(self, kind: str = "claims") -> dict[str, int]:
        """Options of `claims.compute`."""
        return {"seed": self.seed, **asdict(self.effort or SCALES[self.scale][kind])}


class Folder:
    """The folder of some panels, which others may be at work in too.

    Parameters
    ----------
    path : Path
        Made when it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = _made(path)
        self.records: dict[str, dict[str, Any]] = {}
        self._figures: dict[str, Figure] = {}
        # Failures that were there before, by their files: this call tries again.
        self._before: dict[Path, Any] = {}

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
        self.records[panel.name], self._figures[panel.name] = record, panel
        place = self.path / "cells" / panel.name
        for entry in record["cells"]:
            if entry["row"] is None:
                entry.update(state="waiting", error=None)
                found = outcome_of(place / entry["key"])
                if found is not None and found["row"] is None:
                    self._before[place / entry["key"]] = found
        self._save(panel.name)
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

    def entry(self, cell: Trained) -> dict[str, Any]:
        """What is known of a cell, with what others have done since."""
        self._gather(cell.panel, cell.key)
        found: dict[str, Any] = next(entry for entry in self.records[cell.panel]["cells"] if entry["key"] == cell.key)
        return found

    def note(self, order: Order, outcome: Outcome) -> dict[str, Any]:
        """Write down what has become of a cell; returns what is known of it."""
        found = outcome.summary
        row = None if found is None else order.cell.row(found)
        values = {"attempt": secrets.token_hex(8), "row": row, "seconds": None if found is None else found["seconds"]}
        write_json(outcome_path(order.folder), {**values, "error": outcome.error, "warnings": list(outcome.warnings)})
        self._save(order.cell.panel)
        return self.entry(order.cell)

    def complete(self, name: str) -> bool:
        """Whether all cells of a panel have ended, since this call began or before."""
        self._gather(name)
        return all(entry["state"] in ("done", "failed") for entry in self.records[name]["cells"])

    def ended(self) -> list[Path]:
        """Folders of the cells that have been trained to the end."""
        return [
            self.path / "cells" / name / entry["key"]
            for name, record in self.records.items()
            for entry in record["cells"]
            if entry["row"] is not None
        ]

    def _gather(self, name: str, key: str | None = None) -> bool:
        """Take over what others have noted of a panel's cells, or of one; returns whether that was news."""
        news = False
        for entry in self.records[name]["cells"]:
            place = self.path / "cells" / name / entry["key"]
            if entry["state"] in ("done", "failed") or key not in (None, entry["key"]):
                continue
            found = outcome_of(place)
            if found is not None and found != self._before.get(place):
                state = "failed" if found["row"] is None else "done"
                entry.update(state=state, **{what: found[what] for what in ("row", "seconds", "error", "warnings")})
                news = True
        return news

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
        """Write what is known of a panel: once more if more is known then, so that the last to write knows all."""
        self._gather(name)
        write_json(self.path / f"{name}.json", self.records[name])
        while self._gather(name):
            write_json(self.path / f"{name}.json", self.records[name])


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
    folder = Folder(out)
    orders = _share(panels, [order for panel in panels for order in folder.open(panel, request)], request)

    def finish(name: str) -> None:
        folder.finish(name)
        drawn(name)

    def settled(index: int) -> bool:
        return bool(folder.entry(orders[index].cell)["state"] in ("done", "failed"))

    def over(index: int, outcome: Outcome) -> None:
        entry = folder.note(orders[index], outcome)
        panel = orders[index].cell.panel
        ended(folder.records[panel], entry)
        if folder.complete(panel):
            finish(panel)

    for panel in panels:
        if folder.complete(panel.name):
            finish(panel.name)
    if orders:
        run(orders, request.jobs, request.patience, settled, over, tick)
    leases.clear(folder.ended())
    for panel in panels if orders else ():
        held = read(out / f"{panel.name}.json")
        # The panel with a layer less may have ended after this one, and whoever trained the last cell may have died.
        if (panel.shallower is not None or not held["caption"]) and folder.complete(panel.name):
            finish(panel.name)
        elif held["caption"]:
            folder.records[panel.name] = held
    return list(folder.records.values())


def _share(panels: Sequence[Figure], orders: list[Order], request: Request) -> list[Order]:
    """The orders of this call's share of the cells, which is the same whatever has been done: every N-th of them.

    Those that go on from another are in its share.
    """
    if request.shard is None:
        return orders
    numbers: dict[tuple[str, str], int] = {}
    for panel in panels:
        for cell in panel.cells(request.lengths):
            numbers[panel.name, cell.key] = len(numbers) if cell.after is None else numbers[panel.name, cell.after]
    place, count = request.shard
    return [order for order in orders if numbers[order.cell.panel, order.cell.key] % count == place]


def _made(out: Path) -> Path:
    """A folder, made when it is not there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise FileError(f"{out}: is a file, wants a folder") from None
    return out


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """The folder for one process that checks claims, made when it is not there."""
    lock = filelock.FileLock(_made(out) / ".lock", timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise FileError(f"{out}: another process is at work in this folder; wants another one, or patience") from None
    try:
        yield
    finally:
        lock.release()


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
