"""C++ kernels for the CPU: one pass over the data, on the best instruction set that the machine has.

An adapter over `fastlin._C`, which gets addresses. Tokens, Gram matrices and queries are read in place when their
last dimension is contiguous, whatever the other strides are; otherwise torch copies them once. The threads are those
of torch: `torch.set_num_threads` governs both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

from fastlin import _extension
from fastlin.backends.problem import Gradients, Problem

name = "cpu"
traceable = False
any_form = True
checks_tasks = True

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
    """Predictions yhat (R, B), or (B,) without R."""
    yhat = problem.q.new_empty((*problem.front, problem.q.shape[0]))
    _attention(problem, {"yhat": yhat})
    return yhat


def predict_bwd(problem: Problem, gy: Tensor, wants: str) -> Gradients:
    """Gradients of the wanted letters, given gy = dloss/dyhat (R, B) or (B,)."""
    grads = _empty_gradients(problem, wants)
    _attention(problem, grads, gy=gy)
    return grads


def loss(problem: Problem, y: Tensor, weight: Tensor | None, wants: str) -> tuple[Tensor, Tensor, Gradients]:
    """Loss (R,), per-task losses (R, K), both without R when the parameters have none, and gradients of loss."""
    W, v = problem.W, problem.v
    front = W.shape[:1] if W.ndim > 2 else ()
    value, per_task = torch.empty(front, dtype=y.dtype), torch.empty((*front, v.shape[-2]), dtype=y.dtype)
    grads = _empty_gradients(problem, wants)
    _attention(problem, {"loss": value, "per_task": per_task, **grads}, y, weight)
    return value, per_task, grads


def gram(z: Tensor) -> Tensor:
    """Gram matrices sum_i z_i z_i' (..., m, m) of tokens z (..., n, m)."""
    global last_kernel
    *front, n, m = z.shape
    B = math.prod(front)
    tokens = _rows(z.reshape(B, n, m))
    G = z.new_empty(*front, m, m)
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
    x, is_gram, q, task, p, A, C, W, v, h, scale, skips, see_query = problem
    x, q = _rows(x), _rows(q)
    B, m = q.shape
    layers = 0 if A is None else A.shape[1]
    # Copies live until the kernel has returned.
    inputs = [
        t if t is None or (t.is_contiguous() and _is_read_as_it_is(t)) else _plain(t)
        for t in (task, p, A, C, W, v, h, y, weight, gy)
    ]
    R, H = (W.shape[0] if W.ndim > 2 else 1), (W.shape[1] if W.ndim > 3 else 1)
    last_kernel = _C().attention(
        _selected or _best(),
        q.dtype is torch.float64,
        torch.get_num_threads(),
        (B, x.shape[1], m, v.shape[-2], 0 if p is None else p.shape[-2], R, H, layers),
        (x.stride(0), x.stride(1), q.stride(0)),
        (scale, skips[0], skips[min(1, layers)], skips[-1]),
        (is_gram, see_query),
        [0 if t is None else t.data_ptr() for t in (x, q, *inputs)],
        [results[letter].data_ptr() if letter in results else 0 for letter in _RESULTS],
    )


def _empty_gradients(problem: Problem, wants: str) -> Gradients:
    empty = {}
    for letter in wants:
        tensor = getattr(problem, letter)
        # Half the time of new_empty, which takes 2 us; but it keeps the strides.
        empty[letter] = torch.empty_like(tensor) if tensor.is_contiguous() else tensor.new_empty(tensor.shape)
    return empty


def _rows(tensor: Tensor) -> Tensor:
    """The tensor itself when its rows are contiguous, else a copy."""
    has_rows = tensor.is_contiguous() or tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return tensor if has_rows and _is_read_as_it_is(tensor) else _plain(tensor)


def _is_read_as_it_is(tensor: Tensor) -> bool:
    """Whether the memory of a tensor holds its numbers.

    It does not where torch negates when it reads, as in x.conj().imag, nor where zeros have no memory.
    """
    return not (tensor.is_neg() or tensor._is_zerotensor())


def _plain(tensor: Tensor) -> Tensor:
    """A contiguous copy that is read as it is."""
    return torch.zeros_like(tensor) if tensor._is_zerotensor() else tensor.resolve_neg().contiguous()


@functools.cache
def _best() -> str:
    return instruction_sets()[0]


def _C() -> ModuleType:
    module = _extension.extension()
    assert module is not None, _extension.why_missing()
    return module
