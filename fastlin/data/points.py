"""A source that draws from given points."""

from typing import Any, Self

import torch

from fastlin.data.checks import check_array
from fastlin.data.layout import FEATURES, BatchDraws
from fastlin.data.sources import Batch, Source


class PointSet(Source):
    """A finite set of points. Context and query are drawn from it with replacement; there is no `sample_gram`.

    Parameters
    ----------
    x : array (P, d)
        Features of the points.
    y : array (P,)
        Their labels.
    bias : bool
        Whether tokens start with a constant one.

    Examples
    --------
    >>> points = fl.PointSet(torch.randn(100, 3), torch.randn(100))
    >>> z, q, y, task = points.sample(batch=8, n=20)
    >>> z.shape
    torch.Size([8, 20, 4])
    """

    def __init__(self, x: Any, y: Any, bias: bool = False) -> None:
        self.x = check_array("x", x, ("P", "d"))
        self.y = check_array("y", y, (self.x.shape[0],))
        super().__init__(self.x.shape[1], bias)

    def _facts(self) -> dict[str, str]:
        return {"points": str(len(self.y)), **super()._facts()}

    @classmethod
    def drawn(cls, source: Source, points: int, *, seed: int = 0, stream: int = 0) -> Self:
        """Draw the points from a task source: features and labels of its queries."""
        _, q, y, _ = source.sample(points, 0, seed=seed, stream=stream, dtype=torch.float64, device="cpu")
        return cls(q[:, int(source.bias) : -1], y, bias=source.bias)

    def _tokens(self, draws: BatchDraws, n: int) -> Batch:
        P = len(self.y)
        index = (draws.uniform(FEATURES, n + 1) * P).long().clamp(max=P - 1)
        x, y = self.x[index], self.y[index]
        query = self._join(x[:, n], torch.zeros_like(y[:, n]))
        return self._join(x[:, :n], y[:, :n]), query, y[:, n], torch.zeros(draws.batch, dtype=torch.int64)
