"""The problems that are timed: random tokens and parameters of one shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Loss = Callable[..., Tensor]
"""A loss () or (R,) of z, q, y, task and the parameters."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a problem, under the letters of `fastlin.ops.functional`; R = None is no trial dimension."""

    op: str = "prompt_loss"
    B: int = 8192
    n: int = 50
    m: int = 11
    K: int = 2
    t: int = 1
    R: int | None = None
    L: int = 3


@dataclass(frozen=True)
class Case:
    """One problem: z (B, n, m), q (B, m), y (B,), task (B,), and the parameters by name, which require grad."""

    shape: Shape
    data: tuple[Tensor, Tensor, Tensor, Tensor]
    parameters: dict[str, Tensor]

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """Data and parameters in the order of the ops."""
        return (*self.data, *self.parameters.values())

    @property
    def dtype(self) -> torch.dtype:
        """Of everything but the tasks."""
        return self.data[0].dtype

    def to(self, dtype: torch.dtype) -> Case:
        """The same numbers in another precision."""
        z, q, y, task = self.data
        parameters = {name: x.detach().to(dtype).requires_grad_() for name, x in self.parameters.items()}
        return replace(self, data=(z.to(dtype), q.to(dtype), y.to(dtype), task), parameters=parameters)

    def head(self, count: int) -> Case:
        """The first sequences."""
        z, q, y, task = (x[:count] for x in self.data)
        return replace(self, shape=replace(self.shape, B=z.shape[0]), data=(z, q, y, task))

    def step(self, loss: Loss) -> Callable[[], tuple[Tensor, ...]]:
        """What is timed: the loss, then torch.autograd.grad of it, summed over trials, for every parameter."""
        arguments, leaves = self.arguments, tuple(self.parameters.values())
        if self.shape.R is None:

            def call() -> tuple[Tensor, ...]:
                value = loss(*arguments)
                return (value, *torch.autograd.grad(value, leaves))

        else:

            def call() -> tuple[Tensor, ...]:
                value = loss(*arguments)
                return (value, *torch.autograd.grad(value.sum(), leaves))

        return call


def make(shape: Shape, seed: int = 0, device: torch.device | str = "cpu") -> Case:
    """A random float32 problem whose predictions are of order one, the same numbers on every device.

    G is about (n + t) I, so W has entries of order 1 / ((n + t) m), and A and C are such that A G C is about half as
    large as I: through more, a stack would magnify rounding errors with every layer.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int, size: float = 1.0) -> Tensor:
        return torch.randn(*sizes, generator=generator).mul_(size).to(device)

    B, n, m, K, L = shape.B, shape.n, shape.m, shape.K, shape.L
    task = torch.randint(0, K, (B,), generator=generator).to(device)
    data = (normal(B, n, m), normal(B, m), normal(B), task)
    trials = () if shape.R is None else (shape.R,)
    size = 1 / ((n + shape.t) * m)
    parameters = {"p": normal(*trials, K, shape.t, m)}
    if shape.op == "stack_loss":
        parameters["A"] = normal(*trials, L, m, m, size=math.sqrt(size) / 2)
        parameters["C"] = normal(*trials, L, m, m, size=math.sqrt(size) / 2)
        parameters["h"] = normal(*trials, K, m)
    else:
        parameters["W"] = normal(*trials, m, m, size=size)
        parameters["v"] = normal(*trials, K, m)
    return Case(shape, data, {name: x.requires_grad_() for name, x in parameters.items()})
