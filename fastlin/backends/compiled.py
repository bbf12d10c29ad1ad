"""What the backends of compiled kernels share: how a problem is packed into sizes, strides and addresses.

The order of what is packed is that of csrc/binding_arguments.h. Tokens, Gram matrices and queries are read in place
when their last dimension is contiguous, whatever the other strides are; otherwise torch copies them once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlin.backends.base import Backend, check_sizes
from fastlin.backends.draw import Draw
from fastlin.backends.problem import Gradients, Problem
from fastlin.backends.update import UpdateRule, UpdateState

RESULTS = ("yhat", "loss", "per_task", "x", "q", "p", "A", "C", "W", "v", "h")
"""What kernels can be asked for, gradients by their letter."""


class Inputs(NamedTuple):
    """What a kernel reads beside the problem."""

    y: Tensor | None = None
    weight: Tensor | None = None
    gy: Tensor | None = None
    draw: Draw | None = None  # draws the sequences that the problem lacks
    counts: Tensor | None = None  # sequences of each task (K,) in the whole batch, where this batch is a piece of it
    total: int = 0  # of all tasks


class CompiledBackend(Backend):
    """A backend whose ops are all calls of one kernel, `attention`."""

    any_form = True
    draws = True
    piece: int
    """Most sequences that one call draws. A larger batch is summed up piece by piece."""

    @abstractmethod
    def attention(self, problem: Problem, results: dict[str, Tensor], inputs: Inputs) -> None:
        """Fill the results, some of `RESULTS` by name."""

    @abstractmethod
    def count(self, draw: Draw, like: Tensor) -> Tensor:
        """Sequences of each task (K,), int64, on the device of `like`."""

    def predict(self, problem: Problem) -> Tensor:
        _, q = problem.data
        yhat = q.new_empty((*problem.front, q.shape[0]))
        self.attention(problem, {"yhat": yhat}, Inputs())
        return yhat

    def predict_bwd(self, problem: Problem, gy: Tensor, wants: str) -> Gradients:
        grads = _empty_gradients(problem, wants)
        self.attention(problem, grads, Inputs(gy=gy))
        return grads

    def loss(self, problem: Problem, y: Tensor, weight: Tensor | None, wants: str) -> tuple[Tensor, Tensor, Gradients]:
        value, per_task = empty_losses(problem)
        grads = _empty_gradients(problem, wants)
        self.attention(problem, {"loss": value, "per_task": per_task, **grads}, Inputs(y, weight))
        return value, per_task, grads

    def sampled_loss(
        self, problem: Problem, draw: Draw, weight: Tensor | None, wants: str
    ) -> tuple[Tensor, Tensor, Gradients]:
        check_sizes(draw, problem)
        value, per_task = empty_losses(problem)
        grads = _empty_gradients(problem, wants)
        results = {"loss": value, "per_task": per_task, **grads}
        if draw.batch <= self.piece:
            self.attention(problem, results, Inputs(weight=weight, draw=draw))
        else:
            self._add_pieces(problem, results, weight, draw)
        return value, per_task, grads

    def _add_pieces(self, problem: Problem, results: Gradients, weight: Tensor | None, draw: Draw) -> None:
        counts = torch.zeros(draw.recipe.K, dtype=torch.int64, device=problem.W.device)
        for piece in self._pieces(draw):
            counts += self.count(piece, problem.W)
        sums = {letter: torch.zeros_like(result, dtype=torch.float64) for letter, result in results.items()}
        for piece in self._pieces(draw):
            self.attention(problem, results, Inputs(weight=weight, draw=piece, counts=counts, total=draw.batch))
            for letter, result in results.items():
                sums[letter] += result
        for letter, result in results.items():
            result.copy_(sums[letter])

    def _pieces(self, draw: Draw) -> Iterator[Draw]:
        for first in range(0, draw.batch, self.piece):
            yield draw.piece(first, min(self.piece, draw.batch - first))


def packed(
    problem: Problem, results: dict[str, Tensor], inputs: Inputs, source: tuple[Any, ...] | None
) -> tuple[tuple[Any, ...], list[Tensor | None]]:
    """Arguments of the kernel `attention`, and the tensors that must live until it has run.

    `source` is the draw as the kernel takes it (`Draw.packed`).
    """
    sizes, factors, flags = constants(problem)
    y, weight, gy, draw, counts, total = inputs
    x, q = problem.x, problem.q
    if draw is None:
        x, q = map(rows, problem.data)
        B, n, strides = q.shape[0], x.shape[1], (x.stride(0), x.stride(1), q.stride(0))
    else:
        B, n, strides = draw.batch, draw.n, (0, 0, 0)
    task, p, A, C, W, v, h = problem[3:10]
    others = [None if t is None else contiguous(t) for t in (task, p, A, C, W, v, h, y, weight, gy, counts)]
    kept = [x, q, *others]
    addresses = [0 if t is None else t.data_ptr() for t in kept]
    outputs = [results[letter].data_ptr() if letter in results else 0 for letter in RESULTS]
    return ((B, n, *sizes, total), strides, factors, flags, addresses, outputs, source), kept


PackedUpdate = tuple[tuple[Any, ...], list[Tensor]]


def packed_update(rule: UpdateRule, state: UpdateState) -> Callable[[Tensor, list[Tensor], float], PackedUpdate]:
    """A function of losses, gradients and average weight: arguments of the kernel `update`, as in `packed`."""
    is_adam, *numbers = rule
    absent = [0] * len(state.values)
    values, *others = [
        [0 if t is None else t.data_ptr() for t in tensors] or absent
        for tensors in (state.values, state.first, state.second, state.averages, state.idle, state.units)
    ]
    of_trials = [tensor.data_ptr() for tensor in (state.total, state.rates, state.updates, state.diverged)]
    sizes = [(value[0].numel(), *copies) for value, copies in zip(state.values, state.copies, strict=True)]
    trials = len(state.total)

    def call(loss: Tensor, gradients: list[Tensor], average_weight: float) -> PackedUpdate:
        kept = [gradient if gradient.is_contiguous() else gradient.contiguous() for gradient in gradients]
        arrays = [values, [gradient.data_ptr() for gradient in kept], *others]
        of_all = [loss.data_ptr(), *of_trials]
        return (trials, sizes, arrays, of_all, is_adam, (*numbers, average_weight)), [loss, *kept]

    return call


def constants(problem: Problem) -> tuple[tuple[int, ...], tuple[float, ...], tuple[bool, ...]]:
    """What the forms of a problem's parameters decide: sizes (m, K, t, R, H, L - 1), factors, flags."""
    layers = 0 if problem.A is None else problem.A.shape[1]
    t = 0 if problem.p is None else problem.p.shape[-2]
    sizes = (problem.W.shape[-1], problem.tasks, t, problem.trials, problem.heads, layers)
    skips = problem.skips
    factors = (problem.scale, skips[0], skips[min(1, layers)], skips[-1])
    return sizes, factors, (problem.is_gram, problem.see_query, problem.v.ndim == 1)


def rows(tensor: Tensor) -> Tensor:
    """The tensor itself when its rows are contiguous, else a copy."""
    has_rows = tensor.is_contiguous() or tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return tensor if has_rows and _holds_its_numbers(tensor) else _copied(tensor)


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself when a kernel can read it in place, else a copy."""
    return tensor if tensor.is_contiguous() and _holds_its_numbers(tensor) else _copied(tensor)


def _holds_its_numbers(tensor: Tensor) -> bool:
    # Not so where torch negates when it reads, as in x.conj().imag, nor where zeros have no memory.
    return not (tensor.is_neg() or tensor._is_zerotensor())


def _copied(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor._is_zerotensor() else tensor.resolve_neg().contiguous()


def empty_losses(problem: Problem) -> tuple[Tensor, Tensor]:
    """Room for loss (R,) and per-task losses (R, K), without R when W has none."""
    W = problem.W
    value = torch.empty(problem.front, dtype=W.dtype, device=W.device)
    return value, torch.empty((*problem.front, problem.tasks), dtype=W.dtype, device=W.device)


def _empty_gradients(problem: Problem, wants: str) -> Gradients:
    empty = {}
    for letter in wants:
        tensor = getattr(problem, letter)
        # Half the time of new_empty, which takes 2 us; but it keeps the strides.
        empty[letter] = torch.empty_like(tensor) if tensor.is_contiguous() else tensor.new_empty(tensor.shape)
    return empty
