"""C++ kernels for the CPU: one pass over the data, on the best instruction set that the machine has.

An adapter over `fastlin._C`, which gets addresses. Tokens, Gram matrices and queries are read in place when their
last dimension is contiguous, whatever the other strides are; otherwise torch copies them once. The threads are those
of torch: `torch.set_num_threads` governs both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fastlin import _extension
from fastlin._instruction_sets import instruction_set, instruction_sets, using
from fastlin.backends.draw import Draw
from fastlin.backends.problem import Gradients, Problem

__all__ = [
    "gram",
    "instruction_set",
    "instruction_sets",
    "loss",
    "predict",
    "predict_bwd",
    "sample",
    "sampled_loss",
    "supports",
    "using",
]

name = "cpu"
traceable = False
any_form = True
checks_tasks = True

last_kernel: str | None = None
"""Instruction set, dtype and path of the last call, for tests and for the curious: "avx2 float32 streamed"."""
last_sampler: str | None = None
"""The same of the last batch that was drawn to be kept: "avx2 float32 sampled tokens"."""


def supports(op: str, device: torch.device, dtype: torch.dtype, m: int) -> str | None:
    """Why this backend cannot serve a call, or None."""
    if device.type != "cpu":
        return f"the data are on {device}; wants the cpu"
    if dtype not in (torch.float32, torch.float64):
        return f"the data have dtype {dtype}; wants torch.float32 or torch.float64"
    return _extension.why_missing()


def predict(problem: Problem) -> Tensor:
    """Predictions yhat (R, B), or (B,) without R."""
    _, q = problem.data
    yhat = q.new_empty((*problem.front, q.shape[0]))
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
    value = torch.empty(front, dtype=y.dtype, device="cpu")
    per_task = torch.empty((*front, v.shape[-2]), dtype=y.dtype, device="cpu")
    grads = _empty_gradients(problem, wants)
    _attention(problem, {"loss": value, "per_task": per_task, **grads}, y, weight)
    return value, per_task, grads


def sampled_loss(problem: Problem, draw: Draw, weight: Tensor | None, wants: str) -> tuple[Tensor, Tensor, Gradients]:
    """`loss` of sequences that the kernel draws and forgets."""
    W, batch = problem.W, draw.batch
    if (draw.m, draw.recipe.K) != (W.shape[-1], problem.v.shape[-2]):
        sizes = f"m = {draw.m}, K = {draw.recipe.K}"
        raise ValueError(f"mix: draws {sizes}; wants the sizes that it had when it was made")
    front = W.shape[:1] if W.ndim > 2 else ()
    results = {"loss": W.new_empty(front), "per_task": W.new_empty((*front, problem.v.shape[-2]))}
    results.update(_empty_gradients(problem, wants))
    if batch <= _PIECE:
        _attention(problem, results, weight=weight, draw=draw)
    else:
        _add_pieces(problem, results, weight, draw)
    return results.pop("loss"), results.pop("per_task"), results


_PIECE = 1 << 18
"""Sequences that are drawn in one go: their tasks and order take 4 MB. A larger batch is summed up piece by piece."""


def _add_pieces(problem: Problem, results: Gradients, weight: Tensor | None, draw: Draw) -> None:
    batch = draw.batch
    counts = torch.zeros(draw.recipe.K, dtype=torch.int64, device="cpu")
    task = torch.empty(_PIECE, dtype=torch.int64, device="cpu")
    for piece in _pieces(draw):
        size = piece.batch
        _extension.loaded().sample_tasks(
            instruction_set(), torch.get_num_threads(), piece.packed(), size, task.data_ptr()
        )
        counts += torch.bincount(task[:size], minlength=draw.recipe.K)
    sums = {letter: torch.zeros_like(result, dtype=torch.float64) for letter, result in results.items()}
    for piece in _pieces(draw):
        _attention(problem, results, weight=weight, draw=piece, counts=counts, total=batch)
        for letter, result in results.items():
            sums[letter] += result
    for letter, result in results.items():
        result.copy_(sums[letter])


def _pieces(draw: Draw) -> Iterator[Draw]:
    for first in range(0, draw.batch, _PIECE):
        yield draw.piece(first, min(_PIECE, draw.batch - first))


def sample(
    draw: Draw, is_gram: bool, dtype: torch.dtype, device: torch.device | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gram matrices (B, m, m) or tokens (B, n, m), queries (B, m), targets (B,), tasks (B,) of drawn sequences."""
    global last_sampler
    B, m = draw.batch, draw.m
    name = "float64" if dtype is torch.float64 else "float32"
    # Buffers of numpy's: inside torch.func a tensor of torch's own may be a wrapper without memory.
    shapes = ((B, m if is_gram else draw.n, m), (B, m), (B,))
    arrays = [*(np.empty(shape, name) for shape in shapes), np.empty(B, np.int64)]
    last_sampler = _extension.loaded().sample(
        instruction_set(),
        dtype is torch.float64,
        torch.get_num_threads(),
        draw.packed(),
        B,
        is_gram,
        [array.ctypes.data for array in arrays],
    )
    x, q, y, task = (torch.from_numpy(array).to(device) for array in arrays)
    return x, q, y, task


def gram(z: Tensor) -> Tensor:
    """Gram matrices sum_i z_i z_i' (..., m, m) of tokens z (..., n, m)."""
    global last_kernel
    *front, n, m = z.shape
    B = math.prod(front)
    tokens = _rows(z.reshape(B, n, m))
    G = z.new_empty(*front, m, m)
    last_kernel = _extension.loaded().gram(
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
    draw: Draw | None = None,
    counts: Tensor | None = None,
    total: int = 0,
) -> None:
    """Fill the results, each under its letter."""
    global last_kernel
    x, is_gram, q, task, p, A, C, W, v, h, scale, skips, see_query = problem
    layers = 0 if A is None else A.shape[1]
    if draw is None:
        x, q = map(_rows, problem.data)
        B, n, strides = q.shape[0], x.shape[1], (x.stride(0), x.stride(1), q.stride(0))
    else:
        B, n, strides = draw.batch, draw.n, (0, 0, 0)
    # Copies live until the kernel has returned.
    inputs = [
        t if t is None or (t.is_contiguous() and _is_read_as_it_is(t)) else _plain(t)
        for t in (task, p, A, C, W, v, h, y, weight, gy, counts)
    ]
    R, H = (W.shape[0] if W.ndim > 2 else 1), (W.shape[1] if W.ndim > 3 else 1)
    last_kernel = _extension.loaded().attention(
        instruction_set(),
        W.dtype is torch.float64,
        torch.get_num_threads(),
        (B, n, W.shape[-1], v.shape[-2], 0 if p is None else p.shape[-2], R, H, layers, total),
        strides,
        (scale, skips[0], skips[min(1, layers)], skips[-1]),
        (is_gram, see_query),
        [0 if t is None else t.data_ptr() for t in (x, q, *inputs)],
        [results[letter].data_ptr() if letter in results else 0 for letter in _RESULTS],
        None if draw is None else draw.packed(),
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
