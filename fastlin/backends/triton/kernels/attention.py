"""A stack of L layers over Gram matrices: the last is W, v, those before it A, C. The letters are those of `eager`.

    G = Gx + sum_t p p' (+ q q')                 Gx from tokens, given, or drawn and never written
    T = rho I + sum_h A_h G C_h      G <- T' G T      q <- T' q                            each matrix layer
    yhat = sum_h a_h . c_h + q . h               a_h = W_h' q       c_h = G v_h            the last layer
    r = dloss/dyhat      dW_h = sum r q c_h'     dv_h = sum r G a_h      Gb = r sym(a_h v_h')      qb = r (h + W_h c_h)
    Tb = q qb' + 2 G T Gb      dA_h = Tb C_h' G      dC_h = G A_h' Tb    Gb <- T Gb T' + sym(A_h' Tb C_h')    qb <- T qb
    dp = 2 Gb p      dG = Gb      dz_i = 2 Gb z_i      dq = qb (+ 2 Gb q)

A and W come with the scale in them, h with the factor of the last skip. A program takes tile after tile of BB sequences
of one task, makes their Gx once, and goes through its trials with it. G, T and Gb are matrices of `matrices`: tiles
[BB, M, M] at M = 16 (`tiles` says how m = 11 fills them), places in memory beyond. A layer costs 2 + 2 H products
forward and 3 + 5 H backward. Gx, and what the reverse needs of a layer, G, T and q, wait in ROOM, memory that belongs
to the program and is used again for every trial and tile; a barrier stands between what one thread of a program writes
and another reads. Sums over a tile are written once for each tile and trial, [m, m] for a matrix; `reduce` adds them.

What does not change from trial to trial, from layer to layer or from head to head is not computed ahead of them:
addresses and masks of that kind took the registers of the tiles, and in float64 spilled 96 bytes on sm_90.
"""

import triton
import triton.language as tl

from fastlin.backends.triton.kernels.matrices import (
    add,
    add_outer,
    add_prompt,
    add_symmetric,
    apply,
    apply_transposed,
    diagonal,
    hold,
    keep,
    matrix,
    parameter,
    product,
    put_outer,
    put_product,
    put_vector,
    total,
    vector,
)
from fastlin.backends.triton.kernels.random import sequence_of
from fastlin.backends.triton.kernels.sampler import PLACE_NAMES, drawn_gram, question, weights
from fastlin.backends.triton.kernels.tiles import given_gram, gram_of_tokens, members, put_gram, tokens_product

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
def layer_matrix(
    A, C, G, rho, AT, S0, S1, m, H, BB: tl.constexpr, M: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr
):
    """T = rho I + sum_h A_h G C_h, left AT, with A, C at [H, M, M]."""
    T = diagonal(rho, AT, BB, M, DT)  # The pad has rho as well: it multiplies zeros.
    for h in tl.range(0, H, disable_licm=True):
        GC = product(G, parameter(C + h * M * M, BB, M), S0, m, M, PREC)
        T = add(T, product(parameter(A + h * M * M, BB, M), GC, S1, m, M, PREC), M)
    return T


@triton.jit
def reverse_layer(
    A,
    C,
    DA,
    DC,
    to,
    G,
    T,
    q,
    Gb,
    qb,
    AT,
    S0,
    S1,
    S2,
    LINE,
    m,
    H,
    BB: tl.constexpr,
    M: tl.constexpr,
    PREC: tl.constexpr,
):
    """Gb, left AT, and qb below a layer, from those above; sums over the tile of dA and dC are left from `to` on.

    G and T are at their places, and read where they are used: tiles that wait for it would take registers.
    """
    TGb = product(matrix(T, BB, M), Gb, S0, m, M, PREC)
    Tb = add_outer(product(matrix(G, BB, M), TGb, S1, m, M, PREC), q, qb, LINE, M, FACTOR=2)
    tl.debug_barrier()
    Gb = product(TGb, matrix(T, BB, M), AT, m, M, PREC, YT=True)
    qb = apply(matrix(T, BB, M), qb, LINE, M)
    for h in tl.range(0, H, disable_licm=True):
        TbCt = product(Tb, parameter(C + h * M * M, BB, M), S0, m, M, PREC, YT=True)
        if DA is not None:
            put_product(DA + to + h * m * m, TbCt, matrix(G, BB, M), m, M, PREC)
        Gb = add_symmetric(Gb, product(parameter(A + h * M * M, BB, M), TbCt, S2, m, M, PREC, XT=True), M)
        if DC is not None:
            tl.debug_barrier()
            AtTb = product(parameter(A + h * M * M, BB, M), Tb, S2, m, M, PREC, XT=True)
            put_product(DC + to + h * m * m, matrix(G, BB, M), AtTb, m, M, PREC)
    return Gb, qb


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
    A,  # [R, L, H, M, M] or None
    C,  # [R, L, H, M, M] or None
    RHO,  # [L] factors of I, or None
    W,  # [R, H, M, M]
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
    SLOTS: tl.constexpr,
):
    """Tiles first_tile to last_tile: `groups` programs side by side share the trials of every tile that is theirs."""
    PLACE = (seed_low, seed_high, stream, step, offset_low, offset_high)
    pid = tl.program_id(0).to(tl.int64)
    needs_reverse: tl.constexpr = (
        (DP is not None) or (DA is not None) or (DC is not None) or (DX is not None) or (DQ is not None)
    )
    needs_gradients: tl.constexpr = needs_reverse or (DW is not None) or (DV is not None) or (DH is not None)
    keeps: tl.constexpr = needs_reverse and (A is not None)
    # In ROOM: Gx, and the sum of Gb over the trials; beyond M = 16 three matrices on their way, and Gb; two vectors;
    # G, T and q, of each layer where the reverse needs them.
    KEPT: tl.constexpr = (2 * M + 1) * M * BB
    ROOM += pid * (SLOTS * M * M + 2 * M + KEPT + (L * KEPT if keeps else 0))
    S0 = ROOM + 2 * BB * M * M
    S1 = S0 + M * M
    S2 = S1 + M * M
    LINE = ROOM + SLOTS * M * M
    LAYERS = LINE + 2 * M
    layer_step = KEPT if keeps else 0
    for tile in range(first_tile + (pid // groups).to(tl.int32), last_tile, tl.num_programs(0) // groups):
        k, b, is_there = members(TILE, ORDER, tile, tiles, BB)
        j = tl.arange(0, M)[None, :]
        AT_X = ROOM
        if X is None:
            sequence = sequence_of(b, PLACE)[:, None]
            task = tl.zeros((BB,), tl.int64) + k
            beta = weights(sequence, task, PLACE, NUMBERS, MEANS, FACTORS, LINE, m - 1 - BIAS, DT, M, BIAS)
            q0, y = question(sequence, beta, PLACE, NUMBERS, FEATURE, LINE, m - 1 - BIAS, NOISY, DT, M, BIAS)
            Gx = drawn_gram(
                sequence, beta, PLACE, NUMBERS, FEATURE, AT_X, S0, S1, LINE, n, m - 1 - BIAS, NOISY, DT, M, BIAS
            )
        else:
            q0 = tl.load(Q + b[:, None] * qb + j * qj, mask=is_there[:, None] & (j < m), other=0.0).to(DT)  # [BB, M]
            if IS_GRAM:
                Gx = given_gram(X, b, is_there, m, sb, si, sj, AT_X, DT, M)
            else:
                Gx = hold(gram_of_tokens(X, b, is_there, n, m, sb, si, sj, DT, BB, M, BN, PREC), AT_X, M)
            if Y is not None:
                y = tl.load(Y + b, mask=is_there, other=0.0)
        if SEE_QUERY:
            Gx = add_outer(Gx, q0, q0, LINE, M)
        AT_B = S2 + M * M
        keep(Gx, AT_X, M)
        if DX is not None:
            AT_ALL = AT_X + BB * M * M
            keep(diagonal(0.0, AT_ALL, BB, M, DT), AT_ALL, M)
        if DQ is not None:
            qb_all = tl.zeros((BB, M), DT)

        for r in tl.range((pid % groups).to(tl.int32), R, groups, disable_licm=True):
            slot = (tile - first_tile).to(tl.int64) * R + r
            q = q0
            G = add_prompt(matrix(AT_X, BB, M), P, (r * K + k) * t * m, t, m, LAYERS, M)
            if A is not None:
                for layer in tl.range(0, L, disable_licm=True):
                    AT = LAYERS + layer * layer_step
                    at = (tl.cast(r, tl.int64) * L + layer) * H * M * M
                    rho = tl.load(RHO + layer)
                    T = layer_matrix(A + at, C + at, G, rho, AT + BB * M * M, S0, S1, m, H, BB, M, DT, PREC)
                    if keeps:
                        keep(G, AT, M)
                        keep(T, AT + BB * M * M, M)
                        tl.store(AT + 2 * BB * M * M + tl.arange(0, BB)[:, None] * M + j, q)
                    GT = product(G, T, S0, m, M, PREC)
                    G = product(T, GT, AT + layer_step, m, M, PREC, XT=True)
                    q = apply_transposed(T, q, LINE, M)
            yhat = tl.zeros((BB,), DT)
            for h in tl.range(0, H, disable_licm=True):
                w = matrix(W + (tl.cast(r, tl.int64) * H + h) * M * M, 1, M)
                v = vector(V + ((tl.cast(r, tl.int64) * H + h) * K + k) * m, m, M)
                yhat += tl.sum(apply_transposed(w, q, LINE, M) * apply(G, v, LINE, M), 1)
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
                if needs_reverse:
                    Gb = diagonal(0.0, AT_B, BB, M, DT)
                back = tl.zeros((BB, M), DT)  # qb
                for h in tl.range(0, H, disable_licm=True):
                    w = matrix(W + (tl.cast(r, tl.int64) * H + h) * M * M, 1, M)
                    v = vector(V + ((tl.cast(r, tl.int64) * H + h) * K + k) * m, m, M)
                    ga = apply_transposed(w, q, LINE, M) * gy[:, None]
                    gc = apply(G, v, LINE, M) * gy[:, None]
                    if DW is not None:
                        put_outer(DW + (slot * H + h) * m * m, q, gc, LINE, m, M)
                    if DV is not None:
                        put_vector(DV + (slot * H + h) * m, tl.sum(apply(G, ga, LINE, M), 0, keep_dims=True), m, M)
                    if needs_reverse:
                        Gb = add_outer(Gb, 0.5 * ga, v, LINE, M)
                        Gb = add_outer(Gb, 0.5 * v, ga, LINE, M)
                        back += apply(w, gc, LINE, M)
                if HEAD is not None:
                    back += head * gy[:, None]
                    if DH is not None:
                        put_vector(DH + slot * m, tl.sum(q * gy[:, None], 0, keep_dims=True), m, M)
            if needs_reverse:
                if A is not None:
                    tl.debug_barrier()
                    for above in tl.range(0, L, disable_licm=True):
                        layer = L - 1 - above
                        AT = LAYERS + layer * layer_step
                        at = (tl.cast(r, tl.int64) * L + layer) * H * M * M
                        to = (slot * L + layer) * H * m * m
                        T_AT = AT + BB * M * M
                        q = tl.load(AT + 2 * BB * M * M + tl.arange(0, BB)[:, None] * M + j)
                        Gb, back = reverse_layer(
                            A + at, C + at, DA, DC, to, AT, T_AT, q, Gb, back, AT_B, S0, S1, S2, LINE, m, H, BB, M, PREC
                        )
                    tl.debug_barrier()
                if DP is not None:
                    Gb_tile = total(Gb, M)
                    for i in range(t):
                        p = vector(P + ((r * K + k) * t + i) * m, m, M)
                        put_vector(DP + (slot * t + i) * m, 2 * apply(Gb_tile, p, LINE, M), m, M)
                if DX is not None:
                    keep(add(matrix(AT_ALL, BB, M), Gb, M), AT_ALL, M)
                if DQ is not None:
                    qb_all += back
                    if SEE_QUERY:
                        qb_all += 2 * apply(Gb, q0, LINE, M)

        if DQ is not None:
            tl.store(DQ + b[:, None] * m + j, qb_all, mask=is_there[:, None] & (j < m))
        if DX is not None:
            Gb_all = matrix(AT_ALL, BB, M)
            if IS_GRAM:
                put_gram(Gb_all, DX, b, is_there, m, M)
            else:
                column = tl.arange(0, M)[None, None, :]
                for first in range(0, n, BN):
                    dz = 2 * tokens_product(X, b, is_there, first, n, m, sb, si, sj, Gb_all, DT, BB, M, BN, PREC)
                    i = first + tl.arange(0, BN)[None, :, None]
                    there = is_there[:, None, None] & (i < n) & (column < m)
                    tl.store(DX + (b[:, None, None] * n + i) * m + column, dz, mask=there)
