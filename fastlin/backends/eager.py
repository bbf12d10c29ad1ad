"""The core in torch operations: every device and dtype, differentiable any number of times.

Values and reverse mode are written by hand, in the letters of `problem`. Tensors inside are (B, R, H, m): one matrix
product applies the data of a sequence to all its trials and heads, and no trial copies the data.

    g  = scale dloss/dyhat      a = W' q      c = G v      e = G a
    dW = sum_b g q c'           dv_k = sum_b g e           Gb = g sym(a v')        qb = rho r h + g W c
    matrix layers, last to first, with Gb = dloss/dG and qb = dloss/dq:
    Tb = q qb' + 2 G T Gb       dA = scale Tb C' G         dC = scale G A' Tb
    Gb <- T Gb T' + scale sym(A' Tb C')                    qb <- T qb
    at the bottom: dp = 2 Gb p   dz_i = 2 Gb z_i   dG = Gb   dq = qb (+ 2 Gb q when see_query)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastlin.backends.base import Backend
from fastlin.backends.problem import Gradients, Problem

Apply = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Forward:
    """What the forward pass leaves for the reverse: q, h (B, R, m), a, v, c (B, R, H, m), P (B, R, t, m)."""

    yhat: Tensor
    q: Tensor
    a: Tensor
    v: Tensor
    c: Tensor
    h: Tensor | None
    P: Tensor | None
    apply: Apply
    layers: list[tuple[Tensor, Tensor, Tensor]]


class EagerBackend(Backend):
    name = "eager"
    traceable = True

    def supports(self, op: str, device: torch.device, dtype: torch.dtype, m: int) -> str | None:
        return None

    def predict(self, problem: Problem) -> Tensor:
        return _forward(problem).yhat

    def predict_bwd(self, problem: Problem, gy: Tensor, wants: str) -> Gradients:
        return _reverse(problem, _forward(problem), gy, wants)

    def loss(self, problem: Problem, y: Tensor, weight: Tensor | None, wants: str) -> tuple[Tensor, Tensor, Gradients]:
        forward = _forward(problem)
        error = forward.yhat - y
        value, per_task = losses(error.square(), y, problem.task, problem.tasks, weight)
        if not wants:
            return value, per_task, {}
        gy = 2 * error * error_coefficients(problem.task, y, weight, y.new_ones(()), None)
        return value, per_task, _reverse(problem, forward, gy, wants)

    def gram(self, z: Tensor) -> Tensor:
        return z.mT @ z


backend = EagerBackend()


def losses(squares: Tensor, y: Tensor, task: Tensor | None, tasks: int, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Loss (R,) and per-task losses (R, K) of squared errors (R, B); y, task, weight as in `loss`."""
    shares = _task_shares(task, y, tasks)
    per_task = _sum_over_tasks(squares.mT * shares[:, None], task, tasks).mT
    value = squares.sum(-1) / max(y.shape[0], 1) if weight is None else per_task @ weight
    return value, per_task


def error_coefficients(
    task: Tensor | None, y: Tensor, weight: Tensor | None, g_loss: Tensor | None, g_per_task: Tensor | None
) -> Tensor:
    """Coefficients (B,) or (R, B) of the squared errors in sum(g_loss loss) + sum(g_per_task per_task).

    g_loss is () or (R,), g_per_task (K,) or (R, K).
    """
    of_tasks = g_per_task
    if g_loss is not None and weight is not None:
        of_loss = g_loss[..., None] * weight
        of_tasks = of_loss if of_tasks is None else of_tasks + of_loss
    total = y.new_zeros(())
    if of_tasks is not None:
        of_sequences = of_tasks if task is None else of_tasks.index_select(-1, task)
        total = of_sequences * _task_shares(task, y, of_tasks.shape[-1])
    if g_loss is not None and weight is None:
        total = total + g_loss[..., None] / max(y.shape[0], 1)
    return total


def _task_shares(task: Tensor | None, y: Tensor, tasks: int) -> Tensor:
    if task is None:
        return y.new_full(y.shape, 1.0 / max(y.shape[0], 1))
    # Whole numbers: float32 stops counting at 2^24.
    counts = task.new_zeros(tasks).index_add(0, task, torch.ones_like(task))
    return counts.to(y.dtype).reciprocal().index_select(0, task)


def _forward(problem: Problem) -> _Forward:
    _, query = problem.data
    B, m = query.shape
    R, H = problem.W.shape[:2]
    q = query[:, None].expand(B, R, m)
    v = by_task(problem.v.permute(2, 0, 1, 3), problem.task, B)
    h = None if problem.h is None else by_task(problem.h.transpose(0, 1), problem.task, B)
    P = None if problem.p is None else by_task(problem.p.transpose(0, 1), problem.task, B)
    layers: list[tuple[Tensor, Tensor, Tensor]] = []
    if problem.A is None or problem.C is None:
        apply = _shared_context(problem, P, R * H)
    else:
        G = _initial_gram(problem, P, R)
        eye = torch.eye(m, dtype=q.dtype, device=q.device)
        for A, C, rho in zip(problem.A.unbind(1), problem.C.unbind(1), problem.skips[:-1], strict=True):
            T = problem.scale * torch.einsum("rhij,brjk,rhkl->bril", A, G, C) + rho * eye
            layers.append((G, q, T))
            G = T.mT @ G @ T
            q = (q[..., None, :] @ T)[..., 0, :]
        apply = _matrix_context(G)
    a = torch.einsum("bri,rhij->brhj", q, problem.W)
    c = apply(v)
    yhat = problem.scale * (a * c).sum((-1, -2))
    if h is not None:
        yhat = yhat + problem.skips[-1] * (q * h).sum(-1)
    return _Forward(yhat.mT, q, a, v, c, h, P, apply, layers)


def _reverse(problem: Problem, forward: _Forward, gy: Tensor, wants: str) -> Gradients:
    tasks = problem.tasks
    q, a, v = forward.q, forward.a, forward.v
    r = gy.mT[..., None]
    g = problem.scale * r[..., None]
    ga, gc = g * a, g * forward.c
    grads: Gradients = {}
    if "W" in wants:
        grads["W"] = torch.einsum("bri,brhj->rhij", q, gc)
    if "v" in wants:
        dv = _sum_over_tasks(g * forward.apply(a), problem.task, tasks)
        grads["v"] = dv.permute(1, 2, 0, 3)
    if "h" in wants:
        grads["h"] = _sum_over_tasks(problem.skips[-1] * r * q, problem.task, tasks).transpose(0, 1)
    if not set("pACxq").intersection(wants):
        return grads

    qb = torch.einsum("rhij,brhj->bri", problem.W, gc)
    if forward.h is not None:
        qb = qb + problem.skips[-1] * r * forward.h
    if problem.A is None or problem.C is None:

        def pull(x: Tensor) -> Tensor:
            return (x @ v.mT) @ ga + (x @ ga.mT) @ v

        Gb_all = _symmetric(ga.flatten(1, 2).mT @ v.flatten(1, 2)) if "x" in wants else None
    else:
        Gb, qb = _reverse_layers(problem, forward, _symmetric(ga.mT @ v), qb, wants, grads)

        def pull(x: Tensor) -> Tensor:
            return 2 * x @ Gb

        Gb_all = Gb.sum(1) if "x" in wants else None

    if "p" in wants and forward.P is not None:
        grads["p"] = _sum_over_tasks(pull(forward.P), problem.task, tasks).transpose(0, 1)
    x, query = problem.data
    if "q" in wants:
        if problem.see_query:
            qb = qb + pull(query[:, None, None].expand(*qb.shape[:2], 1, -1))[:, :, 0]
        grads["q"] = qb.sum(1)
    if Gb_all is not None:
        grads["x"] = Gb_all if problem.is_gram else 2 * x @ Gb_all
    return grads


def _reverse_layers(
    problem: Problem, forward: _Forward, Gb: Tensor, qb: Tensor, wants: str, grads: Gradients
) -> tuple[Tensor, Tensor]:
    """Carry Gb (B, R, m, m) and qb (B, R, m) down through the matrix layers; leave dA and dC in `grads`."""
    assert problem.A is not None
    assert problem.C is not None
    dA: list[Tensor] = []
    dC: list[Tensor] = []
    backwards = zip(problem.A.unbind(1)[::-1], problem.C.unbind(1)[::-1], forward.layers[::-1], strict=True)
    for A, C, (G, q, T) in backwards:
        Tb = q[..., None] * qb[..., None, :] + 2 * G @ T @ Gb
        if "A" in wants:
            dA.insert(0, problem.scale * torch.einsum("brij,rhkj,brkl->rhil", Tb, C, G))
        if "C" in wants:
            dC.insert(0, problem.scale * torch.einsum("brij,rhkj,brkl->rhil", G, A, Tb))
        through_T = torch.einsum("rhji,brjk,rhlk->bril", A, Tb, C)
        Gb = T @ Gb @ T.mT + problem.scale * _symmetric(through_T)
        qb = (T @ qb[..., None])[..., 0]
    if dA:
        grads["A"] = torch.stack(dA, 1)
    if dC:
        grads["C"] = torch.stack(dC, 1)
    return Gb, qb


def _shared_context(problem: Problem, P: Tensor | None, vectors: int) -> Apply:
    """Apply G to vectors (B, R, H, m), where only the prompt differs between trials."""
    # Streaming the tokens costs 4 n m multiply-adds per vector and gradient, forming G costs n m^2 once and 2 m^2 per
    # vector: G is formed when the R H vectors are more than m / 4.
    z, q = problem.data
    if problem.is_gram:
        G = _symmetric(z)
    elif 4 * vectors > z.shape[-1]:
        G = z.mT @ z
    else:
        G = None

    def apply(x: Tensor) -> Tensor:
        rows = x.flatten(1, 2)
        out = (rows @ z.mT) @ z if G is None else rows @ G
        if problem.see_query:
            out = out + (rows @ q[..., None]) * q[:, None]
        out = out.reshape(x.shape)
        return out if P is None else out + (x @ P.mT) @ P

    return apply


def _matrix_context(G: Tensor) -> Apply:
    return lambda x: x @ G


def _initial_gram(problem: Problem, P: Tensor | None, R: int) -> Tensor:
    """G of the first layer for each trial, (B, R, m, m)."""
    x, q = problem.data
    G = _symmetric(x) if problem.is_gram else x.mT @ x
    if problem.see_query:
        G = G + q[:, :, None] * q[:, None]
    G = G[:, None].expand(-1, R, -1, -1)
    return G if P is None else G + P.mT @ P


def _symmetric(x: Tensor) -> Tensor:
    return (x + x.mT) / 2


def by_task(values: Tensor, task: Tensor | None, batch: int) -> Tensor:
    """Rows of values (K, ...) for each sequence, (B, ...)."""
    return values.expand(batch, *values.shape[1:]) if task is None else values.index_select(0, task)


def _sum_over_tasks(values: Tensor, task: Tensor | None, tasks: int) -> Tensor:
    """Sums (K, ...) of values (B, ...) over the sequences of each task."""
    # index_add adds one by one, so that its error grows with B: 4e-4 at a million float32. Blocks of at least 1024
    # sequences have their own sums, which take no more memory than the values, and torch.sum adds these in pairs.
    if task is None:
        return values.sum(0, keepdim=True)
    B = values.shape[0]
    blocks = max(B // max(1024, tasks), 1)
    slot = task + tasks * (torch.arange(B, device=task.device) * blocks // max(B, 1))
    sums = values.new_zeros(blocks * tasks, *values.shape[1:]).index_add(0, slot, values)
    return sums.reshape(blocks, tasks, *values.shape[1:]).sum(0)
