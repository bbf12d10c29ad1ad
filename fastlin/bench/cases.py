"""The problems that are timed: random data and parameters of one shape, and what a call must do at least.

Multiply-adds and bytes are those of the best algorithm known for the op, whatever a contender does: a form that does
more work, or passes over the data more often, shows as a lower rate.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from fastlin import validation

Loss = Callable[..., Tensor]
"""A loss () or (R,) of the arguments of an op; of an op without loss, its result."""

Step = Callable[[], tuple[Tensor, ...]]
"""What is timed: returns the loss and the gradients of all parameters, or the result of an op that has no loss."""

ARGUMENTS: dict[str, tuple[str, ...]] = {
    **{name: (*op.data, *op.parameters) for name, op in validation.OPS.items() if op.data},
    "gram": ("z", "p", "task"),
}
"""Arguments of the ops that are given their data, in order."""

SAMPLED = {"sampled_loss": "prompt_loss", "sampled_stack_loss": "stack_loss"}
"""The ops that draw their data, each with the one that has its parameters."""

OPS = (*ARGUMENTS, *SAMPLED)


@dataclass(frozen=True)
class CaseShape:
    """Sizes of a problem, under the letters of `fastlin.ops.api`; R = None is no trial dimension."""

    op: str = "prompt_loss"
    B: int = 8192
    n: int = 50
    m: int = 11
    K: int = 2
    t: int = 1
    R: int | None = None
    L: int = 3

    @property
    def layers(self) -> int:
        return self.L if "stack" in self.op else 1


@dataclass(frozen=True)
class Case:
    """One problem: its data and parameters by name."""

    shape: CaseShape
    data: dict[str, Tensor]  # of z (B, n, m) or G (B, m, m), q (B, m), y (B,) and task (B,)
    parameters: dict[str, Tensor]  # require grad where the op has a loss

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        values = {**self.data, **self.parameters}
        return tuple(values[name] for name in ARGUMENTS[self.shape.op])

    @property
    def results(self) -> tuple[str, ...]:
        if "y" not in self.data:
            return ("result",)
        return ("loss", *(f"d{name}" for name in self.parameters))

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.data.values())).dtype

    def to(self, dtype: torch.dtype) -> Self:
        data = {name: x.to(dtype) if x.is_floating_point() else x for name, x in self.data.items()}
        parameters = {name: x.detach().to(dtype).requires_grad_(x.requires_grad) for name, x in self.parameters.items()}
        return replace(self, data=data, parameters=parameters)

    def head(self, count: int) -> Self:
        data = {name: x[:count] for name, x in self.data.items()}
        return replace(self, shape=replace(self.shape, B=min(count, self.shape.B)), data=data)

    def step(self, loss: Loss) -> Step:
        """The loss, then torch.autograd.grad of it, summed over trials, in all parameters; else the result."""
        arguments, leaves = self.arguments, tuple(self.parameters.values())
        has_loss, has_trials = "y" in self.data, self.shape.R is not None

        def call() -> tuple[Tensor, ...]:
            value = loss(*arguments)
            if not has_loss:
                return (value,)
            return (value, *torch.autograd.grad(value.sum() if has_trials else value, leaves))

        return call


def make(shape: CaseShape, seed: int = 0, device: torch.device | str = "cpu") -> Case:
    """A random float32 problem whose predictions are of order one, the same numbers on every device."""
    # G is about (n + t) I, so W has entries of order 1 / ((n + t) m), and A and C are such that A G C is about half as
    # large as I: through more, a stack would magnify rounding errors with every layer. Beyond three layers it is
    # smaller in proportion, so that G grows by the same factor through any stack.
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int, size: float = 1.0) -> Tensor:
        return torch.randn(*sizes, generator=generator).mul_(size).to(device)

    B, n, m, K, L = shape.B, shape.n, shape.m, shape.K, shape.L
    names = ARGUMENTS[shape.op]
    task = torch.randint(0, K, (B,), generator=generator).to(device)
    data = {"z": normal(B, n, m), "q": normal(B, m), "y": normal(B), "task": task}
    if "G" in names:
        G = data["z"].mT @ data["z"]
        data["G"] = (G + G.mT) / 2
    trials = () if shape.R is None else (shape.R,)
    size = 1 / ((n + shape.t) * m)
    parameters = {"p": normal(*trials, K, shape.t, m)}
    if "A" in names:
        of_layer = math.sqrt(size * min(1.0, 3 / L)) / 2
        parameters["A"] = normal(*trials, L, m, m, size=of_layer)
        parameters["C"] = normal(*trials, L, m, m, size=of_layer)
        parameters["h"] = normal(*trials, K, m)
    elif "W" in names:
        parameters["W"] = normal(*trials, m, m, size=size)
        parameters["v"] = normal(*trials, K, m)
    has_loss = "y" in names
    return Case(
        shape,
        {name: data[name] for name in names if name in data},
        {name: x.requires_grad_(has_loss) for name, x in parameters.items()},
    )


def parameters_of(shape: CaseShape, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Parameters for an op that draws its data, of the same size as in the other cases."""
    return make(replace(shape, op=SAMPLED[shape.op], B=1), device=device).parameters


def multiply_adds(shape: CaseShape) -> int:
    """Useful multiply-adds of a call, with the gradients of all parameters where the op has a loss.

    One layer on tokens takes the query's row, W'q, then z.a and z.v, and with gradients c and e and dW; or half of each
    Gram matrix once, and G v, G a and W'q, dW for each trial: whichever is less. A layer of a stack but the last one
    has 4 products of m x m matrices, and 6 more in reverse. Where data are drawn, G is a triangle times its transpose;
    random numbers are not counted.
    """
    n, m, R, op = shape.n, shape.m, shape.R or 1, shape.op
    gradients = op not in ("predict", "stack_predict", "gram")
    if op in SAMPLED:
        forming = m * (m + 1) * (m + 2) // 6
    elif op in ("gram_loss", "gram_stack_loss"):
        forming = 0
    else:
        forming = n * m * (m + 1) // 2
    if op == "gram":
        return shape.B * forming * (1 if shape.R is None else R)
    per_layer = (10 if gradients else 4) * m * m * m
    by_gram = forming + R * ((4 if gradients else 2) * m * m + (shape.layers - 1) * per_layer)
    if op in ("prompt_loss", "predict"):
        by_row = R * ((4 if gradients else 2) * n * m + (2 if gradients else 1) * m * m)
        return shape.B * min(by_gram, by_row)
    return shape.B * by_gram


def bytes_moved(shape: CaseShape, size: int = 4) -> int:
    """Bytes of the data that a call must read once and, without a loss, of its results; of numbers of `size` bytes.

    Parameters are not counted: they stay in the cache. An op that draws its data reads none.
    """
    if shape.op in SAMPLED:
        return 0
    n, m = shape.n, shape.m
    numbers = {"z": n * m, "G": m * m, "q": m, "y": 1}
    names = ARGUMENTS[shape.op]
    results = {"predict": 1, "stack_predict": 1, "gram": m * m}.get(shape.op, 0) * (shape.R or 1)
    return shape.B * (size * (sum(numbers.get(name, 0) for name in names) + results) + 8 * ("task" in names))
