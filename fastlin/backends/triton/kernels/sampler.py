"""Sequences of a task source, a tile at a time: task, weights, query and label, Gram matrix or tokens.

`fastlin.data` (place, sources, bartlett) has the layout of the draws and the distribution. Vectors are in the tokens'
coordinates, [1; x; y] or [x; y]: feature j is at j + BIAS. A drawn Gram matrix takes a normal for each of the M^2
entries of a padded triangular factor, of which r d - r (r + 1) / 2 are used, r = min(n, d): 45 of 256 at d = 10.
"""

import triton
import triton.language as tl

from fastlin.backends.triton.kernels.matrices import ROWS, product, put_lines, rows_at
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
from fastlin.backends.triton.kernels.tiles import put_gram

PLACE_NAMES = ("seed_low", "seed_high", "stream", "step", "offset_low", "offset_high")


@triton.jit
def factor(F, i, j, d, DT: tl.constexpr, BIAS: tl.constexpr):
    """Entries of a matrix of the recipe, float64 (d, d) at addresses F, in the tokens' coordinates i, j."""
    there = (i >= BIAS) & (i < BIAS + d) & (j >= BIAS) & (j < BIAS + d)
    return tl.load(F + (i - BIAS) * d + j - BIAS, mask=there, other=0.0).to(DT)


@triton.jit
def apply_factor(F, x, LINE, d, DT: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr):
    """F x [BB, M] for matrices of the recipe at addresses F [BB] and vectors [BB, M], in the tokens' coordinates."""
    if M == 16:
        F = factor(F[:, None, None], tl.arange(0, M)[None, :, None], tl.arange(0, M)[None, None, :], d, DT, BIAS)
        return tl.sum(F * x[:, None, :], 2)
    else:
        tl.debug_barrier()
        for first in tl.range(0, M, ROWS, loop_unroll_factor=1):
            row = first + tl.arange(0, ROWS)
            rows = factor(F[:, None], row[:, None], tl.arange(0, M)[None, :], d, DT, BIAS)
            tl.store(LINE + row, tl.sum(rows * x, 1))
        tl.debug_barrier()
        return tl.load(LINE + tl.arange(0, M)[None, :])


@triton.jit
def weights(
    sequence, task, PLACE, NUMBERS, MEANS, FACTORS, LINE, d, DT: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr
):
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
            beta = mean + apply_factor(FACTORS + task * d * d, drawn, LINE, d, DT, M, BIAS)
    return beta


@triton.jit
def question(
    sequence,
    beta,
    PLACE,
    NUMBERS,
    FEATURE,
    LINE,
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
        x = apply_factor(FEATURE + tl.zeros((x.shape[0],), tl.int32), x, LINE, d, DT, M, BIAS)
    y = tl.sum(x * beta, 1)
    if NOISY:
        y += tl.load(NUMBERS).to(DT) * tl.sum(tl.where(j == d, drawn, 0.0), 1)
    if BIAS:
        x = tl.where(column == 0, 1.0, x)
    return x.to(DT), y


@triton.jit
def factor_rows(i, j, variates, constant, rank, sequence, PLACE, d, DT: tl.constexpr, BIAS: tl.constexpr):
    """Entries i, j of a triangular factor whose diagonal is `variates`; i and j broadcast, with what they index."""
    i = i - constant  # below the row of the constant coordinate
    j = j - BIAS
    index = tl.where(i < 0, j, constant * d + i * d - i * (i + 1) // 2 + j - i - 1)
    is_normal = (j >= 0) & (j < d) & (i < rank) & (j > i)
    drawn = normals(FACTOR, tl.where(is_normal, index, 0), sequence, PLACE, DT)
    return tl.where(is_normal, drawn, tl.where((i == j) & (i >= 0) & (i < rank), variates, 0.0)).to(DT)


@triton.jit
def labelled(X, j, labels, is_constant, root, d, DT: tl.constexpr, BIAS: tl.constexpr):
    """Rows X of a factor with their labels in place, and the constant coordinate's."""
    X = tl.where(j == BIAS + d, labels, X)
    if BIAS:
        X = tl.where((j == 0) & is_constant, root, X)
    return X.to(DT)


@triton.jit
def drawn_gram(
    sequence,
    beta,
    PLACE,
    NUMBERS,
    FEATURE,
    AT,
    S0,
    S1,
    LINE,
    n,
    d,
    NOISY: tl.constexpr,
    DT: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Gram matrices of contexts of n tokens of sequences [BB, 1] with weights beta [BB, M]."""
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
    root = tl.sqrt(length.to(tl.float64)).to(DT)
    deviation = tl.load(NUMBERS).to(DT)
    if M == 16:
        i = tl.arange(0, M)[None, :, None]
        j = tl.arange(0, M)[None, None, :]
        X = factor_rows(i, j, variates[:, :, None], constant, rank, sequence[:, :, None], PLACE, d, DT, BIAS)
        if FEATURE is not None:
            F = tl.broadcast_to(factor(FEATURE, i, j, d, DT, BIAS), (BB, M, M))
            X = product(X, F, AT, M, M, "ieee", YT=True)
        labels = tl.sum(X * beta[:, None, :], 2)  # [BB, M]
        if NOISY:
            labels += tl.where(row < constant + rank, deviation * normals(NOISE, row, sequence, PLACE, DT), 0.0)
        X = labelled(X, j, labels[:, :, None], i < constant, root, d, DT, BIAS)
        G = product(X, X, AT, M, M, "ieee", XT=True)
        if NOISY:
            rest = deviation * tl.sum(tl.where(slot == d, variates, 0.0), 1)
            G += tl.where((i == BIAS + d) & (j == BIAS + d), (rest * rest)[:, None, None], 0.0)
        return G
    else:
        j = tl.arange(0, M)[None, :]
        put_lines(LINE, variates, variates, M)
        for first in tl.range(0, M, ROWS, loop_unroll_factor=1):
            i = first + tl.arange(0, ROWS)[:, None]
            X = factor_rows(i, j, tl.load(LINE + i), constant, rank, sequence, PLACE, d, DT, BIAS)
            tl.store(S0 + rows_at(first, ROWS, M), X)
            if FEATURE is not None:
                tl.store(S1 + rows_at(first, ROWS, M), factor(FEATURE, i, j, d, DT, BIAS))
        tl.debug_barrier()
        U = S0
        if FEATURE is not None:
            U = product(S0, S1, AT, d + BIAS, M, "ieee", YT=True)
        for first in tl.range(0, M, ROWS, loop_unroll_factor=1):
            i = first + tl.arange(0, ROWS)[:, None]
            X = tl.load(U + rows_at(first, ROWS, M))
            labels = tl.sum(X * beta, 1, keep_dims=True)  # [ROWS, 1]
            if NOISY:
                labels += tl.where(i < constant + rank, deviation * normals(NOISE, i, sequence, PLACE, DT), 0.0)
            tl.store(S1 + rows_at(first, ROWS, M), labelled(X, j, labels, i < constant, root, d, DT, BIAS))
        tl.debug_barrier()
        G = product(S1, S1, AT, d + 1 + BIAS, M, "ieee", XT=True)
        if NOISY:
            rest = deviation * tl.sum(tl.where(slot == d, variates, 0.0), 1)
            corner = G + (BIAS + d) * (M + 1) + tl.arange(0, 1)
            whole = tl.load(corner) + rest * rest
            tl.debug_barrier()
            tl.store(corner, whole)
            tl.debug_barrier()
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


@triton.jit
def features(i, j, n, sequence, PLACE, d, DT: tl.constexpr, BIAS: tl.constexpr):
    """Standard normals of tokens i and coordinates j of sequences [BB, 1]; zero where no feature is."""
    j = j - BIAS
    is_feature = (j >= 0) & (j < d) & (i < n)
    drawn = normals(FEATURES, tl.where(is_feature, i * d + j, 0), sequence[:, :, None], PLACE, DT)
    return tl.where(is_feature, drawn, 0.0).to(DT)


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
    ROOM,  # [programs, 3 M^2 + 2 M] beyond M = 16
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
    LINE = ROOM + pid * (3 * M * M + 2 * M)
    S0 = LINE + 2 * M
    S1 = S0 + M * M
    beta = weights(sequence, task, PLACE, NUMBERS, MEANS, FACTORS, LINE, d, DT, M, BIAS)
    if pid % blocks == 0:
        q, y = question(sequence, beta, PLACE, NUMBERS, FEATURE, LINE, d, NOISY, DT, M, BIAS)
        j = tl.arange(0, M)[None, :]
        tl.store(Q + b[:, None] * m + j, q, mask=is_there[:, None] & (j < m))
        tl.store(Y + b, y, mask=is_there)
    if IS_GRAM:
        AT = S1 + M * M
        G = drawn_gram(sequence, beta, PLACE, NUMBERS, FEATURE, AT, S0, S1, LINE, n, d, NOISY, DT, M, BIAS)
        put_gram(G, X, b, is_there, m, M)
    else:
        column = tl.arange(0, M)[None, None, :]
        for first in range((pid % blocks).to(tl.int32) * BN, n, blocks * BN):
            i = first + tl.arange(0, BN)[None, :, None]
            z = features(i, column, n, sequence, PLACE, d, DT, BIAS)  # [BB, BN, M]
            if FEATURE is not None:
                z = tl.zeros((BB, BN, M), DT)
                for inner in tl.range(0, m, 16, loop_unroll_factor=1):
                    j = inner + tl.arange(0, 16)
                    x = features(i, j[None, None, :], n, sequence, PLACE, d, DT, BIAS)  # [BB, BN, 16]
                    F = factor(FEATURE, column, j[None, :, None], d, DT, BIAS)  # transposed, [1, 16, M]
                    F = tl.broadcast_to(F, (BB, 16, M))
                    z = tl.dot(x, F, z, input_precision="ieee", out_dtype=DT)
            labels = tl.sum(z * beta[:, None, :], 2)  # [BB, BN]
            if NOISY:
                token = first + tl.arange(0, BN)[None, :]
                labels += tl.load(NUMBERS).to(DT) * normals(NOISE, token, sequence, PLACE, DT)
            z = labelled(z, column, labels[:, :, None], i < n, 1.0, d, DT, BIAS)
            there = is_there[:, None, None] & (i < n) & (column < m)
            tl.store(X + (b[:, None, None] * n + i) * m + column, z, mask=there)
