"""Closed forms of the reduced model f = x' W (X'y + p_k): population loss, optima, and the gaps between them.

The derivations use only E[X'X A X'X] = n tr(SA) S + n(n+1) S A S (A symmetric). They assume no isotropy, no commuting
matrices and no symmetry of W. `moments` defines the symbols. Losses are sums of non-negative terms, so they keep their
digits when n is large and the loss is small against E[y^2].
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlin.theory._checks import array, check_shots
from fastlin.theory.moments import Mixture, Moments
from fastlin.theory.optimum import NotAttained, Optimum

# An optimum counts as attained when the error of its prompts adds less than this fraction of E[y^2] to the loss.
_ATTAINED = 1e-12


def normaliser(mix: Mixture) -> float:
    """E[y^2] = tr(S Btil) + s2, the loss of predicting zero. Risk curves are divided by it.

    Parameters
    ----------
    mix : as in `plain`

    Returns
    -------
    float

    Examples
    --------
    >>> fl.theory.normaliser(fl.TaskMixture([[1.0]], 2.0))
    3.0
    """
    return Moments.of(mix).a


def population_loss(mix: Mixture, n: int, W: Any, prompts: Any = None) -> Tensor:
    """Exact population loss of the reduced model at any W and prompts; differentiable in both.

        L = s2 + tr(S E Bbar E') + n a tr(S W S W') + n tr(S W S Btil S W')
            + sum_k pi_k ||E mu_k + W p_k||_S^2,    E = n W S - I

    The same loss, with the squares expanded:

        sum_k pi_k { tr(S W C_k W') - 2n tr(S W S R_k) + tr(S R_k) + s2 + 2 v_k'S W p_k + p_k'W'S W p_k }
        C_k = n (tr(S R_k) + s2) S + n(n+1) S R_k S        v_k = E mu_k

    Only the first two moments of beta enter.

    Parameters
    ----------
    mix, n : as in `plain`
    W : Tensor (d, d) or (R, d, d)
    prompts : Tensor (K, d) or (R, K, d), optional
        None is zero. A batch of W may share one set of prompts, and a batch of prompts one W.

    Returns
    -------
    Tensor () or (R,), float64

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
    >>> optimum = fl.theory.joint(mix, 10)
    >>> W = optimum.W.clone().requires_grad_()
    >>> loss = fl.theory.population_loss(mix, 10, W, optimum.prompts)
    >>> loss.backward()
    >>> round(loss.item(), 4), W.grad.abs().max().item() < 1e-12
    (0.6207, True)
    """
    mom, n = Moments.of(mix), check_shots(n)
    W = array("W", W, (mom.d, mom.d), ("R", mom.d, mom.d))
    if prompts is not None:
        R = len(W) if W.ndim == 3 else "R"
        prompts = array("prompts", prompts, (mom.K, mom.d), (R, mom.K, mom.d))
    return reduced_loss(mom, n, W, prompts)


def reduced_loss(mom: Moments, n: int, W: Tensor, prompts: Tensor | None) -> Tensor:
    """`population_loss` of moments, W (..., d, d) and prompts (..., K, d)."""
    S = mom.S
    WS = W @ S
    E = n * WS - mom.eye
    loss = mom.s2 + _quadratic(S, E, mom.Bbar)
    loss = loss + n * mom.a * _quadratic(S, W, S) + n * _quadratic(S, WS, mom.Btil)
    bias = mom.mu @ E.mT  # rows E mu_k
    if prompts is not None:
        bias = bias + prompts @ W.mT
    return loss + torch.einsum("k,...ki,ij,...kj->...", mom.pi, bias, S, bias)


def _quadratic(S: Tensor, W: Tensor, C: Tensor) -> Tensor:
    """tr(S W C W') over the last two dimensions."""
    return ((S @ W @ C) * W).sum((-2, -1))


def plain(mix: Mixture, n: int) -> Optimum:
    """Optimum without prompts: the paper's Theorem 1, for any S.

        W = Btil (a I + (n+1) S Btil)^-1 = (a Btil^-1 + (n+1) S)^-1        L = a - n tr(S W S Btil)

    Btil may be singular. At n = 0 every W has the loss E[y^2], and W follows the formula. W = 0 without signal and
    noise.

    Parameters
    ----------
    mix : TaskMixture
        With bias=False.
    n : int
        Context length, 0 allowed.

    Returns
    -------
    Optimum with W (d, d) and zero prompts (K, d)

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
    >>> round(fl.theory.plain(mix, 10).loss, 4)
    0.6923
    """
    mom, n = Moments.of(mix), check_shots(n)
    loss = mom.s2
    if mom.a != 0:  # L = s2 + tr(S Btil (a I + (n+1) S Btil)^-1 (a I + S Btil))
        SB, ridge = mom.S @ mom.Btil, mom.a * mom.eye
        loss += float(torch.trace(SB @ left_divide(ridge + (n + 1) * SB, ridge + SB)))
    W = ridge_preconditioner(mom, n, mom.Btil, mom.a)
    return Optimum(W, torch.zeros_like(mom.mu), None, loss)


def fine_tuned(mix: Mixture, n: int) -> Optimum:
    """Optimum over the prompts, with W frozen at that of `plain`.

        p_k = (a Btil^-1 + S) mu_k        L = L_plain - tr(S M (n S W - I)^2)

    Btil^-1 is a pseudo-inverse. Every mean lies in the range of Btil, so the prompts exist for any rank. They do not
    depend on n. At n = 0 the loss is abar. The paper's Theorem 2 has (nW-I)'(nW-I) in place of the square, which is
    right only if S and Btil commute. The formula P = Mmu (W^-1 - n S) of its appendix is right only for S = I.

    Parameters
    ----------
    mix, n : as in `plain`

    Returns
    -------
    Optimum with W (d, d) of `plain`, prompts (K, d)

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
    >>> round(fl.theory.fine_tuned(mix, 10).loss, 4)
    0.6391
    """
    mom, start = Moments.of(mix), plain(mix, n)
    prompts = mom.mu @ (mom.a * torch.linalg.pinv(mom.Btil, hermitian=True) + mom.S)
    loss = start.loss
    if mom.a > 0:
        SB = mom.S @ mom.Btil
        I_nSW = right_divide(mom.a * mom.eye + SB, mom.a * mom.eye + (n + 1) * SB)  # I - n S W
        loss -= float(torch.trace(mom.S @ mom.M @ I_nSW @ I_nSW))
    return Optimum(start.W, prompts, None, loss)


def joint(mix: Mixture, n: int) -> Optimum:
    """Optimum over W and prompts together.

        W = Bbar (a I + (n+1) S Bbar + S M)^-1        p_k = [(a I + S M) Bbar^-1 + S] mu_k
        L = tr(S Bbar) + s2 - n tr(S W S Bbar)

    W is not symmetric in general, even for S = I. The prompts do not depend on n. With a singular Bbar they exist if
    every mean lies in its range, and Bbar^-1 is a pseudo-inverse; else NotAttained reports the infimum. At n = 0 the
    loss is abar, and any W with W p_k = mu_k attains it. The prompts of the paper's Theorem 3 need W' = W, and its
    "prompts of about -n S mu_k" do not occur.

    Parameters
    ----------
    mix, n : as in `plain`

    Returns
    -------
    Optimum with W (d, d), prompts (K, d)

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
    >>> round(fl.theory.joint(mix, 10).loss, 4)
    0.6207
    >>> torch.allclose(fl.theory.joint(mix, 10).prompts, fl.theory.joint(mix, 1000).prompts)
    True
    """
    return joint_optimum(Moments.of(mix), check_shots(n))


def joint_optimum(mom: Moments, n: int) -> Optimum:
    """`joint` of moments."""
    S = mom.S
    if mom.a == 0:
        return Optimum(torch.zeros_like(S), torch.zeros_like(mom.mu), None, 0.0)
    fixed = mom.a * mom.eye + S @ mom.M
    SB = S @ mom.Bbar
    W = right_divide(mom.Bbar, fixed + (n + 1) * SB)
    loss = mom.s2 + float(torch.trace(SB @ left_divide(fixed + (n + 1) * SB, fixed + SB)))
    prompts = mom.mu @ (torch.linalg.pinv(mom.Bbar, hermitian=True) @ fixed.mT + S)
    target = mom.mu - n * mom.mu @ (W @ S).mT
    W, prompts = attain(mom, W, prompts, target, loss, W_is_free=n == 0)
    return Optimum(W, prompts, None, loss)


def one_prompt(mix: Mixture, n: int) -> Optimum:
    """Optimum over W and one prompt p for all tasks, which hides the task from the model.

    The loss depends on beta through its first two moments over all tasks. So the optimum is `joint` of a single task
    with mean mubar = sum_k pi_k mu_k and covariance Btil - mubar mubar'. It raises NotAttained where that does, and
    equals `plain`, with p = 0, when mubar = 0.

    Parameters
    ----------
    mix, n : as in `plain`

    Returns
    -------
    Optimum with W (d, d), prompts (K, d) that all equal p

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
    >>> round(fl.theory.one_prompt(mix, 10).loss, 4)
    0.6565
    """
    mom, n = Moments.of(mix), check_shots(n)
    optimum = joint_optimum(mom.pooled(), n)
    return Optimum(optimum.W, optimum.prompts.repeat(mom.K, 1), None, optimum.loss)


def ridge_preconditioner(mom: Moments, n: int, B: Tensor, a: float) -> Tensor:
    """B (a I + (n+1) S B)^-1 (d, d), zero for a = 0 (then S B = 0 as well)."""
    if a == 0:
        return torch.zeros_like(B)
    return right_divide(B, a * mom.eye + (n + 1) * mom.S @ B)


def attain(
    mom: Moments, W: Tensor, prompts: Tensor, target: Tensor, loss: float, *, W_is_free: bool
) -> tuple[Tensor, Tensor]:
    """W and prompts (K, d) with W p_k = target_k in S-norm, or NotAttained with the infimum `loss`.

    A residual e_k = W p_k - target_k adds sum_k pi_k ||e_k||_S^2 to the loss. If W is free, because the context is
    empty or carries no information, the target is mu_k. The W of `plain` then serves: its range contains every mean.
    """
    residual = prompts @ W.mT - target
    if float(torch.einsum("k,ki,ij,kj->", mom.pi, residual, mom.S, residual)) <= _ATTAINED * mom.a:
        return W, prompts
    if W_is_free:
        W = ridge_preconditioner(mom, 0, mom.Btil, mom.a)
        return W, mom.mu @ torch.linalg.pinv(W).mT
    reason = "a mean lies outside the range of the singular mean task covariance"
    raise NotAttained(loss, reason, "means inside that range")


class GapLimits(NamedTuple):
    """Limits for n -> infinity of the scaled gaps between optima.

    Attributes
    ----------
    plain_fine_tuned, fine_tuned_joint, joint_decoupled : float
        The first two are limits of n^2 times the gap, the third of n times the gap.

    Examples
    --------
    >>> fl.theory.gap_limits(fl.TaskMixture([[1.0], [-1.0]]))
    GapLimits(plain_fine_tuned=4.0, fine_tuned_joint=4.0, joint_decoupled=2.0)
    """

    plain_fine_tuned: float
    fine_tuned_joint: float
    joint_decoupled: float


def gap_limits(mix: Mixture) -> GapLimits:
    """Rates at which the optima approach one another as the context grows.

        n^2 (L_plain - L_fine_tuned)  ->  tr( M (I + a Btil^-1 S^-1) S (I + a S^-1 Btil^-1) )
        n^2 (L_fine_tuned - L_joint)  ->  tr( S^-1 K Bbar K' ),    K = (a I + S M) Bbar^-1 - a Btil^-1
        n   (L_joint - L_decoupled)   ->  (d+1) tr(S M)

    S and Bbar must be invertible. The paper's Corollary 1 states O(1/n) for the second gap, which is Theta(1/n^2).

    Parameters
    ----------
    mix : as in `plain`

    Returns
    -------
    GapLimits

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
    >>> gap = fl.theory.joint(mix, 10_000).loss - fl.theory.decoupled(mix, 10_000).loss
    >>> round(10_000 * gap, 2), round(fl.theory.gap_limits(mix).joint_decoupled, 2)
    (3.0, 3.0)
    """
    mom = Moments.of(mix)
    for name, matrix in (("feature covariance", mom.S), ("mean task covariance", mom.Bbar)):
        if int(torch.linalg.matrix_rank(matrix, hermitian=True)) < mom.d:
            raise ValueError(f"mix: wants an invertible {name}, got a singular one")
    S, a, eye = mom.S, mom.a, mom.eye
    Binv, Sinv = torch.linalg.inv(mom.Btil), torch.linalg.inv(S)
    rise = eye + a * Binv @ Sinv
    K = (a * eye + S @ mom.M) @ torch.linalg.inv(mom.Bbar) - a * Binv
    return GapLimits(
        float(torch.trace(mom.M @ rise @ S @ rise.mT)),
        float(torch.trace(Sinv @ K @ mom.Bbar @ K.mT)),
        (mom.d + 1) * float((S * mom.M).sum()),
    )


def left_divide(X: Tensor, B: Tensor) -> Tensor:
    """X^-1 B, for matrices (d, d) or batches of them (k, d, d).

    One solve for each matrix: torch's batched solve is wrong for d >= 151 on several threads (pytorch issue 142815).
    """
    if X.ndim > 2:
        return torch.stack([left_divide(*pair) for pair in zip(X, B.expand_as(X), strict=True)])
    quotient: Tensor = torch.linalg.solve(X, B)
    return quotient


def right_divide(B: Tensor, X: Tensor) -> Tensor:
    """B X^-1, as `left_divide`."""
    return left_divide(X.mT, B.mT).mT
