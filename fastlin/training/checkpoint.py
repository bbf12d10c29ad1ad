"""Any nest of tensors, numbers and texts as a JSON tree beside its tensors, and back: optimisers, without pickle."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_PLAIN = (bool, int, float, str, type(None))


def flatten(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """A tree that JSON holds; tensors go into `tensors` under names that start with `where`.

    Raises
    ------
    TypeError
        When something is in it that is neither a container nor a tensor, number, text or None.
    """
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
    """The inverse of `flatten`.

    Raises
    ------
    KeyError, TypeError or ValueError
        When the tree is not one that `flatten` makes.
    """
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: restore(entry, tensors) for key, entry in value}
    entries = [restore(entry, tensors) for entry in value]
    return entries if kind == "list" else tuple(entries)
