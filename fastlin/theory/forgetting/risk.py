"""Exact n-shot error of each member of the family."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlin.theory._checks import array, check_shot_counts, check_shots, check_variance
from fastlin.theory.forgetting.family import Family, covariance, pretrained, symmetric


def inner(S: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """<a, b> = a'S b over the last dimension."""
    return ((a @ S) * b).sum(-1)


def query_moments(S: Tensor, Q: Tensor, q: Tensor | float) -> tuple[Tensor, Tensor]:
    """m1 = E[x x'(q + x'Q x)] and M2 = E[x x'(q + x'Q x)^2], both (d, d), for x ~ N(0, S).

    With Qs = sym(Q), t1 = tr(Q S), t2 = tr(Qs S Qs S): m1 = (q + t1) S + 2 S Qs S and
    M2 = q^2 S + 2q (t1 S + 2 S Qs S) + (t1^2 + 2 t2) S + 4 t1 S Qs S + 8 S Qs S Qs S.
    """
    QsS = 0.5 * (Q + Q.mT) @ S
    SQS = S @ QsS
    t1, t2 = QsS.trace(), (QsS * QsS.mT).sum()
    m1 = (q + t1) * S + 2 * SQS
    M2 = ((q + t1) ** 2 + 2 * t2) * S + 4 * (q + t1) * SQS + 8 * SQS @ QsS
    return m1, M2


def error(family: Family, theta: Any, n: Any, cov: Any = None, noise_var: float = 0.0) -> Tensor:
    """E_n(theta): expected squared error on theta with n shots; differentiable in the family and in theta.

        E_n = s2 + ||theta||^2 - (2/N) { n u'S Q S theta + theta' m1 v_x }
              + (1/N^2) { n tau [q^2 + tr(Q S Q' S)] + n(n+1) u'S Q S Q' S u
                          + v_x' M2 v_x + 2 n u'S Q m1 v_x }
           -> s2 + ||Q'S u - theta||^2    for n -> infinity

    with u = v_x + v theta, tau = ||u||^2 + v^2 s2, N = n + 1 and m1, M2 of `query_moments`.

    Parameters
    ----------
    family : Family
    theta : Tensor (..., d)
    n : int, integers that broadcast against theta's leading dimensions, or None
        Shots; 0 is zero-shot, None the limit.
    cov : Tensor (d, d), optional
        S; None is I.
    noise_var : float
        s2.

    Returns
    -------
    Tensor of the broadcast shape (...), float64

    Examples
    --------
    >>> family = fl.theory.forgetting.pretrained(3)
    >>> fl.theory.forgetting.error(family, [1.0, 0.0, 0.0], n=[0, 1, 10, 100])
    tensor([1.0000, 1.2500, 0.3388, 0.0393], dtype=torch.float64)
    """
    theta = array("theta", theta, ("...", family.d))
    S, s2 = covariance("cov", cov, family.d), check_variance(noise_var)
    v_x, v, q, Q = family.v_x, family.v, family.q, family.Q
    u = v_x + v * theta
    uSQ = u @ S @ Q
    if n is None:
        return s2 + inner(S, uSQ - theta, uSQ - theta)
    n = check_shot_counts(n)
    N = n + 1
    m1, M2 = query_moments(S, Q, q)
    m1_v_x = m1 @ v_x
    spread = (inner(S, u, u) + v.square() * s2) * (q.square() + ((Q @ S) * (S @ Q)).sum())
    linear = n * inner(S, uSQ, theta) + theta @ m1_v_x
    square = n * spread + n * N * inner(S, uSQ, uSQ) + v_x @ M2 @ v_x + 2 * n * (uSQ @ m1_v_x)
    total: Tensor = s2 + inner(S, theta, theta) - 2 * linear / N + square / N**2
    return total


def pretraining_loss(
    d: int, shots: int | None = None, cov: Any = None, noise_var: float = 0.0, task_cov: Any = None
) -> Tensor:
    """Error of `pretrained` with m = `shots` shots, averaged over the tasks of pretraining.

        s2 + tr(ST) - m/(m+1) tr(S Q S T)        m -> infinity: s2

    Parameters
    ----------
    d, shots, cov, noise_var, task_cov : as in `pretrained`

    Returns
    -------
    Tensor (), float64

    Examples
    --------
    >>> fl.theory.forgetting.pretraining_loss(3, shots=20)
    tensor(0.5000, dtype=torch.float64)
    """
    S, T = covariance("cov", cov, d), covariance("task_cov", task_cov, d)
    Q = pretrained(d, shots, cov, noise_var, task_cov).Q
    s2 = S.new_tensor(check_variance(noise_var))
    if shots is None:
        return s2
    m = check_shots(shots, "shots")
    return s2 + (S * T).sum() - m / (m + 1) * ((S @ Q @ S) * T).sum()


def threshold_shots(theta: Any, cov: Any = None, noise_var: float = 0.0) -> Tensor:
    """Shots above which the limit of pretraining beats predicting zero: n > d (1 + s2/||theta||^2) - 1.

    The threshold is a real number, infinite for theta = 0 with noise.

    Parameters
    ----------
    theta, cov, noise_var : as in `error`

    Returns
    -------
    Tensor (...), float64

    Examples
    --------
    >>> fl.theory.forgetting.threshold_shots([1.0, 0.0, 0.0])
    tensor(2., dtype=torch.float64)
    """
    theta = array("theta", theta, ("...", "d"))
    d, s2 = theta.shape[-1], check_variance(noise_var)
    size = inner(covariance("cov", cov, d), theta, theta)
    return d * (1 + s2 / size) - 1 if s2 > 0 else torch.full_like(size, d - 1)


class QuadraticForm(NamedTuple):
    """Coefficients of E_n - E_0 = -v_x'A v_x + 2 b'v_x + C.

    Attributes
    ----------
    A, b, C : Tensor (d, d), (d,), ()

    Examples
    --------
    >>> form = fl.theory.forgetting.quadratic_form(torch.eye(3), [1.0, 0.0, 0.0], n=10)
    >>> form.A.shape, form.b.shape, form.C.shape
    (torch.Size([3, 3]), torch.Size([3]), torch.Size([]))
    """

    A: Tensor
    b: Tensor
    C: Tensor


def quadratic_form(Q: Any, theta: Any, n: int, cov: Any = None, noise_var: float = 0.0) -> QuadraticForm:
    """Excess of the n-shot error over the zero-shot error as a function of v_x, for q = 0 and v = 1.

    With X = S Q S Q S, tq = tr(Q S Q S), N = n + 1 and m1, M2 of `query_moments`:

        A = M2 - [n tq S + n(n+1) X + M2 + n (S Q m1 + m1 Q S)]/N^2
        b = m1 theta - (n S Q S theta + m1 theta)/N + [n tq S + n(n+1) X + n m1 Q S] theta/N^2
        C = -(2n/N) theta'S Q S theta + [n (||theta||^2 + s2) tq + n(n+1) theta'X theta]/N^2

    Shots do not help iff (v_x - A^-1 b)'A (v_x - A^-1 b) <= C + b'A^-1 b.

    Parameters
    ----------
    Q : Tensor (d, d)
        Symmetric.
    theta : Tensor (d,)
    n, cov, noise_var : as in `error`, with a single n

    Returns
    -------
    QuadraticForm

    Examples
    --------
    >>> family = fl.theory.forgetting.value_tuned([1.0, 0.0, 0.0])
    >>> A, b, C = fl.theory.forgetting.quadratic_form(family.Q, [1.0, 0.0, 0.0], n=10)
    >>> E_0, E_10 = fl.theory.forgetting.error(family, [1.0, 0.0, 0.0], n=[0, 10])
    >>> torch.allclose(E_10 - E_0, -family.v_x @ A @ family.v_x + 2 * b @ family.v_x + C)
    True
    """
    theta = array("theta", theta, ("d",))
    d = theta.shape[0]
    S, Q = covariance("cov", cov, d), symmetric("Q", Q, d)
    n, s2 = check_shots(n), check_variance(noise_var)
    N = n + 1
    m1, M2 = query_moments(S, Q, 0.0)
    SQ = S @ Q
    SQS, tq = SQ @ S, (SQ * SQ.mT).sum()
    context = n * tq * S + n * N * SQ @ SQS
    SQm1 = SQ @ m1
    A = M2 - (context + M2 + n * (SQm1 + SQm1.mT)) / N**2
    b = m1 @ theta - (n * SQS + m1) @ theta / N + (context + n * SQm1.mT) @ theta / N**2
    C = -2 * n / N * (theta @ SQS @ theta) + (n * s2 * tq + theta @ context @ theta) / N**2
    return QuadraticForm(A, b, C)
