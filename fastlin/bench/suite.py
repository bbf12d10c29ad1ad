"""What `fastlin bench` measures: the cases of its default run, or those that a user asks for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastlin.bench import contenders
from fastlin.bench.cases import Shape

TABLE, SCALING = "table", "scaling"


@dataclass(frozen=True)
class Spec:
    """One case: an op at a shape, in a precision, on some threads, and who takes part.

    Attributes
    ----------
    part : str
        "table", or "scaling": a point of a curve.
    axis : str or None
        Of the curve: "B", "n", "d", "L", "R" or "threads".
    """

    part: str
    shape: Shape
    dtype: str
    threads: int
    labels: tuple[str, ...]
    axis: str | None = None

    @property
    def name(self) -> str:
        """The case without its contenders, as tables and comparisons call it."""
        shape = self.shape
        sizes = f"B={shape.B} n={shape.n} m={shape.m}"
        sizes += f" L={shape.L}" * ("stack" in shape.op) + f" R={shape.R}" * (shape.R is not None)
        sizes += f" K={shape.K}" * (shape.K != Shape.K) + f" t={shape.t}" * (shape.t != Shape.t)
        return f"{shape.op} {sizes} {self.dtype} threads={self.threads}"

    def small(self) -> Spec:
        """The same with few sequences and trials: to see that it runs."""
        R = self.shape.R
        return replace(self, shape=replace(self.shape, B=min(self.shape.B, 64), R=None if R is None else min(R, 4)))

    @property
    def place(self) -> int:
        """Where on its axis the point is."""
        if self.axis == "threads":
            return self.threads
        if self.axis == "d":
            return self.shape.m - 1
        return int(getattr(self.shape, self.axis or "n") or 1)


_LAYER = Shape("prompt_loss")
_STACK = Shape("stack_loss")
_DEFAULT: tuple[tuple[Shape, str, str], ...] = (
    (_LAYER, "float32", "fastlin reference eager eager-gram compile compile-gram numpy jax jax-gram"),
    (replace(_LAYER, n=200), "float32", "fastlin eager eager-gram"),
    (replace(_LAYER, R=50), "float32", "fastlin vmap-gram jax-gram"),
    (_LAYER, "float64", "fastlin eager eager-gram"),
    (_STACK, "float32", "fastlin eager eager-gram compile-gram jax-gram"),
    (Shape("gram_loss"), "float32", "fastlin eager-gram"),
    (Shape("gram_stack_loss"), "float32", "fastlin eager-gram"),
    (Shape("predict"), "float32", "fastlin reference eager eager-gram numpy"),
    (Shape("stack_predict"), "float32", "fastlin eager eager-gram"),
    (Shape("gram"), "float32", "fastlin eager-gram numpy"),
    (Shape("sampled_loss"), "float32", "fastlin eager eager-gram"),
    (Shape("sampled_loss", R=50), "float32", "fastlin vmap-gram jax-gram"),
    (Shape("sampled_stack_loss"), "float32", "fastlin eager eager-gram"),
)
_FEW = "fastlin eager eager-gram"
_SMALL = 2048
_SCALING: tuple[tuple[str, Shape, Sequence[int], str], ...] = (
    ("B", _LAYER, (8, 64, 512, 4096, 32768), _FEW),
    ("n", _LAYER, (5, 20, 80, 320), _FEW),
    ("d", replace(_LAYER, B=_SMALL), (2, 5, 10, 20, 40, 80), _FEW),
    ("L", replace(_STACK, B=512), (2, 4, 8), _FEW),
    ("R", replace(_LAYER, B=_SMALL), (1, 4, 16, 64), "fastlin vmap-gram"),
)


def default(threads: int) -> list[Spec]:
    """The default run: a table over all ops, and curves over every size and over threads."""
    table = [Spec(TABLE, shape, dtype, threads, tuple(labels.split())) for shape, dtype, labels in _DEFAULT]
    curves = [
        Spec(SCALING, _sized(shape, axis, place), "float32", threads, tuple(labels.split()), axis)
        for axis, shape, places, labels in _SCALING
        for place in places
    ]
    some = sorted({threads, *(1 << i for i in range(threads.bit_length()) if 1 << i <= threads)})
    curves += [Spec(SCALING, replace(_LAYER, R=50), "float32", count, ("fastlin",), "threads") for count in some]
    return table + curves


def chosen(
    ops: Sequence[str],
    sizes: dict[str, Sequence[Any]],
    dtypes: Sequence[str],
    threads: Sequence[int],
    backends: Sequence[str],
    peers: Sequence[str] | None,
) -> list[Spec]:
    """Every combination of what a user asks for; L counts for stacks only, so that other ops take its first.

    Parameters
    ----------
    ops, dtypes, threads, backends
    sizes : dict
        Values of fields of `Shape` by their name.
    peers : sequence of str or None
        Labels of `contenders`; None: all that the op has.
    """
    specs = []
    for op, dtype, count in itertools.product(ops, dtypes, threads):
        own = {name: values if name != "L" or "stack" in op else values[:1] for name, values in sizes.items()}
        for values in itertools.product(*own.values()):
            shape = Shape(op, **dict(zip(own, values, strict=True)))
            labels = contenders.labels(shape, backends)
            if peers is not None:
                labels = [label for label in labels if contenders.kind(label) == "fastlin" or label in peers]
            specs.append(Spec(TABLE, shape, dtype, count, tuple(labels)))
    return specs


def _sized(shape: Shape, axis: str, place: int) -> Shape:
    sizes: dict[str, Any] = {"m": place + 1} if axis == "d" else {axis: place}
    return replace(shape, **sizes)
