"""Task sources: each draws the sequences of one kind of regression problem.

For sequence i a source draws a task k, weights beta, features x ~ N(0, S) and labels y = x'beta + noise. `sample`
returns the context tokens z = [x; y], the query q = [x; 0] and the query's label; with a constant coordinate a token is
[1; x; y]. `sample_gram` returns the tokens' Gram matrix instead, drawn from its own distribution (`bartlett`).

A sequence depends on (seed, step, stream, i) alone. It is computed in float64 in a fixed order of operations and
rounded once, so pieces of a batch have its bits. The compiled kernels draw on the requested device in the requested
dtype; their numbers differ by rounding. `layout` has the layout of the draws.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fastlin._tables import html
from fastlin.backends import sampler_on
from fastlin.backends.draw import Draw, Recipe, kernel_dtype
from fastlin.data import bartlett
from fastlin.data.checks import (
    check_array,
    check_covariances,
    check_device,
    check_dimension,
    check_means,
    check_number,
    described,
)
from fastlin.data.layout import (
    BETA,
    FEATURES,
    FEATURES_WITH_ROOM,
    NOISE,
    QUERY,
    TASK,
    BatchDraws,
    check_draws,
    check_gram_room,
    check_room,
)
from fastlin.data.rows import apply_factor, dot, factor, turned
from fastlin.data.strata import balanced_tasks

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
Device = torch.device | str | None


class Source(ABC):
    """Base class of the task sources."""

    K = 1  # number of tasks

    def __init__(self, d: int, bias: bool) -> None:
        self.d = d  # number of features
        self.m = d + 1 + int(bias)  # token width
        self.bias = bool(bias)  # whether tokens start with a constant one

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
        device: Device = None,
    ) -> Batch:
        """Draw tokens.

        Parameters
        ----------
        batch, n : int
            Number of sequences and of context tokens; both may be 0.
        seed, step, stream, offset : int
            Coordinates in the generator (`fastlin.data.philox`); `offset` is the index of the first sequence.
        dtype, device
            Of the tensors; None is torch's default.

        Returns
        -------
        z : Tensor (batch, n, m)
        q : Tensor (batch, m)
            Queries, label slot zero.
        y : Tensor (batch,)
            Labels of the queries.
        task : Tensor (batch,), int64

        Examples
        --------
        >>> z, q, y, task = fl.SphereTasks(2).sample(batch=8, n=5, seed=1)
        >>> z.shape, q.shape, y.shape, task.shape
        (torch.Size([8, 5, 3]), torch.Size([8, 3]), torch.Size([8]), torch.Size([8]))
        >>> torch.equal(fl.SphereTasks(2).sample(batch=3, n=5, seed=1, offset=5)[0], z[5:])
        True
        """
        draws, n = check_draws(batch, n, seed, step, stream, offset)
        return _rounded(self._sample(draws, n, _default(dtype), _where(device)), dtype, device)

    def _sample(self, draws: BatchDraws, n: int, dtype: torch.dtype, device: torch.device) -> Batch:
        """Tokens on a device or on the CPU, in `dtype` or in float64."""
        with torch.device("cpu"):
            return self._tokens(draws, n)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        return html(type(self).__name__, self._facts())

    def _facts(self) -> dict[str, str]:
        # Numbers of the user's subclasses too; arrays, zeros and False say nothing in a line.
        found = {n: v for n, v in vars(self).items() if isinstance(v, (int, float)) and v and n[0] != "_" and n != "m"}
        return {name: f"{value:g}" if type(value) is float else str(value) for name, value in found.items()}

    def describe(self) -> dict[str, Any]:
        """The source as a dict for JSON. A digest replaces an array of more than 12,800 numbers.

        Examples
        --------
        >>> fl.SphereTasks(2).describe()["source"]
        'SphereTasks'
        """
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {"source": type(self).__qualname__, **{name: described(value) for name, value in public.items()}}

    @abstractmethod
    def _tokens(self, draws: BatchDraws, n: int) -> Batch:
        """Tokens in float64 on the CPU."""

    def _join(self, x: Tensor, y: Tensor) -> Tensor:
        """Tokens (..., m) from features (..., d) and labels (...)."""
        parts = [torch.ones_like(y)[..., None]] if self.bias else []
        return torch.cat([*parts, x, y[..., None]], -1)


class LinearTasks(Source):
    """Base class of the sources with linear labels, y = x'beta + noise; features have covariance `feature_cov`."""

    def __init__(self, d: int, noise_std: float, feature_cov: Any, bias: bool) -> None:
        super().__init__(d, bias)
        self.noise_std = check_number("noise_std", noise_std)
        self.feature_cov = torch.eye(d, dtype=torch.float64, device="cpu")
        self._feature_factor: Tensor | None = None
        if feature_cov is not None:
            self.feature_cov = check_covariances("feature_cov", feature_cov, (d, d))
            self._feature_factor = factor(self.feature_cov).contiguous()

    def sample_gram(
        self,
        batch: int,
        n: int,
        *,
        seed: int = 0,
        step: int = 0,
        stream: int = 0,
        offset: int = 0,
        dtype: torch.dtype | None = None,
        device: Device = None,
    ) -> Batch:
        """Gram matrices of sequences `offset` to `offset + batch`, drawn without their tokens.

        Parameters
        ----------
        batch, n, seed, step, stream, offset, dtype, device
            As in `sample`; n may be as large as 10^12, at the same cost.

        Returns
        -------
        G : Tensor (batch, m, m)
            With exactly the distribution of `fastlin.gram(z)`; without prompt and query.
        q, y, task
            The same as from `sample`, number for number.

        Examples
        --------
        >>> G, q, y, task = fl.SphereTasks(2).sample_gram(batch=8, n=10**9)
        >>> G.shape
        torch.Size([8, 3, 3])
        """
        draw = self.draw(batch, n, seed=seed, step=step, stream=stream, offset=offset)
        sampler = sampler_on(_where(device), kernel_dtype(_default(dtype)), self.m)
        if draw is None or sampler is None:
            drawn = self._gram_in_torch(*check_draws(batch, n, seed, step, stream, offset))
        else:
            drawn = sampler.sample(draw, True, kernel_dtype(_default(dtype)), _where(device))
        return _rounded(drawn, dtype, device)

    def draw(
        self, batch: int, n: int, *, seed: int = 0, step: int = 0, stream: int = 0, offset: int = 0
    ) -> Draw | None:
        """The same sequences for a kernel that draws them itself; None for a subclass that draws in its own way."""
        draws, n = check_draws(batch, n, seed, step, stream, offset)
        if _has_its_own_way(type(self)):
            return None
        if self.d > FEATURES_WITH_ROOM:
            check_gram_room(n, self.d)
        return Draw(self._recipe(), n, *draws)

    @abstractmethod
    def _recipe(self) -> Recipe:
        """The source in numbers."""

    def _sample(self, draws: BatchDraws, n: int, dtype: torch.dtype, device: torch.device) -> Batch:
        sampler = sampler_on(device, kernel_dtype(dtype), self.m)
        if sampler is None or _has_its_own_way(type(self)):
            return super()._sample(draws, n, dtype, device)
        check_room(n * self.d, 4)
        return sampler.sample(Draw(self._recipe(), n, *draws), False, kernel_dtype(dtype), device)

    def _gram_in_torch(self, draws: BatchDraws, n: int) -> Batch:
        with torch.device("cpu"):
            task, beta, q, y = self._query(draws)
            return bartlett.sample(draws, n, beta, self._feature_factor, self.noise_std, self.bias), q, y, task

    def _tokens(self, draws: BatchDraws, n: int) -> Batch:
        task, beta, q, y = self._query(draws)
        X = self._features(draws.normal(FEATURES, n * self.d).view(draws.batch, n, self.d))
        Y = dot(X, beta[:, None])
        if self.noise_std:
            Y = Y + self.noise_std * draws.normal(NOISE, n)
        return self._join(X, Y), q, y, task

    def _query(self, draws: BatchDraws) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Task (batch,), weights (batch, d), query (batch, m) and the query's label (batch,)."""
        task = self._task(draws)
        beta = self._beta(draws, task)
        normals = draws.normal(QUERY, self.d + 1)
        x = self._features(normals[:, : self.d])
        y = dot(x, beta)
        if self.noise_std:
            y = y + self.noise_std * normals[:, self.d]
        return task, beta, self._join(x, torch.zeros_like(y)), y

    def _task(self, draws: BatchDraws) -> Tensor:
        return torch.zeros(draws.batch, dtype=torch.int64)

    @abstractmethod
    def _beta(self, draws: BatchDraws, task: Tensor) -> Tensor:
        """Weights of each sequence, (batch, d)."""

    def _features(self, normals: Tensor) -> Tensor:
        """Features (..., d) of covariance S from standard normals (..., d)."""
        return normals if self._feature_factor is None else apply_factor(self._feature_factor, normals)


class TaskMixture(LinearTasks):
    """A mixture of Gaussian tasks: task k with probability weights_k, then beta ~ N(means_k, covariances_k).

    Parameters
    ----------
    means : array (K, d)
        In a list with a vector, a number is that multiple of the all-ones vector.
    covariances : array (), (K,), (K, d) or (K, d, d)
        A multiple of I for all tasks, or for each a multiple of I, a diagonal or a matrix. A list may mix these.
    weights : array (K,), optional
        Non-negative, of sum one; None: 1/K each.
    noise_std : float
        Standard deviation of the label noise, also on the query's label.
    feature_cov : array (), (d,) or (d, d), optional
        Covariance of the features, written like that of a task; None is I.
    bias : bool
        Whether tokens start with a constant one.
    stratify : bool
        Whether each task gets its exact share of a batch (`strata.balanced_tasks`), instead of a random one.

    Examples
    --------
    >>> mix = fl.TaskMixture([1.0, [0.0, -1.0]], covariances=[1.0, [0.5, 2.0]], noise_std=0.1)
    >>> mix.d, mix.m, mix.K
    (2, 3, 2)
    >>> z, q, y, task = mix.sample(batch=8, n=5)
    >>> z.shape
    torch.Size([8, 5, 3])
    """

    def __init__(
        self,
        means: Any,
        covariances: Any = 1.0,
        weights: Any = None,
        noise_std: float = 0.0,
        feature_cov: Any = None,
        bias: bool = False,
        stratify: bool = False,
    ) -> None:
        self.means = check_means("means", means)
        K, d = self.means.shape
        self.covariances = check_covariances("covariances", covariances, (K, d, d))
        self.K = K
        self._weigh(weights, stratify)
        super().__init__(d, noise_std, feature_cov, bias)
        self._factors = torch.stack([factor(covariance) for covariance in self.covariances]).contiguous()

    def _weigh(self, weights: Any, stratify: bool) -> None:
        self.weights = check_array("weights", [1 / self.K] * self.K if weights is None else weights, (self.K,))
        total = float(self.weights.sum())
        if bool((self.weights < 0).any()) or abs(total - 1) > 1e-9:
            raise ValueError(f"weights: got {self.weights.tolist()} of sum {total}, wants numbers >= 0 of sum 1")
        self._cumulative = self.weights.cumsum(0)
        self.stratify = stratify
        self._strata = balanced_tasks(self.weights) if stratify else None

    def reweighted(self, weights: Any, stratify: bool = False) -> Self:
        """A copy with other `weights` and `stratify`."""
        other = copy.copy(self)
        other._weigh(weights, stratify)
        return other

    def task_counts(self, first: int, batch: int) -> Tensor:
        """Number of sequences of each task (K,), int64, in a stratified batch that starts at sequence `first`."""
        if self._strata is None or _has_its_own_way(type(self)):
            raise ValueError(
                f"{type(self).__name__}: draws tasks in its own way; wants a TaskMixture with stratify=True"
            )
        P, count = len(self._strata), functools.partial(torch.bincount, minlength=self.K)
        rest = (first + torch.arange(batch % P)) % P
        return batch // P * count(self._strata) + count(self._strata[rest])

    def _recipe(self) -> Recipe:
        means = _as_read("means", self.means, (self.K, self.d))
        cumulative = self._cumulative if self.K > 1 else None
        arrays = (means, self._factors, cumulative, self._strata)
        return Recipe(self.d, self.K, self.bias, self.noise_std, self._feature_factor, *arrays)

    def _task(self, draws: BatchDraws) -> Tensor:
        if self._strata is not None:
            index = np.arange(draws.batch, dtype=np.uint64) + np.uint64(draws.offset)
            return self._strata[torch.from_numpy((index % np.uint64(len(self._strata))).astype(np.int64))]
        u = draws.uniform(TASK, 1)[:, 0]
        return torch.searchsorted(self._cumulative, u, right=True).clamp(max=self.K - 1)

    def _beta(self, draws: BatchDraws, task: Tensor) -> Tensor:
        normals = draws.normal(BETA, self.d)
        return self.means[task] + apply_factor(self._factors[task], normals)


class SphereTasks(LinearTasks):
    """Weights drawn uniformly from a sphere in R^d.

    Parameters
    ----------
    d : int
    radius : float
    noise_std, feature_cov, bias : as in `TaskMixture`

    Examples
    --------
    >>> z, q, y, task = fl.SphereTasks(5, noise_std=0.3, bias=True).sample(batch=8, n=20)
    >>> z.shape, bool((z[..., 0] == 1).all())
    (torch.Size([8, 20, 7]), True)
    """

    def __init__(
        self, d: int, radius: float = 1.0, noise_std: float = 0.0, feature_cov: Any = None, bias: bool = False
    ) -> None:
        super().__init__(check_dimension("d", d), noise_std, feature_cov, bias)
        self.radius = check_number("radius", radius)

    def _recipe(self) -> Recipe:
        return Recipe(self.d, self.K, self.bias, self.noise_std, self._feature_factor, radius=self.radius)

    def _beta(self, draws: BatchDraws, task: Tensor) -> Tensor:
        normals = draws.normal(BETA, self.d)
        return normals * (self.radius / dot(normals, normals).sqrt())[:, None]


class FixedTask(LinearTasks):
    """One task: the same weights in every sequence.

    Parameters
    ----------
    theta : array (d,)
    noise_std, feature_cov, bias : as in `TaskMixture`

    Examples
    --------
    >>> z, q, y, task = fl.FixedTask([1.0, -2.0]).sample(batch=8, n=20)
    >>> torch.allclose(z[..., 2], z[..., 0] - 2 * z[..., 1], atol=1e-5)
    True
    """

    def __init__(self, theta: Any, noise_std: float = 0.0, feature_cov: Any = None, bias: bool = False) -> None:
        self.theta = check_array("theta", theta, ("d",))
        super().__init__(len(self.theta), noise_std, feature_cov, bias)

    def at_cosine(self, cosine: float) -> FixedTask:
        """The task with theta turned to this cosine, from -1 to 1; everything else is the same.

        Norm and angle are in <a, b> = a'S b with the feature covariance S (`rows.turned`).

        Examples
        --------
        >>> fl.FixedTask([1.0, 0.0]).at_cosine(-1).theta.tolist()
        [-1.0, 0.0]
        """
        cov = None if self._feature_factor is None else self.feature_cov
        return FixedTask(turned(self.theta, self.feature_cov, cosine), self.noise_std, cov, self.bias)

    def _recipe(self) -> Recipe:
        theta = _as_read("theta", self.theta, (self.d,))
        return Recipe(self.d, self.K, self.bias, self.noise_std, self._feature_factor, theta)

    def _beta(self, draws: BatchDraws, task: Tensor) -> Tensor:
        return self.theta.expand(draws.batch, self.d)


_HOOKS = ("sample", "sample_gram", "_sample", "_tokens", "_gram_in_torch", "_query", "_task", "_beta", "_features")


@functools.cache
def _has_its_own_way(source: type[LinearTasks]) -> bool:
    owner = next(c for c in source.__mro__ if "_recipe" in vars(c))
    return any(getattr(source, name) is not getattr(owner, name) for name in _HOOKS)


def _as_read(name: str, array: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A public array, which users may have replaced, in the layout that a kernel reads."""
    if array.shape != shape:
        raise ValueError(f"{name}: got shape {tuple(array.shape)}, wants {shape}, as when the source was made")
    # numpy converts: inside torch.func the result of a torch operation may be a wrapper without memory.
    is_right = array.dtype is torch.float64 and array.is_contiguous()
    return array if is_right else torch.from_numpy(np.ascontiguousarray(array.numpy(), np.float64))


def _default(dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype: got {dtype!r}, wants a floating-point dtype such as torch.float32")
    return dtype


def _where(device: Device) -> torch.device:
    return torch.get_default_device() if device is None else check_device(device)


def _rounded(batch: Batch, dtype: torch.dtype | None, device: Device) -> Batch:
    """The batch in the caller's dtype and device; the task stays an integer."""
    dtype, device = _default(dtype), _where(device)
    first, q, y = (t.to(dtype=dtype, device=device) for t in batch[:3])
    return first, q, y, batch[3].to(device=device)
