"""Minima of the exact loss of the full one-layer model, found numerically.

With A = [N, w] (d, m) the rows of W that multiply the query, and v_k = [a1; a2], the loss depends on the prompt only
through c_k = A p_k (p_k'v_k). Each c_k has a token:

    p_k = [N^-1 (c_k - s w); s]        s = (1 - a1'N^-1 c_k) / (a2 - a1'N^-1 w),  so that p_k'v_k = 1

The variables are A, the heads and c, each in units of its size. With prompts in place of c, 400 iterations end 1 %
too high; with c, 100 give ten digits.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlin import theory
from fastlin._threads import one_thread
from fastlin.data import random
from fastlin.data.sources import TaskMixture
from fastlin.figures.claims.entry import STARTS

# Number of starts, and their distance from the reduced model's optimum, in units of each parameter.
_COUNT, _SPREAD = 2, 0.3
# Figure 2(a) at n = 40 needs about 100.
_ITERATIONS = 500
# Starts that reach the same minimum agree to about 1e-11 of it.
AGREE = 1e-8


class Minimum(NamedTuple):
    """The lowest loss of all starts, its parameters, and how far above it the highest is, relative."""

    loss: float
    attention: theory.Attention
    disagreement: float


@one_thread()
def minimum(mix: TaskMixture, n: int, near: theory.Optimum, *, task_heads: bool, seed: int) -> Minimum:
    """Minimise `theory.full_population_loss` from two random points near an optimum of the reduced model.

    `task_heads` gives each task its own head; otherwise all share one.
    """
    ends = [_descend(mix, n, near, task_heads, seed, start) for start in range(_COUNT)]
    loss, attention = min(ends, key=lambda end: end[0])
    return Minimum(loss, attention, max(end[0] for end in ends) / loss - 1.0)


def _descend(
    mix: TaskMixture, n: int, near: theory.Optimum, task_heads: bool, seed: int, start: int
) -> tuple[float, theory.Attention]:
    d, K = mix.d, mix.K
    p, W, v = near.attention()
    size = (mix.means.square() + mix.covariances.diagonal(dim1=1, dim2=2)).mean().sqrt()  # of an entry of beta
    entry = W[:d, :d].diagonal().abs().mean()
    # The shared head is [a1; 1]: only the product of its length and that of A matters.
    heads = v if task_heads else v[:1, :d]
    start_values = {"A": W[:d], "heads": heads, "c": (p[:, 0] @ W[:d].mT) * (p[:, 0] * v).sum(1, keepdim=True)}
    one = torch.ones_like(size)
    units = {
        "A": torch.stack([entry] * d + [entry / size]),
        "heads": torch.stack([size] * d + [one] * int(task_heads)),
        "c": size,
    }
    raw = {}
    for stream, (name, values) in enumerate(start_values.items()):
        draws = random.normal(1, values.numel(), seed=seed, step=start, stream=STARTS + stream, dtype=torch.float64)
        raw[name] = (values / units[name] + _SPREAD * draws.view(values.shape)).requires_grad_()

    def attention() -> theory.Attention:
        A, heads, c = (raw[name] * units[name] for name in start_values)
        if not task_heads:
            heads = torch.nn.functional.pad(heads, (0, 1), value=1.0).expand(K, d + 1)
        return theory.Attention(tokens(A, heads, c), torch.nn.functional.pad(A, (0, 0, 0, 1)), heads)

    limits: dict[str, Any] = {"max_iter": _ITERATIONS, "tolerance_grad": 1e-9, "tolerance_change": 1e-11}
    optimiser = torch.optim.LBFGS(list(raw.values()), **limits, history_size=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = theory.full_population_loss(mix, n, *attention())
        torch.autograd.backward(value)
        return value

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        parameters = attention()
        end = float(theory.full_population_loss(mix, n, *parameters))
    return (end if math.isfinite(end) else math.inf), parameters


def tokens(A: Tensor, v: Tensor, c: Tensor) -> Tensor:
    """Prompt tokens (K, 1, m) with A p_k (p_k'v_k) = c_k; A (d, m), v (K, m), c (K, d). N must be invertible."""
    d = A.shape[0]
    r = torch.linalg.solve(A[:, :d], torch.cat([c, A[None, :, d]]).mT).mT
    r, w = r[:-1], r[-1]
    s = (1.0 - (v[:, :d] * r).sum(1)) / (v[:, d] - v[:, :d] @ w)
    return torch.cat([r - s[:, None] * w, s[:, None]], dim=1)[:, None, :]
