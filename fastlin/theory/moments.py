"""Moments of a task mixture, the only property of the data that enters the closed forms.

Symbols in all modules of the folder: S feature covariance; pi_k, mu_k, B_k weight, mean and covariance of task k; s2
variance of the label noise; R_k = B_k + mu_k mu_k';

    Bbar = sum_k pi_k B_k      M = sum_k pi_k mu_k mu_k'      Btil = Bbar + M
    a    = tr(S Btil) + s2     abar = tr(S Bbar) + s2

' is the transpose. x ~ N(0, S), beta ~ N(mu_k, B_k), y = x'beta + noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fastlin.theory._checks import array, identity

_ATTRIBUTES = ("means", "covariances", "weights", "feature_cov", "noise_std")


class Mixture(Protocol):
    """The attributes of a task source that the closed forms read."""

    means: Tensor  # (K, d)
    covariances: Tensor  # (K, d, d)
    weights: Tensor  # (K,)
    feature_cov: Tensor  # (d, d)
    noise_std: float
    bias: bool


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of a mixture, float64, under the symbols of the module's docstring."""

    S: Tensor  # (d, d)
    pi: Tensor  # (K,)
    mu: Tensor  # (K, d)
    B: Tensor  # (K, d, d)
    s2: float
    Bbar: Tensor  # (d, d), mean task covariance
    M: Tensor  # (d, d), second moment of the means
    Btil: Tensor  # (d, d), their sum
    a: float  # E[y^2]
    abar: float  # E[y^2] with every mean at zero

    @classmethod
    def of(cls, mix: Mixture) -> Moments:
        """Moments of `mix`, a Gaussian mixture with bias=False."""
        missing = [name for name in _ATTRIBUTES if not hasattr(mix, name)]
        if missing:
            raise ValueError(f"mix: wants a task mixture, got {type(mix).__name__} without {', '.join(missing)}")
        if getattr(mix, "bias", False):
            raise ValueError("mix: the closed forms hold for bias=False, got bias=True")
        mu = array("mix.means", mix.means, ("K", "d"))
        K, d = mu.shape
        B = array("mix.covariances", mix.covariances, (K, d, d))
        pi = array("mix.weights", mix.weights, (K,))
        S = array("mix.feature_cov", mix.feature_cov, (d, d))
        return cls.build(S, pi, mu, B, float(mix.noise_std) ** 2)

    @classmethod
    def build(cls, S: Tensor, pi: Tensor, mu: Tensor, B: Tensor, s2: float) -> Moments:
        """Derive the moments over all tasks."""
        Bbar = torch.einsum("k,kij->ij", pi, B)
        M = torch.einsum("k,ki,kj->ij", pi, mu, mu)
        abar = float((S * Bbar).sum()) + s2
        return cls(S, pi, mu, B, s2, Bbar, M, Bbar + M, abar + float((S * M).sum()), abar)

    def shifted(self, m: Tensor) -> Moments:
        """Moments with `m` (d,) subtracted from every mean."""
        return Moments.build(self.S, self.pi, self.mu - m, self.B, self.s2)

    def pooled(self) -> Moments:
        """Moments of a single task with the mean and covariance of beta over all tasks."""
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
