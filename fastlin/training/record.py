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
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import filelock
from msgspec import Meta, Struct, to_builtins
from torch import Tensor

from fastlin import _tensors
from fastlin._files import FileError, check_kind, checked, naming, read_json, write_json

MODEL, RECORDS, RUN = "model.safetensors", "records.jsonl", "run.json"
_CHECKPOINT, _RESULT, _LOCK = "checkpoint.safetensors", "result.json", ".lock"
_KIND = "fastlin run"
# What a process that was killed in the middle of a write has left (`_files.replacing`).
_LEFTOVER = re.compile(r"\.(run|checkpoint|result|model)\.\d+(-[0-9a-f]+)?\.(json|safetensors)")

Size = Annotated[int, Meta(ge=0)]


class FolderInUseError(FileError):
    """Another process is training in the folder."""


class Position(Struct, frozen=True):
    """A place in the records: so many bytes, and their checksum."""

    bytes: Size
    sha256: str


class RunFile(Struct, frozen=True):
    """run.json: the configuration that decides the numbers, and the installation that computed them."""

    kind: str
    version: int
    config: dict[str, Any]
    backend: str
    info: dict[str, Any]
    device: str = "cpu"
    machine: dict[str, Any] = {}
    processes: int = 1


class Result(Struct, frozen=True):
    """result.json: what is known of the trials at the end; None in place of a number that is not finite."""

    risk: list[float | None]
    risk_error: list[float | None]
    tail: list[float | None]
    typical: list[float | None]
    best: Size
    theory: float | None
    diverged: list[tuple[Size, Size]]
    seconds: float
    records: Position


class Checkpoint(Struct, frozen=True):
    """The description in checkpoint.safetensors: of which configuration, where in the records, and the state."""

    config: str
    records: Position
    state: dict[str, Any]


def ended(path: Path) -> tuple[RunFile, Result, list[dict[str, Any]]]:
    """Description, result and records of a run that has ended; nothing is locked.

    Raises
    ------
    FileError
        When the folder holds no run, or one that has not ended.
    """
    if not holds_a_run(path):
        raise FileError(f"{path}: holds no run, wants the folder of one that has ended")
    if not has_ended(path):
        raise FileError(f"{path}: holds a run that has not ended; `train` with resume=True (--resume) resumes it")
    return _run_file(path), *_result(path)


def holds_a_run(path: Path) -> bool:
    """Whether a folder holds a run; raises when it holds something else."""
    try:
        held = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    except FileNotFoundError:
        held = []
    except NotADirectoryError:
        raise _no_folder(path) from None
    if held and RUN not in held:
        raise FileError(f"{path}: holds {held[0]} and no {RUN}; wants a new folder, or one that holds a run")
    return bool(held)


def has_ended(path: Path) -> bool:
    """Whether the run of a folder has its result."""
    return (path / _RESULT).exists()


def _run_file(path: Path) -> RunFile:
    run = read_json(path / RUN, RunFile)
    check_kind(path / RUN, run, _KIND, _tensors.VERSION)
    return run


def _result(path: Path) -> tuple[Result, list[dict[str, Any]]]:
    """The result of a run, and the records."""
    result = read_json(path / _RESULT, Result)
    trials = len(result.risk)
    if not result.best < trials == len(result.risk_error) == len(result.tail) == len(result.typical):
        raise FileError(f"{path / _RESULT}: damaged, or not a file of fastlin: its trials are not as many everywhere")
    data = _records_up_to(path, result.records)
    return result, [json.loads(line) for line in data.splitlines()]


def _records_up_to(path: Path, position: Position) -> bytes:
    """The records up to a position, when they are what they were there."""
    file = path / RECORDS
    data = file.read_bytes()[: position.bytes] if file.exists() else b""
    if len(data) != position.bytes or hashlib.sha256(data).hexdigest() != position.sha256:
        raise FileError(f"{file}: damaged: its first {position.bytes} bytes are not what the run had written")
    return data


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
        self._config = dict(config)
        holds_a_run(path)
        self._lock = _locked(path)
        try:
            if holds_a_run(path):
                if not resume:
                    raise FileError(
                        f"{path}: holds a run already; wants another folder, or resume=True (--resume) to resume it"
                    )
                self._compare(self.run_file())
            else:
                run = {"kind": _KIND, "version": _tensors.VERSION, "config": self._config, **about}
                write_json(path / RUN, run)
            for entry in path.iterdir():
                if _LEFTOVER.fullmatch(entry.name):
                    entry.unlink()
        except BaseException:
            self.close()
            raise

    def _compare(self, run: RunFile) -> None:
        """Raise when the folder's run is not the one that was asked for."""
        difference = first_difference(run.config, self._config)
        if difference is not None:
            name, held, given = difference
            raise FileError(
                f"{self.path}: holds a run with {name} = {held!r}, this one has {given!r}; "
                "wants the same configuration to resume it, or another folder"
            )

    def run_file(self) -> RunFile:
        """What run.json says."""
        return _run_file(self.path)

    def result(self) -> tuple[Result, list[dict[str, Any]]] | None:
        """Result and records of a run that has ended, else None."""
        return _result(self.path) if has_ended(self.path) else None

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
        description = Checkpoint(_digest(self._config), self._position(), dict(state))
        _tensors.write(self.path / _CHECKPOINT, "checkpoint", to_builtins(description), tensors)

    def restore(self) -> tuple[dict[str, Any], dict[str, Tensor], list[dict[str, Any]]] | None:
        """State and tensors of the checkpoint, and the records, cut to where it was made; None: no checkpoint yet."""
        path = self.path / RECORDS
        try:
            description, tensors = _tensors.read(self.path / _CHECKPOINT, "checkpoint")
        except FileNotFoundError:
            path.unlink(missing_ok=True)
            return None
        try:
            checkpoint = checked(description, Checkpoint)
        except ValueError as error:
            raise FileError(f"{self.path / _CHECKPOINT}: damaged, or not a file of fastlin: {error}") from None
        if checkpoint.config != _digest(self._config):
            raise FileError(f"{self.path / _CHECKPOINT}: is of a run with another configuration than {RUN}")
        data = _records_up_to(self.path, checkpoint.records)
        if path.exists():
            os.truncate(path, len(data))
        self._hash = hashlib.sha256(data)
        if data:
            self._file = path.open("ab")
        return checkpoint.state, tensors, [json.loads(line) for line in data.splitlines()]

    def finish(self, result: Mapping[str, Any]) -> Result:
        """Write the result of a run that has ended, whose checkpoint is not needed any more."""
        made = Result(**result, records=self._position())
        write_json(self.path / _RESULT, to_builtins(made))
        self._forget()
        return made

    def _forget(self) -> None:
        """Remove the checkpoint."""
        (self.path / _CHECKPOINT).unlink(missing_ok=True)

    def close(self) -> None:
        """Let others in."""
        try:
            if self._file is not None:
                self._file.close()
        finally:
            self._lock.release()

    def _position(self) -> Position:
        """Where the records are, on disk, and what they say up to there."""
        size = 0
        if self._file is not None:
            os.fsync(self._file.fileno())
            size = self._file.tell()
        return Position(size, self._hash.hexdigest())


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
        raise FolderInUseError(
            f"{path}: another process is training in this folder; wants a folder for each run"
        ) from None
    return lock


def _no_folder(path: Path) -> FileError:
    place = path if path.exists() else next(parent for parent in path.parents if parent.exists())
    return FileError(f"{place}: is a file, wants a folder")


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
