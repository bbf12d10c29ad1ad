"""What the kernels share: places in a tile of sequences, products of matrices, contexts.

A tile is BB sequences of one task. Matrices are padded to M x M, M the power of two from m on and at least 16, because
tl.dot wants 16 along the inner side: T, G, Gb are [BB, M, M] tiles in registers, and all sequences of a tile take part
in one batched dot. At m = 11 that is M = 16, BB = 8: 11/16 of the lanes of a vector operation and (11/16)^3 = 32 % of
the multiply-adds of a product are useful. Packing sequences more densely does not pay: block-diagonal tiles of two
sequences in 32 x 32 do 4 times the multiply-adds of two batched 16 x 16 products, and products in vector operations
read M^3 numbers from registers that a dot reads from shared memory. At m = 7 it is 8 %, at m = 16 all.
"""

import triton
import triton.language as tl


@triton.jit
def product(X, Y, ROOM, PREC: tl.constexpr):
    """X Y for tiles [BB, M, M]; ROOM holds two such tiles.

    A dot keeps whole rows and columns of its factors in registers, which is too much beyond M = 16: at M = 32 the
    reverse of a layer spills 400 bytes. There the factors lie in memory that this program alone uses, which the nearest
    cache holds, and come by 16; at M = 64 one column and row at a time.
    """
    BB: tl.constexpr = X.shape[0]
    M: tl.constexpr = X.shape[1]
    if M == 16:
        out = tl.dot(X, Y, input_precision=PREC, out_dtype=X.dtype)
    else:
        b = tl.arange(0, BB)[:, None, None]
        i = tl.arange(0, M)[None, :, None]
        j = tl.arange(0, M)[None, None, :]
        tl.store(ROOM + (b * M + i) * M + j, X)
        tl.store(ROOM + BB * M * M + (b * M + i) * M + j, Y)
        tl.debug_barrier()
        out = tl.zeros((BB, M, M), X.dtype)
        if M == 32 or PREC != "ieee":
            for first in range(0, M, 16):
                row = first + tl.arange(0, 16)[None, :, None]
                column = first + tl.arange(0, 16)[None, None, :]
                x = tl.load(ROOM + (b * M + i) * M + column)  # [BB, M, 16]
                y = tl.load(ROOM + BB * M * M + (b * M + row) * M + j)  # [BB, 16, M]
                out = tl.dot(x, y, out, input_precision=PREC, out_dtype=X.dtype)
        else:
            for k in range(M):
                x = tl.load(ROOM + (b * M + i) * M + k)  # [BB, M, 1]
                y = tl.load(ROOM + BB * M * M + (b * M + k) * M + j)  # [BB, 1, M]
                out += x * y
        tl.debug_barrier()
    return out


@triton.jit
def transpose(X):
    """X' for a tile [BB, M, M]."""
    return tl.permute(X, (0, 2, 1))


@triton.jit
def outer(x, y):
    """X y' [BB, M, M] for vectors [BB, M]."""
    return x[:, :, None] * y[:, None, :]


@triton.jit
def apply(X, y):
    """X y [BB, M] for a tile [BB, M, M] and vectors [BB, M]."""
    return tl.sum(X * y[:, None, :], 2)


@triton.jit
def apply_transposed(X, y):
    """X' y [BB, M] for a tile [BB, M, M] and vectors [BB, M]."""
    return tl.sum(X * y[:, :, None], 1)


@triton.jit
def matrix(START, m, M: tl.constexpr):
    """A matrix [m, m] of a parameter as [1, M, M], zero beyond m."""
    i = tl.arange(0, M)[None, :, None]
    j = tl.arange(0, M)[None, None, :]
    return tl.load(START + i * m + j, mask=(i < m) & (j < m), other=0.0)


@triton.jit
def vector(START, m, M: tl.constexpr):
    """A vector [m] of a parameter as [1, M], zero beyond m."""
    j = tl.arange(0, M)[None, :]
    return tl.load(START + j, mask=j < m, other=0.0)


@triton.jit
def put_matrix(START, X, m, M: tl.constexpr):
    """Write [1, M, M] to a matrix [m, m]."""
    i = tl.arange(0, M)[None, :, None]
    j = tl.arange(0, M)[None, None, :]
    tl.store(START + i * m + j, X, mask=(i < m) & (j < m))


@triton.jit
def put_vector(START, x, m, M: tl.constexpr):
    """Write [1, M] to a vector [m]."""
    j = tl.arange(0, M)[None, :]
    tl.store(START + j, x, mask=j < m)


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
def tokens(X, b, is_there, first, n, m, sb, si, sj, M: tl.constexpr, BN: tl.constexpr):
    """Tokens first to first + BN of sequences b, [BB, BN, M]; zero beyond the last."""
    i = first + tl.arange(0, BN)[None, :, None]
    j = tl.arange(0, M)[None, None, :]
    there = is_there[:, None, None] & (i < n) & (j < m)
    return tl.load(X + b[:, None, None] * sb + i.to(tl.int64) * si + j * sj, mask=there, other=0.0)


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
    G = tl.zeros((BB, M, M), DT)
    for first in range(0, n, BN):
        z = tokens(X, b, is_there, first, n, m, sb, si, sj, M, BN).to(DT)
        G = tl.dot(tl.permute(z, (0, 2, 1)), z, G, input_precision=PREC, out_dtype=DT)
    return G


@triton.jit
def given_gram(X, b, is_there, m, sb, si, sj, DT: tl.constexpr, M: tl.constexpr):
    """The symmetric part of Gram matrices that are given, [BB, M, M]."""
    i = tl.arange(0, M)[None, :, None]
    j = tl.arange(0, M)[None, None, :]
    there = is_there[:, None, None] & (i < m) & (j < m)
    at = X + b[:, None, None] * sb
    G = tl.load(at + i * si + j * sj, mask=there, other=0.0).to(DT)
    return 0.5 * (G + tl.load(at + j * si + i * sj, mask=there, other=0.0).to(DT))


@triton.jit
def gram_of_prompt(P, t, m, DT: tl.constexpr, M: tl.constexpr):
    """Sum of p p' over the t tokens of a prompt, [1, M, M]."""
    G = tl.zeros((1, M, M), DT)
    for i in range(t):
        p = vector(P + i * m, m, M)
        G += outer(p, p)
    return G


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
