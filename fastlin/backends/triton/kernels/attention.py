"""A stack of L layers over Gram matrices: the last is W, v, those before it A, C. The letters are those of `eager`.

    G = Gx + sum_t p p' (+ q q')                 Gx from tokens, given, or drawn here and never written
    T = rho I + sum_h A_h G C_h      G <- T' G T      q <- T' q                            each matrix layer
    yhat = sum_h a_h . c_h + q . h               a_h = W_h' q       c_h = G v_h            the last layer
    r = dloss/dyhat      dW_h = sum r q c_h'     dv_h = sum r G a_h      Gb = r sym(a_h v_h')      qb = r (h + W_h c_h)
    Tb = q qb' + 2 G T Gb      dA_h = Tb C_h' G      dC_h = G A_h' Tb    Gb <- T Gb T' + sym(A_h' Tb C_h')    qb <- T qb
    dp = 2 Gb p      dG = Gb      dz_i = 2 Gb z_i      dq = qb (+ 2 Gb q)

A and W come with the scale in them, h with the factor of the last skip. A program takes tile after tile of BB sequences
of one task, makes their Gx once, and goes through its trials with it. G, T and Gb are [BB, M, M] in registers (`tiles`
says how m = 11 fills them); a layer costs 4 products forward and 7 + 5 H backward. What the reverse needs of a layer,
G, T and q, waits in ROOM, memory that belongs to the program and is used again for every trial and tile; a barrier
stands between what one thread of a program writes and another reads. Sums over a tile are written once for each tile
and trial, [m, m] for a matrix, and added by `reduce`.
"""

import triton
import triton.language as tl

from fastlin.backends.triton.kernels.random import sequence_of
from fastlin.backends.triton.kernels.sampler import PLACE_NAMES, drawn_gram, question, weights
from fastlin.backends.triton.kernels.tiles import (
    apply,
    apply_transposed,
    given_gram,
    gram_of_prompt,
    gram_of_tokens,
    matrix,
    members,
    outer,
    product,
    put_matrix,
    put_vector,
    tokens,
    transpose,
    vector,
)

SIZES = (
    "B",
    "n",
    "m",
    "t",
    "K",
    "R",
    "H",
    "L",
    "groups",
    "first_tile",
    "last_tile",
    "tiles",
    "sb",
    "si",
    "sj",
    "qb",
    "qj",
)


@triton.jit
def keep(AT, G, T, q, M: tl.constexpr):
    """Leave G, T [BB, M, M] and q [BB, M] of a layer."""
    BB: tl.constexpr = q.shape[0]
    b = tl.arange(0, BB)[:, None, None]
    at = AT + (b * M + tl.arange(0, M)[None, :, None]) * M + tl.arange(0, M)[None, None, :]
    tl.store(at, G)
    tl.store(at + BB * M * M, T)
    tl.store(AT + 2 * BB * M * M + tl.arange(0, BB)[:, None] * M + tl.arange(0, M)[None, :], q)


@triton.jit
def kept(AT, BB: tl.constexpr, M: tl.constexpr):
    """What `keep` has left."""
    b = tl.arange(0, BB)[:, None, None]
    at = AT + (b * M + tl.arange(0, M)[None, :, None]) * M + tl.arange(0, M)[None, None, :]
    q = tl.load(AT + 2 * BB * M * M + tl.arange(0, BB)[:, None] * M + tl.arange(0, M)[None, :])
    return tl.load(at), tl.load(at + BB * M * M), q


@triton.jit
def layer_matrix(A, C, G, rho, ROOM, m, H, PREC: tl.constexpr):
    """T = rho I + sum_h A_h G C_h [BB, M, M], with A, C at [H, m, m]."""
    BB: tl.constexpr = G.shape[0]
    M: tl.constexpr = G.shape[1]
    # The pad has rho as well: it multiplies zeros.
    T = tl.where(tl.arange(0, M)[None, :, None] == tl.arange(0, M)[None, None, :], rho, 0.0).to(G.dtype)
    T = tl.broadcast_to(T, (BB, M, M))
    for h in range(H):
        GC = product(G, tl.broadcast_to(matrix(C + h * m * m, m, M), (BB, M, M)), ROOM, PREC)
        T += product(tl.broadcast_to(matrix(A + h * m * m, m, M), (BB, M, M)), GC, ROOM, PREC)
    return T


@triton.jit
def reverse_layer(A, C, DA, DC, to, G, T, q, Gb, qb, ROOM, m, H, PREC: tl.constexpr):
    """Gb and qb below a layer, from those above; sums over the tile of dA and dC are left from `to` on, [H, m, m]."""
    BB: tl.constexpr = G.shape[0]
    M: tl.constexpr = G.shape[1]
    TGb = product(T, Gb, ROOM, PREC)
    Tb = outer(q, qb) + 2 * product(G, TGb, ROOM, PREC)
    Gb = product(TGb, transpose(T), ROOM, PREC)
    for h in range(H):
        Ct = transpose(tl.broadcast_to(matrix(C + h * m * m, m, M), (BB, M, M)))
        TbCt = product(Tb, Ct, ROOM, PREC)
        if DA is not None:
            put_matrix(DA + to + h * m * m, tl.sum(product(TbCt, G, ROOM, PREC), 0, keep_dims=True), m, M)
        At = transpose(tl.broadcast_to(matrix(A + h * m * m, m, M), (BB, M, M)))
        if DC is not None:
            AtTb = product(At, Tb, ROOM, PREC)
            put_matrix(DC + to + h * m * m, tl.sum(product(G, AtTb, ROOM, PREC), 0, keep_dims=True), m, M)
        through = product(At, TbCt, ROOM, PREC)
        Gb += 0.5 * (through + transpose(through))
    return Gb, apply(T, qb)


@triton.jit(do_not_specialize=[*SIZES, *PLACE_NAMES])
def attention_kernel(
    X,  # [B, n, m] tokens, [B, m, m] Gram matrices, or None: drawn
    Q,  # [B, m] or None
    Y,  # [B] targets, or None
    GY,  # [R, B] gradients of the predictions, or None
    ORDER,  # [B] sequences by task, or None
    TILE,  # [3, tiles] task, first sequence in ORDER, number of sequences
    COEFFICIENT,  # [K] of a task's squared errors in the loss, or None
    P,  # [R, K, t, m] or None
    A,  # [R, L, H, m, m] or None
    C,  # [R, L, H, m, m] or None
    RHO,  # [L] factors of I, or None
    W,  # [R, H, m, m]
    V,  # [R, H, K, m]
    HEAD,  # [R, K, m] or None
    YHAT,  # [R, B] or None
    SQUARES,  # [tiles here, R] or None
    DP,  # [tiles here, R, t, m] or None
    DA,  # [tiles here, R, L, H, m, m] or None
    DC,  # [tiles here, R, L, H, m, m] or None
    DW,  # [tiles here, R, H, m, m] or None
    DV,  # [tiles here, R, H, m] or None
    DH,  # [tiles here, R, m] or None
    DX,  # like X, contiguous, or None
    DQ,  # [B, m] or None
    ROOM,  # [programs, room]
    NUMBERS,  # the source's, as in `sampler`; None when X is given
    MEANS,
    FACTORS,
    FEATURE,
    seed_low,
    seed_high,
    stream,
    step,
    offset_low,
    offset_high,
    B,
    n,
    m,
    t,
    K,
    R,
    H,
    L,
    groups,
    first_tile,
    last_tile,
    tiles,
    sb,
    si,
    sj,
    qb,
    qj,
    IS_GRAM: tl.constexpr,
    SEE_QUERY: tl.constexpr,
    NOISY: tl.constexpr,
    BIAS: tl.constexpr,
    DT: tl.constexpr,
    BB: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    PREC: tl.constexpr,
):
    """Tiles first_tile to last_tile: `groups` programs side by side share the trials of every tile that is theirs."""
    PLACE = (seed_low, seed_high, stream, step, offset_low, offset_high)
    pid = tl.program_id(0).to(tl.int64)
    needs_reverse: tl.constexpr = (
        (DP is not None) or (DA is not None) or (DC is not None) or (DX is not None) or (DQ is not None)
    )
    needs_gradients: tl.constexpr = needs_reverse or (DW is not None) or (DV is not None) or (DH is not None)
    FACTORS_ROOM: tl.constexpr = 2 * M * M * BB if M > 16 else 0  # the two of a product
    KEPT: tl.constexpr = (2 * M * M + M) * BB if needs_reverse else 0  # of one layer
    ROOM += pid * (FACTORS_ROOM + L * KEPT)
    LAYERS = ROOM + FACTORS_ROOM
    for tile in range(first_tile + (pid // groups).to(tl.int32), last_tile, tl.num_programs(0) // groups):
        k, b, is_there = members(TILE, ORDER, tile, tiles, BB)
        j = tl.arange(0, M)[None, :]
        if X is None:
            sequence = sequence_of(b, PLACE)[:, None]
            task = tl.zeros((BB,), tl.int64) + k
            beta = weights(sequence, task, PLACE, NUMBERS, MEANS, FACTORS, m - 1 - BIAS, DT, M, BIAS)
            q0, y = question(sequence, beta, PLACE, NUMBERS, FEATURE, m - 1 - BIAS, NOISY, DT, M, BIAS)
            Gx = drawn_gram(sequence, beta, PLACE, NUMBERS, FEATURE, ROOM, n, m - 1 - BIAS, NOISY, DT, M, BIAS)
        else:
            q0 = tl.load(Q + b[:, None] * qb + j * qj, mask=is_there[:, None] & (j < m), other=0.0).to(DT)  # [BB, M]
            if IS_GRAM:
                Gx = given_gram(X, b, is_there, m, sb, si, sj, DT, M)
            else:
                Gx = gram_of_tokens(X, b, is_there, n, m, sb, si, sj, DT, BB, M, BN, PREC)
            if Y is not None:
                y = tl.load(Y + b, mask=is_there, other=0.0)
        if SEE_QUERY:
            Gx += outer(q0, q0)
        if DX is not None:
            Gb_all = tl.zeros((BB, M, M), DT)
        if DQ is not None:
            qb_all = tl.zeros((BB, M), DT)

        for r in range((pid % groups).to(tl.int32), R, groups):
            slot = (tile - first_tile).to(tl.int64) * R + r
            G = Gx
            q = q0
            if P is not None:
                G += gram_of_prompt(P + (r * K + k) * t * m, t, m, DT, M)
            if A is not None:
                for layer in range(L):
                    at = (tl.cast(r, tl.int64) * L + layer) * H * m * m
                    T = layer_matrix(A + at, C + at, G, tl.load(RHO + layer), ROOM, m, H, PREC)
                    if needs_reverse:
                        keep(LAYERS + layer * KEPT, G, T, q, M)
                    G = product(transpose(T), product(G, T, ROOM, PREC), ROOM, PREC)
                    q = apply_transposed(T, q)
            yhat = tl.zeros((BB,), DT)
            for h in range(H):
                w = matrix(W + (tl.cast(r, tl.int64) * H + h) * m * m, m, M)
                v = vector(V + ((tl.cast(r, tl.int64) * H + h) * K + k) * m, m, M)
                yhat += tl.sum(apply_transposed(w, q) * apply(G, v), 1)
            if HEAD is not None:
                head = vector(HEAD + (tl.cast(r, tl.int64) * K + k) * m, m, M)
                yhat += tl.sum(q * head, 1)
            if YHAT is not None:
                tl.store(YHAT + tl.cast(r, tl.int64) * B + b, yhat, mask=is_there)
            gy = tl.zeros((BB,), DT)
            if SQUARES is not None:
                error = tl.where(is_there, yhat - y, 0.0)
                tl.store(SQUARES + slot, tl.sum(error * error, 0))
                gy = 2 * error * tl.load(COEFFICIENT + k)
            elif GY is not None:
                gy = tl.load(GY + tl.cast(r, tl.int64) * B + b, mask=is_there, other=0.0)

            if needs_gradients:
                Gb = tl.zeros((BB, M, M), DT)
                back = tl.zeros((BB, M), DT)  # qb
                for h in range(H):
                    w = matrix(W + (tl.cast(r, tl.int64) * H + h) * m * m, m, M)
                    v = vector(V + ((tl.cast(r, tl.int64) * H + h) * K + k) * m, m, M)
                    ga = apply_transposed(w, q) * gy[:, None]
                    gc = apply(G, v) * gy[:, None]
                    if DW is not None:
                        put_matrix(DW + (slot * H + h) * m * m, tl.sum(outer(q, gc), 0, keep_dims=True), m, M)
                    if DV is not None:
                        put_vector(DV + (slot * H + h) * m, tl.sum(apply(G, ga), 0, keep_dims=True), m, M)
                    if needs_reverse:
                        Gb += 0.5 * (outer(ga, v) + outer(v, ga))
                        back += apply(w, gc)
                if HEAD is not None:
                    back += head * gy[:, None]
                    if DH is not None:
                        put_vector(DH + slot * m, tl.sum(q * gy[:, None], 0, keep_dims=True), m, M)
            if needs_reverse:
                if A is not None:
                    tl.debug_barrier()
                    for above in range(L):
                        layer = L - 1 - above
                        at = (tl.cast(r, tl.int64) * L + layer) * H * m * m
                        to = (slot * L + layer) * H * m * m
                        G, T, q = kept(LAYERS + layer * KEPT, BB, M)
                        Gb, back = reverse_layer(A + at, C + at, DA, DC, to, G, T, q, Gb, back, ROOM, m, H, PREC)
                    tl.debug_barrier()
                if DP is not None:
                    Gb_tile = tl.sum(Gb, 0, keep_dims=True)  # [1, M, M]
                    for i in range(t):
                        p = vector(P + ((r * K + k) * t + i) * m, m, M)
                        put_vector(DP + (slot * t + i) * m, 2 * apply(Gb_tile, p), m, M)
                if DX is not None:
                    Gb_all += Gb
                if DQ is not None:
                    qb_all += back
                    if SEE_QUERY:
                        qb_all += 2 * apply(Gb, q0)

        if DQ is not None:
            tl.store(DQ + b[:, None] * m + j, qb_all, mask=is_there[:, None] & (j < m))
        if DX is not None:
            column = tl.arange(0, M)[None, None, :]
            if IS_GRAM:
                i = tl.arange(0, M)[None, :, None]
                there = is_there[:, None, None] & (i < m) & (column < m)
                tl.store(DX + (b[:, None, None] * m + i) * m + column, Gb_all, mask=there)
            else:
                for first in range(0, n, BN):
                    z = tokens(X, b, is_there, first, n, m, sb, si, sj, M, BN).to(DT)
                    dz = 2 * tl.dot(z, Gb_all, input_precision=PREC, out_dtype=DT)
                    i = first + tl.arange(0, BN)[None, :, None]
                    there = is_there[:, None, None] & (i < n) & (column < m)
                    tl.store(DX + (b[:, None, None] * n + i) * m + column, dz, mask=there)
