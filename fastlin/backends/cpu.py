"""C++ kernels for the CPU: one pass over the data, on the best instruction set that the machine has.

An adapter over `fastlin._C`, which gets addresses. Tokens, Gram matrices and queries are read in place when their
last dimension is contiguous, whatever the other strides are; otherwise torch copies them once. The threads are those
of torch: `torch.set_num_threads` governs both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastlin import _extension
from fastlin.backends.problem import Gradients, Problem

name = "cpu"
traceable = False

_selected: str | None = None
last_kernel: str | None = None
"""Instruction set, dtype and path of the last call, for tests and for the curious: "avx2 float32 streamed"."""


def supports(op: str, device: torch.device, dtype: torch.dtype, m: int) -> str | None:
    """Why this backend cannot serve a call, or None."""
    if device.type != "cpu":
        return f"the data are on {device}; wants the cpu"
    if dtype not in (torch.float32, torch.float64):
        return f"the data have dtype {dtype}; wants torch.float32 or torch.float64"
    return _extension.why_missing()


def instruction_sets() -> tuple[str, ...]:
    """Names of the instruction sets that are built in and run on this machine, best first."""
    return tuple(label for label, runs_here in _C().instruction_sets() if runs_here)


def instruction_set() -> str:
    """The one that kernels run on."""
    return _selected or _best()


@contextmanager
def using(label: str) -> Iterator[None]:
    """Run the kernels on an instruction set by name, in this process.

    Raises
    ------
    ValueError
        When the machine does not have it.
    """
    global _selected
    if label not in instruction_sets():
        raise ValueError(f"instruction set {label!r} does not run here; wants one of {', '.join(instruction_sets())}")
    before, _selected = _selected, label
    try:
        yield
    finally:
        _selected = before


def predict(problem: Problem) -> Tensor:
    """Predictions yhat (R, B)."""
    yhat = problem.q.new_empty(problem.W.shape[0], problem.q.shape[0])
    _attention(problem, {"yhat": yhat})
    return yhat


def predict_bwd(problem: Problem, gy: Tensor, wants: str) -> Gradients:
    """Gradients of the wanted letters, given gy = dloss/dyhat (R, B)."""
    grads = _empty_gradients(problem, wants)
    _attention(problem, grads, gy=gy.contiguous())
    return grads


def loss(problem: Problem, y: Tensor, weight: Tensor | None, wants: str) -> tuple[Tensor, Tensor, Gradients]:
    """Loss (R,), per-task losses (R, K), and the gradients of loss for the wanted letters."""
    R = problem.W.shape[0]
    value, per_task = y.new_empty(R), y.new_empty(R, problem.tasks)
    grads = _empty_gradients(problem, wants)
    results = {"loss": value, "per_task": per_task, **grads}
    _attention(problem, results, y=y.contiguous(), weight=None if weight is None else weight.contiguous())
    return value, per_task, grads


def gram(z: Tensor) -> Tensor:
    """Gram matrices sum_i z_i z_i' (..., m, m) of tokens z (..., n, m)."""
    global last_kernel
    *front, n, m = z.shape
    tokens = _rows(z.reshape(-1, n, m))
    G = z.new_empty(*front, m, m)
    B = tokens.shape[0]
    last_kernel = _C().gram(
        instruction_set(),
        z.dtype is torch.float64,
        torch.get_num_threads(),
        (B, n, m, tokens.stride(0), tokens.stride(1)),
        (tokens.data_ptr(), G.data_ptr()),
    )
    return G


_RESULTS = ("yhat", "loss", "per_task", "x", "q", "p", "A", "C", "W", "v", "h")


def _attention(
    problem: Problem,
    results: dict[str, Tensor],
    y: Tensor | None = None,
    weight: Tensor | None = None,
    gy: Tensor | None = None,
) -> None:
    """Fill the results, each under its letter."""
    global last_kernel
    x, q = _rows(problem.x), _rows(problem.q)
    p, A = problem.p, problem.A
    R, H, K, m = problem.v.shape
    layers = 0 if A is None else A.shape[1]
    given = (problem.task, p, A, problem.C, problem.W, problem.v, problem.h, y, weight, gy)
    # Contiguous copies live until the kernel has returned.
    inputs = [x, q, *(None if t is None else t.contiguous() for t in given)]
    last_kernel = _C().attention(
        instruction_set(),
        q.dtype is torch.float64,
        torch.get_num_threads(),
        (q.shape[0], x.shape[1], m, K, 0 if p is None else p.shape[2], R, H, layers),
        (x.stride(0), x.stride(1), q.stride(0)),
        (problem.scale, problem.skips[0], problem.skips[min(1, layers)], problem.skips[-1]),
        (problem.is_gram, problem.see_query),
        [0 if t is None else t.data_ptr() for t in inputs],
        [results[letter].data_ptr() if letter in results else 0 for letter in _RESULTS],
    )


def _empty_gradients(problem: Problem, wants: str) -> Gradients:
    grads: Gradients = {}
    for letter in wants:
        tensor: Any = getattr(problem, letter)
        grads[letter] = tensor.new_empty(tensor.shape)
    return grads


def _rows(tensor: Tensor) -> Tensor:
    """The tensor itself when its rows are contiguous, else a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


@functools.cache
def _best() -> str:
    return instruction_sets()[0]


def _C() -> ModuleType:
    module = _extension.extension()
    assert module is not None, _extension.why_missing()
    return module
