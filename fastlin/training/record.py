"""The folder of a run.

    run.json                 the resolved configuration, versions, backend, machine, seed
    records.jsonl            a line for each record; no clock in it, so that a resumed run has the same bytes
    checkpoint.safetensors   parameters, optimiser and their position in the records
    model.safetensors, result.json   at the end

One process at a time holds the folder's lock, which the system releases when the process dies.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, to_builtins
from torch import Tensor

from fastlin import _tensors
from fastlin._files import FileError, check_kind, checked, digest, locked, naming, no_folder, read_json, write_json

MODEL, RECORDS, RUN = "model.safetensors", "records.jsonl", "run.json"
RESULT, _CHECKPOINT = "result.json", "checkpoint.safetensors"
_KIND = "fastlin run"
# Temporary files of `_files.replacing` that a killed process left.
_LEFTOVER = re.compile(r"\.(run|checkpoint|result|model)\.\d+(-[0-9a-f]+)?\.(json|safetensors)")

Size = Annotated[int, Meta(ge=0)]


class FolderInUseError(FileError):
    """Another process is training in the folder."""


class Position(Struct, frozen=True):
    """A position in records.jsonl: the bytes up to it, and their checksum."""

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
    step: str = ""  # "lean", or "autograd" and why


class Result(Struct, frozen=True):
    """result.json; None in place of a number that is not finite."""

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
    """The description in checkpoint.safetensors."""

    config: str  # digest of the configuration
    records: Position
    state: dict[str, Any]


def ended(path: Path) -> tuple[RunFile, Result, list[dict[str, Any]]]:
    """Description, result and records of a run that has ended, without a lock; else a FileError."""
    if not holds_a_run(path):
        raise FileError(f"{path}: holds no run, wants the folder of one that has ended")
    if not (path / RESULT).exists():
        raise FileError(f"{path}: holds a run that has not ended; `train` with resume=True (--resume) resumes it")
    return _run_file(path), *_result(path)


def holds_a_run(path: Path) -> bool:
    """Whether a folder holds a run; raises when it holds other files."""
    try:
        names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    except FileNotFoundError:
        names = []
    except NotADirectoryError:
        raise no_folder(path) from None
    if names and RUN not in names:
        raise FileError(f"{path}: holds {names[0]} and no {RUN}; wants a new folder, or one that holds a run")
    return bool(names)


def _run_file(path: Path) -> RunFile:
    run = read_json(path / RUN, RunFile)
    check_kind(path / RUN, run, _KIND, _tensors.VERSION)
    return run


def _result(path: Path) -> tuple[Result, list[dict[str, Any]]]:
    result = read_json(path / RESULT, Result)
    trials = len(result.risk)
    if not result.best < trials == len(result.risk_error) == len(result.tail) == len(result.typical):
        raise FileError(f"{path / RESULT}: damaged, or not a file of fastlin: its numbers of trials disagree")
    data = _records_up_to(path, result.records)
    return result, [json.loads(line) for line in data.splitlines()]


def _records_up_to(path: Path, position: Position) -> bytes:
    file = path / RECORDS
    data = file.read_bytes()[: position.bytes] if file.exists() else b""
    if len(data) != position.bytes or hashlib.sha256(data).hexdigest() != position.sha256:
        raise FileError(f"{file}: damaged: its first {position.bytes} bytes are not what the run had written")
    return data


def check_folder(path: Path, config: Mapping[str, Any], resume: bool) -> bool:
    """Whether a folder holds a run; raises unless it is empty, or with `resume` holds a run of the same config."""
    if not holds_a_run(path):
        return False
    if not resume:
        raise FileError(f"{path}: holds a run already; wants another folder, or resume=True (--resume) to resume it")
    held = _run_file(path).config
    # Runs of fastlin 0.1, whose draws are version 1, do not have the entry.
    theirs, own = (described.get("draws", 1) for described in (held, config))
    if theirs != own:
        raise FileError(
            f"{path}: holds a run on version {theirs} of the draws, this fastlin draws version {own}; "
            "wants a new folder (fl.load reads a run of any version that has ended)"
        )
    difference = first_difference(held, dict(config))
    if difference is not None:
        name, theirs, own = difference
        raise FileError(
            f"{path}: holds a run with {name} = {theirs!r}, this one has {own!r}; "
            "wants the same configuration to resume it, or another folder"
        )
    return True


class Folder:
    """The folder of a run, locked; created when missing.

    It must be empty, or with `resume` hold a run of the same `config`. `about` has the versions and the machine; it is
    written once and never compared.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], about: Mapping[str, Any], resume: bool) -> None:
        self.path = path
        self._file: Any = None
        self._hash = hashlib.sha256()
        self._config = dict(config)
        holds_a_run(path)
        busy = f"{path}: another process is training in this folder; wants a folder for each run"
        self._lock = locked(path, FolderInUseError(busy)).lock
        try:
            if not check_folder(path, self._config, resume):
                run = {"kind": _KIND, "version": _tensors.VERSION, "config": self._config, **about}
                write_json(path / RUN, run)
            for entry in path.iterdir():
                if _LEFTOVER.fullmatch(entry.name):
                    entry.unlink()
        except BaseException:
            self.close()
            raise

    def run_file(self) -> RunFile:
        """The contents of run.json."""
        return _run_file(self.path)

    def result(self) -> tuple[Result, list[dict[str, Any]]] | None:
        """Result and records of a run that has ended, else None."""
        return _result(self.path) if (self.path / RESULT).exists() else None

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
        description = Checkpoint(digest(self._config), self._position(), dict(state))
        _tensors.write(self.path / _CHECKPOINT, "checkpoint", to_builtins(description), tensors)

    def restore(self) -> tuple[dict[str, Any], dict[str, Tensor], list[dict[str, Any]]] | None:
        """State and tensors of the checkpoint, and the records, truncated to it; None without a checkpoint."""
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
        if checkpoint.config != digest(self._config):
            raise FileError(f"{self.path / _CHECKPOINT}: is of a run with another configuration than {RUN}")
        data = _records_up_to(self.path, checkpoint.records)
        if path.exists():
            os.truncate(path, len(data))
        self._hash = hashlib.sha256(data)
        if data:
            self._file = path.open("ab")
        return checkpoint.state, tensors, [json.loads(line) for line in data.splitlines()]

    def finish(self, result: Mapping[str, Any]) -> Result:
        """Write the result of a run that has ended, and remove its checkpoint."""
        written = Result(**result, records=self._position())
        write_json(self.path / RESULT, to_builtins(written))
        self._forget()
        return written

    def _forget(self) -> None:
        (self.path / _CHECKPOINT).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock."""
        try:
            if self._file is not None:
                self._file.close()
        finally:
            self._lock.release()

    def _position(self) -> Position:
        size = 0
        if self._file is not None:
            os.fsync(self._file.fileno())
            size = self._file.tell()
        return Position(size, self._hash.hexdigest())


def first_difference(a: Any, b: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Dotted name of the first entry in which two trees of JSON differ, and both values; None for equal trees."""
    if isinstance(a, dict) and isinstance(b, dict):
        entries = (first_difference(a.get(key), b.get(key), f"{name}.{key}" if name else key) for key in {**a, **b})
        return next((difference for difference in entries if difference is not None), None)
    return None if a == b else (name, a, b)
