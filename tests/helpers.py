"""Problems for the ops, in every form, and the way they are compared."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import fastlin as fl

DOUBLE = torch.float64
EAGER_TOLERANCE = 1e-11
LOSSES = ("prompt_loss", "stack_loss", "gram_loss", "gram_stack_loss")
PREDICTIONS = ("predict", "stack_predict")


@dataclass(frozen=True)
class Case:
    """Arguments of one call; `inputs` are the tensors it can be differentiated in, by name."""

    op: str
    inputs: dict[str, Tensor | None]
    y: Tensor
    task: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, module: Any = fl, **inputs: Any) -> Any:
        """Call the op of a module, with some of the inputs or options replaced."""
        given = {**self.inputs, **{name: t for name, t in inputs.items() if name in self.inputs}}
        options = {**self.options, **{name: o for name, o in inputs.items() if name not in self.inputs}}
        first, q, *parameters = given.values()
        data = (first, q) if self.op in PREDICTIONS else (first, q, self.y)
        return getattr(module, self.op)(*data, self.task, *parameters, **options)

    def differentiable(self, *names: str) -> Case:
        """The same with inputs that require grad: those named, or all."""
        names = names or tuple(self.inputs)
        ready = {
            name: t if t is None else t.detach().clone().requires_grad_(name in names)
            for name, t in self.inputs.items()
        }
        return replace(self, inputs=ready)

    def leaves(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.inputs.items() if t is not None and t.requires_grad}

    def to(self, dtype: torch.dtype) -> Case:
        inputs = {name: t if t is None else t.detach().to(dtype) for name, t in self.inputs.items()}
        options = {n: o.to(dtype) if isinstance(o, Tensor) else o for n, o in self.options.items()}
        return replace(self, inputs=inputs, y=self.y.to(dtype), options=options)


def make(
    op: str,
    *,
    B: int = 6,
    n: int = 4,
    m: int = 5,
    K: int | None = 3,
    t: int | None = 2,
    R: int | None = None,
    H: int | None = None,
    L: int = 2,
    shared_head: bool = False,
    seed: int = 0,
    dtype: torch.dtype = DOUBLE,
    **options: Any,
) -> Case:
    """A random problem of unit size. K = None is one task without index, t = None is no prompt.

    With K > 1 the last task is absent.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (size * torch.randn(*shape, generator=generator, dtype=DOUBLE)).to(dtype)

    tasks = 1 if K is None else K
    trials = () if R is None else (R,)
    heads = () if H is None else (H,)
    z = normal(B, n, m)
    inputs: dict[str, Tensor | None] = {"G": z.mT @ z} if op.startswith("gram") else {"z": z}
    inputs["q"] = normal(B, m)
    inputs["p"] = None if t is None else normal(*trials, tasks, t, m)
    per_task = () if shared_head else (tasks,)
    size = (n + 1) ** -0.5 / m
    if "stack" in op:
        inputs["A"] = normal(*trials, L, *heads, m, m, size=size**0.5)
        inputs["C"] = normal(*trials, L, *heads, m, m, size=size**0.5)
        inputs["h"] = normal(*trials, *per_task, m)
    else:
        inputs["W"] = normal(*trials, *heads, m, m, size=size)
        inputs["v"] = normal(*trials, *heads, *per_task, m)
    task = None
    if K is not None:
        task = torch.randint(0, max(tasks - 1, 1), (B,), generator=generator)
    return Case(op, inputs, normal(B), task, options)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert found.dtype == expected.dtype
    if expected.numel() == 0:
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-300))


def assert_close(found: Any, expected: Any, tolerance: float = EAGER_TOLERANCE, what: str = "") -> None:
    """All tensors of two results agree to the relative tolerance."""
    pairs = zip(_flat(found), _flat(expected), strict=True)
    for i, (a, b) in enumerate(pairs):
        if float(b.detach().abs().max() if b.numel() else 0.0) == 0.0:
            assert float(a.detach().abs().max() if a.numel() else 0.0) == 0.0, f"{what} {i}"
        error = relative_error(a.detach(), b.detach())
        assert error <= tolerance, f"{what} {i}: relative error {error:.2e}"


def gradients(case: Case, module: Any = fl, *, per_task: bool = True, **options: Any) -> list[Tensor]:
    """Gradients of the leaves for a result weighted by fixed, all different numbers."""
    total = torch.zeros((), dtype=case.y.dtype)
    for result in _flat(case(module, **options))[: None if per_task else 1]:
        count = torch.arange(1, result.numel() + 1, dtype=result.dtype).reshape(result.shape)
        total = total + (result * (count / result.numel() + 0.5).cos()).sum()
    leaves = list(case.leaves().values())
    return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))


def _flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]
