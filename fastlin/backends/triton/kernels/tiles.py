"""What the kernels share: places in a tile of sequences, tokens, Gram matrices of tokens and of those that are given.

A tile is BB sequences of one task. At m = 11 the matrices of `matrices` have M = 16, and BB = 4: 11/16 of the lanes of
a vector operation and (11/16)^3 = 32 % of the multiply-adds of a product are useful. Packing sequences more densely
does not pay: block-diagonal tiles of two sequences in 32 x 32 do 4 times the multiply-adds of two batched 16 x 16
products, and products in vector operations read M^3 numbers from registers that a dot reads from shared memory. At
m = 7 it is 8 %, at m = 16 all.
"""

import triton
import triton.language as tl

from fastlin.backends.triton.kernels.matrices import ROWS, rows_at


@triton.jit
def members(TILE, ORDER, tile, tiles, BB: tl.constexpr):
    """Task of a tile, sequences [BB] in it, and which of these there are."""
    k = tl.load(TILE + tile)
    first = tl.load(TILE + tiles + tile)
    count = tl.load(TILE + 2 * tiles + tile)
    lane = tl.arange(0, BB)
    is_there = lane < count
    b = first + lane
    if ORDER is not None:
        b = tl.load(ORDER + b, mask=is_there, other=0)
    return k, tl.where(is_there, b, 0).to(tl.int64), is_there


@triton.jit
def tokens(X, b, is_there, first, n, column, m, sb, si, sj, BN: tl.constexpr, M: tl.constexpr):
    """Entries column to column + M of tokens first to first + BN of sequences b, [BB, BN, M]; zero beyond the last."""
    i = first + tl.arange(0, BN)[None, :, None]
    j = column + tl.arange(0, M)[None, None, :]
    there = is_there[:, None, None] & (i < n) & (j < m)
    return tl.load(X + b[:, None, None] * sb + i.to(tl.int64) * si + j * sj, mask=there, other=0.0)


@triton.jit
def tokens_product(
    X,
    b,
    is_there,
    first,
    n,
    m,
    sb,
    si,
    sj,
    Y,
    DT: tl.constexpr,
    BB: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    PREC: tl.constexpr,
):
    """Z Y [BB, BN, M] of tokens first to first + BN and a matrix."""
    if M == 16:
        z = tokens(X, b, is_there, first, n, 0, m, sb, si, sj, BN, M).to(DT)
        return tl.dot(z, Y, input_precision=PREC, out_dtype=DT)
    else:
        out = tl.zeros((BN, M), DT)
        for column in range(0, m, 16):
            z = tokens(X, b, is_there, first, n, column, m, sb, si, sj, BN, 16).to(DT)
            row = column + tl.arange(0, 16)[:, None]
            y = tl.load(Y + row * M + tl.arange(0, M)[None, :])  # [16, M]
            out = tl.dot(tl.reshape(z, (BN, 16)), y, out, input_precision=PREC, out_dtype=DT)
        return out[None, :, :]


@triton.jit
def gram_of_tokens(
    X,
    b,
    is_there,
    n,
    m,
    sb,
    si,
    sj,
    DT: tl.constexpr,
    BB: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    PREC: tl.constexpr,
):
    """G = sum_i z_i z_i' [BB, M, M]: one dot over BN tokens at a time."""
    if BB == 1:  # not a batch: `matrices` says why
        G = tl.zeros((M, M), DT)
        for first in range(0, n, BN):
            z = tl.reshape(tokens(X, b, is_there, first, n, 0, m, sb, si, sj, BN, M).to(DT), (BN, M))
            G = tl.dot(tl.trans(z), z, G, input_precision=PREC, out_dtype=DT)
        return G[None, :, :]
    else:
        G = tl.zeros((BB, M, M), DT)
        for first in range(0, n, BN):
            z = tokens(X, b, is_there, first, n, 0, m, sb, si, sj, BN, M).to(DT)
            G = tl.dot(tl.permute(z, (0, 2, 1)), z, G, input_precision=PREC, out_dtype=DT)
        return G


@triton.jit
def given_gram(X, b, is_there, m, sb, si, sj, AT, DT: tl.constexpr, M: tl.constexpr):
    """The symmetric part of Gram matrices that are given."""
    if M == 16:
        i = tl.arange(0, M)[None, :, None]
        j = tl.arange(0, M)[None, None, :]
        there = is_there[:, None, None] & (i < m) & (j < m)
        START = X + b[:, None, None] * sb
        G = tl.load(START + i * si + j * sj, mask=there, other=0.0).to(DT)
        return 0.5 * (G + tl.load(START + j * si + i * sj, mask=there, other=0.0).to(DT))
    else:
        j = tl.arange(0, M)[None, :]
        START = X + b[:, None] * sb  # [1, 1]
        tl.debug_barrier()
        for first in tl.range(0, M, ROWS, loop_unroll_factor=1):
            i = first + tl.arange(0, ROWS)[:, None]
            there = is_there[:, None] & (i < m) & (j < m)
            G = tl.load(START + i * si + j * sj, mask=there, other=0.0).to(DT)
            G = 0.5 * (G + tl.load(START + j * si + i * sj, mask=there, other=0.0).to(DT))
            tl.store(AT + rows_at(first, ROWS, M), G)
        tl.debug_barrier()
        return AT


@triton.jit
def put_gram(X, START, b, is_there, m, M: tl.constexpr):
    """Write a matrix of sequences b to [B, m, m]."""
    if M == 16:
        i = tl.arange(0, M)[None, :, None]
        j = tl.arange(0, M)[None, None, :]
        there = is_there[:, None, None] & (i < m) & (j < m)
        tl.store(START + (b[:, None, None] * m + i) * m + j, X, mask=there)
    else:
        j = tl.arange(0, M)[None, :]
        for first in tl.range(0, M, ROWS, loop_unroll_factor=1):
            i = first + tl.arange(0, ROWS)[:, None]
            there = is_there[:, None] & (i < m) & (j < m)
            tl.store(START + (b[:, None] * m + i) * m + j, tl.load(X + rows_at(first, ROWS, M)), mask=there)


@triton.jit(do_not_specialize=["B", "n", "m", "sb", "si", "sj"])
def gram_kernel(
    X, G, B, n, m, sb, si, sj, DT: tl.constexpr, BB: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr
):
    """G (B, m, m) of tokens X (B, n, m). A program has BB sequences; it reads 4 n m bytes of each and writes 4 m^2."""
    b = tl.program_id(0).to(tl.int64) * BB + tl.arange(0, BB)
    is_there = b < B
    out = gram_of_tokens(X, b, is_there, n, m, sb, si, sj, DT, BB, M, BN, PREC)
    i = tl.arange(0, M)[None, :, None]
    j = tl.arange(0, M)[None, None, :]
    there = is_there[:, None, None] & (i < m) & (j < m)
    tl.store(G + (b[:, None, None] * m + i) * m + j, out, mask=there)
