"""The family of predictors that the theory covers, and the members that training converges to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastlin.theory._checks import array, check_shots, check_variance, identity


@dataclass(frozen=True, eq=False)
class Family:
    """Predictors with a value matrix V of last row [0, v_x', v] and the query-key matrix blockdiag(q, Q, 0).

    Attributes
    ----------
    v_x, v : Tensor (d,), ()
        Weights of the features and of the label in the value.
    q, Q : Tensor (), (d, d)
        Query-key weights of the constant coordinate and of the features.

    Examples
    --------
    >>> family = fl.theory.forgetting.Family(v_x=torch.zeros(3), v=1.0, q=0.0, Q=torch.eye(3))
    >>> W, v = family.attention()
    >>> W.shape, v.shape
    (torch.Size([5, 5]), torch.Size([5]))
    """

    v_x: Tensor
    v: Tensor
    q: Tensor
    Q: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "v_x", array("v_x", self.v_x, ("d",)))
        shapes: dict[str, tuple[int, ...]] = {"v": (), "q": (), "Q": (self.d, self.d)}
        for name, shape in shapes.items():
            object.__setattr__(self, name, array(name, getattr(self, name), shape))

    @property
    def d(self) -> int:
        """Number of features."""
        return self.v_x.shape[0]

    def attention(self) -> tuple[Tensor, Tensor]:
        """W = blockdiag(q, Q', 0) (m, m) and v (m,), the last row of V, for the ops; m = d + 2.

        The ops need p=None, see_query=True and scale = 1/(n+1).
        """
        zero = self.v_x.new_zeros(1)
        pad = torch.nn.functional.pad
        W = pad(self.q.reshape(1, 1), (0, self.d + 1, 0, self.d + 1)) + pad(self.Q.mT, (1, 1, 1, 1))
        return W, torch.cat([zero, self.v_x, self.v.reshape(1)])


@dataclass(frozen=True, eq=False)
class FamilyOptimum:
    """The member of the family that training should reach, up to (sV, Q/s); `float(optimum)` is its loss.

    Attributes
    ----------
    family : Family
    loss : float

    Examples
    --------
    >>> float(fl.theory.forgetting.FamilyOptimum(fl.theory.forgetting.pretrained(3), loss=0.5))
    0.5
    """

    family: Family = field(repr=False)
    loss: float

    def __float__(self) -> float:
        return self.loss


def symmetric(name: str, value: Any, d: int) -> Tensor:
    """`value` as a symmetric float64 matrix (d, d); None is the identity."""
    d = check_shots(d, "d")
    if d == 0:
        raise ValueError("d: wants at least one feature, got 0")
    if value is None:
        return identity(d)
    matrix = array(name, value, (d, d))
    if not torch.allclose(matrix, matrix.mT, rtol=1e-6, atol=1e-9):
        raise ValueError(f"{name}: wants a symmetric matrix, got one that is not")
    return matrix


def covariance(name: str, value: Any, d: int) -> Tensor:
    """`value` as a positive semi-definite float64 matrix (d, d); None is the identity."""
    matrix = symmetric(name, value, d)
    if value is not None:
        lowest = float(torch.linalg.eigvalsh(matrix.detach())[0])
        if lowest < -1e-9 * float(matrix.detach().abs().max()):
            raise ValueError(f"{name}: wants a positive semi-definite matrix, got the eigenvalue {lowest:.3g}")
    return matrix


def pretrained(
    d: int, shots: int | None = None, cov: Any = None, noise_var: float = 0.0, task_cov: Any = None
) -> Family:
    """Optimum of pretraining with `shots` = m shots: pure in-context learning.

        v_x = 0    v = 1    q = 0    Q = (S + (tr(ST) + s2)/(m+1) T^-1)^-1    m -> infinity: Q = S^-1

    It depends on the distribution of theta only through T, which may be singular. (sV, Q/s) is the same predictor.

    Parameters
    ----------
    d : int
        Number of features.
    shots : int or None
        m; None is the limit of many.
    cov, task_cov : Tensor (d, d), optional
        S, of the features, and T = E[theta theta']; None is I.
    noise_var : float
        s2.

    Returns
    -------
    Family

    Examples
    --------
    >>> family = fl.theory.forgetting.pretrained(3, shots=20, noise_var=0.1)
    >>> family.v_x.tolist(), round(float(family.Q[0, 0]), 4)
    ([0.0, 0.0, 0.0], 0.8714)
    """
    S, T = covariance("cov", cov, d), covariance("task_cov", task_cov, d)
    s2 = check_variance(noise_var)
    if shots is None:
        rank = int(torch.linalg.matrix_rank(S, hermitian=True))
        if rank < d:
            raise ValueError(f"cov: wants an invertible matrix for shots=None, got rank {rank} of {d}")
        Q = torch.linalg.inv(S)
    else:
        ridge = ((S * T).sum() + s2) / (check_shots(shots, "shots") + 1)
        Q = torch.zeros_like(S)
        if ridge > 0:
            Q = torch.linalg.solve(S @ T + ridge * identity(d), T, left=False)
    return Family(S.new_zeros(d), S.new_ones(()), S.new_zeros(()), 0.5 * (Q + Q.mT))


def fully_tuned(theta0: Any, c: Any = 1.0) -> Family:
    """Zero-shot fine-tuning of all weights on theta0 (d,): v_x = theta0, q = 1, Q = 0, and any v = c.

        E_0(theta) = s2 + ||theta - theta0||^2
        E_n(theta) = s2 + ||theta - theta0/N||^2 + (n/N^2)(||theta0 + c theta||^2 + c^2 s2)
                  -> s2 + ||theta||^2

    The zero-shot loss has other global minimisers; this one is in the paper's family.

    Parameters
    ----------
    theta0 : Tensor (d,)
        The task.
    c : float
        The free scalar v.

    Returns
    -------
    Family

    Examples
    --------
    >>> family = fl.theory.forgetting.fully_tuned([1.0, 2.0])
    >>> fl.theory.forgetting.error(family, [1.0, 2.0], n=0, noise_var=0.1)
    tensor(0.1000, dtype=torch.float64)
    """
    theta0 = array("theta0", theta0, ("d",))
    d = theta0.shape[0]
    return Family(theta0, c, theta0.new_ones(()), theta0.new_zeros(d, d))


def value_tuned(
    theta0: Any, c: Any = 1.0, shots: int | None = None, cov: Any = None, noise_var: float = 0.0, task_cov: Any = None
) -> Family:
    """Zero-shot fine-tuning of the value matrix alone, from `pretrained(d, shots, cov, noise_var, task_cov)`.

        v_x = M2^-1 m1 theta0 = [(t1^2 + 2 t2) I + 4 t1 Q S + 8 Q S Q S]^-1 [t1 I + 2 Q S] theta0
        t1 = tr(Q S), t2 = tr(Q S Q S), Q and q = 0 of the pretrained model; shots = None: v_x = theta0/(d+4)

    The zero-shot loss does not depend on v = c. Its minimum is s2 + ||theta0||^2 - theta0' m1 M2^-1 m1 theta0, in the
    limit s2 + 2 ||theta0||^2/(d+4).

    Parameters
    ----------
    theta0, c : as in `fully_tuned`
    shots, cov, noise_var, task_cov : as in `pretrained`

    Returns
    -------
    Family

    Examples
    --------
    >>> fl.theory.forgetting.value_tuned([7.0, 0.0, 0.0]).v_x
    tensor([1., 0., 0.], dtype=torch.float64)
    """
    theta0 = array("theta0", theta0, ("d",))
    d = theta0.shape[0]
    start = pretrained(d, shots, cov, noise_var, task_cov)
    if shots is None:
        return Family(theta0 / (d + 4), c, start.q, start.Q)
    QS = start.Q @ covariance("cov", cov, d)
    t1, t2 = QS.trace(), (QS * QS.mT).sum()
    if t1 <= 0:
        raise ValueError("task_cov: wants tasks that affect the labels, got tr(cov task_cov) = 0")
    quartic = (t1.square() + 2 * t2) * identity(d) + 4 * t1 * QS + 8 * QS @ QS
    v_x = torch.linalg.solve(quartic, t1 * theta0 + 2 * QS @ theta0)
    return Family(v_x, c, start.q, start.Q)


def minimal_update_scalar(start: Family) -> Tensor:
    """The free scalar c closest to `start`: argmin_c ||V_c - V||_F = v, which is 1 for `pretrained`.

    Gradient descent on the zero-shot loss keeps this value, because the loss does not depend on v.

    Parameters
    ----------
    start : Family

    Returns
    -------
    Tensor ()

    Examples
    --------
    >>> float(fl.theory.forgetting.minimal_update_scalar(fl.theory.forgetting.pretrained(3)))
    1.0
    """
    return start.v
