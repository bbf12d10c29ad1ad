"""What is in a folder."""

from __future__ import annotations


def contents(folder):
    """The bytes of each file, at whatever depth."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def visible(folder):
    """Names, without those that are hidden."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
