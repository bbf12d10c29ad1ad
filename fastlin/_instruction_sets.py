"""Which instruction set the compiled kernels run on: the best that the machine has, or one by name."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from fastlin import _extension

selected = ""
"""The instruction set that `using` chose; the extension takes an empty name for the best one."""


def instruction_sets() -> tuple[str, ...]:
    """Names of the instruction sets that are built in and run on this machine, best first."""
    return tuple(label for label, runs_here in _extension.loaded().instruction_sets() if runs_here)


def instruction_set() -> str:
    return selected or _best()


@contextmanager
def using(label: str) -> Iterator[None]:
    """Run the kernels on an instruction set by name, in this process; ValueError when the machine does not have it."""
    global selected
    if label not in instruction_sets():
        raise ValueError(f"instruction set {label!r} does not run here; wants one of {', '.join(instruction_sets())}")
    before, selected = selected, label
    try:
        yield
    finally:
        selected = before


@functools.cache
def _best() -> str:
    return instruction_sets()[0]
