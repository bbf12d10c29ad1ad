"""`fastlin reproduce`: figures, cell by cell, in a folder that a later call resumes.

    DIR/2a.json                      what the panel is, its cells, its closed forms; at the end their rows
    DIR/2a.csv                       the table
    DIR/2a.png, .pdf, .svg, .md      the picture, and its caption with the table
    DIR/cells/2a/KEY/                the run of a cell (`fastlin.training.record`)
    DIR/cells/2a/KEY.json            what became of a cell: its row of the table, or the error that ended it

A cell that is done is not trained again, and one that was stopped resumes from its checkpoint, so that the tables are
the same however many processes worked on them (`sweep`) and however often the work was stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import filelock

from fastlin._files import FileError, replacing, write_json
from fastlin._info import info
from fastlin.data.philox import integer
from fastlin.figures.panel_files import KIND, VERSION, outcome_of, outcome_path, panels_of, read
from fastlin.figures.sweep import CellRequest, refuse_unguarded, run
from fastlin.training.checks import choice
from fastlin.training.presets import PRESETS

if TYPE_CHECKING:
    from distributed import Client


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
        """What is to be trained, each a `sweep.Trained`, with the key of the cell that it continues, or None."""

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
        Processes; None is one for each thread of torch's, 1 trains in this process.
    effort : Effort or None
        In place of the scale's.
    lengths : tuple of int or None
        In place of the setting's context lengths.
    shard : tuple of int or None
        (i, N): only every N-th of the cells, from the i-th on, counted from 0; None is all.
    """

    scale: str = "quick"
    preset: str = "tuned"
    seed: int = 0
    jobs: int | None = None
    effort: Effort | None = None
    lengths: tuple[int, ...] | None = None
    shard: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        choice("scale", self.scale, SCALES)
        choice("preset", self.preset, PRESETS)
        integer("seed", self.seed, 1 << 64)
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"jobs: got {self.jobs}, wants an integer >= 1")
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            raise ValueError(f"shard: got {self.shard[0]}/{self.shard[1]}, wants I/N with 0 <= I < N")

    def asked(self, panel: Figure, cells: Sequence[Any]) -> dict[str, Any]:
        """What decides the numbers of a panel with these cells."""
        effort = self.effort or SCALES[self.scale][panel.kind(cells)]
        asked = {"scale": self.scale, "preset": self.preset, "seed": self.seed, **asdict(effort)}
        return {**asked, "values": dict(panel.values)}

    def claims(self, kind: str = "claims") -> dict[str, int]:
        """Options of `claims.compute`."""
        return {"seed": self.seed, **asdict(self.effort or SCALES[self.scale][kind])}


class Folder:
    """The folder of some panels.

    Parameters
    ----------
    path : Path
        Made when it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = _made(path).absolute()
        self.records: dict[str, dict[str, Any]] = {}
        self._figures: dict[str, Figure] = {}

    def open(self, panel: Figure, request: Request) -> list[CellRequest]:
        """Begin a panel or resume it; returns what is left to do."""
        cells = panel.cells(request.lengths)
        asked = request.asked(panel, cells)
        path, place = self.path / f"{panel.name}.json", self.path / "cells" / panel.name
        record = read(path) if path.exists() else _new_record(panel, cells, asked)
        for name, value in asked.items():
            if record["asked"].get(name) != value:
                raise FileError(
                    f"{path}: was made with {name} = {record['asked'].get(name)!r}, this call has {value!r}; "
                    "wants the same to resume, or another folder"
                )
        if [cell["key"] for cell in record["cells"]] != [cell.key for cell in cells]:
            raise FileError(f"{path}: has other cells than this call; wants the same, or another folder")
        self.take(panel, record)
        if not path.exists():
            write_json(path, record)
        options = {name: asked[name] for name in ("preset", "seed", "trials", "batch")}
        requests = []
        for cell, entry in zip(cells, record["cells"], strict=True):
            if entry["row"] is None:
                # A cell that failed is tried again.
                outcome_path(place / cell.key).unlink(missing_ok=True)
                entry.update(state="waiting", error=None, warnings=[])
                steps = asked["steps"] * cell.stretches
                requests.append(
                    CellRequest(
                        cell,
                        place / cell.key,
                        {**options, "steps": steps, **asked["values"], "records": 20},
                        None if cell.after is None else place / cell.after,
                    )
                )
        return requests

    def take(self, panel: Figure, record: dict[str, Any]) -> None:
        """Take up a panel with its record, and read what has become of its cells."""
        self.records[panel.name], self._figures[panel.name] = record, panel
        for entry in record["cells"]:
            self.refresh(panel.name, entry["key"])

    def refresh(self, panel: str, key: str) -> dict[str, Any]:
        """The entry of a cell, with what has become of it by now."""
        entry: dict[str, Any] = next(cell for cell in self.records[panel]["cells"] if cell["key"] == key)
        found = outcome_of(self.path / "cells" / panel / key) if entry["row"] is None else None
        if found is not None:
            state = "failed" if found.row is None else "done"
            entry.update(state=state, row=found.row, seconds=found.seconds, error=found.error, warnings=found.warnings)
        return entry

    def complete(self, name: str) -> bool:
        """Whether all cells of a panel have ended."""
        return all(entry["state"] in ("done", "failed") for entry in self.records[name]["cells"])

    def finish(self, name: str) -> None:
        """Write the table and the caption of a panel."""
        record = self.records[name]
        other = record["shallower"]
        shallower = None
        if other is not None:
            path = self.path / f"{other}.json"
            shallower = self.records.get(other) or (read(path) if path.exists() else None)
        record["caption"], rows, table = self._figures[name].closing(record, self.path, shallower)
        write_json(self.path / f"{name}.json", record)
        _write(self.path / f"{name}.csv", rows)
        lines = "\n".join(f"- {sentence}" for sentence in record["caption"])
        text = f"# {record['title']}\n\n![{record['title']}]({name}.png)\n\n{lines}\n\n"
        _write(self.path / f"{name}.md", f"{text}```\n{table}```\n")


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
    out: str | Path,
    request: Request | None = None,
    *,
    client: Client | None = None,
    drawn: Callable[[str], object] = lambda name: None,
    ended: Callable[[dict[str, Any], dict[str, Any]], object] = lambda record, cell: None,
    tick: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Train what is not yet there, and write tables and captions.

    A script that calls it with more than one process needs `if __name__ == "__main__":` around the call.

    Parameters
    ----------
    panels : sequence of Panel
    out : str or Path
        Of the folder, which all workers must see under this path.
    request : Request, optional
        By default at quick scale, with a process for each thread of torch's.
    client : distributed.Client, optional
        Of a dask cluster that is there, in place of local processes.
    drawn : callable
        Called with the name of a panel whose record and table are written, to draw it.
    ended : callable
        Called with the panel's record and the entry of a cell that has ended.
    tick : callable
        Called about twice a second while a cluster trains.

    Returns
    -------
    list of dict
        The records of the panels.
    """
    refuse_unguarded()
    request = request or Request()
    folder = Folder(Path(out))
    requests = _share(panels, [one for panel in panels for one in folder.open(panel, request)], request)
    finished = set()

    def finish(name: str) -> None:
        folder.finish(name)
        drawn(name)
        finished.add(name)

    def done(one: CellRequest) -> None:
        panel = one.cell.panel
        ended(folder.records[panel], folder.refresh(panel, one.cell.key))
        if folder.complete(panel):
            finish(panel)

    for panel in panels:
        if folder.complete(panel.name):
            finish(panel.name)
    if requests:
        run(requests, folder.path, jobs=request.jobs, client=client, done=done, tick=tick)
    for panel in panels:
        # Other shards may have ended meanwhile, and so may the panel with a layer less that a caption speaks of.
        folder.take(panel, folder.records[panel.name])
        if folder.complete(panel.name) and (panel.name not in finished or (panel.shallower and requests)):
            finish(panel.name)
    return list(folder.records.values())


def close_panels(out: Path, figures: Mapping[str, Figure]) -> list[str]:
    """Names of the panels of a folder that can be drawn; tables of those whose last cells have just ended are written.

    Parameters
    ----------
    out : Path
    figures : mapping
        The figures that are known, by name.
    """
    folder, names = Folder(out), []
    for record in panels_of(out, empty=True):
        name = record["name"]
        if not record["caption"] and name in figures:
            folder.take(figures[name], record)
            if folder.complete(name):
                folder.finish(name)
        if record["caption"]:
            names.append(name)
    return names


def _share(panels: Sequence[Figure], requests: list[CellRequest], request: Request) -> list[CellRequest]:
    """The requests of one shard: every N-th cell, whatever has been done already.

    A cell that continues another is in its shard.
    """
    if request.shard is None:
        return requests
    numbers: dict[tuple[str, str], int] = {}
    for panel in panels:
        for cell in panel.cells(request.lengths):
            numbers[panel.name, cell.key] = len(numbers) if cell.after is None else numbers[panel.name, cell.after]
    place, count = request.shard
    return [one for one in requests if numbers[one.cell.panel, one.cell.key] % count == place]


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
        raise FileError(
            f"{out}: another process is checking claims in this folder; wants another folder, or wait"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
