"""The folder of a run: what it is, its records, its checkpoint and its result.

    run.json                 the resolved configuration, versions, backend, machine, seed
    records.jsonl            a line for each record; no clock in it, so that a resumed run has the same bytes
    checkpoint.safetensors   parameters, optimiser and where in the records they belong
    model.safetensors, result.json   at the end

One process at a time: a lock that the system releases when the process dies.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock
from torch import Tensor

from fastlin import _tensors
from fastlin._files import replacing
from fastlin._tensors import FileError

_RUN, _RECORDS, _CHECKPOINT, RESULT, MODEL = (
    "run.json",
    "records.jsonl",
    "checkpoint.safetensors",
    "result.json",
    "model.safetensors",
)
_LOCK = ".lock"
_KIND = "fastlin run"


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
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = filelock.FileLock(path / _LOCK, timeout=0)
            self._lock.acquire()
        except filelock.Timeout:
            raise FileError(
                f"{path}: another process is training in this folder; wants a folder for each run"
            ) from None
        except (FileExistsError, NotADirectoryError):
            raise FileError(f"{path}: is a file, wants a folder") from None
        try:
            self._take(config, about, resume)
        except BaseException:
            self.close()
            raise

    def _take(self, config: Mapping[str, Any], about: Mapping[str, Any], resume: bool) -> None:
        """Check that the folder may be used, and leave the run's description in it."""
        held = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith("."))
        given = json.loads(json.dumps(config))
        if _RUN in held:
            if not resume:
                raise FileError(f"{self.path}: holds a run already; wants another folder, or resume=True to go on")
            self._compare(given)
        elif held:
            raise FileError(f"{self.path}: holds {held[0]} and no {_RUN}; wants a new folder, or one that holds a run")
        else:
            self.write(_RUN, {"kind": _KIND, "version": _tensors.VERSION, "config": given, **about})

    def _compare(self, given: dict[str, Any]) -> None:
        """Raise when the folder's run is not the one that was asked for."""
        path = self.path / _RUN
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            kind, version, held = run["kind"], run["version"], dict(run["config"])
        except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise FileError(f"{path}: damaged, or not a file of fastlin: {error}") from None
        if kind != _KIND or version != _tensors.VERSION:
            raise FileError(f"{path}: is a {kind!r} of version {version}, wants a {_KIND!r} of {_tensors.VERSION}")
        different = [name for name in {**held, **given} if held.get(name) != given.get(name)]
        if different:
            name = different[0]
            raise FileError(
                f"{self.path}: holds a run with {name} = {held.get(name)!r}, this one has {given.get(name)!r}; "
                "wants the same configuration to go on, or another folder"
            )

    def about(self) -> dict[str, Any]:
        """What run.json says."""
        run: dict[str, Any] = json.loads((self.path / _RUN).read_text(encoding="utf-8"))
        return run

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file, whole or not at all."""
        with replacing(self.path / name) as temporary:
            temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

    def result(self) -> dict[str, Any] | None:
        """The result of a run that has ended, else None."""
        path = self.path / RESULT
        if not path.exists():
            return None
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, UnicodeDecodeError) as error:
            raise FileError(f"{path}: damaged, or not a file of fastlin: {error}") from None
        return found

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record."""
        if self._file is None:
            self._file = (self.path / _RECORDS).open("ab")
        line = (json.dumps(record) + "\n").encode()
        self._file.write(line)
        self._file.flush()
        self._hash.update(line)

    def save(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Replace the checkpoint."""
        size = 0
        if self._file is not None:
            os.fsync(self._file.fileno())
            size = self._file.tell()
        records = {"bytes": size, "sha256": self._hash.hexdigest()}
        _tensors.write(self.path / _CHECKPOINT, "checkpoint", {"records": records, "state": state}, tensors)

    def restore(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The checkpoint, with the records cut to where it was made; None when there is none yet."""
        path = self.path / _RECORDS
        try:
            description, tensors = _tensors.read(self.path / _CHECKPOINT, "checkpoint")
        except FileNotFoundError:
            path.unlink(missing_ok=True)
            return None
        size = description["records"]["bytes"]
        data = path.read_bytes()[:size] if path.exists() else b""
        digest = hashlib.sha256(data)
        if len(data) != size or digest.hexdigest() != description["records"]["sha256"]:
            raise FileError(f"{path}: damaged: its first {size} bytes are not those of the checkpoint")
        if path.exists():
            os.truncate(path, size)
        self._hash = digest
        if size:
            self._file = path.open("ab")
        return description["state"], tensors

    def records(self) -> list[dict[str, Any]]:
        """Every record so far."""
        path = self.path / _RECORDS
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def forget(self) -> None:
        """Remove the checkpoint of a run that has ended."""
        (self.path / _CHECKPOINT).unlink(missing_ok=True)

    def close(self) -> None:
        """Let others in."""
        if self._file is not None:
            self._file.close()
        self._lock.release()
