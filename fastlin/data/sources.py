"""Task sources: where sequences come from.

A source draws, for sequence i of a stream at a step, a task k and weights beta, features x ~ N(0, S), labels
y = x'beta + noise, and gives the tokens z = [x; y] of the context, the query q = [x; 0] and its label. With a constant
coordinate tokens are [1; x; y]. Everything about a sequence is a function of (seed, step, stream, i) alone, computed
in float64 in a fixed order of operations and rounded once: a batch can be taken in any pieces, bit for bit.

The draws of a sequence lie in sections of 2^21 Philox blocks:

    section  draws
    0        word 0: the task
    1        normals of beta, d
    2        normals of the query's features, d, and of its label's noise, 1
    3        normals of the context's features, n d, token by token; or n + 1 words that pick points, the query's last
    4        normals of the context's label noise, n
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlin.data import random
from fastlin.data.philox import integer

BLOCKS_PER_SECTION = 1 << 21
TASK, BETA, QUERY, FEATURES, NOISE = range(5)

Batch = tuple[Tensor, Tensor, Tensor, Tensor]


class Place(NamedTuple):
    """Which sequences: `batch` of them from `offset` on, of one stream at one step of one seed."""

    batch: int
    seed: int
    step: int
    stream: int
    offset: int

    def draw(self, kind: str, section: int, columns: int) -> Tensor:
        """Draws (batch, columns) of a section, float64; `kind` is "uniform" or "normal"."""
        if columns > 4 * BLOCKS_PER_SECTION:
            raise ValueError(f"n: needs {columns} draws for a sequence, wants at most {4 * BLOCKS_PER_SECTION}")
        at = {"seed": self.seed, "step": self.step, "stream": self.stream, "offset": self.offset}
        fill = random.uniform if kind == "uniform" else random.normal
        return fill(self.batch, columns, **at, block=section * BLOCKS_PER_SECTION, dtype=torch.float64)


class Source:
    """What all task sources share: features, noise, the constant coordinate, and the interface.

    Attributes
    ----------
    d, m, K : int
        Number of features; token width d + 1, or d + 2 with the constant coordinate; number of tasks.
    feature_cov : Tensor (d, d), float64
    noise_std : float
    bias : bool
        Whether tokens start with a constant one.
    """

    K = 1

    def __init__(self, d: int, noise_std: float, feature_cov: Any, bias: bool) -> None:
        self.d = d
        self.m = d + 1 + int(bias)
        self.bias = bias
        self.noise_std = check_number("noise_std", noise_std)
        self.feature_cov = torch.eye(d, dtype=torch.float64)
        self._feature_factor: Tensor | None = None
        if feature_cov is not None:
            self.feature_cov = check_covariances("feature_cov", feature_cov, (d, d))
            self._feature_factor = factor(self.feature_cov)

    def sample(
        self,
        batch: int,
        n: int,
        *,
        seed: int = 0,
        step: int = 0,
        stream: int = 0,
        offset: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Batch:
        """Tokens of sequences `offset` to `offset + batch`.

        Parameters
        ----------
        batch, n : int
            Number of sequences and of context tokens; both may be 0.
        seed, step, stream : int
            Where in the generator; see `fastlin.data.philox`.
        offset : int
            Index of the first sequence.
        dtype, device
            Of the tensors; torch's defaults.

        Returns
        -------
        z : Tensor (batch, n, m)
        q : Tensor (batch, m)
            Queries, label slot zero.
        y : Tensor (batch,)
            Labels of the queries.
        task : Tensor (batch,), int64
        """
        place, n = check_place(batch, n, seed, step, stream, offset)
        context, query, label, task = self._tokens(place, n)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        z, q, y = (t.to(dtype=dtype, device=device) for t in (context, query, label))
        return z, q, y, task.to(device=device)

    def _tokens(self, place: Place, n: int) -> Batch:
        """Tokens in float64 on the CPU."""
        task = self._task(place)
        beta = self._beta(place, task)
        x, y = self._query(place, beta)
        X = self._features(place.draw("normal", FEATURES, n * self.d).view(place.batch, n, self.d))
        Y = dot(X, beta[:, None])
        if self.noise_std:
            Y = Y + self.noise_std * place.draw("normal", NOISE, n)
        return self._join(X, Y), self._join(x, torch.zeros_like(y)), y, task

    def _task(self, place: Place) -> Tensor:
        """Task of each sequence, (batch,) int64."""
        return torch.zeros(place.batch, dtype=torch.int64)

    def _beta(self, place: Place, task: Tensor) -> Tensor:
        """Weights of each sequence, (batch, d)."""
        raise TypeError(f"{type(self).__name__} has no task weights")

    def _query(self, place: Place, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Features (batch, d) and label (batch,) of the query."""
        draws = place.draw("normal", QUERY, self.d + 1)
        x = self._features(draws[:, : self.d])
        y = dot(x, beta)
        return x, y + self.noise_std * draws[:, self.d] if self.noise_std else y

    def _features(self, normals: Tensor) -> Tensor:
        """Features (..., d) with covariance S from standard normals."""
        return normals if self._feature_factor is None else apply_factor(self._feature_factor, normals)

    def _join(self, x: Tensor, y: Tensor) -> Tensor:
        """Tokens (..., m) from features (..., d) and labels (...)."""
        parts = [torch.ones_like(y)[..., None]] if self.bias else []
        return torch.cat([*parts, x, y[..., None]], -1)


class TaskMixture(Source):
    """A mixture of Gaussian tasks: task k with probability weights_k, then beta ~ N(means_k, covariances_k).

    Parameters
    ----------
    means : array (K, d)
    covariances : array (K, d, d)
        Symmetric positive semi-definite.
    weights : array (K,)
        Non-negative, of sum one.
    noise_std : float
        Standard deviation of the label noise, also on the query's label.
    feature_cov : array (d, d), optional
        Covariance of the features; None is I.
    bias : bool
        Whether tokens start with a constant one.
    """

    def __init__(
        self,
        means: Any,
        covariances: Any,
        weights: Any,
        noise_std: float = 0.0,
        feature_cov: Any = None,
        bias: bool = False,
    ) -> None:
        self.means = check_array("means", means, ("K", "d"))
        K, d = self.means.shape
        self.covariances = check_covariances("covariances", covariances, (K, d, d))
        self.weights = check_array("weights", weights, (K,))
        total = float(self.weights.sum())
        if bool((self.weights < 0).any()) or abs(total - 1) > 1e-9:
            raise ValueError(f"weights: got {self.weights.tolist()} of sum {total}, wants numbers >= 0 of sum 1")
        super().__init__(d, noise_std, feature_cov, bias)
        self.K = K
        self._factors = torch.stack([factor(covariance) for covariance in self.covariances])
        self._cumulative = self.weights.cumsum(0)

    def _task(self, place: Place) -> Tensor:
        u = place.draw("uniform", TASK, 1)[:, 0]
        return torch.searchsorted(self._cumulative, u, right=True).clamp(max=self.K - 1)

    def _beta(self, place: Place, task: Tensor) -> Tensor:
        normals = place.draw("normal", BETA, self.d)
        return self.means[task] + apply_factor(self._factors[task], normals)


def check_place(batch: int, n: int, seed: int, step: int, stream: int, offset: int) -> tuple[Place, int]:
    """The arguments that all samplers share; the generator checks seed, step, stream and offset."""
    return Place(integer("batch", batch, 1 << 40), seed, step, stream, offset), integer("n", n, 1 << 40)


def check_number(name: str, value: float) -> float:
    """`value` as a finite float that is not negative."""
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name}: got {value!r}, wants a finite number >= 0")
    return number


def check_array(name: str, value: Any, shape: Sequence[int | str]) -> Tensor:
    """`value` as a finite float64 tensor (a copy) whose shape fits, where a name stands for any size >= 1."""
    tensor = torch.tensor(value.tolist() if isinstance(value, Tensor) else value, dtype=torch.float64)
    fits = tensor.ndim == len(shape) and all(
        size >= 1 if isinstance(wanted, str) else size == wanted
        for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wants = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, wants ({wants})")
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name}: got values that are not finite, wants finite numbers")
    return tensor


def check_covariances(name: str, value: Any, shape: Sequence[int]) -> Tensor:
    """`value` as float64 covariances (..., d, d), or an error that says which is none and why."""
    tensor = check_array(name, value, shape)
    for i, matrix in enumerate(tensor.reshape(-1, *tensor.shape[-2:])):
        which = f"{name}[{i}]" if tensor.ndim > 2 else name
        size = float(matrix.abs().max())
        skew = float((matrix - matrix.T).abs().max())
        if skew > 1e-9 * size:
            raise ValueError(f"{which}: differs from its transpose by {skew:.3g}, wants a symmetric matrix")
        lowest = float(torch.linalg.eigvalsh(matrix)[0])
        if lowest < -1e-9 * size:
            raise ValueError(f"{which}: has the eigenvalue {lowest:.3g}, wants a positive semi-definite matrix")
    return tensor


def factor(covariance: Tensor) -> Tensor:
    """F (d, d) with F F' = covariance: the Cholesky factor, or a square root when it is singular."""
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(covariance)
    if int(failed) != 0:
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp_min(0).sqrt()
    return root


def apply_factor(F: Tensor, normals: Tensor) -> Tensor:
    """F (..., d, d) times normals (..., d), column by column, so that no row depends on its neighbours."""
    out = F[..., :, 0] * normals[..., :1]
    for j in range(1, normals.shape[-1]):
        out = out + F[..., :, j] * normals[..., j : j + 1]
    return out


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner products over the last dimension, in order, so that no row depends on its neighbours."""
    out = a[..., 0] * b[..., 0]
    for j in range(1, a.shape[-1]):
        out = out + a[..., j] * b[..., j]
    return out
