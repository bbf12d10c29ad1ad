"""Files of panels and of what became of their cells, read and checked against their schemas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from fastlin._files import FileError, check_kind, checked, read_json

KIND, VERSION = "fastlin panel", 1


class Cell(Struct, frozen=True):
    """A cell in the file of a panel."""

    key: str
    place: float
    layers: int
    state: str
    seconds: float | None
    error: str | None
    warnings: list[str]
    row: dict[str, Any] | None
    stretches: int = 1


class PanelFile(Struct, frozen=True):
    """PANEL.json; other fields depend on the kind of figure, and its drawing reads them."""

    kind: str
    version: int
    name: str
    title: str
    shallower: str | None
    asked: dict[str, Any]
    caption: list[str]
    cells: list[Cell]
    remarks: list[str] = []


class Drawn(Struct, frozen=True):
    """What a panel needs besides to be drawn: its points are the cells."""

    axis: str
    axis_label: str
    lines: dict[str, Any]


class Outcome(Struct, frozen=True):
    """KEY.json: what became of a cell, its row of the table or the error that ended it."""

    row: dict[str, Any] | None
    seconds: float | None
    error: str | None
    warnings: list[str]


def read(path: Path) -> dict[str, Any]:
    """The record of a panel."""
    record = read_json(path, dict)
    try:
        check_kind(path, checked(record, PanelFile), KIND, VERSION)
        if "axes" not in record:  # a figure that is not drawn as its record says
            checked(record, Drawn)
    except FileError:
        raise
    except ValueError as error:
        raise FileError(f"{path}: damaged, or not a file of fastlin: {error}") from None
    return record


def outcome_path(cell: Path) -> Path:
    """The file of what became of a cell, by the folder of its run."""
    return cell.with_name(f"{cell.name}.json")


def outcome_of(cell: Path) -> Outcome | None:
    """What became of a cell, by the folder of its run; None when it has not ended."""
    try:
        return read_json(outcome_path(cell), Outcome)
    except FileNotFoundError:
        return None


def panels_of(folder: Path, *, empty: bool = False) -> list[dict[str, Any]]:
    """Records of the panels in a folder, in the order of their names; `empty` is whether there may be none."""
    if not folder.is_dir():
        raise FileError(f"{folder}: no such folder, wants one of `fastlin reproduce`")
    records = []
    for path in sorted(folder.glob("*.json")):
        if path.name.startswith("."):
            continue  # half of a file whose writer was killed
        try:
            records.append(read(path))
        except FileError:
            # Other records, such as claims.json, lie beside them; a panel that is damaged does not.
            if KIND in path.read_text(encoding="utf-8", errors="replace"):
                raise
    if not records and not empty:
        raise FileError(f"{folder}: holds no panel, wants a folder of `fastlin reproduce`")
    return records
