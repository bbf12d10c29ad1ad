"""What the backends of compiled kernels share: how a problem is packed into sizes, strides and addresses.

The order of what is packed is that of csrc/binding_arguments.h. Tokens, Gram matrices and queries are read in place
when their last dimension is contiguous, whatever the other strides are; otherwise torch copies them once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastlin.backends.draw import Draw
from fastlin.backends.problem import Gradients, Problem

RESULTS = ("yhat", "loss", "per_task", "x", "q", "p", "A", "C", "W", "v", "h")
"""What kernels can be asked for, gradients by their letter."""


class Kernels(ABC):
    """The calls of a backend that takes `any_form`, all over one kernel, `attention`.

    Attributes
    ----------
    piece : int
        Sequences that are drawn in one go. A larger batch is summed up piece by piece.
    """

    piece: int

    @abstractmethod
    def attention(
        self,
        problem: Problem,
        results: dict[str, Tensor],
        y: Tensor | None = None,
        weight: Tensor | None = None,
        gy: Tensor | None = None,
        draw: Draw | None = None,
        counts: Tensor | None = None,
        total: int = 0,
    ) -> None:
        """Fill the results, each under its letter.

        Parameters
        ----------
        problem : Problem
        results : dict
            Some of `RESULTS`.
        y, weight, gy
            As in `Backend.loss` and `Backend.predict_bwd`.
        draw : Draw, optional
            Draws the sequences that the problem lacks.
        counts, total
            Sequences of each task (K,) and of all in the whole that this batch is a piece of.
        """

    @abstractmethod
    def count(self, draw: Draw, like: Tensor) -> Tensor:
        """Sequences of each task (K,), int64, where `like` is."""

    def predict(self, problem: Problem) -> Tensor:
        """Predictions yhat (R, B), or (B,) without R."""
        _, q = problem.data
        yhat = q.new_empty((*problem.front, q.shape[0]))
        self.attention(problem, {"yhat": yhat})
        return yhat

    def predict_bwd(self, problem: Problem, gy: Tensor, wants: str) -> Gradients:
        """Gradients of the wanted letters, given gy = dloss/dyhat (R, B) or (B,)."""
        grads = _empty_gradients(problem, wants)
        self.attention(problem, grads, gy=gy)
        return grads

    def loss(self, problem: Problem, y: Tensor, weight: Tensor | None, wants: str) -> tuple[Tensor, Tensor, Gradients]:
        """Loss (R,), per-task losses (R, K), both without R when the parameters have none, and gradients of loss."""
        value, per_task = empty_losses(problem)
        grads = _empty_gradients(problem, wants)
        self.attention(problem, {"loss": value, "per_task": per_task, **grads}, y, weight)
        return value, per_task, grads

    def sampled_loss(
        self, problem: Problem, draw: Draw, weight: Tensor | None, wants: str
    ) -> tuple[Tensor, Tensor, Gradients]:
        """`loss` of sequences that the kernel draws and forgets."""
        W = problem.W
        if (draw.m, draw.recipe.K) != (W.shape[-1], problem.tasks):
            sizes = f"m = {draw.m}, K = {draw.recipe.K}"
            raise ValueError(f"mix: draws {sizes}; wants the sizes that it had when it was made")
        value, per_task = empty_losses(problem)
        grads = _empty_gradients(problem, wants)
        results = {"loss": value, "per_task": per_task, **grads}
        if draw.batch <= self.piece:
            self.attention(problem, results, weight=weight, draw=draw)
        else:
            self._add_pieces(problem, results, weight, draw)
        return value, per_task, grads

    def _add_pieces(self, problem: Problem, results: Gradients, weight: Tensor | None, draw: Draw) -> None:
        counts = torch.zeros(draw.recipe.K, dtype=torch.int64, device=problem.W.device)
        for piece in self._pieces(draw):
            counts += self.count(piece, problem.W)
        sums = {letter: torch.zeros_like(result, dtype=torch.float64) for letter, result in results.items()}
        for piece in self._pieces(draw):
            self.attention(problem, results, weight=weight, draw=piece, counts=counts, total=draw.batch)
            for letter, result in results.items():
                sums[letter] += result
        for letter, result in results.items():
            result.copy_(sums[letter])

    def _pieces(self, draw: Draw) -> Iterator[Draw]:
        for first in range(0, draw.batch, self.piece):
            yield draw.piece(first, min(self.piece, draw.batch - first))


def packed(
    problem: Problem,
    results: dict[str, Tensor],
    y: Tensor | None,
    weight: Tensor | None,
    gy: Tensor | None,
    draw: Draw | None,
    counts: Tensor | None,
    total: int,
    source: tuple[Any, ...] | None,
) -> tuple[tuple[Any, ...], list[Tensor | None]]:
    """Arguments of the kernel `attention`, and the tensors that must live until it has run.

    `source` is the draw as the kernel takes it, the others are as in `Kernels.attention`.
    """
    x, is_gram, q, task, p, A, C, W, v, h, scale, skips, see_query, tasks = problem
    layers = 0 if A is None else A.shape[1]
    if draw is None:
        x, q = map(rows, problem.data)
        B, n, strides = q.shape[0], x.shape[1], (x.stride(0), x.stride(1), q.stride(0))
    else:
        B, n, strides = draw.batch, draw.n, (0, 0, 0)
    inputs = [
        t if t is None or (t.is_contiguous() and is_read_as_it_is(t)) else _plain(t)
        for t in (task, p, A, C, W, v, h, y, weight, gy, counts)
    ]
    inputs[:0] = x, q
    R, H = (W.shape[0] if W.ndim > 2 else 1), (W.shape[1] if W.ndim > 3 else 1)
    arguments = (
        (B, n, W.shape[-1], tasks, 0 if p is None else p.shape[-2], R, H, layers, total),
        strides,
        (scale, skips[0], skips[min(1, layers)], skips[-1]),
        (is_gram, see_query, v.ndim == 1),
        [0 if t is None else t.data_ptr() for t in inputs],
        [results[letter].data_ptr() if letter in results else 0 for letter in RESULTS],
        source,
    )
    return arguments, inputs


def rows(tensor: Tensor) -> Tensor:
    """The tensor itself when its rows are contiguous, else a copy."""
    has_rows = tensor.is_contiguous() or tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return tensor if has_rows and is_read_as_it_is(tensor) else _plain(tensor)


def empty_losses(problem: Problem) -> tuple[Tensor, Tensor]:
    """Room for loss (R,) and per-task losses (R, K), without R when W has none."""
    W = problem.W
    front = W.shape[:1] if W.ndim > 2 else ()
    value = torch.empty(front, dtype=W.dtype, device=W.device)
    return value, torch.empty((*front, problem.tasks), dtype=W.dtype, device=W.device)


def _empty_gradients(problem: Problem, wants: str) -> Gradients:
    empty = {}
    for letter in wants:
        tensor = getattr(problem, letter)
        # Half the time of new_empty, which takes 2 us; but it keeps the strides.
        empty[letter] = torch.empty_like(tensor) if tensor.is_contiguous() else tensor.new_empty(tensor.shape)
    return empty


def is_read_as_it_is(tensor: Tensor) -> bool:
    """Whether the memory of a tensor holds its numbers.

    It does not where torch negates when it reads, as in x.conj().imag, nor where zeros have no memory.
    """
    return not (tensor.is_neg() or tensor._is_zerotensor())


def _plain(tensor: Tensor) -> Tensor:
    """A contiguous copy that is read as it is."""
    return torch.zeros_like(tensor) if tensor._is_zerotensor() else tensor.resolve_neg().contiguous()
