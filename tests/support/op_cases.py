"""Problems for the ops, in every form, and the way they are compared."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlin as fl
from fastlin import _extension
from fastlin.backends import cpu

INSTRUCTION_SETS = cpu.instruction_sets() if _extension.why_missing() is None else ("missing",)
"""What the cpu backend is tested on; without the extension its tests fail with the reason."""
DOUBLE = torch.float64
EAGER_TOLERANCE = 1e-11
LOSSES = ("prompt_loss", "stack_loss", "gram_loss", "gram_stack_loss")
PREDICTIONS = ("predict", "stack_predict")
FORMS = {"plain": {}, "R": {"R": 3}, "R=1": {"R": 1}, "RH": {"R": 2, "H": 2}, "1H": {"R": 1, "H": 3}}
"""Trials and heads that a call may have."""
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is first imported, which is later
TRITON_DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
"""Where Triton's kernels run: in its interpreter on the CPU where there is no GPU."""
HAS_TRITON = any(importlib.metadata.distributions(name="triton"))  # tests/triton is found as a package, too
needs_triton = (
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
    if TRITON_DEVICE.type == "cpu"
    else pytest.mark.gpu("triton")
)


@dataclass(frozen=True)
class Case:
    """Arguments of one call; `inputs` are the tensors it can be differentiated in, by name."""

    op: str
    inputs: dict[str, Tensor | None]
    y: Tensor
    task: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, module: Any = fl, **inputs: Any) -> Any:
        """Call the op of a module, with some of the inputs or options replaced.

        The reference has no backends: it is not told the case's own.
        """
        given = {**self.inputs, **{name: t for name, t in inputs.items() if name in self.inputs}}
        own = {name: o for name, o in self.options.items() if name != "backend" or module is not fl.reference}
        options = {**own, **{name: o for name, o in inputs.items() if name not in self.inputs}}
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

    def on(self, device: torch.device) -> Case:
        """The same on a device; itself where it is."""

        def moved(given: Any) -> Any:
            return given.to(device) if isinstance(given, Tensor) else given

        inputs = {name: moved(t) for name, t in self.inputs.items()}
        options = {name: moved(o) for name, o in self.options.items()}
        return replace(self, inputs=inputs, y=moved(self.y), task=moved(self.task), options=options)


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


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch leaves uninitialised is full of NaN, and of the largest integer: what is not written shows."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = was_filling


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
    total = case.y.new_zeros(())
    for result in _flat(case(module, **options))[: None if per_task else 1]:
        count = torch.arange(1, result.numel() + 1, dtype=result.dtype, device=result.device).reshape(result.shape)
        total = total + (result * (count / result.numel() + 0.5).cos()).sum()
    leaves = list(case.leaves().values())
    return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))


def results(case: Case, module: Any = fl, *, kernel: str | None = None, **options: Any) -> dict[str, Tensor]:
    """Values and all gradients of a call by name; those of the parameters alone, made with the value, are primed.

    When a kernel is named, it is what has served each of the calls, forward and backward.
    """
    found: dict[str, Tensor] = {}
    parameters = tuple(name for name in case.inputs if name not in "zGq")
    passes = ((case.differentiable(), ""), (case.differentiable(*parameters), "'"))
    for ready, prime in passes[: 1 if module is fl.reference else 2]:
        with _only(kernel):
            values = dict(zip(("loss", "per_task"), _flat(ready(module, **options)), strict=False))
        found.update({name: value.detach() for name, value in values.items()})
        first = values["loss"]
        count = torch.arange(1, first.numel() + 1, dtype=first.dtype, device=first.device).reshape(first.shape)
        total = (first * (count / first.numel() + 0.5).cos()).sum()
        # The loss of parameters alone has its gradients already, which the backward scales.
        is_made = prime and case.op in LOSSES
        with _only(None if is_made else kernel):
            grads = torch.autograd.grad(total, list(ready.leaves().values()))
        found.update({f"d{name}{prime}": grad for name, grad in zip(ready.leaves(), grads, strict=True)})
    if module is fl.reference:
        found.update({f"d{name}'": found[f"d{name}"] for name in parameters if f"d{name}" in found})
    return found


@contextmanager
def _only(kernel: str | None) -> Iterator[None]:
    """What runs inside is served by a kernel of the cpu backend, whatever lies in lanes: sequences, trials, columns."""
    if kernel is None:
        yield
        return
    cpu.backend.last_kernel = None
    yield
    assert cpu.backend.last_kernel is not None
    assert cpu.backend.last_kernel.removesuffix(" trials").removesuffix(" columns") == kernel.removesuffix(" trials")


def check(case: Case) -> None:
    """Values and all gradients are those of the reference, with gradients of the data and without."""
    assert_close(case(), case(fl.reference), what=f"{case.op} value")
    everything = case.differentiable()
    for per_task in (True, False):
        expected = dict(zip(everything.leaves(), gradients(everything, fl.reference, per_task=per_task), strict=True))
        for names in (tuple(case.inputs), tuple(name for name in case.inputs if name not in "zGq")):
            ready = case.differentiable(*names)
            for name, found in zip(ready.leaves(), gradients(ready, per_task=per_task), strict=True):
                assert_close(found, expected[name], what=f"{case.op} d{name}")


def assert_within_budget(found: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Errors are at most twice eager's own in the same dtype and a rounding band of 4 eps of the largest entry."""
    for name, expected in exact.items():
        assert found[name].isfinite().all(), name
        band = 4 * torch.finfo(found[name].dtype).eps
        of_eager = relative_error(eager[name].to(expected.dtype), expected)
        error = relative_error(found[name].to(expected.dtype), expected)
        assert error <= 2 * (of_eager + band), f"{name}: relative error {error:.2e}, eager's {of_eager:.2e}"


def _flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]
