"""Correctness before time: every contender's loss and gradients against `fastlin.reference` in float64.

A tensor's error is its largest difference over the largest true value. It may be

    2 (error of fastlin's eager backend in the contender's dtype + band),    band = eps (sqrt((n + t) m) + sqrt(B)):

rounding errors that walk at random over the products of a sequence and over the sequences of a batch. The band is there
because eager's own error may be small by luck.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from fastlin.bench import peers
from fastlin.bench.cases import Case, CaseShape

AFFORDABLE_SCORES = 3 * 8192 * 52**2
"""Attention scores of width 11 that the reference may form in a check: three layers at B = 8192, n = 50, in seconds."""


class WrongResultError(RuntimeError):
    """A contender's loss or gradient is off; the message says which, by how much, and what is allowed."""


def affordable_batch(shape: CaseShape, scores: int) -> int:
    """Number of sequences for which the reference forms that many scores."""
    of_one = (shape.R or 1) * shape.layers * (shape.n + shape.t + 1) ** 2 * max(shape.m / 11, 1.0)
    return max(int(scores / of_one), 1)


@dataclass(frozen=True)
class Gate:
    """The truth about a case, in float64: the loss, then the gradients; and how far eager is off, by dtype."""

    case: Case
    truth: tuple[Tensor, ...]
    errors_of_eager: dict[torch.dtype, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, scores: int = AFFORDABLE_SCORES) -> Self:
        """Ask the reference."""
        # Where it would take minutes it sees the first sequences only, and eager in float64, which must agree with it
        # there, tells the truth about all.
        shape, double = case.shape, case.to(torch.float64)
        count = affordable_batch(shape, scores)
        eager, reference = peers.op(shape.op, "eager"), peers.literal(shape.op)
        if count >= shape.B:
            return cls(case, _detached(double.step(reference)()))
        head = double.head(count)
        truth = cls(head, _detached(head.step(reference)()))
        truth._compare("eager in float64", head.step(eager)(), [2 * band(head.shape, torch.float64)] * len(truth.truth))
        return cls(case, _detached(double.step(eager)()))

    def check(self, name: str, found: Sequence[Tensor]) -> dict[str, float]:
        """Errors of a contender's results by tensor, or WrongResultError."""
        dtype = found[0].dtype
        allowed = [2 * (error + band(self.case.shape, dtype)) for error in self._eager(dtype)]
        return self._compare(name, found, allowed)

    def _compare(self, name: str, found: Sequence[Tensor], allowed: Sequence[float]) -> dict[str, float]:
        errors = dict(zip(self.case.results, self._errors(found), strict=True))
        for (tensor, error), limit in zip(errors.items(), allowed, strict=True):
            if not error <= limit:  # a NaN is not
                raise WrongResultError(f"{name}: {tensor} is off by {error:.1e} of its largest; {limit:.1e} is allowed")
        return errors

    def _errors(self, found: Sequence[Tensor]) -> list[float]:
        return [relative_error(x, true) for x, true in zip(found, self.truth, strict=True)]

    def _eager(self, dtype: torch.dtype) -> list[float]:
        if dtype not in self.errors_of_eager:
            eager = self.case.to(dtype).step(peers.op(self.case.shape.op, "eager"))
            self.errors_of_eager[dtype] = self._errors(eager())
        return self.errors_of_eager[dtype]


def band(shape: CaseShape, dtype: torch.dtype) -> float:
    """Relative rounding error of sums of this size, as random walks."""
    return torch.finfo(dtype).eps * (math.sqrt((shape.n + shape.t) * shape.m) + math.sqrt(shape.B))


def _detached(results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Results without the graph, which holds a copy of the data."""
    return tuple(x.detach() for x in results)


def relative_error(found: Tensor, true: Tensor) -> float:
    """Largest difference over the largest true value; infinite for another shape."""
    if found.shape != true.shape:
        return float("inf")
    found, true = found.detach().to(torch.float64), true.detach()
    return float((found - true).abs().max() / true.abs().max().clamp_min(torch.finfo(torch.float64).tiny))
