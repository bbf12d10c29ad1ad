"""What a planted fault is: a small bug that the tests should find (`dev.faults`, `dev.kernel_faults`).

A fault gives a wrong number, loses an option or a file, or gives a wrong error. It is no crash at import, no syntax
error, and not equivalent to the original. `old` must occur exactly once in its file.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One planted bug.

    Attributes
    ----------
    name, layer, kind : str
        `layer` is one of `LAYERS`, `kind` one of `KINDS`.
    file : str
        Path from the root of the repository.
    near : str
        Test folders or files that cover this part, separated by spaces. They run first.
    old, new : str
        The text that is replaced, and the bug.
    """

    name: str
    layer: str
    kind: str
    file: str
    near: str
    old: str
    new: str


# fmt: off
LAYERS = (
    "ops", "eager", "compiled", "core", "cpu", "cuda", "triton", "data",
    "theory", "forgetting", "models", "training", "figures", "plots", "cli", "files",
)
KINDS = (
    "wrong sign", "off by one", "missing mask", "wrong task", "lost tail", "swapped transposes", "stale cache",
    "wrong scale", "dropped gradient", "ignored option", "unflushed file", "wrong degree of freedom",
    "reused counter", "lost check",
)
