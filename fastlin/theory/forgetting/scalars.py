"""What the free scalar v = c of value-only fine-tuning should be.

Q = S^-1, q = 0, v_x = theta0/k, k = d + 4; t = ||theta||^2, t0 = ||theta0||^2, g = <theta, theta0>. The
zero-shot error does not depend on c; few-shot errors do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlin.theory._checks import as_float64, check_shot_counts, check_variance
from fastlin.theory.forgetting.family import covariance, vector
from fastlin.theory.forgetting.risk import inner, tasks


def best_scalar(theta0: Any, theta: Any, n: Any, cov: Any = None, noise_var: float = 0.0) -> Tensor:
    """The c that makes the n-shot error on theta least.

        c*_n(theta) = [(n+1) t - (n+2d+3) g/k] / [(n+d+1) t + d s2]  ->  1 - g/(k t)

    For theta = theta0 it increases to (d+3)/(d+4). At n = 0 every c is as good, and the formula's value is
    returned. theta0 (d,), theta (..., d); n as in `forgetting.error`, None the limit.

    Parameters
    ----------
    theta0 : Tensor (d,)
        The task that was tuned on.
    theta : Tensor (..., d)
        The task that is met.
    n : int, integers that broadcast, or None
        Shots; None is the limit.
    cov : Tensor (d, d), optional
    noise_var : float

    Returns
    -------
    Tensor of the broadcast shape (...), float64

    Examples
    --------
    >>> theta0 = torch.tensor([1.0, 0.0, 0.0])
    >>> round(float(fl.theory.forgetting.best_scalar(theta0, theta0, None)), 4)  # (d+3)/(d+4)
    0.8571
    """
    d, g, t = _products(theta0, theta, cov)
    k, s2 = d + 4, check_variance(noise_var)
    if n is None:
        _check_positive(t)
        return 1 - g / (k * t)
    n = check_shot_counts(n)
    size: Tensor = (n + d + 1) * t + d * s2
    _check_positive(size)
    pull: Tensor = (n + 1) * t - (n + 2 * d + 3) * g / k
    return pull / size


def average_scalar(d: int, n: Any, cov: Any = None, noise_var: float = 0.0, task_cov: Any = None) -> Tensor:
    """The c that makes the n-shot error least on average over tasks with mean zero and second moment T.

        c_avg(n) = (n+1) tr(ST) / [(n+d+1) tr(ST) + d s2]  ->  1

    n as in `best_scalar`.

    Parameters
    ----------
    d : int
        Number of features.
    n : int, integers (...) or None
        Shots; None is the limit.
    cov, task_cov : Tensor (d, d), optional
    noise_var : float

    Returns
    -------
    Tensor (...), float64

    Examples
    --------
    >>> round(float(fl.theory.forgetting.average_scalar(3, 20)), 4)
    0.875
    """
    t = (covariance("cov", cov, d) * covariance("task_cov", task_cov, d)).sum()
    s2 = check_variance(noise_var)
    if n is None:
        return torch.ones_like(t)
    n = check_shot_counts(n)
    size: Tensor = (n + d + 1) * t + d * s2
    _check_positive(size, "task_cov")
    pull: Tensor = (n + 1) * t
    return pull / size


def excess_error(theta0: Any, theta: Any, n: Any, c: Any = 1.0, cov: Any = None, noise_var: float = 0.0) -> Tensor:
    """E_n(theta) at c, less its least value over c.

        (n/N^2) [(n+d+1) t + d s2] (c - c*_n(theta))^2        n -> infinity: t (c - c*(theta))^2

    theta0, theta, n as in `best_scalar`; c a number or a tensor that broadcasts.

    Parameters
    ----------
    theta0, theta, n, cov, noise_var
        As in `best_scalar`.
    c : float or Tensor (...)
        The scalar in use; broadcasts.

    Returns
    -------
    Tensor of the broadcast shape (...), float64

    Examples
    --------
    >>> theta0 = torch.tensor([1.0, 0.0, 0.0])
    >>> best = fl.theory.forgetting.best_scalar(theta0, theta0, 20)
    >>> float(fl.theory.forgetting.excess_error(theta0, theta0, 20, c=best))
    0.0
    """
    d, _, t = _products(theta0, theta, cov)
    miss = as_float64("c", c) - best_scalar(theta0, theta, n, cov, noise_var)
    if n is None:
        return t * miss.square()
    n = check_shot_counts(n)
    curvature: Tensor = n / (n + 1) ** 2 * ((n + d + 1) * t + d * check_variance(noise_var))
    return curvature * miss.square()


def cosine_excess(theta0: Any, theta: Any, cov: Any = None) -> Tensor:
    """Excess on theta of the scalar that is best for theta0, n -> infinity, cos = g/sqrt(t t0).

        (sqrt(t0) cos - sqrt(t))^2/k^2

    which is (t0/k^2)(1 - cos)^2 when ||theta|| = ||theta0||.

    Parameters
    ----------
    theta0 : Tensor (d,)
    theta : Tensor (..., d)
    cov : Tensor (d, d), optional

    Returns
    -------
    Tensor (...), float64

    Examples
    --------
    >>> theta0 = torch.tensor([1.0, 0.0, 0.0])
    >>> round(float(fl.theory.forgetting.cosine_excess(theta0, -theta0)), 4)  # 4/(d+4)^2
    0.0816
    """
    d, g, t = _products(theta0, theta, cov)
    _check_positive(t)
    return (g / t.sqrt() - t.sqrt()).square() / (d + 4) ** 2


class AuxiliaryOptimum(NamedTuple):
    """v_x = alpha theta0 and v = c.

    Attributes
    ----------
    alpha : Tensor (...)
    c : Tensor (...)

    Examples
    --------
    >>> optimum = fl.theory.forgetting.auxiliary_optimum(torch.tensor([1.0, 0.0, 0.0]), n=20, weight=0.0)
    >>> round(float(optimum.alpha), 4)  # 1/(d+4)
    0.1429
    """

    alpha: Tensor
    c: Tensor


def auxiliary_optimum(theta0: Any, n: Any, weight: float, cov: Any = None, noise_var: float = 0.0) -> AuxiliaryOptimum:
    """Minimiser of E_0(theta0) + w E_n(theta0) over the value matrix, Q = S^-1, q = 0, n >= 1, w >= 0.

        { k2 t0 + w t0/N^2 [n(n+d+1) + k2 + 2n(d+2)] } alpha + w n t0 (n+2d+3)/N^2 c
            = (d+2) t0 + w t0 (n+d+2)/N
        t0 (n+2d+3) alpha + [(n+d+1) t0 + d s2] c = t0 N

    with k2 = (d+2)(d+4). w -> 0 gives alpha = 1/(d+4) and c = c*_n(theta0): the few-shot weight may be
    annealed away. The paper's own statement of this is not in its text.

    Parameters
    ----------
    theta0 : Tensor (d,)
    n : int or integers (...)
        Shots, 1 or more.
    weight : float
        w, not negative.
    cov : Tensor (d, d), optional
    noise_var : float

    Returns
    -------
    AuxiliaryOptimum
        alpha (...) and c (...), float64.

    Examples
    --------
    >>> theta0 = torch.tensor([1.0, 0.0, 0.0])
    >>> optimum = fl.theory.forgetting.auxiliary_optimum(theta0, n=20, weight=1.0)
    >>> round(float(optimum.alpha), 4), round(float(optimum.c), 4)
    (0.1439, 0.7012)
    """
    theta0 = vector("theta0", theta0)
    d = theta0.shape[0]
    t0 = inner(covariance("cov", cov, d), theta0, theta0)
    _check_positive(t0, "theta0")
    s2, w = check_variance(noise_var), check_variance(weight, "weight")
    n = check_shot_counts(n)
    if bool((n < 1).any()):
        raise ValueError("n: wants at least one shot, got 0, at which the loss does not depend on c")
    N, k2, mixed = n + 1, (d + 2) * (d + 4), n + 2 * d + 3
    a11 = k2 * t0 + w * t0 / N**2 * (n * (n + d + 1) + k2 + 2 * n * (d + 2))
    a12 = w * n * t0 * mixed / N**2
    a22 = (n + d + 1) * t0 + d * s2
    b1 = (d + 2) * t0 + w * t0 * (n + d + 2) / N
    alpha = (b1 - a12 * t0 * N / a22) / (a11 - a12 * t0 * mixed / a22)
    return AuxiliaryOptimum(alpha, t0 * (N - mixed * alpha) / a22)


def auxiliary_step_effect(gradient: Any, step: float, cov: Any = None) -> Tensor:
    """What a step of gradient descent on any loss costs E_0(theta0), from the value-only zero-shot optimum.

        E_0(v_x - step g) - E_0(v_x) = step^2 (d+2)(d+4) ||g||_S^2

    exactly; `gradient` (..., d) is g, the derivative of that loss in v_x.

    Parameters
    ----------
    gradient : Tensor (..., d)
    step : float
        Learning rate.
    cov : Tensor (d, d), optional

    Returns
    -------
    Tensor (...), float64

    Examples
    --------
    >>> round(float(fl.theory.forgetting.auxiliary_step_effect(torch.tensor([1.0, 0.0, 0.0]), step=0.1)), 4)
    0.35
    """
    g = tasks("gradient", gradient)
    d = g.shape[-1]
    return step**2 * (d + 2) * (d + 4) * inner(covariance("cov", cov, d), g, g)


def _products(theta0: Any, theta: Any, cov: Any) -> tuple[int, Tensor, Tensor]:
    """d, <theta, theta0>, ||theta||^2."""
    theta0 = vector("theta0", theta0)
    d = theta0.shape[0]
    theta = tasks("theta", theta, d)
    S = covariance("cov", cov, d)
    return d, inner(S, theta, theta0), inner(S, theta, theta)


def _check_positive(size: Tensor, name: str = "theta") -> None:
    if not bool((size > 0).all()):
        raise ValueError(f"{name}: wants a task that is not zero, got one that no scalar helps")
