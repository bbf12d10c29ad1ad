"""Softmax attention, for comparison: torch operations on the tokens that a task source draws.

    a_h = W_h' q      s_hi = a_h . z_i      u_hi = v_hk . z_i      yhat = sum_h sum_i softmax_i(s_h) u_hi

i runs over the prompt's tokens, the context's and, with see_query, the query's; without any the prediction is 0. What a
sequence says is in no Gram matrix here: its tokens are drawn, and cost what they cost.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastlin import validation
from fastlin.backends import BackendError
from fastlin.backends.eager import by_task, losses
from fastlin.backends.problem import lift
from fastlin.ops import call
from fastlin.ops.api import Weight
from fastlin.ops.sampled import Sequences, TaskSource, for_each_trial, not_a_source, untraced
from fastlin.validation import Settings

# Numbers that a piece of a batch may have in memory: 64 MB of float32.
_PIECE = 1 << 24
# Per score: those of all parts and put together, their values likewise, the weights, the products.
_COPIES = 6


class SoftmaxOptions(Sequences, total=False):
    weight: Weight
    see_query: bool
    backend: str


def softmax_loss(
    mix: TaskSource, n: int, batch: int, p: Tensor | None, W: Tensor, v: Tensor, **options: Unpack[SoftmaxOptions]
) -> tuple[Tensor, Tensor]:
    """Squared error of softmax attention on sequences that a task source draws; arguments as in `sampled_loss`.

    Only the backend "eager" has it. It is differentiable any number of times. A large batch is taken in pieces, which a
    backward pass draws again.
    """
    op, tensors = "softmax_loss", (None, None, None, p, None, None, W, v, None)
    place: dict[str, Any] = {**options}
    weight, see_query, backend = place.pop("weight", None), place.pop("see_query", False), place.pop("backend", "auto")
    if isinstance(mix, type) or not hasattr(mix, "sample"):
        raise not_a_source(op, mix)
    known = {"K": (mix.K, "mix"), "m": (mix.m, "mix")}
    _, weight = call.signature(op, tensors, None, weight, Settings(see_query=see_query, backend=backend), known)
    if backend not in ("auto", "eager"):
        raise BackendError(f"{op}: backend {backend!r} does not have softmax attention; wants 'auto' or 'eager'")
    streams = validation.streams(op, place.get("stream", 0), W.shape[0] if W.ndim > 2 else None)
    if streams is not None:

        def loss_of(trials: tuple[Any, ...], stream: int) -> tuple[Tensor, Tensor]:
            own: Any = {**options, "weight": weight, "stream": stream}
            return softmax_loss(mix, n, batch, *trials, **own)

        loss, per_task = for_each_trial((p, W, v), streams, loss_of)
        return loss, per_task
    full = {name: None if form is None else lift(name, form, mix.K) for name, form in {"p": p, "W": W, "v": v}.items()}
    yhat, y, task = _predictions(mix, n, batch, full, place, see_query)
    loss, per_task = losses((yhat - y).square(), y, task, mix.K, weight)
    return (loss, per_task) if W.ndim > 2 else (loss[0], per_task[0])


def _predictions(
    mix: TaskSource, n: int, batch: int, full: dict[str, Any], place: dict[str, Any], see_query: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Predictions (R, B), targets (B,) and tasks (B,), from parameters in full form."""
    p, W, v = full["p"], full["W"], full["v"]
    tokens = n + 1 + (0 if p is None else p.shape[2])
    size = max(_PIECE // (tokens * (mix.m + _COPIES * W.shape[0] * W.shape[1])), 1)

    def piece(first: int, p: Tensor | None, W: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        where = {**place, "offset": place.get("offset", 0) + first, "dtype": W.dtype, "device": W.device}
        z, q, y, task = untraced(mix.sample, min(size, batch - first), n, **where)
        validation.task_indices("softmax_loss", mix.K, task)
        return _attend(z, q, task, p, W, v, see_query), y, task

    if batch <= size:
        return piece(0, p, W, v)
    pieces = [
        checkpoint(piece, first, p, W, v, use_reentrant=False, preserve_rng_state=False)
        for first in range(0, batch, size)
    ]
    yhat, y, task = zip(*pieces, strict=True)
    return torch.cat(yhat, 1), torch.cat(y), torch.cat(task)


def _attend(z: Tensor, q: Tensor, task: Tensor, p: Tensor | None, W: Tensor, v: Tensor, see_query: bool) -> Tensor:
    """Predictions (R, B) on z (B, n, m), q (B, m), task (B,), with p (R, K, t, m), W (R, H, m, m), v (R, H, K, m)."""
    B = len(q)
    a = torch.einsum("bi,rhij->brhj", q, W)
    # What is to be multiplied by tokens, for scores and for values: (B, 2, R, H, m).
    rows = torch.stack([a, by_task(v.permute(2, 0, 1, 3), task, B)], 1)
    parts = [(rows.flatten(1, 3) @ z.mT).view(*rows.shape[:-1], z.shape[1])]
    if p is not None:
        parts.append(rows @ by_task(p.transpose(0, 1), task, B)[:, None].mT)
    if see_query:
        parts.append(rows @ q[:, None, None, :, None])
    scores, values = torch.cat(parts, -1).unbind(1)
    return (scores.softmax(-1) * values).sum((-1, -2)).mT
