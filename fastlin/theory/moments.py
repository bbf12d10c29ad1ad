"""Moments of a task mixture: the only thing the closed forms need to know about the data.

Symbols, here and in the modules that build on it: S feature covariance, pi_k, mu_k, B_k weights, means and
covariances of the tasks, s2 label-noise variance, R_k = B_k + mu_k mu_k',

    Bbar = sum_k pi_k B_k      M = sum_k pi_k mu_k mu_k'      Btil = Bbar + M
    a    = tr(S Btil) + s2     abar = tr(S Bbar) + s2

' is the transpose. x ~ N(0, S), beta ~ N(mu_k, B_k), y = x'beta + noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fastlin.theory._checks import as_float64, check_shape, identity

_ATTRIBUTES = ("means", "covariances", "weights", "feature_cov", "noise_std")


class Mixture(Protocol):
    """What the closed forms read from a task source."""

    @property
    def means(self) -> Tensor:
        """Means of the tasks, (K, d)."""

    @property
    def covariances(self) -> Tensor:
        """Covariances of the tasks, (K, d, d)."""

    @property
    def weights(self) -> Tensor:
        """Probabilities of the tasks, (K,)."""

    @property
    def feature_cov(self) -> Tensor:
        """Covariance of the features, (d, d)."""

    @property
    def noise_std(self) -> float:
        """Standard deviation of the label noise."""

    @property
    def bias(self) -> bool:
        """Whether tokens have a constant coordinate."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of a mixture, float64.

    Attributes
    ----------
    S : Tensor (d, d)
        Feature covariance.
    pi, mu, B : Tensor (K,), (K, d), (K, d, d)
        Weights, means and covariances of the tasks.
    s2 : float
        Variance of the label noise.
    Bbar, M, Btil : Tensor (d, d)
        Mean task covariance, second moment of the means, and their sum.
    a, abar : float
        E[y^2], and the same with every mean at zero.
    """

    S: Tensor
    pi: Tensor
    mu: Tensor
    B: Tensor
    s2: float
    Bbar: Tensor
    M: Tensor
    Btil: Tensor
    a: float
    abar: float

    @classmethod
    def of(cls, mix: Mixture) -> Moments:
        """Read `mix`, which must be a Gaussian mixture without the constant coordinate."""
        missing = [name for name in _ATTRIBUTES if not hasattr(mix, name)]
        if missing:
            raise ValueError(f"mix: wants a task mixture, got {type(mix).__name__} without {', '.join(missing)}")
        if getattr(mix, "bias", False):
            raise ValueError("mix: the closed forms hold for bias=False, got bias=True")
        mu = as_float64("mix.means", mix.means)
        check_shape("mix.means", mu, ("K", "d"))
        K, d = mu.shape
        B = as_float64("mix.covariances", mix.covariances)
        check_shape("mix.covariances", B, (K, d, d))
        pi = as_float64("mix.weights", mix.weights)
        check_shape("mix.weights", pi, (K,))
        S = as_float64("mix.feature_cov", mix.feature_cov)
        check_shape("mix.feature_cov", S, (d, d))
        return cls.build(S, pi, mu, B, float(mix.noise_std) ** 2)

    @classmethod
    def build(cls, S: Tensor, pi: Tensor, mu: Tensor, B: Tensor, s2: float) -> Moments:
        """Derive the pooled moments."""
        Bbar = torch.einsum("k,kij->ij", pi, B)
        M = torch.einsum("k,ki,kj->ij", pi, mu, mu)
        abar = float((S * Bbar).sum()) + s2
        return cls(S, pi, mu, B, s2, Bbar, M, Bbar + M, abar + float((S * M).sum()), abar)

    def shifted(self, m: Tensor) -> Moments:
        """The moments after `m` (d,) is taken from every mean."""
        return Moments.build(self.S, self.pi, self.mu - m, self.B, self.s2)

    def pooled(self) -> Moments:
        """Those of one task with the mean and the covariance of beta over all tasks."""
        mean = self.pi @ self.mu
        covariance = self.shifted(mean).Btil
        return Moments.build(self.S, torch.ones_like(self.pi[:1]), mean[None], covariance[None], self.s2)

    @property
    def K(self) -> int:
        """Number of tasks."""
        return self.mu.shape[0]

    @property
    def d(self) -> int:
        """Number of features."""
        return self.mu.shape[1]

    @property
    def eye(self) -> Tensor:
        """Identity (d, d)."""
        return identity(self.d)
