"""One layer over tokens, one head: a single pass, and nothing about a sequence is written.

    a = W' q     c = sum_t p (p.v) + sum_i z_i (z_i.v) (+ q (q.v))     e = the same with a for v     yhat = a.c
    r = dloss/dyhat     dW = sum r q c'     dv_k = sum r e     dp = (p.v) sum r a + (p . sum r a) v

A program has RUN tiles of one trial, and a tile BB sequences of one task, whose tokens [BB, BN, M] it reads once: 4 n m
bytes a sequence and trial, of which all trials but the first find them in the cache. All products are vector
operations along m: at m = 11 they use 11 of M = 16 lanes, 69 %, where dots, which want an inner side of 16 vectors,
would find two. dW stays in registers over the RUN tiles; dv, dp and the squared errors are one vector each per tile.
"""

import triton
import triton.language as tl

from fastlin.backends.triton.kernels.matrices import outer, put_matrix, put_vector, rows_at, vector
from fastlin.backends.triton.kernels.tiles import members, tokens


@triton.jit(
    do_not_specialize=["B", "n", "m", "t", "K", "R", "first_tile", "last_tile", "tiles", "sb", "si", "sj", "qb", "qj"]
)
def stream_kernel(
    X,  # [B, n, m] tokens, any strides, also half precision
    Q,  # [B, m]
    Y,  # [B] targets, or None
    GY,  # [R, B] gradients of the predictions, or None
    ORDER,  # [B] sequences by task, or None
    TILE,  # [3, tiles] task, first sequence in ORDER, number of sequences
    COEFFICIENT,  # [K] of a task's squared errors in the loss, or None
    P,  # [R, K, t, m] or None
    W,  # [R, M, M] times the scale
    V,  # [R, K, m]
    YHAT,  # [R, B] or None
    SQUARES,  # [tiles here, R] or None
    DW,  # [groups of RUN tiles here, R, m, m] or None
    DV,  # [tiles here, R, m] or None
    DP,  # [tiles here, R, t, m] or None
    B,
    n,
    m,
    t,
    K,
    R,
    first_tile,
    last_tile,
    tiles,
    sb,
    si,
    sj,
    qb,
    qj,
    SEE_QUERY: tl.constexpr,
    DT: tl.constexpr,
    BB: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    RUN: tl.constexpr,
):
    """Tiles first_tile to last_tile; grid x has the trials of a group of RUN tiles side by side."""
    r = (tl.program_id(0) % R).to(tl.int64)
    group = (tl.program_id(0) // R).to(tl.int64)
    start = first_tile + group * RUN
    w = tl.load(W + r * M * M + rows_at(0, M, M))[None, :, :]  # [1, M, M]
    if DW is not None:
        dW = tl.zeros((1, M, M), DT)
    for tile in range(start, tl.minimum(start + RUN, last_tile)):
        k, b, is_there = members(TILE, ORDER, tile, tiles, BB)
        slot = (tile - first_tile) * R + r
        j = tl.arange(0, M)[None, :]
        q = tl.load(Q + b[:, None] * qb + j * qj, mask=is_there[:, None] & (j < m), other=0.0).to(DT)  # [BB, M]
        v = vector(V + (r * K + k) * m, m, M)  # [1, M]
        a = tl.sum(w * q[:, :, None], 1)  # [BB, M]
        c = tl.zeros((BB, M), DT)
        e = tl.zeros((BB, M), DT)
        if SEE_QUERY:
            c += q * tl.sum(q * v, 1, keep_dims=True)
            e += q * tl.sum(q * a, 1, keep_dims=True)
        if P is not None:
            for i in range(t):
                p = vector(P + ((r * K + k) * t + i) * m, m, M)
                c += p * tl.sum(p * v, 1, keep_dims=True)
                e += p * tl.sum(p * a, 1, keep_dims=True)
        for first in range(0, n, BN):
            z = tokens(X, b, is_there, first, n, 0, m, sb, si, sj, BN, M).to(DT)  # [BB, BN, M]
            zv = tl.sum(z * v[:, None, :], 2)  # [BB, BN]
            c += tl.sum(z * zv[:, :, None], 1)
            if DV is not None:
                za = tl.sum(z * a[:, None, :], 2)
                e += tl.sum(z * za[:, :, None], 1)
        yhat = tl.sum(a * c, 1)  # [BB]
        if YHAT is not None:
            tl.store(YHAT + r * B + b, yhat, mask=is_there)
        if Y is not None:
            error = tl.where(is_there, yhat - tl.load(Y + b, mask=is_there, other=0.0), 0.0)
            tl.store(SQUARES + slot, tl.sum(error * error, 0))
            gy = 2 * error * tl.load(COEFFICIENT + k)
        elif GY is not None:
            gy = tl.load(GY + r * B + b, mask=is_there, other=0.0)
        else:
            gy = tl.zeros((BB,), DT)
        if DW is not None:
            dW += tl.sum(outer(q * gy[:, None], c), 0, keep_dims=True)
        if DV is not None:
            put_vector(DV + slot * m, tl.sum(e * gy[:, None], 0, keep_dims=True), m, M)
        if DP is not None:
            ga = tl.sum(a * gy[:, None], 0, keep_dims=True)  # [1, M]
            for i in range(t):
                p = vector(P + ((r * K + k) * t + i) * m, m, M)
                dp = ga * tl.sum(p * v, 1, keep_dims=True) + v * tl.sum(p * ga, 1, keep_dims=True)
                put_vector(DP + (slot * t + i) * m, dp, m, M)
    if DW is not None:
        put_matrix(DW + (group * R + r) * m * m, dW, m, M)
