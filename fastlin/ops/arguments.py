"""The arguments of the registered ops.

The registered ops are `predict`, `predict_bwd`, `loss` and `gram`. Each takes the nine tensors of `LETTERS`, its own
extra arguments (`EXTRA`) and `Options`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fastlin.backends.draw import Draw
from fastlin.backends.problem import LETTERS, Options

PLACE = {letter: place for place, letter in enumerate(LETTERS)}
PARAMETERS = "pACWvh"
EXTRA: dict[str, dict[str, str]] = {
    "predict": {},
    "predict_bwd": {"gy": "Tensor", "wants": "str"},
    "loss": {"y": "Tensor", "weight": "Tensor?", "wants": "str"},
    "gram": {},
}
"""What each registered op takes between the tensors and the options, with its type in the schema."""

Tensors = Sequence[Tensor | None]
Given = tuple[Tensor | None, ...]
"""The tensors of a public op, in the order of `LETTERS`."""
Plans = dict[tuple[Any, ...], Any]
"""The plans (`call.Plan`) of a signature."""


class Arguments(NamedTuple):
    tensors: Tensors  # in the order of `LETTERS`; None where absent
    options: Options
    y: Tensor | None = None  # targets (B,)
    weight: Tensor | None = None  # of the tasks (K,)
    gy: Tensor | None = None  # gradient of the predictions, (R, B) or (B,)
    wants: str = ""  # letters of the gradients among the results, in order
    draw: Draw | None = None  # draws the sequences
    plans: Plans | None = None  # where calls of this signature keep their plans


def parse(name: str, flat: Sequence[Any]) -> Arguments:
    """Group the flat arguments of a registered op."""
    start, stop = len(LETTERS), len(LETTERS) + len(EXTRA[name])
    return Arguments(flat[:start], Options(*flat[stop:]), **dict(zip(EXTRA[name], flat[start:stop], strict=True)))


def flatten(name: str, args: Arguments) -> tuple[Any, ...]:
    """The inverse of `parse`."""
    return (*args.tensors, *[getattr(args, extra) for extra in EXTRA[name]], *args.options)


def trials_of(tensors: Tensors) -> int | None:
    """R, or None for a call without trials."""
    A, W = tensors[PLACE["A"]], tensors[PLACE["W"]]
    if A is not None:
        return A.shape[0] if A.ndim > 3 else None
    assert W is not None
    return W.shape[0] if W.ndim > 2 else None
