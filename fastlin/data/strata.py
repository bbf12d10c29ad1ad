"""Tasks in exact shares instead of random ones."""

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

LONGEST_PERIOD = 1 << 16


def balanced_tasks(weights: Tensor) -> Tensor:
    """Tasks (P,) int64 of sequences 0 to P - 1; the order repeats with period P.

    Among the first i sequences, for any i, task k occurs floor or ceil of i weights_k times. So a batch that starts at
    sequence 0 has the exact share of each task wherever that is a whole number. P is the common denominator of the
    weights. Weights without one up to 65,536 are rounded to multiples of 1/65,536.

    The order is Tijdeman's (1980), which keeps counts within 1 - 1/(2K - 2) of i weights_k: of the tasks that are not
    ahead of their share, the next is the one with the earliest deadline.
    """
    shares = np.array(_whole_shares(weights), dtype=np.int64)
    P, K = int(shares.sum()), len(shares)
    if K == 1:
        return torch.zeros(1, dtype=torch.int64)
    # Units of 1/(P (2K - 2)) make the comparison below exact, between integers.
    unit = 2 * K - 2
    counts = np.zeros(K, dtype=np.int64)
    order = np.empty(P, dtype=np.int64)
    for i in range(P):
        ready = np.flatnonzero(unit * (shares * (i + 1) - counts * P) >= P)
        deadline = (counts[ready] * unit + (unit - 1)) / shares[ready]
        order[i] = ready[deadline.argmin()]
        counts[order[i]] += 1
    return torch.from_numpy(order)


def _whole_shares(weights: Tensor) -> list[int]:
    """Integers in the ratio of the weights to within 1e-12, with the smallest sum."""
    fractions = [Fraction(w).limit_denominator(LONGEST_PERIOD) for w in weights.tolist()]
    P = math.lcm(*(fraction.denominator for fraction in fractions))
    close = all(abs(float(f) - w) <= 1e-12 for f, w in zip(fractions, weights.tolist(), strict=True))
    if P <= LONGEST_PERIOD and close and sum(fractions) == 1:
        return [int(fraction * P) for fraction in fractions]
    # Largest-remainder rounding: integers that add up to LONGEST_PERIOD, each within one of its exact share.
    exact = [w * LONGEST_PERIOD for w in weights.tolist()]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: shares[k] - exact[k])
    for k in by_remainder[: LONGEST_PERIOD - sum(shares)]:
        shares[k] += 1
    return shares
