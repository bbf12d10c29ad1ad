"""The folder of a run: what it is, its records, its checkpoint and its result.

    run.json                 the resolved configuration, versions, backend, machine, seed
    records.jsonl            a line for each record; no clock in it, so that a resumed run has the same bytes
    checkpoint.safetensors   parameters, optimiser and where in the records they belong
    model.safetensors, result.json   at the end

One process at a time: a lock that the system releases when the process dies.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import filelock
from torch import Tensor

from fastlin import _tensors
from fastlin._files import naming, write_json
from fastlin._tensors import FileError

MODEL, RECORDS = "model.safetensors", "records.jsonl"
_RUN, _CHECKPOINT, _RESULT = "run.json", "checkpoint.safetensors", "result.json"
# A copy that is made in this order while the run goes on is one that can be gone on with: a result is there after all
# that it is of, and the records go on growing beyond those that a checkpoint is of.
FILES = (_RESULT, MODEL, _CHECKPOINT, RECORDS, _RUN)
_LOCK = ".lock"
_KIND = "fastlin run"
# What a process that was killed in the middle of a write has left (`_files.replacing`).
_LEFTOVER = re.compile(r"\.(run|checkpoint|result|model)\.\d+(-[0-9a-f]+)?\.(json|safetensors)")


def ended(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration and result of a run that has ended; nothing is locked.

    Raises
    ------
    FileError
        When the folder holds no run, or one that has not ended.
    """
    if not has_ended(path):
        raise FileError(f"{path}: holds no run that has ended, wants one")
    run = _json(path / _RUN, ("config",))
    return run["config"], _json(path / _RESULT, ("diverged",))


def holds_a_run(path: Path) -> bool:
    """Whether a folder holds a run; raises when it holds something else."""
    try:
        held = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    except FileNotFoundError:
        held = []
    except NotADirectoryError:
        raise _no_folder(path) from None
    if held and _RUN not in held:
        raise FileError(f"{path}: holds {held[0]} and no {_RUN}; wants a new folder, or one that holds a run")
    return bool(held)


def has_ended(path: Path) -> bool:
    """Whether the run of a folder has its result."""
    return (path / _RESULT).exists()


def progress(path: Path) -> int:
    """How far the checkpoint of a folder is, in bytes of records; -1 when there is none.

    Raises
    ------
    FileError
        When it is damaged.
    """
    try:
        return int(_checkpoint(path)[0]["records"]["bytes"])
    except FileNotFoundError:
        return -1


def _checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The checkpoint of a folder: where in the records it is, of which configuration, its state; and its tensors."""
    description, tensors = _tensors.read(path / _CHECKPOINT, "checkpoint")
    for name, kind in (("config", str), ("records", dict), ("state", dict)):
        if not isinstance(description.get(name), kind):
            raise FileError(f"{path / _CHECKPOINT}: damaged, or not a file of fastlin: has no {name}")
    position = description["records"]
    if type(position.get("bytes")) is not int or position["bytes"] < 0:
        raise FileError(f"{path / _CHECKPOINT}: damaged, or not a file of fastlin: has no place in the records")
    return description, tensors


class Folder:
    """The folder of a run, locked.

    Parameters
    ----------
    path : Path
        Made when it is not there. It must be empty, or with `resume` hold a run of the same configuration.
    config : mapping
        What decides the run's numbers.
    about : mapping
        Versions, machine and the like: written once, never compared.
    resume : bool
    """

    def __init__(self, path: Path, config: Mapping[str, Any], about: Mapping[str, Any], resume: bool) -> None:
        self.path = path
        self._file: Any = None
        self._hash = hashlib.sha256()
        self._config: dict[str, Any] = json.loads(json.dumps(config))
        holds_a_run(path)
        self._lock = _locked(path)
        try:
            if holds_a_run(path):
                if not resume:
                    raise FileError(
                        f"{path}: holds a run already; wants another folder, or resume=True (--resume) to go on"
                    )
                self._compare(self.about())
            else:
                run = {"kind": _KIND, "version": _tensors.VERSION, "config": self._config, **about}
                write_json(path / _RUN, run)
            for entry in path.iterdir():
                if _LEFTOVER.fullmatch(entry.name):
                    entry.unlink()
        except BaseException:
            self.close()
            raise

    def _compare(self, run: dict[str, Any]) -> None:
        """Raise when the folder's run is not the one that was asked for."""
        difference = first_difference(run["config"], self._config)
        if difference is not None:
            name, held, given = difference
            raise FileError(
                f"{self.path}: holds a run with {name} = {held!r}, this one has {given!r}; "
                "wants the same configuration to go on, or another folder"
            )

    def about(self) -> dict[str, Any]:
        """What run.json says."""
        run = _json(self.path / _RUN, ("kind", "version", "config"))
        if run["kind"] != _KIND or run["version"] != _tensors.VERSION:
            what = f"is a {run['kind']!r} of version {run['version']}"
            raise FileError(f"{self.path / _RUN}: {what}, wants a {_KIND!r} of {_tensors.VERSION}")
        if not isinstance(run["config"], dict):
            raise FileError(f"{self.path / _RUN}: damaged, or not a file of fastlin: its config is not a table")
        return run

    def result(self, check: Callable[[dict[str, Any]], str | None]) -> dict[str, Any] | None:
        """The result of a run that has ended, else None.

        Parameters
        ----------
        check : callable
            Says what is wrong with a result, or None.
        """
        path = self.path / _RESULT
        if not path.exists():
            return None
        found = _json(path, ("records",))
        wrong = check(found)
        if wrong is not None:
            raise FileError(f"{path}: damaged, or not a file of fastlin: {wrong}")
        self._records_up_to(found["records"])
        return found

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record."""
        path = self.path / RECORDS
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        with naming(path):
            if self._file is None:
                self._file = path.open("ab")
            self._file.write(line)
            self._file.flush()
        self._hash.update(line)

    def save(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Replace the checkpoint."""
        description = {"config": _digest(self._config), "records": self._position(), "state": state}
        _tensors.write(self.path / _CHECKPOINT, "checkpoint", description, tensors)

    def restore(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The checkpoint, with the records cut to where it was made; None when there is none yet."""
        path = self.path / RECORDS
        try:
            description, tensors = _checkpoint(self.path)
        except FileNotFoundError:
            path.unlink(missing_ok=True)
            return None
        if description["config"] != _digest(self._config):
            raise FileError(f"{self.path / _CHECKPOINT}: is of a run with another configuration than {_RUN}")
        data = self._records_up_to(description["records"])
        if path.exists():
            os.truncate(path, len(data))
        self._hash = hashlib.sha256(data)
        if data:
            self._file = path.open("ab")
        return description["state"], tensors

    def records(self) -> list[dict[str, Any]]:
        """Every record so far."""
        path = self.path / RECORDS
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result of a run that has ended, whose checkpoint nobody needs any more."""
        write_json(self.path / _RESULT, {**result, "records": self._position()})
        self._forget()

    def _forget(self) -> None:
        (self.path / _CHECKPOINT).unlink(missing_ok=True)

    def close(self) -> None:
        """Let others in."""
        try:
            if self._file is not None:
                self._file.close()
        finally:
            self._lock.release()

    def _position(self) -> dict[str, Any]:
        """Where the records are, on disk, and what they say up to there."""
        size = 0
        if self._file is not None:
            os.fsync(self._file.fileno())
            size = self._file.tell()
        return {"bytes": size, "sha256": self._hash.hexdigest()}

    def _records_up_to(self, position: dict[str, Any]) -> bytes:
        """The records up to a position, when they are what they were there."""
        path = self.path / RECORDS
        data = path.read_bytes()[: position["bytes"]] if path.exists() else b""
        if len(data) != position["bytes"] or hashlib.sha256(data).hexdigest() != position.get("sha256"):
            raise FileError(f"{path}: damaged: its first {position['bytes']} bytes are not what the run had written")
        return data


def _locked(path: Path) -> filelock.BaseFileLock:
    """The lock of a folder, which is made when it is not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise _no_folder(path) from None
    lock = filelock.FileLock(path / _LOCK, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        if not (path / _LOCK).exists():
            raise OSError(errno.EACCES, "cannot write into the folder", str(path)) from None
        raise FileError(f"{path}: another process is training in this folder; wants a folder for each run") from None
    return lock


def _no_folder(path: Path) -> FileError:
    place = path if path.exists() else next(parent for parent in path.parents if parent.exists())
    return FileError(f"{place}: is a file, wants a folder")


def _json(path: Path, fields: tuple[str, ...]) -> dict[str, Any]:
    """A table of a JSON file that has these fields."""
    found = _tensors.read_json(path)
    missing = [name for name in fields if name not in found]
    if missing:
        raise FileError(f"{path}: damaged, or not a file of fastlin: has no {missing[0]}")
    return found


def first_difference(held: Any, given: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first place where two trees of JSON differ, with what both have there."""
    if isinstance(held, dict) and isinstance(given, dict):
        for key in {**held, **given}:
            found = first_difference(held.get(key), given.get(key), f"{name}.{key}" if name else key)
            if found is not None:
                return found
        return None
    return None if held == given else (name, held, given)


def _digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
