"""What a kernel needs to draw sequences: a task source in numbers, and which of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Recipe(NamedTuple):
    """A source of linear tasks, y = x'beta + noise. Arrays are float64, contiguous, on the CPU."""

    d: int
    K: int
    bias: bool
    noise_std: float
    feature_factor: Tensor | None  # F (d, d) with F F' the features' covariance; None is I
    means: Tensor | None = None  # of beta, (K, d); None puts it on the sphere of `radius`
    factors: Tensor | None = None  # of the covariances of beta, (K, d, d); None with means: beta is the mean
    cumulative: Tensor | None = None  # sums of the tasks' probabilities (K,); None for one task
    strata: Tensor | None = None  # tasks (P,) int64 of sequences 0 to P - 1, which repeat, in place of random ones
    radius: float = 0.0


class Draw(NamedTuple):
    """Sequences of a source: `batch` of them from `offset` on, of n tokens, of one stream at one step of one seed.

    Kernels of a backend with `schedules` read the step from `device_step` (1,), int64, when they run, if it is given.
    """

    recipe: Recipe
    n: int
    batch: int
    seed: int
    step: int
    stream: int
    offset: int
    device_step: Tensor | None = None

    @property
    def m(self) -> int:
        return self.recipe.d + 1 + int(self.recipe.bias)

    @property
    def arrays(self) -> tuple[Tensor | None, ...]:
        """The arrays of its source, in the order of the extension; `packed` repeats them to save a call."""
        recipe = self.recipe
        return recipe.means, recipe.factors, recipe.cumulative, recipe.strata, recipe.feature_factor

    @property
    def versions(self) -> tuple[int, ...]:
        """Changes whenever one of the source's arrays is changed in place."""
        arrays = [array for array in self.arrays if array is not None]
        return tuple(0 if array.is_inference() else array._version for array in arrays)

    def piece(self, first: int, batch: int) -> Draw:
        """`batch` of its sequences from the `first` on."""
        return self._replace(batch=batch, offset=(self.offset + first) % (1 << 64))

    def packed(self, copies: Sequence[Tensor | None] | None = None) -> tuple[Any, ...]:
        """As the extensions take it, with its arrays or `copies` of them; addresses are valid while these live."""
        recipe = self.recipe
        arrays = copies or (recipe.means, recipe.factors, recipe.cumulative, recipe.strata, recipe.feature_factor)
        return (
            (recipe.d, self.n, recipe.K, int(recipe.bias), 0 if recipe.strata is None else len(recipe.strata)),
            (recipe.radius, recipe.noise_std),
            [0 if array is None else array.data_ptr() for array in (*arrays, self.device_step)],
            (self.seed, self.offset, self.step, self.stream),
        )


def kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that kernels draw in, for a requested dtype."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float64
