"""Files of panels and of the outcomes of their cells, checked against their schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from fastlin._files import FileError, check_kind, checked, read_json
from fastlin._info import info
from fastlin.figures.figure import FigureCell

KIND, VERSION = "fastlin panel", 1
_COMMANDS = "`fastlin reproduce` or `fastlin train`"
ENDED = ("done", "failed")
"""States of a cell that has ended."""


class CellEntry(Struct, frozen=True):
    key: str
    place: float
    layers: int
    state: str
    seconds: float | None
    error: str | None
    warnings: list[str]
    row: dict[str, Any] | None
    stretches: int = 1
    steps: int | None = None  # of this cell, where cells have different ones


class PanelFile(Struct, frozen=True):
    """PANEL.json; its other fields depend on the kind of figure."""

    kind: str
    version: int
    name: str
    title: str
    shallower: str | None
    asked: dict[str, Any]
    caption: list[str]
    cells: list[CellEntry]
    remarks: list[str] = []
    runs: str | None = None  # the folder of the runs of the cells; None is cells/NAME


class PanelLines(Struct, frozen=True):
    """Further fields of PANEL.json that the picture of a panel needs."""

    axis: str
    axis_label: str
    lines: dict[str, Any]


class Outcome(Struct, frozen=True):
    """KEY.json: the row of a cell in the table, or the error that ended it."""

    row: dict[str, Any] | None
    seconds: float | None
    error: str | None
    warnings: list[str]


def read(path: Path) -> dict[str, Any]:
    record = read_json(path, dict)
    try:
        panel = checked(record, PanelFile)
        if "axes" not in record:  # a panel; other figures list their axes in the record
            checked(record, PanelLines)
    except ValueError as error:
        raise FileError(f"{path}: damaged, or not a file of fastlin: {error}") from None
    check_kind(path, panel, KIND, VERSION)
    return record


def new_record(
    name: str, title: str, asked: Mapping[str, Any], opening: Mapping[str, Any], cells: Sequence[FigureCell]
) -> dict[str, Any]:
    """The record of a figure whose cells wait."""
    waiting: dict[str, Any] = {"state": "waiting", "seconds": None, "error": None, "warnings": [], "row": None}
    about = ("key", "place", "layers", "stretches")
    entries = [{**{name: getattr(cell, name) for name in about}, **waiting} for cell in cells]
    start = {"kind": KIND, "version": VERSION, "name": name, "title": title, "shallower": None, "asked": dict(asked)}
    return {**start, **opening, "caption": [], "cells": entries, "info": info()}


def run_folder(folder: Path, record: Mapping[str, Any], key: str) -> Path:
    """The folder of the run of a cell."""
    return folder / (record.get("runs") or f"cells/{record['name']}") / key


def outcome_path(cell: Path) -> Path:
    return cell.with_name(f"{cell.name}.json")


def outcome_of(cell: Path) -> Outcome | None:
    """The outcome of a cell, whose run is in the folder `cell`; None before it has ended."""
    try:
        return read_json(outcome_path(cell), Outcome)
    except FileNotFoundError:
        return None


def panels_of(folder: Path, *, empty: bool = False) -> list[dict[str, Any]]:
    """Records of the panels in a folder, sorted by file name; `empty` allows a folder without panels."""
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "no such folder"
        raise FileError(f"{folder}: {found}, wants a folder of {_COMMANDS}")
    records = []
    for path in sorted(folder.glob("*.json")):
        if path.name.startswith("."):
            continue  # the temporary file of a process that was killed
        try:
            records.append(read(path))
        except FileError:
            # Skip other records, such as claims.json; report a damaged panel.
            if KIND in path.read_text(encoding="utf-8", errors="replace"):
                raise
    if not records and not empty:
        raise FileError(f"{folder}: holds no panel and no run, wants a folder of {_COMMANDS}")
    return records
