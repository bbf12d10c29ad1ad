"""Sequences of a task source, a tile at a time: task, weights, query and label, Gram matrix or tokens.

`fastlin.data` (place, sources, bartlett) has the layout of the draws and the distribution. Vectors are in the tokens'
coordinates, [1; x; y] or [x; y]: feature j is at j + BIAS. A drawn Gram matrix takes a normal for each of the M^2
entries of a padded triangular factor, of which r d - r (r + 1) / 2 are used, r = min(n, d): 45 of 256 at d = 10.
"""

import triton
import triton.language as tl

from fastlin.backends.triton.kernels.random import (
    BETA,
    FACTOR,
    FEATURES,
    NOISE,
    QUERY,
    TASK,
    chi,
    normals,
    sequence_of,
    uniform,
    words_of,
)
from fastlin.backends.triton.kernels.tiles import product, transpose

PLACE_NAMES = ("seed_low", "seed_high", "stream", "step", "offset_low", "offset_high")


@triton.jit
def factor(F, d, DT: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr):
    """A matrix of the recipe, float64 (d, d) at addresses F, in the tokens' coordinates [., M, M]."""
    i = tl.arange(0, M)[None, :, None] - BIAS
    j = tl.arange(0, M)[None, None, :] - BIAS
    there = (i >= 0) & (i < d) & (j >= 0) & (j < d)
    return tl.load(F + i * d + j, mask=there, other=0.0).to(DT)


@triton.jit
def weights(sequence, task, PLACE, NUMBERS, MEANS, FACTORS, d, DT: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr):
    """Weights beta [BB, M] of sequences [BB, 1] with tasks [BB]."""
    j = tl.arange(0, M)[None, :] - BIAS
    there = (j >= 0) & (j < d)
    if MEANS is not None and FACTORS is None:
        beta = tl.load(MEANS + j + 0 * task[:, None], mask=there, other=0.0).to(DT)
    else:
        drawn = tl.where(there, normals(BETA, tl.maximum(j, 0), sequence, PLACE, DT), 0.0)  # [BB, M]
        if MEANS is None:
            radius = tl.load(NUMBERS + 1).to(DT)
            length = tl.sqrt(tl.sum(drawn * drawn, 1, keep_dims=True))
            beta = drawn * (radius / length)
        else:
            mean = tl.load(MEANS + task[:, None] * d + j, mask=there, other=0.0).to(DT)
            F = factor(FACTORS + task[:, None, None] * d * d, d, DT, M, BIAS)  # [BB, M, M]
            beta = mean + tl.sum(F * drawn[:, None, :], 2)
    return beta


@triton.jit
def question(
    sequence,
    beta,
    PLACE,
    NUMBERS,
    FEATURE,
    d,
    NOISY: tl.constexpr,
    DT: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Query [BB, M] and its label [BB] of sequences [BB, 1] with weights beta [BB, M]."""
    column = tl.arange(0, M)[None, :]
    j = column - BIAS
    drawn = normals(QUERY, tl.maximum(j, 0), sequence, PLACE, DT)  # the features', then that of the label's noise
    x = tl.where((j >= 0) & (j < d), drawn, 0.0)
    if FEATURE is not None:
        x = tl.sum(factor(FEATURE, d, DT, M, BIAS) * x[:, None, :], 2)
    y = tl.sum(x * beta, 1)
    if NOISY:
        y += tl.load(NUMBERS).to(DT) * tl.sum(tl.where(j == d, drawn, 0.0), 1)
    if BIAS:
        x = tl.where(column == 0, 1.0, x)
    return x.to(DT), y


@triton.jit
def drawn_gram(
    sequence,
    beta,
    PLACE,
    NUMBERS,
    FEATURE,
    ROOM,
    n,
    d,
    NOISY: tl.constexpr,
    DT: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Gram matrices [BB, M, M] of contexts of n tokens of sequences [BB, 1] with weights beta [BB, M]."""
    BB: tl.constexpr = beta.shape[0]
    length = tl.cast(n, tl.int64)
    constant = tl.where(length > 0, BIAS, 0).to(tl.int32)
    below = length - constant
    rank = tl.minimum(below, d).to(tl.int32)
    row = tl.arange(0, M)[None, :]  # of the factor
    slot = row - constant
    freedom = tl.where((slot >= 0) & (slot < rank), below - slot, 0)
    if NOISY:
        freedom = tl.where(slot == d, below - rank, freedom)
    freedom = tl.broadcast_to(freedom, (BB, M))
    variates = chi(tl.maximum(slot, 0), freedom, sequence, PLACE).to(DT)  # [BB, M]

    i = tl.arange(0, M)[None, :, None] - constant  # below the row of the constant coordinate
    column = tl.arange(0, M)[None, None, :]
    j = column - BIAS
    index = tl.where(i < 0, j, constant * d + i * d - i * (i + 1) // 2 + j - i - 1)
    is_normal = (j >= 0) & (j < d) & (i < rank) & (j > i)
    X = normals(FACTOR, tl.where(is_normal, index, 0), sequence[:, :, None], PLACE, DT)  # [BB, M, M]
    X = tl.where(is_normal, X, tl.where((i == j) & (i >= 0) & (i < rank), variates[:, :, None], 0.0)).to(DT)
    if FEATURE is not None:
        F = tl.broadcast_to(transpose(factor(FEATURE, d, DT, M, BIAS)), (BB, M, M))
        X = product(X, F, ROOM, "ieee")
    labels = tl.sum(X * beta[:, None, :], 2)  # [BB, M]
    if NOISY:
        noise = normals(NOISE, row, sequence, PLACE, DT)
        labels += tl.where(row < constant + rank, tl.load(NUMBERS).to(DT) * noise, 0.0)
    X = tl.where(column == BIAS + d, labels[:, :, None], X)
    if BIAS:
        root = tl.sqrt(length.to(tl.float64)).to(DT)
        X = tl.where((column == 0) & (i < 0), root, X)
    G = product(transpose(X), X, ROOM, "ieee")
    if NOISY:
        rest = tl.load(NUMBERS).to(DT) * tl.sum(tl.where(slot == d, variates, 0.0), 1)
        last = BIAS + d
        corner = (tl.arange(0, M)[None, :, None] == last) & (column == last)
        G += tl.where(corner, (rest * rest)[:, None, None], 0.0)
    return G


@triton.jit(do_not_specialize=["B", "K", "period", *PLACE_NAMES])
def task_kernel(
    CUMULATIVE,  # [K] float64 or None
    STRATA,  # [period] int64 or None
    TASKS,  # [B] int64
    seed_low,
    seed_high,
    stream,
    step,
    offset_low,
    offset_high,
    B,
    K,
    period,
    BB: tl.constexpr,
):
    """TASKS (B,): tasks in exact shares where STRATA (period,) is given, else by their probabilities' sums (K,)."""
    PLACE = (seed_low, seed_high, stream, step, offset_low, offset_high)
    b = tl.program_id(0).to(tl.int64) * BB + tl.arange(0, BB)
    sequence = sequence_of(b, PLACE)
    if STRATA is not None:
        k = tl.load(STRATA + (sequence % tl.cast(period, tl.uint64)).to(tl.int64))
    else:
        w0, _w1, _w2, _w3 = words_of(tl.zeros((BB,), tl.int32) + TASK, sequence, PLACE)
        u = uniform(w0)
        k = tl.zeros((BB,), tl.int64)
        for first in range(0, K, 16):
            column = first + tl.arange(0, 16)
            # Beyond the last task is a number that no uniform reaches.
            upper = tl.load(CUMULATIVE + column, mask=column < K, other=2.0)
            k += tl.sum((upper[None, :] <= u[:, None]).to(tl.int64), 1)
        k = tl.minimum(k, K - 1)
    tl.store(TASKS + b, k, mask=b < B)


@triton.jit(do_not_specialize=["B", "n", "d", "blocks", *PLACE_NAMES])
def sample_kernel(
    NUMBERS,  # [2] float64: deviation of the noise, radius
    MEANS,  # [K, d] float64 or None
    FACTORS,  # [K, d, d] float64 or None
    FEATURE,  # [d, d] float64 or None
    TASKS,  # [B]
    X,  # [B, n, m] tokens or [B, m, m] Gram matrices
    Q,  # [B, m]
    Y,  # [B]
    ROOM,  # [programs, 2, BB, M, M]
    seed_low,
    seed_high,
    stream,
    step,
    offset_low,
    offset_high,
    B,
    n,
    d,
    blocks,  # programs for the tokens of a tile of sequences
    IS_GRAM: tl.constexpr,
    NOISY: tl.constexpr,
    DT: tl.constexpr,
    BB: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Sequences that are kept. A program has BB sequences and, of their tokens, every `blocks`-th block of BN."""
    PLACE = (seed_low, seed_high, stream, step, offset_low, offset_high)
    pid = tl.program_id(0).to(tl.int64)
    b = pid // blocks * BB + tl.arange(0, BB)
    m = d + 1 + BIAS
    is_there = b < B
    sequence = sequence_of(b, PLACE)[:, None]
    task = tl.load(TASKS + b, mask=is_there, other=0)
    beta = weights(sequence, task, PLACE, NUMBERS, MEANS, FACTORS, d, DT, M, BIAS)
    if pid % blocks == 0:
        q, y = question(sequence, beta, PLACE, NUMBERS, FEATURE, d, NOISY, DT, M, BIAS)
        j = tl.arange(0, M)[None, :]
        tl.store(Q + b[:, None] * m + j, q, mask=is_there[:, None] & (j < m))
        tl.store(Y + b, y, mask=is_there)
    column = tl.arange(0, M)[None, None, :]
    if IS_GRAM:
        G = drawn_gram(
            sequence,
            beta,
            PLACE,
            NUMBERS,
            FEATURE,
            ROOM + (pid * 2 * BB * M * M if M > 16 else 0),
            n,
            d,
            NOISY,
            DT,
            M,
            BIAS,
        )
        i = tl.arange(0, M)[None, :, None]
        there = is_there[:, None, None] & (i < m) & (column < m)
        tl.store(X + (b[:, None, None] * m + i) * m + column, G, mask=there)
    else:
        j = column - BIAS
        for first in range((pid % blocks).to(tl.int32) * BN, n, blocks * BN):
            i = first + tl.arange(0, BN)[None, :, None]
            is_feature = (j >= 0) & (j < d) & (i < n)
            z = normals(FEATURES, tl.where(is_feature, i * d + j, 0), sequence[:, :, None], PLACE, DT)
            z = tl.where(is_feature, z, 0.0).to(DT)  # [BB, BN, M]
            if FEATURE is not None:
                F = transpose(factor(FEATURE, d, DT, M, BIAS))
                z = tl.dot(z, tl.broadcast_to(F, (BB, M, M)), input_precision="ieee", out_dtype=DT)
            labels = tl.sum(z * beta[:, None, :], 2)  # [BB, BN]
            if NOISY:
                token = first + tl.arange(0, BN)[None, :]
                labels += tl.load(NUMBERS).to(DT) * normals(NOISE, token, sequence, PLACE, DT)
            z = tl.where(column == BIAS + d, labels[:, :, None], z)
            if BIAS:
                z = tl.where(column == 0, 1.0, z).to(DT)
            there = is_there[:, None, None] & (i < n) & (column < m)
            tl.store(X + (b[:, None, None] * n + i) * m + column, z, mask=there)
