"""The Gram matrix of a context, drawn from its exact distribution in O(d^2) numbers for any n.

Tokens are [x; y], with x ~ N(0, S), S = F F', and y = x'beta + noise of standard deviation s. Let r = min(n, d). The
triangular factor of X is R F' with independent

    R_ii = chi_{n-i+1} (i = 1..r)     R_ij ~ N(0, 1) for j > i     noise g ~ N(0, s^2 I_r)     e ~ s^2 chi^2_{n-r}

Let X_i be the rows of R F' and y_i = X_i'beta + g_i. The Gram matrix of the tokens has the distribution of
sum_i [X_i; y_i] [X_i; y_i]' with e added to the last entry. A constant coordinate uses one degree of freedom: the
factor gets the row [sqrt n; X_0; y_0] with X_0 ~ N(0, S), and the other rows are those of n - 1 tokens.
"""

import math

import torch
from torch import Tensor

from fastlin.data.layout import FACTOR, NOISE, BatchDraws
from fastlin.data.rows import apply_factor, dot, gram


def sample(
    draws: BatchDraws, n: int, beta: Tensor, feature_factor: Tensor | None, noise_std: float, bias: bool
) -> Tensor:
    """Gram matrices (batch, m, m) of n tokens, float64; beta (batch, d), feature_factor F (d, d) or None for I."""
    batch, d = beta.shape
    constant = int(bias and n > 0)
    below = n - constant
    rank = min(below, d)
    diagonal = draws.chi([below - i for i in range(rank)] + [0] * (d - rank) + [below - rank if noise_std else 0])
    normals = draws.normal(FACTOR, constant * d + rank * d - rank * (rank + 1) // 2)
    R = beta.new_zeros(batch, constant + rank, d)
    if constant:
        R[:, 0] = normals[:, :d]
    start = constant * d
    for i in range(rank):
        R[:, constant + i, i] = diagonal[:, i]
        R[:, constant + i, i + 1 :] = normals[:, start : start + d - i - 1]
        start += d - i - 1
    X = R if feature_factor is None else apply_factor(feature_factor, R)
    Y = dot(X, beta[:, None])
    if noise_std:
        Y = Y + noise_std * draws.normal(NOISE, constant + rank)
    parts = [X, Y[..., None]]
    if bias:
        first = beta.new_zeros(batch, constant + rank, 1)
        first[:, :constant] = math.sqrt(n)
        parts.insert(0, first)
    G = gram(torch.cat(parts, -1))
    if noise_std:
        G[:, -1, -1] += (noise_std * diagonal[:, d]).square()
    return G
