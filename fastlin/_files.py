"""Files that are either whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SEAL = "sha256"


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


def unsealed(value: dict[str, Any]) -> dict[str, Any]:
    """What `write_json` had been given, of what was read; files without a checksum are taken as they are.

    Raises
    ------
    ValueError
        When it is not what was written.
    """
    rest = {name: entry for name, entry in value.items() if name != _SEAL}
    if _SEAL in value and value[_SEAL] != _digest(rest):
        raise ValueError("its checksum is not that of its contents")
    return rest


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def to_disk(path: Path) -> None:
    """Have a file, or the names in a folder, survive a power cut."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
