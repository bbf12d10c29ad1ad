"""Nested containers of tensors, numbers and texts, such as optimiser states, as a JSON tree plus tensors: no pickle."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_PLAIN = (bool, int, float, str, type(None))


def flatten(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON tree of a value; its tensors are added to `tensors` under names that start with `where`."""
    if isinstance(value, Tensor):
        tensors[where] = value
        return {"tensor": where}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        return {"dict": [[key, flatten(entry, f"{where}.{key}", tensors)] for key, entry in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [flatten(entry, f"{where}.{i}", tensors) for i, entry in enumerate(value)]}
    raise TypeError(f"{where}: a checkpoint cannot hold a {type(value).__name__}; wants tensors, numbers and texts")


def restore(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `flatten`; KeyError, TypeError or ValueError for other trees."""
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: restore(entry, tensors) for key, entry in value}
    entries = [restore(entry, tensors) for entry in value]
    return entries if kind == "list" else tuple(entries)
