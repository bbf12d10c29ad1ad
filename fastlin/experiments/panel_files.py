"""Files of panels and of what became of their cells, read and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastlin._tensors import FileError, read_json

KIND, VERSION = "fastlin panel", 1
_FIELDS = ("name", "title", "shallower", "asked", "caption", "cells")
# Of a panel whose cells are points of it, and of a figure that is drawn as its record says.
_DRAWN = (("axis", "axis_label", "lines", "remarks"), ("axes",))
_CELL_FIELDS = ("key", "place", "layers", "state", "seconds", "error", "warnings", "row")


def read(path: Path) -> dict[str, Any]:
    """The record of a panel."""
    try:
        record = read_json(path)
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
    except (KeyError, TypeError) as error:
        raise FileError(f"{path}: damaged, or not a file of fastlin: {error!r}") from None
    return record


def outcome_path(cell: Path) -> Path:
    """The file of what became of a cell, by the folder of its run."""
    return cell.with_name(f"{cell.name}.json")


def outcome_of(cell: Path) -> dict[str, Any] | None:
    """What was noted of a cell, by the folder of its run; None when nothing was."""
    path = outcome_path(cell)
    try:
        found = read_json(path)
    except FileNotFoundError:
        return None
    missing = [name for name in ("attempt", "row", "seconds", "error", "warnings") if name not in found]
    if missing:
        raise FileError(f"{path}: damaged, or not a file of fastlin: has no {missing[0]}")
    return found


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
