"""The paper taken literally: concatenate, attend, mask, read the query row. Oracle and baseline.

    Z      = [p_k; z_1 ... z_n; q]                          tokens are rows
    Attn(Z) = scale sum_h (Z A_h Z' M) Z C_h                A = Wq Wk', C = Wv, M masks the query as key and value
    stack:   Z <- rho Z + Attn(Z) layer by layer            rho = 0 in a first layer without skip
    yhat   = last row of Z . h_k;   one layer: last row of Attn(Z) h_k, with v_k = Wv h_k

Slow and obvious, and written without the Gram form that every fast backend uses. Trials and attention heads are loops.
The ops that take a Gram matrix have no tokens to attend over: they read the symmetric part of G. torch differentiates.

Every function takes the arguments of the op of its name, which documents them: `fastlin.prompt_loss` and the others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastlin import validation
from fastlin.validation import LETTERS, OPS, Settings

Result = TypeVar("Result")
Losses = tuple[Tensor, Tensor]

__all__ = sorted({*OPS} - {"softmax_loss"})


def _validated(function: Callable[..., Result]) -> Callable[..., Result]:
    """Let an oracle take every option of its op, `backend` included, and refuse what the op refuses."""
    op, signature = function.__name__, inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, backend: str = "reference", check_finite: bool = False, **options: Any) -> Result:
        if backend not in ("auto", "reference"):
            raise ValueError(f"reference.{op}: backend is {backend!r}; wants 'auto' or 'reference'")
        bound = signature.bind(*args, **options)
        given = {**bound.arguments, **bound.arguments.get("model", {})}
        for name in bound.arguments.get("model", {}):
            if name not in OPS[op].options:
                raise TypeError(f"reference.{op}: got an unexpected option {name!r}")
        tensors = [given.get("z", given.get("G")) if letter == "x" else given.get(letter) for letter in LETTERS]
        model = {name: given[name] for name in OPS[op].options if name in given}
        settings = Settings(**model, backend=backend, check_finite=check_finite)
        y, weight = given.get("y"), given.get("weight")
        checked, weight = validation.arguments(op, tensors, y, weight, settings)
        validation.task_indices(op, checked.tasks, given.get("task"))
        if check_finite:
            validation.finite(op, validation.named(op, tensors, y, weight))
        if "z" in given and given["z"].dtype in validation.HALF:
            bound.arguments["z"] = given["z"].float()
        return function(*bound.args, **bound.kwargs)

    return call


@_validated
def predict(z: Tensor, q: Tensor, task: Any, p: Any, W: Tensor, v: Tensor, **model: Any) -> Tensor:
    """Predictions of one layer of masked linear attention, (B,) or (R, B)."""
    return _each_trial(_layer, (z, q, task), (p, W, v), W.ndim > 2, model)


@_validated
def stack_predict(z: Tensor, q: Tensor, task: Any, p: Any, A: Tensor, C: Tensor, h: Tensor, **model: Any) -> Tensor:
    """Predictions of a stack of layers, (B,) or (R, B)."""
    return _each_trial(_stack, (z, q, task), (p, A, C, h), A.ndim > 3, model)


@_validated
def prompt_loss(
    z: Tensor, q: Tensor, y: Tensor, task: Any, p: Any, W: Tensor, v: Tensor, *, weight: Any = None, **model: Any
) -> Losses:
    """Loss and per-task losses of one layer."""
    return _losses(predict(z, q, task, p, W, v, **model), y, task, weight, p, v)


@_validated
def stack_loss(
    z: Any, q: Any, y: Any, task: Any, p: Any, A: Any, C: Any, h: Any, *, weight: Any = None, **model: Any
) -> Losses:
    """Loss and per-task losses of a stack."""
    return _losses(stack_predict(z, q, task, p, A, C, h, **model), y, task, weight, p, h)


@_validated
def gram_loss(
    G: Tensor, q: Tensor, y: Tensor, task: Any, p: Any, W: Tensor, v: Tensor, *, weight: Any = None, **model: Any
) -> Losses:
    """Loss and per-task losses of one layer, from Gram matrices."""
    yhat = _each_trial(_gram_layer, (G, q, task), (p, W, v), W.ndim > 2, model)
    return _losses(yhat, y, task, weight, p, v)


@_validated
def gram_stack_loss(
    G: Any, q: Any, y: Any, task: Any, p: Any, A: Any, C: Any, h: Any, *, weight: Any = None, **model: Any
) -> Losses:
    """Loss and per-task losses of a stack, from Gram matrices."""
    yhat = _each_trial(_gram_stack, (G, q, task), (p, A, C, h), A.ndim > 3, model)
    return _losses(yhat, y, task, weight, p, h)


def sampled_loss(mix: Any, n: int, batch: int, p: Any, W: Tensor, v: Tensor, **options: Any) -> Losses:
    """Loss and per-task losses of one layer on the sequences that `mix` draws."""
    return _sampled("sampled_loss", mix, n, batch, (p, W, v), W.shape[0] if W.ndim > 2 else None, **options)


def sampled_stack_loss(mix: Any, n: int, batch: int, p: Any, A: Tensor, C: Tensor, h: Tensor, **options: Any) -> Losses:
    """Loss and per-task losses of a stack on the sequences that `mix` draws."""
    return _sampled("sampled_stack_loss", mix, n, batch, (p, A, C, h), A.shape[0] if A.ndim > 3 else None, **options)


def _sampled(
    op: str,
    mix: Any,
    n: int,
    batch: int,
    parameters: tuple[Any, ...],
    R: int | None,
    *,
    seed: int,
    step: int,
    stream: Any = 0,
    offset: int = 0,
    **options: Any,
) -> Losses:
    at = {"seed": seed, "step": step, "offset": offset}
    streams = validation.streams(op, stream, R)
    if streams is not None:  # each trial alone, on its own stream
        trials = []
        for r, one in enumerate(streams):
            own = tuple(_trial(t, slice(r, r + 1)) for t in parameters)
            trials.append(_sampled(op, mix, n, batch, own, R, **at, stream=one, **options))
        return torch.cat([loss for loss, _ in trials]), torch.cat([per_task for _, per_task in trials])
    like = parameters[1]
    has_gram = hasattr(mix, "sample_gram")
    data = (mix.sample_gram if has_gram else mix.sample)(
        batch, n, **at, stream=stream, dtype=like.dtype, device=like.device
    )
    literals = (prompt_loss, gram_loss) if op == "sampled_loss" else (stack_loss, gram_stack_loss)
    loss, per_task = literals[has_gram](*data, *parameters, **options)
    # Tasks after the last one drawn have no loss.
    return loss, torch.nn.functional.pad(per_task, (0, mix.K - per_task.shape[-1]))


@_validated
def gram(z: Tensor, p: Any = None, task: Any = None, q: Any = None, *, see_query: bool = False) -> Tensor:
    """Gram matrices of the prompted tokens, (B, m, m) or (R, B, m, m)."""
    if p is not None and p.ndim == 4:
        return torch.stack([gram(z, p_r, task, q, see_query=see_query) for p_r in p])
    Z = _prepend(z, z.new_zeros(z.shape[0], z.shape[2]) if q is None else q, task, p)
    return Z.mT @ (_mask(Z, see_query).unsqueeze(-1) * Z)


def _each_trial(
    one: Callable[..., Tensor], data: tuple[Any, ...], parameters: tuple[Any, ...], has_trials: bool, model: Any
) -> Tensor:
    options = Settings(**model)
    if not has_trials:
        return one(*data, *parameters, options)
    trials = range(len(parameters[-1]))
    return torch.stack([one(*data, *(_trial(tensor, r) for tensor in parameters), options) for r in trials])


def _trial(tensor: Tensor | None, r: Any) -> Tensor | None:
    return None if tensor is None else tensor[r]


def _layer(z: Tensor, q: Tensor, task: Any, p: Any, W: Tensor, v: Tensor, options: Settings) -> Tensor:
    Z = _prepend(z, q, task, p)
    mask = _mask(Z, options.see_query)
    attended = torch.zeros_like(Z[..., :1])
    for W_h, v_h in zip(_heads(W), [v] if W.ndim == 2 else list(v), strict=True):
        values = Z @ _of_task(v_h, task, q.shape[0]).unsqueeze(-1)
        attended = attended + options.scale * (Z @ W_h @ Z.mT * mask) @ values
    return attended[:, -1, 0]


def _stack(z: Tensor, q: Tensor, task: Any, p: Any, A: Tensor, C: Tensor, h: Tensor, options: Settings) -> Tensor:
    Z = _prepend(z, q, task, p)
    mask = _mask(Z, options.see_query)
    for layer in range(A.shape[0]):
        attended = torch.zeros_like(Z)
        for A_h, C_h in zip(_heads(A[layer]), _heads(C[layer]), strict=True):
            attended = attended + options.scale * (Z @ A_h @ Z.mT * mask) @ (Z @ C_h)
        Z = options.residual * Z + attended if _has_skip(layer, A.shape[0], options.first_skip) else attended
    return (Z[:, -1] * _of_task(h, task, q.shape[0])).sum(-1)


def _gram_layer(G: Tensor, q: Tensor, task: Any, p: Any, W: Tensor, v: Tensor, options: Settings) -> Tensor:
    G = _whole_gram(G, q, task, p, options.see_query)
    yhat = q.new_zeros(q.shape[0])
    for W_h, v_h in zip(_heads(W), [v] if W.ndim == 2 else list(v), strict=True):
        a = q @ W_h
        c = (G @ _of_task(v_h, task, q.shape[0]).unsqueeze(-1)).squeeze(-1)
        yhat = yhat + options.scale * (a * c).sum(-1)
    return yhat


def _gram_stack(G: Tensor, q: Tensor, task: Any, p: Any, A: Tensor, C: Tensor, h: Tensor, options: Settings) -> Tensor:
    G = _whole_gram(G, q, task, p, options.see_query)
    for layer in range(A.shape[0]):
        T = torch.zeros_like(G)
        for A_h, C_h in zip(_heads(A[layer]), _heads(C[layer]), strict=True):
            T = T + options.scale * A_h @ G @ C_h
        if _has_skip(layer, A.shape[0], options.first_skip):
            T = T + options.residual * torch.eye(q.shape[1], dtype=q.dtype, device=q.device)
        G, q = T.mT @ G @ T, (q.unsqueeze(1) @ T).squeeze(1)
    return (q * _of_task(h, task, q.shape[0])).sum(-1)


def _prepend(z: Tensor, q: Tensor, task: Tensor | None, p: Tensor | None) -> Tensor:
    """Tokens (B, t + n + 1, m): the task's prompt, the context, the query."""
    tokens = [z, q.unsqueeze(1)]
    if p is not None:
        tokens.insert(0, p.expand(z.shape[0], -1, -1) if task is None else p[task.long()])
    return torch.cat(tokens, 1)


def _mask(Z: Tensor, see_query: bool) -> Tensor:
    mask = torch.ones(Z.shape[1], dtype=Z.dtype, device=Z.device)
    if not see_query:
        mask[-1] = 0
    return mask


def _whole_gram(G: Tensor, q: Tensor, task: Tensor | None, p: Tensor | None, see_query: bool) -> Tensor:
    extra = gram(q.new_zeros(q.shape[0], 0, q.shape[1]), p, task, q, see_query=see_query)
    return (G + G.mT) / 2 + extra


def _has_skip(layer: int, layers: int, first_skip: bool | None) -> bool:
    if layer > 0:
        return True
    return layers > 1 if first_skip is None else first_skip


def _heads(matrices: Tensor) -> list[Tensor]:
    """The attention heads of a layer: (H, m, m) as a list, or the one head (m, m)."""
    return list(matrices) if matrices.ndim == 3 else [matrices]


def _of_task(heads: Tensor, task: Tensor | None, batch: int) -> Tensor:
    """Each sequence's own row (B, m) of heads (K, m) or of a shared head (m,)."""
    if heads.ndim == 1 or task is None:
        return heads.expand(batch, -1)
    return heads[task.long()]


def _tasks(task: Tensor | None, p: Tensor | None, heads: Tensor, weight: Tensor | None) -> int:
    if p is not None:
        return p.shape[-3]
    if heads.ndim > 1:
        return heads.shape[-2]
    if weight is not None:
        return len(weight)
    return 1 if task is None or task.numel() == 0 else int(task.max()) + 1


def _losses(yhat: Tensor, y: Tensor, task: Any, weight: Any, p: Any, heads: Tensor) -> Losses:
    squares = (yhat - y) ** 2
    index = torch.zeros_like(y, dtype=torch.long) if task is None else task
    means = []
    for k in range(_tasks(task, p, heads, weight)):
        of_task = squares[..., index == k]
        means.append(of_task.mean(-1) if of_task.shape[-1] else squares.new_zeros(squares.shape[:-1]))
    per_task = torch.stack(means, -1)
    if weight is not None:
        return (per_task * torch.as_tensor(weight, dtype=y.dtype, device=y.device)).sum(-1), per_task
    return squares.mean(-1) if y.shape[0] else squares.sum(-1), per_task
