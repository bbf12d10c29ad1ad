"""The problems that are timed: random data and parameters of one shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

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

    def to(self, dtype: torch.dtype) -> Case:
        data = {name: x.to(dtype) if x.is_floating_point() else x for name, x in self.data.items()}
        parameters = {name: x.detach().to(dtype).requires_grad_(x.requires_grad) for name, x in self.parameters.items()}
        return replace(self, data=data, parameters=parameters)

    def head(self, count: int) -> Case:
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
