"""Which widths cost more than their neighbours say they should."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

NEIGHBOURS = 8
FEWEST = 3


def over_trend(costs: Mapping[int, float]) -> dict[int, float]:
    """Cost of each width over the trend of its neighbours.

    The trend at m is a line through log cost against log m of the eight widths nearest to m, m left out. Its slope is
    the median of the slopes between pairs, weighted by their distance, and its level the median of what is left: two
    slow neighbours of eight do not move it, and a cost that grows smoothly, at the ends too, is on it.

    Parameters
    ----------
    costs : mapping
        Time per token-element by width.

    Returns
    -------
    dict
        1 is on the trend. Empty when there are too few widths for one.
    """
    if len(costs) <= FEWEST:
        return {}
    points = {m: (math.log(m), math.log(cost)) for m, cost in costs.items()}
    return {m: math.exp(y - _line(_nearest(m, points), x)) for m, (x, y) in points.items()}


def _nearest(m: int, points: Mapping[int, tuple[float, float]]) -> list[tuple[float, float]]:
    others = sorted((other for other in points if other != m), key=lambda other: abs(points[other][0] - points[m][0]))
    return [points[other] for other in others[:NEIGHBOURS]]


def _line(points: Sequence[tuple[float, float]], at: float) -> float:
    """Value at `at` of the Theil-Sen line through points of different abscissae."""
    pairs = [(p, q) if p[0] < q[0] else (q, p) for p, q in itertools.combinations(points, 2)]
    slope = _weighted_median([((q[1] - p[1]) / (q[0] - p[0]), q[0] - p[0]) for p, q in pairs])
    return _weighted_median([(y + slope * (at - x), 1.0) for x, y in points])


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """The value at which half of the weight is reached; between two when it is reached exactly."""
    ordered = sorted(values)
    half = sum(weight for _, weight in ordered) / 2
    reached = 0.0
    for i, (value, weight) in enumerate(ordered):
        reached += weight
        if math.isclose(reached, half) and i + 1 < len(ordered):
            return (value + ordered[i + 1][0]) / 2
        if reached > half:
            return value
    return ordered[-1][0]
