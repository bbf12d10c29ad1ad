"""Atomic writes, and JSON files with a checksum and a schema.

The schema of a file is a `msgspec.Struct` beside the code that writes it. A reader gets an object of that class, or a
`FileError` that names the file, the field, what it got and what it wants.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import filelock
import msgspec

_SEAL = "sha256"
T = TypeVar("T")


class FileError(ValueError):
    """A wrong or damaged file; the message names it and its fault. Nothing was changed."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` once it is on disk, or remove it after an error."""
    # The token: two machines that share the folder may have processes of the same id.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}-{secrets.token_hex(4)}{path.suffix}")
    try:
        with naming(path):
            yield temporary
            # Contents first: a rename that reaches the disk before them leaves an empty file after a power cut.
            to_disk(temporary)
            temporary.replace(path)
            to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file name to an OSError without one, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file, with a checksum of its contents."""
    # The checksum is that of the contents after a round trip: JSON turns integer keys into texts, which sort otherwise.
    contents: dict[str, Any] = json.loads(json.dumps(value))
    sealed = {**contents, _SEAL: digest(contents)}
    write_text(path, json.dumps(sealed, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write text files, by name, into a folder, which is created if needed; returns their paths."""
    create_folder(folder)
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def create_folder(path: Path) -> Path:
    """The folder itself, created with its parents where it does not exist."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise no_folder(path) from None
    return path


def locked(folder: Path, busy: FileError) -> filelock.AcquireReturnProxy[Any]:
    """Create a folder and lock it; the system releases the lock of a process that dies. `busy` is raised at once."""
    path = create_folder(folder) / ".lock"
    try:
        return filelock.FileLock(path, timeout=0).acquire()
    except filelock.Timeout:
        if not path.exists():
            raise OSError(errno.EACCES, "cannot write into the folder", str(folder)) from None
        raise busy from None


def no_folder(path: Path) -> FileError:
    """The error for a path where a file stands in the way."""
    file = path if path.exists() else next(parent for parent in path.parents if parent.exists())
    return FileError(f"{file}: is a file, wants a folder")


def read_json(path: Path, schema: type[T]) -> T:
    """Read a file of `write_json` as a `msgspec.Struct`, or as any table with `dict`.

    A file without a checksum is accepted. Raises a FileError where the file is no JSON table, its checksum is wrong or
    it does not fit the schema.
    """
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(contents, dict) and contents.pop(_SEAL, None) not in (None, digest(contents)):
            raise ValueError("its checksum is not that of its contents")
        return checked(contents, schema)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: damaged, or not a file of fastlin: {error}") from None


def checked(value: Any, schema: type[T]) -> T:
    """A JSON value as an object of a schema, or a ValueError that names the field, what it got and what it wants."""
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").lstrip(".")
        mismatch = re.fullmatch(r"Expected `(.*)`, got `(.*)`", what)
        message = f"got {mismatch[2]}, wants {mismatch[1]}" if mismatch else what[0].lower() + what[1:]
        raise ValueError(f"{field}: {message}" if field else message) from None


def check_kind(path: Path, contents: Any, kind: str, version: int) -> None:
    """Raise unless a file has the wanted `kind` and `version`."""
    if contents.kind != kind or contents.version != version:
        raise FileError(f"{path}: is a {contents.kind!r} of version {contents.version}, wants a {kind!r} of {version}")


def digest(value: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON value, for any order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk, so that they survive a power cut."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
