"""Choice of the free scalar v = c after fine-tuning of the value matrix.

Here Q = S^-1, q = 0, v_x = theta0/k, k = d + 4; t = ||theta||^2, t0 = ||theta0||^2, g = <theta, theta0>, N = n + 1. The
zero-shot error does not depend on c; few-shot errors do.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlin.theory._checks import array, check_shot_counts, check_variance
from fastlin.theory.forgetting.family import covariance
from fastlin.theory.forgetting.risk import inner


def best_scalar(theta0: Any, theta: Any, n: Any, cov: Any = None, noise_var: float = 0.0) -> Tensor:
    """The c that minimises the n-shot error on theta.

        c*_n(theta) = [(n+1) t - (n+2d+3) g/k] / [(n+d+1) t + d s2]  ->  1 - g/(k t)

    For theta = theta0 it increases to (d+3)/(d+4). At n = 0 the error does not depend on c, and the result is the
    formula's.

    Parameters
    ----------
    theta0 : Tensor (d,)
        The task of fine-tuning.
    theta, n, cov, noise_var : as in `error`

    Returns
    -------
    Tensor of the broadcast shape (...), float64

    Examples
    --------
    >>> theta = [1.0, 0.0, 0.0]
    >>> fl.theory.forgetting.best_scalar(theta, theta, n=None)  # (d+3)/(d+4)
    tensor(0.8571, dtype=torch.float64)
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
    """The c that minimises the n-shot error averaged over tasks with mean zero and second moment T.

        c_avg(n) = (n+1) tr(ST) / [(n+d+1) tr(ST) + d s2]  ->  1

    Parameters
    ----------
    d, cov, noise_var, task_cov : as in `pretrained`
    n : int, integers (...) or None
        Shots; None is the limit.

    Returns
    -------
    Tensor (...) shaped like n, float64

    Examples
    --------
    >>> fl.theory.forgetting.average_scalar(3, n=20)
    tensor(0.8750, dtype=torch.float64)
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
    """E_n(theta) at c, minus its minimum over c.

        (n/N^2) [(n+d+1) t + d s2] (c - c*_n(theta))^2        n -> infinity: t (c - c*(theta))^2

    Parameters
    ----------
    theta0, theta, n, cov, noise_var : as in `best_scalar`
    c : float or Tensor (...) that broadcasts

    Returns
    -------
    Tensor of the broadcast shape (...), float64

    Examples
    --------
    >>> seven = [7.0, 0.0, 0.0]  # the best c is 6/7
    >>> fl.theory.forgetting.excess_error(seven, seven, n=None, c=1.0)
    tensor(1.0000, dtype=torch.float64)
    """
    d, _, t = _products(theta0, theta, cov)
    miss = array("c", c) - best_scalar(theta0, theta, n, cov, noise_var)
    if n is None:
        return t * miss.square()
    n = check_shot_counts(n)
    curvature: Tensor = n / (n + 1) ** 2 * ((n + d + 1) * t + d * check_variance(noise_var))
    return curvature * miss.square()


def cosine_excess(theta0: Any, theta: Any, cov: Any = None) -> Tensor:
    """Excess error on theta, for n -> infinity, of the scalar that is best for theta0.

        (sqrt(t0) cos - sqrt(t))^2/k^2,    cos = g/sqrt(t t0)

    For ||theta|| = ||theta0|| this is (t0/k^2)(1 - cos)^2.

    Parameters
    ----------
    theta0, theta, cov : as in `best_scalar`

    Returns
    -------
    Tensor (...) of theta's leading shape, float64

    Examples
    --------
    >>> fl.theory.forgetting.cosine_excess([1.0, 0.0, 0.0], [-1.0, 0.0, 0.0])  # 4/(d+4)^2
    tensor(0.0816, dtype=torch.float64)
    """
    d, g, t = _products(theta0, theta, cov)
    _check_positive(t)
    return (g / t.sqrt() - t.sqrt()).square() / (d + 4) ** 2


class AuxiliaryOptimum(NamedTuple):
    """The value matrix with v_x = alpha theta0 and v = c.

    Attributes
    ----------
    alpha, c : Tensor (...)

    Examples
    --------
    >>> optimum = fl.theory.forgetting.auxiliary_optimum([1.0, 0.0, 0.0], n=20, weight=0.0)
    >>> optimum.alpha  # 1/(d+4)
    tensor(0.1429, dtype=torch.float64)
    """

    alpha: Tensor
    c: Tensor


def auxiliary_optimum(theta0: Any, n: Any, weight: float, cov: Any = None, noise_var: float = 0.0) -> AuxiliaryOptimum:
    """Minimiser of E_0(theta0) + w E_n(theta0) over the value matrix, Q = S^-1, q = 0, n >= 1, w >= 0.

        { k2 t0 + w t0/N^2 [n(n+d+1) + k2 + 2n(d+2)] } alpha + w n t0 (n+2d+3)/N^2 c
            = (d+2) t0 + w t0 (n+d+2)/N
        t0 (n+2d+3) alpha + [(n+d+1) t0 + d s2] c = t0 N

    with k2 = (d+2)(d+4). The limit w -> 0 has alpha = 1/(d+4) and c = c*_n(theta0), so the few-shot weight can be
    annealed to zero. The paper refers to this statement but does not print it.

    Parameters
    ----------
    theta0, cov, noise_var : as in `best_scalar`
    n : int or integers (...)
        Shots, 1 or more.
    weight : float
        w, not negative.

    Returns
    -------
    AuxiliaryOptimum with alpha (...), c (...)

    Examples
    --------
    >>> fl.theory.forgetting.auxiliary_optimum([1.0, 0.0, 0.0], n=20, weight=1.0)
    AuxiliaryOptimum(alpha=tensor(0.1439, dtype=torch.float64), c=tensor(0.7012, dtype=torch.float64))
    """
    theta0 = array("theta0", theta0, ("d",))
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
    """Increase of E_0(theta0) after one gradient step on any loss, from the zero-shot optimum of the value matrix.

        E_0(v_x - step g) - E_0(v_x) = step^2 (d+2)(d+4) ||g||_S^2    exactly

    Parameters
    ----------
    gradient : Tensor (..., d)
        g, the derivative of the loss with respect to v_x.
    step : float
        Learning rate.
    cov : as in `error`

    Returns
    -------
    Tensor (...) of the gradient's leading shape, float64

    Examples
    --------
    >>> fl.theory.forgetting.auxiliary_step_effect([1.0, 0.0, 0.0], step=0.1)
    tensor(0.3500, dtype=torch.float64)
    """
    g = array("gradient", gradient, ("...", "d"))
    d = g.shape[-1]
    return step**2 * (d + 2) * (d + 4) * inner(covariance("cov", cov, d), g, g)


def _products(theta0: Any, theta: Any, cov: Any) -> tuple[int, Tensor, Tensor]:
    """Return d, <theta, theta0> and ||theta||^2."""
    theta0 = array("theta0", theta0, ("d",))
    d = theta0.shape[0]
    theta = array("theta", theta, ("...", d))
    S = covariance("cov", cov, d)
    return d, inner(S, theta, theta0), inner(S, theta, theta)


def _check_positive(size: Tensor, name: str = "theta") -> None:
    if not bool((size > 0).all()):
        raise ValueError(f"{name}: wants a task that is not zero, got one that no scalar helps")
