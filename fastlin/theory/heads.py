"""Closed forms with heads: debiased gradient descent, the shared shift, scaled task heads, and a lower bound.

A head a_k = s_k [-m_k; 1] turns the labels into s_k (y - X m_k). With A = [[W, 0], [0, 0]] the prediction is
x' { s_k W X'(y - X m_k) + c_k }. The prompt token [r; r.m_k + 1/s_k] has p'a_k = 1 and gives c_k = W r. `moments`
defines the symbols.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from fastlin.theory._checks import array, check_shots
from fastlin.theory.moments import Mixture, Moments
from fastlin.theory.optimum import Attention, Bound, NotAttained, Optimum, embed
from fastlin.theory.prompts import attain, joint_optimum, left_divide, reduced_loss, ridge_preconditioner, right_divide

_MAX_SWEEPS = 20_000


def debiased_loss(mix: Mixture, n: int, W: Any) -> Tensor:
    """Population loss of debiased preconditioned gradient descent f = x' { W X'(y - X mu_k) + mu_k }.

        L = s2 + tr(S E Bbar E') + n abar tr(S W S W') + n tr(S W S Bbar S W'),    E = n W S - I

    Parameters
    ----------
    mix, n : as in `plain`
    W : Tensor (d, d) or (R, d, d)

    Returns
    -------
    Tensor () or (R,), float64, differentiable in W

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
    >>> fl.theory.debiased_loss(mix, 10, torch.eye(2) / 13)
    tensor(0.4615, dtype=torch.float64)
    """
    mom, n = Moments.of(mix), check_shots(n)
    W = array("W", W, (mom.d, mom.d), ("R", mom.d, mom.d))
    centred = Moments.build(mom.S, mom.pi, torch.zeros_like(mom.mu), mom.B, mom.s2)
    return reduced_loss(centred, n, W, None)


def debiased_attention(mix: Mixture, W: Any) -> Attention:
    """Attention parameters whose prediction, at scale 1, is that of `debiased_loss`.

        A = [[W, 0], [0, 0]]        v_k = [-mu_k; 1]        p_k = [W^-1 mu_k; mu_k' W^-T mu_k + 1]

    Parameters
    ----------
    mix : as in `plain`
    W : Tensor (d, d)
        Invertible.

    Returns
    -------
    Attention with p (K, 1, m), W (m, m), v (K, m); m = d + 1

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
    >>> attention = fl.theory.debiased_attention(mix, torch.eye(2) / 13)
    >>> fl.theory.full_population_loss(mix, 10, *attention)
    tensor(0.4615, dtype=torch.float64)
    """
    mom = Moments.of(mix)
    W = array("W", W, (mom.d, mom.d))
    rank = int(torch.linalg.matrix_rank(W))
    if rank < mom.d:
        raise ValueError(f"W: wants an invertible matrix, got one of rank {rank} of {mom.d}")
    r = torch.linalg.solve(W, mom.mu.mT).mT
    tokens, heads = _tokens(r, mom.mu, torch.ones_like(mom.pi))
    return Attention(tokens[:, None, :], embed(W), heads)


def decoupled(mix: Mixture, n: int) -> Optimum:
    """Minimum of `debiased_loss` over W, with the heads and prompts of `debiased_attention`.

        W = (abar Bbar^-1 + (n+1) S)^-1        L = tr(S Bbar) + s2 - n tr(S W S Bbar)

    W exists for a singular Bbar. If then a mean lies outside the range of Bbar, NotAttained reports the infimum, except
    where the loss does not depend on W: n = 0 (loss abar), or Bbar = 0 without noise (loss 0). The paper's
    Proposition 1 equates this loss with the infimum over heads and prompts. It is only an upper bound of it (see
    `scaled_heads`). The paper's appendix omits s2.

    Parameters
    ----------
    mix, n : as in `plain`

    Returns
    -------
    Optimum with W (d, d), prompt tokens and heads (K, d+1)

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
    >>> round(fl.theory.decoupled(mix, 10).loss, 4)
    0.4615
    """
    mom, n = Moments.of(mix), check_shots(n)
    W = ridge_preconditioner(mom, n, mom.Bbar, mom.abar)
    loss = _debiased_minima(mom, n, mom.Bbar[None], mom.S.new_tensor([mom.abar]))
    return _with_heads(mom, n, W, torch.ones_like(mom.pi), float(loss))


def shared_shift(mix: Mixture, n: int) -> Optimum:
    """Optimum over W, prompts and a head [-m; 1] that all tasks share.

    The best shift is m = sum_k pi_k mu_k. W and the loss are those of `joint` for the centred means.

        head [-m; 1]        prompt token [r_k; r_k.m + 1],    r_k = p_k(centred) + W^-1 m

    The paper does not have this optimum. Its Assumption 1 sets m = 0, a restriction if sum_k pi_k mu_k != 0.

    Parameters
    ----------
    mix, n : as in `plain`

    Returns
    -------
    Optimum with W (d, d), prompt tokens (K, d+1), and heads (K, d+1) that are all equal

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
    >>> round(fl.theory.shared_shift(mix, 10).loss, 4), round(fl.theory.joint(mix, 10).loss, 4)
    (0.545, 0.6207)
    """
    mom, n = Moments.of(mix), check_shots(n)
    m = mom.pi @ mom.mu
    centred = joint_optimum(mom.shifted(m), n)
    W, loss = centred.W, centred.loss
    r = centred.prompts + m @ torch.linalg.pinv(W).mT
    target = m + centred.prompts @ W.mT
    W, r = attain(mom, W, r, target, loss, W_is_free=n == 0)
    tokens, heads = _tokens(r, m.expand_as(mom.mu), torch.ones_like(mom.pi))
    return Optimum(W, tokens, heads, loss)


def scaled_heads(mix: Mixture, n: int) -> Optimum:
    """Optimum over W and heads s_k [-mu_k; 1] with prompts: debiased descent with a step length for each task.

        L = min_{W, s} sum_k pi_k { s_k^2 tr(S W C0_k W') - 2 n s_k tr(S W S B_k) + tr(S B_k) + s2 }
        C0_k = n (tr(S B_k) + s2) S + n(n+1) S B_k S

    Alternation finds the minimum:

        W = n (sum_k pi_k s_k B_k) S (sum_k pi_k s_k^2 C0_k)^-1        s_k = n tr(S W S B_k) / tr(S W C0_k W')

    It runs from K+1 starts: s = 1, which makes the result no worse than `decoupled`, and the best W of each task. It
    stops when no s_k changes by more than 1e-10 of the largest. The loss is then exact to rounding, because it is flat
    to first order. The lowest loss is returned, with sum_k pi_k s_k^2 = 1. The problem is not convex, so the starts
    could miss a minimum; random starts found none that was missed. The paper's Proposition 1 overlooks these heads:
    L <= L_decoupled, with equality when one W is best for all tasks.

    Parameters
    ----------
    mix, n : as in `plain`

    Returns
    -------
    Optimum with W (d, d), prompt tokens (K, d+1), heads (K, d+1)

    Examples
    --------
    >>> diagonals = [[4.0, 0.1], [0.1, 4.0]]
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]], diagonals, [0.3, 0.7], noise_std=1.0)
    >>> fl.theory.scaled_heads(mix, 10).loss < fl.theory.decoupled(mix, 10).loss
    True
    """
    mom, n = Moments.of(mix), check_shots(n)
    if n == 0 or mom.abar == 0:
        return decoupled(mix, n)
    W, s, loss = _alternate(mom, n)
    return _with_heads(mom, n, W, s, loss)


def heads_lower_bound(mix: Mixture, n: int) -> Bound:
    """Lower bound on the loss of any one-layer attention with task heads and prompts.

        sum_k pi_k min_W L0_k(W) = sum_k pi_k { tr(S B_k) + s2 - n tr(S W_k S B_k) }
        W_k = B_k ((tr(S B_k) + s2) I + (n+1) S B_k)^-1

    L0_k is the debiased loss of task k alone. The bound equals `decoupled` when every task has the same W_k.

    Parameters
    ----------
    mix, n : as in `plain`

    Returns
    -------
    Bound

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
    >>> round(float(fl.theory.heads_lower_bound(mix, 10)), 4)
    0.4615
    """
    mom, n = Moments.of(mix), check_shots(n)
    a = torch.einsum("ij,kij->k", mom.S, mom.B) + mom.s2
    return Bound(float(mom.pi @ _debiased_minima(mom, n, mom.B, a)))


def _debiased_minima(mom: Moments, n: int, B: Tensor, a: Tensor) -> Tensor:
    """Minimum (k,) over W of the debiased loss for task covariances B (k, d, d) and a = tr(S B) + s2 (k,).

    tr(S B) + s2 - n tr(S W S B) = s2 + tr(S B (a I + (n+1) S B)^-1 (a I + S B)); a = 0 implies S B = 0.
    """
    SB = mom.S @ B
    ridge = torch.where(a > 0, a, 1.0)[:, None, None] * mom.eye
    inner = left_divide(ridge + (n + 1) * SB, ridge + SB)
    return mom.s2 + (SB * inner.mT).sum((-2, -1))


def _alternate(mom: Moments, n: int) -> tuple[Tensor, Tensor, float]:
    """W (d, d), s (K,) and loss of `scaled_heads`, for n >= 1 and abar > 0."""
    S, B, pi = mom.S, mom.B, mom.pi
    a = torch.einsum("ij,kij->k", S, B) + mom.s2  # (K,)
    SBS = S @ B @ S

    def best_W(s: Tensor) -> Tensor:  # (r, K) -> (r, d, d)
        ridge = (s.square() @ (pi * a))[:, None, None] * mom.eye
        spread = torch.einsum("rk,kij->rij", pi * s.square(), B)
        pull = torch.einsum("rk,kij->rij", pi * s, B)
        return right_divide(pull, ridge + (n + 1) * S @ spread)

    def best_s(W: Tensor) -> Tensor:  # (r, d, d) -> (r, K)
        SW = S @ W
        reach = torch.einsum("rij,kji->rk", SW @ S, B)  # tr(S W S B_k)
        size = (SW @ S * W).sum((-2, -1))[:, None] * a  # tr(S W C0_k W') / n
        size = size + (n + 1) * torch.einsum("rij,kjl,ril->rk", SW, SBS, W)
        s = torch.where(size > 0, reach / torch.where(size > 0, size, 1.0), 1.0)
        s = s / (s.square() @ pi).sqrt()[:, None]
        return s * torch.where(s @ pi < 0, -1.0, 1.0)[:, None]

    task_W = [ridge_preconditioner(mom, n, B_k, float(a_k)) for B_k, a_k in zip(B, a, strict=True) if float(a_k) > 0]
    s = torch.cat([S.new_ones(1, mom.K), best_s(torch.stack(task_W))])
    for _ in range(_MAX_SWEEPS):
        previous, s = s, best_s(best_W(s))
        if float((s - previous).abs().max()) <= 1e-10 * float(s.abs().max()):
            break
    else:
        warnings.warn(f"scaled_heads: no convergence after {_MAX_SWEEPS} sweeps", RuntimeWarning, stacklevel=3)
    W = best_W(s)
    losses = torch.stack([_scaled_loss(mom, n, W_r, s_r) for W_r, s_r in zip(W, s, strict=True)])
    best = int(losses.argmin())
    return W[best], s[best], float(losses[best])


def _scaled_loss(mom: Moments, n: int, W: Tensor, s: Tensor) -> Tensor:
    S, sW = mom.S, s[:, None, None] * W
    sWS = sW @ S
    E = n * sWS - mom.eye
    a = torch.einsum("ij,kij->k", S, mom.B) + mom.s2
    spread = (S @ E @ mom.B * E).sum((-2, -1)) + n * (S @ sWS @ mom.B * sWS).sum((-2, -1))
    return mom.s2 + mom.pi @ (spread + n * a * (S @ sWS * sW).sum((-2, -1)))


def _with_heads(mom: Moments, n: int, W: Tensor, s: Tensor, loss: float) -> Optimum:
    if bool((s == 0).any()):
        reason = "the context carries no information about a task, which needs a head of size zero"
        raise NotAttained(loss, reason, "task covariances that are not zero")
    r = mom.mu @ torch.linalg.pinv(W).mT
    W, r = attain(mom, W, r, mom.mu, loss, W_is_free=n == 0 or mom.abar == 0)
    tokens, heads = _tokens(r, mom.mu, s)
    return Optimum(W, tokens, heads, loss)


def _tokens(r: Tensor, m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Prompt tokens [r_k; r_k.m_k + 1/s_k] and heads s_k [-m_k; 1], both (K, d+1); r, m (K, d), s (K,)."""
    tokens = torch.cat([r, (r * m).sum(1, keepdim=True) + 1.0 / s[:, None]], dim=1)
    heads = s[:, None] * torch.cat([-m, torch.ones_like(m[:, :1])], dim=1)
    return tokens, heads
