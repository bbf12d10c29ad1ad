"""Folders that cells are trained in: each worker has its own, and a run that has ended gets the cell's name.

    KEY/               the run of a cell that has ended
    .KEY.at.TOKEN/     a run on its way, of the worker whose lease has the token
    .KEY.part.TOKEN/   a copy that is being made, to go on with what another worker had done
    .KEY.old.TOKEN/    what nobody needs any more, on its way out

Nobody writes in another's folder, so that two workers on one cell cannot spoil each other's files, and names are given
by renaming: the first to end gives its folder the cell's name, the second finds it there. Both have the same bits.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from fastlin._files import to_disk
from fastlin._tensors import FileError
from fastlin.training import record

_TRIES = 40  # to remove a folder: two seconds


def at(cell: Path, token: str) -> Path:
    """The folder of the worker whose lease has the token."""
    return _beside(cell, "at", token)


def _beside(cell: Path, what: str, token: str) -> Path:
    return cell.with_name(f".{cell.name}.{what}.{token}")


def started(cell: Path) -> list[Path]:
    """Folders of runs of a cell that have not got its name."""
    return _all(cell, "at")


def _all(cell: Path, what: str) -> list[Path]:
    start = _beside(cell, what, "").name
    try:
        return [cell.with_name(name) for name in sorted(os.listdir(cell.parent)) if name.startswith(start)]
    except FileNotFoundError:
        return []


def begin(cell: Path, token: str) -> Path:
    """A folder to train a cell in, that goes on from the run that is furthest.

    Raises
    ------
    FileError
        When the cell's folder holds something else, or every run that is there has a damaged checkpoint.
    """
    held = [cell] if record.holds_a_run(cell) else []
    place = at(cell, token)
    found: list[tuple[bool, int, Path]] = []
    damaged: FileError | None = None
    for path in [*held, *started(cell)]:
        try:
            found.append((record.has_ended(path), record.progress(path), path))
        except FileError as error:
            damaged = error
    if damaged is not None and not any(ended or step >= 0 for ended, step, _ in found):
        raise damaged
    part = _beside(cell, "part", token)
    part.mkdir(parents=True)
    if found:
        for name in record.FILES:
            # A run that ends meanwhile drops its checkpoint: then this one starts anew, to the same bits.
            with suppress(FileNotFoundError):
                shutil.copyfile(max(found)[2] / name, part / name)
                to_disk(part / name)
        if not (part / record.FILES[-1]).exists():
            shutil.rmtree(part)
            part.mkdir()
    to_disk(part)
    part.rename(place)
    to_disk(place.parent)
    for _, _, path in found:
        if path != cell:
            _retire(path, cell)
    return place


def publish(place: Path, cell: Path) -> None:
    """Give the folder of a run that has ended the cell's name, unless another one has it."""
    while True:
        try:
            place.rename(cell)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if record.holds_a_run(cell) and record.has_ended(cell):
                _retire(place, cell)
                break
            # A run on its way that has the cell's name is of an earlier version, and this one went on from it.
            _retire(cell, cell)
        else:
            break
    to_disk(cell.parent)
    for what in ("at", "part", "old"):
        for path in _all(cell, what):
            _retire(path, cell)


def leave(cell: Path, token: str) -> None:
    """Clear up after a worker that has lost a cell; as long as that has not ended, others may go on from its run."""
    if record.has_ended(cell):
        _retire(at(cell, token), cell)


def _retire(path: Path, cell: Path) -> None:
    """Remove a folder of a cell; under another name first, so that a worker that has it cannot publish half of it."""
    old = _beside(cell, "old", secrets.token_hex(8))
    try:
        path.rename(old)
    except OSError:
        return  # somebody else was faster
    for _ in range(_TRIES):
        shutil.rmtree(old, ignore_errors=True)
        if not old.exists():
            return
        time.sleep(0.05)  # a worker that is writing there puts a file back in place
