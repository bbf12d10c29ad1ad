"""Files that are either whole or not there, and JSON files that are checked against a schema.

The schema of a file is a `msgspec.Struct` beside the code that writes it: names and types of its fields. A reader gets
an object of that class, or a `FileError` that names the file, the field, what it got and what it wants.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

_SEAL = "sha256"
T = TypeVar("T")


class FileError(ValueError):
    """A file that is not what it should be; the message names it and says what is wrong. Nothing was changed."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; on disk and renamed to it at the end, or removed after an error."""
    # Processes of two machines that share the folder may have the same id.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}-{secrets.token_hex(4)}{path.suffix}")
    try:
        with naming(path):
            yield temporary
            # A rename that reaches the disk before the contents would leave an empty file after a power cut.
            to_disk(temporary)
            temporary.replace(path)
            to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an error of the system the name of the file where it has none: a full disk does not say whose."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file of JSON, with a checksum of what it says."""
    # As it will be read: JSON has no numbers for names, which would sort in another order.
    read: dict[str, Any] = json.loads(json.dumps(value))
    sealed = {**read, _SEAL: _digest(read)}
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(sealed, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path, schema: type[T]) -> T:
    """What a JSON file of `write_json` says, as an object of a schema; files without a checksum are taken as they are.

    Parameters
    ----------
    path : Path
    schema : type
        A `msgspec.Struct`; `dict` takes any table.

    Raises
    ------
    FileError
        When it is not a table in JSON, its checksum is another, or it does not fit the schema.
    FileNotFoundError
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.pop(_SEAL, None) not in (None, _digest(found)):
            raise ValueError("its checksum is not that of its contents")
        return checked(found, schema)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: damaged, or not a file of fastlin: {error}") from None


def checked(value: Any, schema: type[T]) -> T:
    """A value of JSON as an object of a schema, or a ValueError that names the field, what it got and what it wants."""
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        where = place.rstrip("`").lstrip(".")
        mismatch = re.fullmatch(r"Expected `(.*)`, got `(.*)`", what)
        said = f"got {mismatch[2]}, wants {mismatch[1]}" if mismatch else what[0].lower() + what[1:]
        raise ValueError(f"{where}: {said}" if where else said) from None


def check_kind(path: Path, found: Any, kind: str, version: int) -> None:
    """Raise unless a file's fields `kind` and `version` are those that this version reads."""
    if found.kind != kind or found.version != version:
        raise FileError(f"{path}: is a {found.kind!r} of version {found.version}, wants a {kind!r} of {version}")


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def to_disk(path: Path) -> None:
    """Have a file, or the names in a folder, survive a power cut."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
