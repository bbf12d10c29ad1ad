"""`fastlin reproduce`: figures, cell by cell, in a folder from which a later call resumes.

    DIR/2a.json                      the panel: its cells, closed forms and, at the end, the rows of its table
    DIR/2a.csv                       the table
    DIR/2a.png, .pdf, .svg, .md      the picture, and its caption with the table
    DIR/cells/2a/KEY/                the run of a cell (`fastlin.training.record`)
    DIR/cells/2a/KEY.json            the outcome of a cell: its row of the table, or an error

A call skips cells that are done and resumes those that were stopped from their checkpoints. The tables are the same for
any number of processes (`sweep`) and any number of interruptions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from fastlin import _files
from fastlin._checks import choice, integer
from fastlin._files import FileError, create_folder, write_json, write_text
from fastlin.figures.figure import Figure
from fastlin.figures.panel_files import ENDED, new_record, outcome_of, outcome_path, panels_of, read
from fastlin.figures.sweep import CellRequest, refuse_unguarded, run
from fastlin.training.presets import PRESETS

if TYPE_CHECKING:
    from distributed import Client


@dataclass(frozen=True)
class Effort:
    trials: int
    steps: int
    batch: int


# By the kind of a figure. quick: 42 cells of one layer take 80 s on two cores, 21 of three layers 4 minutes.
SCALES = {
    "quick": {
        "layer": Effort(4, 1500, 4096),
        "stack": Effort(4, 2000, 2048),
        "softmax": Effort(2, 1500, 1024),
        "claims": Effort(2, 1500, 4096),
        # Steps are per phase.
        "forgetting": Effort(5, 1000, 2000),
    },
    "paper": {
        **dict.fromkeys(("layer", "stack", "softmax", "claims"), Effort(50, 20_000, 8192)),
        "forgetting": Effort(5, 5000, 5000),
    },
}


@dataclass(frozen=True)
class Request:
    """Options of `reproduce`."""

    scale: str = "quick"
    preset: str = "tuned"
    seed: int = 0
    jobs: int | None = None  # number of processes; None is torch's number of threads, 1 trains in this process
    effort: Effort | None = None  # replaces the scale's
    lengths: tuple[int, ...] | None = None  # replace the setting's context lengths
    shard: tuple[int, int] | None = None  # (i, N) trains every N-th cell, starting at cell i, counted from 0

    def __post_init__(self) -> None:
        choice("scale", self.scale, SCALES)
        choice("preset", self.preset, PRESETS)
        integer("seed", self.seed, 1 << 64)
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"jobs: got {self.jobs}, wants an integer >= 1")
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            raise ValueError(f"shard: got {self.shard[0]}/{self.shard[1]}, wants I/N with 0 <= I < N")

    def asked(self, panel: Figure, cells: Sequence[Any]) -> dict[str, Any]:
        """Options that decide the numbers of a panel; a folder holds panels made with one set of them."""
        asked = {"scale": self.scale, "preset": self.preset, **self.claims(panel.kind(cells))}
        return {**asked, "values": dict(panel.values)}

    def claims(self, kind: str) -> dict[str, int]:
        """Options of `claims.compute`: seed, trials, steps and batch of a kind of `SCALES`."""
        return {"seed": self.seed, **asdict(self.effort or SCALES[self.scale][kind])}


class PanelFolder:
    """A folder of panels; creates it where it does not exist."""

    def __init__(self, path: Path) -> None:
        self.path = create_folder(path).absolute()
        self.records: dict[str, dict[str, Any]] = {}
        self._figures: dict[str, Figure] = {}

    def open(self, panel: Figure, request: Request) -> list[CellRequest]:
        """Begin or resume a panel; returns its cells that are not done."""
        cells = panel.cells(request.lengths)
        asked = request.asked(panel, cells)
        path, folder = self.path / f"{panel.name}.json", self.path / "cells" / panel.name
        opening = {"shallower": panel.shallower, **panel.opening(cells)}
        record = read(path) if path.exists() else new_record(panel.name, panel.title, asked, opening, cells)
        for name, value in asked.items():
            if record["asked"].get(name) != value:
                raise FileError(
                    f"{path}: was made with {name} = {record['asked'].get(name)!r}, this call has {value!r}; "
                    "wants the same to resume, or another folder"
                )
        if [cell["key"] for cell in record["cells"]] != [cell.key for cell in cells]:
            raise FileError(f"{path}: has other cells than this call; wants the same, or another folder")
        self.add(panel, record)
        if not path.exists():
            write_json(path, record)
        options = {name: asked[name] for name in ("preset", "seed", "trials", "batch")}
        requests = []
        for cell, entry in zip(cells, record["cells"], strict=True):
            if entry["row"] is None:
                # Retry a cell that failed.
                outcome_path(folder / cell.key).unlink(missing_ok=True)
                entry.update(state="waiting", error=None, warnings=[])
                training = {**options, "steps": asked["steps"] * cell.stretches, **asked["values"], "records": 20}
                after = None if cell.after is None else folder / cell.after
                requests.append(CellRequest(cell, folder / cell.key, training, after))
        return requests

    def add(self, panel: Figure, record: dict[str, Any]) -> None:
        """Add a panel with its record, and read the outcomes of its cells."""
        self.records[panel.name], self._figures[panel.name] = record, panel
        for entry in record["cells"]:
            self.refresh(panel.name, entry["key"])

    def refresh(self, panel: str, key: str) -> dict[str, Any]:
        """The entry of a cell in its panel's record, updated from its outcome on disk."""
        entry: dict[str, Any] = next(cell for cell in self.records[panel]["cells"] if cell["key"] == key)
        outcome = outcome_of(self.path / "cells" / panel / key) if entry["row"] is None else None
        if outcome is not None:
            entry.update(state="failed" if outcome.row is None else "done", **to_builtins(outcome))
        return entry

    def complete(self, name: str) -> bool:
        return all(entry["state"] in ENDED for entry in self.records[name]["cells"])

    def finish(self, name: str) -> None:
        record, shallower = self.records[name], None
        if record["shallower"] is not None:
            path = self.path / f"{record['shallower']}.json"
            shallower = self.records.get(record["shallower"]) or (read(path) if path.exists() else None)
        closing = self._figures[name].closing(record, self.path, shallower)
        record["caption"] = closing.caption
        write_json(self.path / f"{name}.json", record)
        write_text(self.path / f"{name}.csv", closing.csv)
        lines = "\n".join(f"- {sentence}" for sentence in closing.caption)
        text = f"# {record['title']}\n\n![{record['title']}]({name}.png)\n\n{lines}\n\n"
        write_text(self.path / f"{name}.md", f"{text}```\n{closing.table}```\n")


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
    """Train the cells that are not done, and write tables and captions; returns the records of the panels.

    All workers must see the folder `out` under this path. `client` is that of a running dask cluster, in place of local
    processes. A script that calls it with more than one process needs `if __name__ == "__main__":` around the call.

    Calls `drawn` with the name of a panel after its record and tables are written, `ended` with the panel's record and
    the cell's entry whenever a cell has ended, and `tick` about twice a second while a cluster trains.
    """
    refuse_unguarded()
    request = request or Request()
    if request.lengths is not None and not any(panel.over_n for panel in panels):
        names = ", ".join(panel.name for panel in panels)
        raise ValueError(f"lengths: got {request.lengths}, wants none (no -n): {names} have places of their own")
    folder = PanelFolder(Path(out))
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
        # Other shards may have ended in the meantime, and so may the panel with one layer less that a caption compares.
        folder.add(panel, folder.records[panel.name])
        if folder.complete(panel.name) and (panel.name not in finished or (panel.shallower and requests)):
            finish(panel.name)
    return list(folder.records.values())


def close_panels(out: Path, figures: Mapping[str, Figure]) -> list[str]:
    """Write missing tables of panels whose cells have all ended; returns the names of the panels that can be drawn."""
    folder, names = PanelFolder(out), []
    for record in panels_of(out, empty=True):
        name = record["name"]
        if record.get("runs"):
            continue  # of `fastlin train`
        if not record["caption"] and name in figures:
            folder.add(figures[name], record)
            if folder.complete(name):
                folder.finish(name)
        if record["caption"]:
            names.append(name)
    return names


def _share(panels: Sequence[Figure], requests: list[CellRequest], request: Request) -> list[CellRequest]:
    """The requests of one shard: every N-th cell, counting those that are done; a cell follows the one it continues."""
    if request.shard is None:
        return requests
    numbers: dict[tuple[str, str], int] = {}
    for panel in panels:
        for cell in panel.cells(request.lengths):
            numbers[panel.name, cell.key] = len(numbers) if cell.after is None else numbers[panel.name, cell.after]
    index, count = request.shard
    return [one for one in requests if numbers[one.cell.panel, one.cell.key] % count == index]


def locked(out: Path) -> AbstractContextManager[Any]:
    """Create a folder and lock it for one process that checks claims."""
    message = f"{out}: another process is checking claims in this folder; wants another folder, or wait"
    return _files.locked(out, FileError(message))
