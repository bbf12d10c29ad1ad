"""Exact population loss of the full one-layer model, for any W (m, m), heads, prompt tokens and attention heads.

The prediction is yhat = sum_h q' A_h G a_h with q = [x; 0], G = sum_t p p' + sum_i z z', z = [x; y], A_h = scale W_h
and a_h = v_h = [a1_h; a2_h]. The last entry of q is zero, so only the first d rows [N_h, w_h] (d, d+1) of A_h count.
Given beta, let Z = E[z z'] and

    g_ij = A_i Z a_j = N_i S a1_j + s2 a2_j w_i + (a2_j N_i S + w_i a1_j' S) beta + a2_j w_i (beta'S beta)

    loss = s2 + E_beta{ ||n sum_h g_hh + c - beta||_S^2
                        + n sum_ij [ (a_i'Z a_j) tr(S A_i Z A_j') + g_ij' S g_ji ] }

with c = sum_h A_h sum_t p p' a_h. Every factor has the form c0 + L beta + e (beta'S beta). So the expectation over
beta ~ N(mu, B) needs only the mean and covariance of (beta, beta'S beta), at a cost of O(d^3) for each trial, task and
pair of attention heads.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fastlin.theory._checks import array, check_shots
from fastlin.theory.moments import Mixture, Moments


def full_population_loss(mix: Mixture, n: int, p: Any, W: Any, v: Any, *, scale: float = 1.0) -> Tensor:
    """Exact population loss of yhat = scale sum_h (W_h' q).(G v_hk); differentiable in p, W, v.

    The paper's Assumption 1 restricts W to [[W, 0], [0, 0]] and v to e_m. With non-zero means the full model has lower
    minima.

    Parameters
    ----------
    mix, n : as in `plain`; m = d + 1
    p : Tensor (K, t, m) or None; (R, K, t, m) with trials
        Prompt tokens.
    W : Tensor (m, m); (R, m, m) with trials; (R, H, m, m) with attention heads
    v : Tensor (K, m) or (m,); (R, K, m) with trials; (R, H, K, m) with attention heads
    scale : float

    Returns
    -------
    Tensor () or, with trials, (R,), float64

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
    >>> optimum = fl.theory.joint(mix, 10)
    >>> round(optimum.loss, 4), fl.theory.full_population_loss(mix, 10, *optimum.attention())
    (0.6207, tensor(0.6207, dtype=torch.float64))
    """
    return full_task_losses(mix, n, p, W, v, scale=scale) @ Moments.of(mix).pi


def full_task_losses(mix: Mixture, n: int, p: Any, W: Any, v: Any, *, scale: float = 1.0) -> Tensor:
    """Loss of each task, whose average is `full_population_loss`.

    Parameters
    ----------
    mix, n, p, W, v, scale : as in `full_population_loss`

    Returns
    -------
    Tensor (K,) or, with trials, (R, K), float64

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
    >>> fl.theory.full_task_losses(mix, 10, *fl.theory.joint(mix, 10).attention()).shape
    torch.Size([2])
    """
    mom, n = Moments.of(mix), check_shots(n)
    p, W, v, trials = _full_form(mom, p, W, v)
    losses = _task_losses(mom, n, p, scale * W[..., : mom.d, :], v)
    return losses if trials else losses[0]


def _full_form(mom: Moments, p: Any, W: Any, v: Any) -> tuple[Tensor | None, Tensor, Tensor, bool]:
    """P (R, K, t, m) or None, W (R, H, m, m), v (R, H, K, m), and whether W has trials."""
    K, m = mom.K, mom.d + 1
    W = array("W", W, (m, m), ("R", m, m), ("R", "H", m, m))
    lead = tuple(W.shape[:-2])  # (), (R,) or (R, H)
    v = array("v", v, (*lead, K, m)) if lead else array("v", v, (K, m), (m,)).expand(K, m)
    if p is not None:
        p = array("p", p, (*lead[:1], K, "t", m))
        p = p if lead else p[None]
    if len(lead) < 2:
        W, v = W.unsqueeze(-3), v.unsqueeze(-3)
    return (p, W, v, True) if lead else (p, W[None], v[None], False)


class _Quadratic(NamedTuple):
    """const + linear beta + square (beta'S beta): (..., r), (..., r, d), (..., r)."""

    const: Tensor
    linear: Tensor
    square: Tensor


class _Task(NamedTuple):
    """Joint moments of beta ~ N(mu, B) and b = beta'S beta for each task."""

    mu: Tensor  # (K, d)
    B: Tensor  # (K, d, d)
    mean: Tensor  # (K,)     E b = tr(S B) + mu'S mu
    cross: Tensor  # (K, d)  Cov(beta, b) = 2 B S mu
    spread: Tensor  # (K,)   Var b = 2 tr(S B S B) + 4 mu'S B S mu

    @classmethod
    def of(cls, mom: Moments) -> Self:
        SB, Smu = mom.S @ mom.B, mom.mu @ mom.S
        cross = 2.0 * torch.einsum("kij,kj->ki", mom.B, Smu)
        mean = SB.diagonal(dim1=-2, dim2=-1).sum(-1) + (Smu * mom.mu).sum(-1)
        spread = 2.0 * (SB * SB.mT).sum((-2, -1)) + 2.0 * (Smu * cross).sum(-1)
        return cls(mom.mu, mom.B, mean, cross, spread)


def _expected_product(f: _Quadratic, g: _Quadratic, metric: Tensor, task: _Task) -> Tensor:
    """Expectation (..., K) over beta of f' metric g; f, g (..., K, r), metric (r, r) symmetric."""
    f_mean, g_mean = (
        h.const + torch.einsum("...krd,kd->...kr", h.linear, task.mu) + h.square * task.mean[:, None] for h in (f, g)
    )
    f_cross, g_cross = (torch.einsum("...krd,kd->...kr", h.linear, task.cross) for h in (f, g))
    vectors = (f_mean @ metric) * g_mean + (f_cross @ metric) * g.square
    vectors = vectors + (f.square @ metric) * (g_cross + task.spread[:, None] * g.square)
    return vectors.sum(-1) + ((metric @ f.linear @ task.B) * g.linear).sum((-2, -1))


def _task_losses(mom: Moments, n: int, p: Tensor | None, A: Tensor, v: Tensor) -> Tensor:
    """Losses (R, K) of p (R, K, t, m), A (R, H, d, m), v (R, H, K, m). Indices i, j run over attention heads."""
    S, s2, d = mom.S, mom.s2, mom.d
    task = _Task.of(mom)
    N, w, a1, a2 = A[..., :d], A[..., d], v[..., :d], v[..., d]  # (R,H,d,d) (R,H,d) (R,H,K,d) (R,H,K)
    NS, Sa, Sw = N @ S, a1 @ S, w @ S

    w_a2 = torch.einsum("rid,rjk->rijkd", w, a2)
    g = _Quadratic(
        torch.einsum("ride,rjke->rijkd", NS, a1) + s2 * w_a2,
        torch.einsum("rjk,ride->rijkde", a2, NS) + torch.einsum("rid,rjke->rijkde", w, Sa),
        w_a2,
    )
    residual = _Quadratic(n * _pair_trace(g.const), n * _pair_trace(g.linear) - mom.eye, n * _pair_trace(g.square))
    if p is not None:
        prompted = torch.einsum("rktm,rktl,rhkl->rhkm", p, p, v)
        residual = residual._replace(const=residual.const + torch.einsum("rhdm,rhkm->rkd", A, prompted))
    losses = s2 + _expected_product(residual, residual, S, task)
    if n == 0:
        return losses

    a2_a2 = torch.einsum("rik,rjk->rijk", a2, a2)
    a_Z_a = _Quadratic(
        (torch.einsum("rikd,rjkd->rijk", Sa, a1) + s2 * a2_a2)[..., None],
        _symmetrised(torch.einsum("rikd,rjk->rijkd", Sa, a2))[..., None, :],
        a2_a2[..., None],
    )
    w_w = torch.einsum("rid,rjd->rij", Sw, w)
    A_Z_A = _Quadratic(
        (torch.einsum("ride,rjde->rij", S @ NS, N) + s2 * w_w)[..., None, None],
        _symmetrised(torch.einsum("rid,rjde->rije", Sw, NS))[..., None, None, :],
        w_w[..., None, None],
    )
    one = S.new_ones(1, 1)
    swapped = _Quadratic(*(part.transpose(1, 2) for part in g))
    noise = _expected_product(a_Z_a, A_Z_A, one, task) + _expected_product(g, swapped, S, task)
    return losses + n * noise.sum((1, 2))


def _pair_trace(x: Tensor) -> Tensor:
    return x.diagonal(dim1=1, dim2=2).sum(-1)


def _symmetrised(x: Tensor) -> Tensor:
    return x + x.transpose(1, 2)
