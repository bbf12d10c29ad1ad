"""Exact n-shot error of any one-layer model on tokens [1; x; y], inside the family or not.

The prediction is f = s sum_h (W_h'z).(G v_h), G = P + sum_i z_i z_i' + z z', P = sum_t p p', z = [1; x; 0] the query
and s the scale. With xt = [1; x], X = E[xt xt'], e the first unit vector, Z = E[z_i z_i'] given theta, A_h the first
d + 1 rows of W_h, b_ij = A_i Z v_j, B_h the first d + 1 columns of A_h and g_h the first d + 1 entries of v_h,

    f = s sum_h { xt'A_h (sum_i z_i z_i' + P) v_h + (xt'B_h xt)(g_h'xt) }

has, given xt, the mean theta'x + l'xt + s sum_h (xt'B_h xt)(g_h'xt) with l = s sum_h (n b_hh + A_h P v_h) - [0; theta].
The expectation of its variance is

    s^2 n sum_ij { tr(X A_i Z A_j') v_i'Z v_j + b_ij'X b_ji - 2 (A_i e)'X (A_j e) (v_i'e)(v_j'e) }

The square of the mean needs moments of xt up to the sixth. For a Gaussian vector of mean e and second moment X they are
sums over pairings with X, minus twice those with four indices on e, plus 16 times that with six. The result is exact.
The error is a polynomial of degree four in theta, so averages over tasks are finite sums (`task_points`).
"""

import math
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlin.theory._checks import array, check_shots, check_variance, identity
from fastlin.theory.forgetting.family import covariance
from fastlin.theory.forgetting.risk import inner


def attention_error(
    W: Any,
    v: Any,
    theta: Any,
    n: int,
    *,
    p: Any = None,
    cov: Any = None,
    noise_var: float = 0.0,
    scale: float | None = None,
    see_query: bool = True,
) -> Tensor:
    """E_n(theta) of yhat = scale sum_h (W_h'z).(G v_h) on tokens [1; x; y]; differentiable in p, W, v, theta.

    Parameters
    ----------
    W : Tensor (m, m); (R, m, m) with trials; (R, H, m, m) with attention heads
        m = d + 2.
    v : Tensor (m,); (R, m); (R, H, m)
    theta, n, cov, noise_var : as in `error`, with a single n
    p : Tensor (t, m) or (R, t, m), optional
        Prompt tokens.
    scale : float, optional
        None is 1/(n+1).
    see_query : bool
        Whether the query is in G.

    Returns
    -------
    Tensor (...) or, with trials, (R, ...), float64

    Examples
    --------
    >>> W, v = fl.theory.forgetting.pretrained(3, shots=20).attention()
    >>> fl.theory.forgetting.attention_error(W, v, [1.0, 0.0, 0.0], n=20)
    tensor(0.1667, dtype=torch.float64)
    """
    theta = array("theta", theta, ("...", "d"))
    d = theta.shape[-1]
    m, S, s2, n = d + 2, covariance("cov", cov, d), check_variance(noise_var), check_shots(n)
    s = 1.0 / (n + 1) if scale is None else float(scale)
    W = array("W", W, (m, m), ("R", m, m), ("R", "H", m, m))
    v = array("v", v, (*W.shape[:-2], m))
    lead = W.shape[:1] if W.ndim > 2 else W.shape[:0]
    W, v = W.reshape(*(lead or (1,)), -1, m, m), v.reshape(*(lead or (1,)), -1, m)
    if p is not None:
        p = array("p", p, (*lead, "t", m)).reshape(len(W), -1, m)
    errors = _errors(W, v, theta.reshape(-1, d), n, p, S, s2, s, see_query)
    return errors.reshape((*lead, *theta.shape[:-1]))


def _errors(
    W: Tensor, v: Tensor, theta: Tensor, n: int, p: Tensor | None, S: Tensor, s2: float, s: float, see_query: bool
) -> Tensor:
    """Errors (R, T) of W (R, H, m, m), v (R, H, m), theta (T, d). Indices i, j run over attention heads."""
    d = theta.shape[-1]
    A, B, g = W[..., : d + 1, :], W[..., : d + 1, : d + 1], v[..., : d + 1]
    B = 0.5 * (B + B.mT)
    X = torch.nn.functional.pad(S, (1, 0, 1, 0))
    X[0, 0] = 1.0
    Z = _token_moment(theta, S, s2)
    Zv = torch.einsum("tml,rhl->trhm", Z, v)
    b = torch.einsum("ridm,trjm->trijd", A, Zv)
    line = s * n * torch.einsum("triid->trd", b)
    line = line - torch.nn.functional.pad(theta, (1, 0))[:, None]
    if p is not None:
        line = line + s * torch.einsum("rhdm,rqm,rql,rhl->rd", A, p, p, v)
    errors = s2 + inner(X, line, line)
    if see_query:
        H = W.shape[1]
        for i in range(H):
            errors = errors + 2.0 * s * _fourth(X, line, g[:, i], B[:, i])
            for j in range(H):
                errors = errors + s**2 * _sixth(X, g[:, i], g[:, j], B[:, i], B[:, j])
    if n:
        XA = torch.einsum("cd,ridm->ricm", X, A)
        spread = torch.einsum("ricm,tml,rjcl->trij", XA, Z, A) * torch.einsum("trim,rjm->trij", Zv, v)
        crossed = torch.einsum("trijd,dc,trjic->trij", b, X, b)
        first = torch.einsum("ric,rjc->rij", XA[..., 0], A[..., 0]) * v[:, :, None, 0] * v[:, None, :, 0]
        errors = errors + s**2 * n * (spread + crossed - 2.0 * first).sum((-2, -1))
    return errors.mT


def _token_moment(theta: Tensor, S: Tensor, s2: float) -> Tensor:
    """Z (T, m, m) of tokens [1; x; y]."""
    Stheta = theta @ S
    size = (Stheta * theta).sum(-1) + s2
    features = torch.cat([S.expand(len(theta), -1, -1), Stheta[:, None]], 1)
    label = torch.cat([Stheta, size[:, None]], 1)
    Z = torch.nn.functional.pad(torch.cat([features, label[..., None]], 2), (1, 0, 1, 0))
    one = torch.zeros_like(Z[0])
    one[0, 0] = 1.0
    return Z + one


def _apply(M: Tensor, a: Tensor) -> Tensor:
    return torch.einsum("rcd,...rd->...rc", M, a)


def _trace(M: Tensor) -> Tensor:
    return M.diagonal(dim1=-2, dim2=-1).sum(-1)


def _fourth(X: Tensor, a: Tensor, g: Tensor, B: Tensor) -> Tensor:
    """E[(a'xt)(g'xt)(xt'B xt)], (..., R)."""
    twice = inner(X, a, g) * _trace(B @ X) + 2.0 * ((a @ X) * _apply(B, g @ X)).sum(-1)
    return twice - 2.0 * a[..., 0] * g[..., 0] * B[..., 0, 0]


def _sixth(X: Tensor, g: Tensor, h: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """E[(g'xt)(h'xt)(xt'B xt)(xt'C xt)], (R,): 15 pairings, those with four indices on e, and that with six."""
    gX, hX, BX, CX = g @ X, h @ X, B @ X, C @ X
    tB, tC, gh = _trace(BX), _trace(CX), inner(X, g, h)
    Bh, Ch, Bg, Cg = _apply(B, hX), _apply(C, hX), _apply(B, gX), _apply(C, gX)
    pairs = gh * (tB * tC + 2.0 * (BX * CX.mT).sum((-2, -1)))
    pairs = pairs + 2.0 * ((gX * Bh).sum(-1) * tC + (gX * Ch).sum(-1) * tB)
    pairs = pairs + 4.0 * (inner(X, Bg, Ch) + inner(X, Cg, Bh))
    g0, h0, B0, C0 = g[..., 0], h[..., 0], B[..., 0, 0], C[..., 0, 0]
    four = gh * B0 * C0 + g0 * h0 * (tB * C0 + tC * B0 + 4.0 * inner(X, B[..., 0], C[..., 0]))
    four = four + 2.0 * h0 * (Bg[..., 0] * C0 + Cg[..., 0] * B0) + 2.0 * g0 * (Bh[..., 0] * C0 + Ch[..., 0] * B0)
    return pairs - 2.0 * four + 16.0 * g0 * h0 * B0 * C0


class TaskPoints(NamedTuple):
    """Tasks and weights, some of them negative, for exact averages of polynomials of degree four.

    Attributes
    ----------
    theta, weight : Tensor (T, d), (T,)

    Examples
    --------
    >>> points = fl.theory.forgetting.task_points(3, radius=1.0)
    >>> points.theta.shape, round(float(points.weight.sum()), 12)
    (torch.Size([18, 3]), 1.0)
    """

    theta: Tensor
    weight: Tensor

    def mean(self, errors: Tensor) -> Tensor:
        """Average over tasks (...) of errors (..., T) at the points."""
        return errors @ self.weight


def task_points(d: int, *, radius: float | None = None, mean: Any = None, task_cov: Any = None) -> TaskPoints:
    """Tasks whose weighted sums are exact averages of `attention_error` over a distribution of tasks.

    With `radius` the distribution is uniform on that sphere in R^d, else it is N(mean, task_cov). Both cubature
    formulas have degree five. The sphere has 2 d^2 points, the Gaussian one more.

    Parameters
    ----------
    d : int
        Number of features.
    radius : float, optional
    mean, task_cov : Tensor (d,), (d, d), optional
        None is 0 and I.

    Returns
    -------
    TaskPoints

    Examples
    --------
    >>> points = fl.theory.forgetting.task_points(3, radius=1.0)
    >>> family = fl.theory.forgetting.pretrained(3, shots=20, task_cov=torch.eye(3) / 3)
    >>> errors = fl.theory.forgetting.attention_error(*family.attention(), points.theta, 20)
    >>> loss = fl.theory.forgetting.pretraining_loss(3, shots=20, task_cov=torch.eye(3) / 3)
    >>> points.mean(errors), loss
    (tensor(0.1667, dtype=torch.float64), tensor(0.1667, dtype=torch.float64))
    """
    eye = identity(d)
    if radius is not None:
        single, pair = (4 - d) / (2 * d * (d + 2)), 1.0 / (d * (d + 2))
        points, weights = [radius * eye, -radius * eye], [torch.full((2 * d,), single, dtype=torch.float64)]
        unit = radius / math.sqrt(2.0)
    else:
        single, pair, unit = (4 - d) / 18, 1.0 / 36, math.sqrt(3.0)
        points = [torch.zeros(1, d, dtype=torch.float64), unit * eye, -unit * eye]
        centre = 1.0 - 2 * d * single - 2 * d * (d - 1) * pair
        weights = [torch.tensor([centre, *[single] * (2 * d)], dtype=torch.float64)]
    for i, j in combinations(range(d), 2):
        points.append(unit * torch.stack([eye[i] + eye[j], eye[i] - eye[j], eye[j] - eye[i], -eye[i] - eye[j]]))
    weights.append(torch.full((2 * d * (d - 1),), pair, dtype=torch.float64))
    theta, weight = torch.cat(points), torch.cat(weights)
    if radius is None:
        values, vectors = torch.linalg.eigh(covariance("task_cov", task_cov, d))
        theta = theta @ (vectors * values.clamp(min=0.0).sqrt()).mT
        theta = theta if mean is None else theta + array("mean", mean)
    return TaskPoints(theta, weight)
