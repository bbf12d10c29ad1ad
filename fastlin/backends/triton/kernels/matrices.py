"""Matrices of a tile of sequences: where they are, and what is done with them.

Padded to M x M, M the power of two from m on and at least 16, because tl.dot wants 16 along the inner side. At M = 16 a
matrix is a tile [BB, M, M] in registers, and all sequences of a tile take part in one batched dot. Beyond that BB = 1,
and a matrix is a place in memory, [M, M], that this program alone uses and the nearest caches hold: a tile of 64 x 64
would take 16 registers of each of 256 threads, or 32 in float64, the reverse of a layer has five of them alive, and a
dot keeps rows and columns of its factors there as well.

Functions that make a matrix take the place `AT` where it is then left. In memory they go through it by ROWS rows, so
that no more than a tile [ROWS, M] is in registers, in loops that are not unrolled, or the compiler would have all rows
in flight; and they are called, not inlined: with 14 products inlined a stack spills 96 bytes in float64 on sm_80. There
tiles are [ROWS, M], not [1, ROWS, M]: of a batch of one, tensor cores have every warp compute the whole.

`LINE` is the place [2, M] where vectors wait for a function that is called. A barrier stands before and after whatever
is written to either: one thread's entries are read by others.
"""

import triton
import triton.language as tl

ROWS = tl.constexpr(32)
"""Rows of a matrix in memory that are in registers at a time."""


@triton.jit
def matrix(START, BB: tl.constexpr, M: tl.constexpr):
    """The matrix at a place [M, M], the same for all sequences, or at one of `keep` [BB, M, M]."""
    if M == 16:
        b = tl.arange(0, BB)[:, None, None]
        return tl.load(START + (b * M + tl.arange(0, M)[None, :, None]) * M + tl.arange(0, M)[None, None, :])
    else:
        return START


@triton.jit
def parameter(START, BB: tl.constexpr, M: tl.constexpr):
    """A matrix of a parameter, padded to [M, M], as a factor of products."""
    if M == 16:
        return tl.broadcast_to(matrix(START, 1, M), (BB, M, M))
    else:
        return START


@triton.jit
def keep(X, AT, M: tl.constexpr):
    """Leave a matrix at a place [BB, M, M] also where it is in registers; elsewhere it was made there."""
    if M == 16:
        b = tl.arange(0, X.shape[0])[:, None, None]
        tl.debug_barrier()
        tl.store(AT + (b * M + tl.arange(0, M)[None, :, None]) * M + tl.arange(0, M)[None, None, :], X)
        tl.debug_barrier()


@triton.jit
def hold(X, AT, M: tl.constexpr):
    """A matrix from a tile [BB, M, M]."""
    if M == 16:
        return X
    else:
        tl.debug_barrier()
        tl.store(AT + rows_at(0, M, M), tl.reshape(X, (M, M)))
        tl.debug_barrier()
        return AT


@triton.jit
def rows_at(first, COUNT: tl.constexpr, M: tl.constexpr):
    """Where rows first to first + COUNT of a place [M, M] are, [COUNT, M]."""
    return (first + tl.arange(0, COUNT)[:, None]) * M + tl.arange(0, M)[None, :]


@triton.jit
def rows_product(X, Y, first, m, M: tl.constexpr, PREC: tl.constexpr, XT: tl.constexpr, YT: tl.constexpr):
    """Rows first to first + ROWS of X Y [ROWS, M] for places X and Y, which XT and YT transpose."""
    i = first + tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, M)[None, :]
    out = tl.zeros((ROWS, M), X.dtype.element_ty)
    for inner in range(0, m, 16):
        column = inner + tl.arange(0, 16)[None, :]
        row = inner + tl.arange(0, 16)[:, None]
        x = tl.load(X + (column * M + i if XT else i * M + column))  # [ROWS, 16]
        y = tl.load(Y + (j * M + row if YT else row * M + j))  # [16, M]
        out = tl.dot(x, y, out, input_precision=PREC, out_dtype=out.dtype)
    return out


@triton.jit
def tile_product(X, Y, PREC: tl.constexpr, XT: tl.constexpr, YT: tl.constexpr):
    """X Y for tiles [BB, 16, 16], which XT and YT transpose."""
    if XT:
        X = transpose(X)
    if YT:
        Y = transpose(Y)
    return tl.dot(X, Y, input_precision=PREC, out_dtype=X.dtype)


@triton.jit
def product(X, Y, AT, m, M: tl.constexpr, PREC: tl.constexpr, XT: tl.constexpr = False, YT: tl.constexpr = False):
    """X Y, where XT and YT transpose a factor; m is the length of the inner side. AT is neither factor's place."""
    if M == 16:
        return tile_product(X, Y, PREC, XT, YT)
    else:
        product_of_places(X, Y, AT, m, M, PREC, XT, YT)
        return AT


@triton.jit(noinline=True)
def product_of_places(X, Y, AT, m, M: tl.constexpr, PREC: tl.constexpr, XT: tl.constexpr, YT: tl.constexpr):
    """`product` in memory."""
    tl.debug_barrier()
    for first in tl.range(0, M, ROWS, loop_unroll_factor=1):
        tl.store(AT + rows_at(first, ROWS, M), rows_product(X, Y, first, m, M, PREC, XT, YT))
    tl.debug_barrier()


@triton.jit
def put_product(START, X, Y, m, M: tl.constexpr, PREC: tl.constexpr):
    """Write the sum over the tile of X Y to a matrix [m, m]."""
    if M == 16:
        put_matrix(START, tl.sum(tile_product(X, Y, PREC, False, False), 0, keep_dims=True), m, M)
    else:
        put_product_of_places(START, X, Y, m, M, PREC)


@triton.jit(noinline=True)
def put_product_of_places(START, X, Y, m, M: tl.constexpr, PREC: tl.constexpr):
    """`put_product` in memory."""
    for first in tl.range(0, M, ROWS, loop_unroll_factor=1):
        put_rows(START, rows_product(X, Y, first, m, M, PREC, False, False), first, m, M)


@triton.jit
def put_outer(START, x, y, LINE, m, M: tl.constexpr):
    """Write the sum over the tile of x y' to a matrix [m, m], for vectors [BB, M]."""
    if M == 16:
        put_matrix(START, tl.sum(outer(x, y), 0, keep_dims=True), m, M)
    else:
        put_lines(LINE, x, y, M)
        put_outer_of_lines(START, LINE, m, M)


@triton.jit(noinline=True)
def put_outer_of_lines(START, LINE, m, M: tl.constexpr):
    """`put_outer` in memory."""
    y = tl.load(LINE + M + tl.arange(0, M)[None, :])
    for first in tl.range(0, M, ROWS, loop_unroll_factor=1):
        put_rows(START, tl.load(LINE + first + tl.arange(0, ROWS)[:, None]) * y, first, m, M)


@triton.jit
def diagonal(rho, AT, BB: tl.constexpr, M: tl.constexpr, DT: tl.constexpr):
    """Rho I."""
    if M == 16:
        X = tl.where(tl.arange(0, M)[None, :, None] == tl.arange(0, M)[None, None, :], rho, 0.0).to(DT)
        return tl.broadcast_to(X, (BB, M, M))
    else:
        put_diagonal(rho, AT, M)
        return AT


@triton.jit(noinline=True)
def put_diagonal(rho, AT, M: tl.constexpr):
    """`diagonal` in memory."""
    tl.debug_barrier()
    for first in tl.range(0, M, ROWS, loop_unroll_factor=1):
        is_diagonal = first + tl.arange(0, ROWS)[:, None] == tl.arange(0, M)[None, :]
        tl.store(AT + rows_at(first, ROWS, M), tl.where(is_diagonal, rho, 0.0).to(AT.dtype.element_ty))
    tl.debug_barrier()


@triton.jit
def add_outer(Z, x, y, LINE, M: tl.constexpr, FACTOR: tl.constexpr = 1):
    """FACTOR Z + x y', which takes the place of Z, for vectors [BB, M]."""
    if M == 16:
        return FACTOR * Z + outer(x, y)
    else:
        put_lines(LINE, x, y, M)
        add_outer_of_lines(Z, LINE, M, FACTOR)
        return Z


@triton.jit(noinline=True)
def add_outer_of_lines(Z, LINE, M: tl.constexpr, FACTOR: tl.constexpr):
    """`add_outer` in memory."""
    y = tl.load(LINE + M + tl.arange(0, M)[None, :])
    for first in tl.range(0, M, ROWS, loop_unroll_factor=1):
        x = tl.load(LINE + first + tl.arange(0, ROWS)[:, None])
        out = FACTOR * tl.load(Z + rows_at(first, ROWS, M)) + x * y
        tl.debug_barrier()
        tl.store(Z + rows_at(first, ROWS, M), out)
    tl.debug_barrier()


@triton.jit
def add_symmetric(Z, X, M: tl.constexpr):
    """Z + (X + X') / 2, which takes the place of Z."""
    if M == 16:
        return Z + 0.5 * (X + transpose(X))
    else:
        add_symmetric_of_places(Z, X, M)
        return Z


@triton.jit(noinline=True)
def add_symmetric_of_places(Z, X, M: tl.constexpr):
    """`add_symmetric` in memory."""
    j = tl.arange(0, M)[None, :]
    for first in tl.range(0, M, ROWS, loop_unroll_factor=1):
        i = first + tl.arange(0, ROWS)[:, None]
        out = tl.load(Z + i * M + j) + 0.5 * (tl.load(X + i * M + j) + tl.load(X + j * M + i))
        tl.debug_barrier()
        tl.store(Z + i * M + j, out)
    tl.debug_barrier()


@triton.jit
def add_prompt(X, P, at, t, m, AT, M: tl.constexpr):
    """X + sum of p p' over the t tokens of a prompt, if there is P, from `at` on; another matrix than X."""
    if M == 16:
        if P is not None:
            G = tl.zeros((1, M, M), X.dtype)
            for i in range(t):
                p = vector(P + at + i * m, m, M)
                G += outer(p, p)
            X += G
        return X
    else:
        if P is not None:
            put_with_prompt(X, P + at, t, m, AT, M)
        else:
            put_with_prompt(X, X, 0, m, AT, M)
        return AT


@triton.jit(noinline=True)
def put_with_prompt(X, P, t, m, AT, M: tl.constexpr):
    """`add_prompt` in memory."""
    tl.debug_barrier()
    for first in tl.range(0, M, ROWS, loop_unroll_factor=1):
        row = first + tl.arange(0, ROWS)[:, None]
        out = tl.load(X + rows_at(first, ROWS, M))
        for i in range(t):
            p = tl.load(P + i * m + row, mask=row < m, other=0.0)  # [ROWS, 1]
            out += p * vector(P + i * m, m, M)
        tl.store(AT + rows_at(first, ROWS, M), out)
    tl.debug_barrier()


@triton.jit
def add(Z, X, M: tl.constexpr):
    """Z + X, which takes the place of Z."""
    if M == 16:
        return Z + X
    else:
        add_places(Z, X, M)
        return Z


@triton.jit(noinline=True)
def add_places(Z, X, M: tl.constexpr):
    """`add` in memory."""
    for first in tl.range(0, M, ROWS, loop_unroll_factor=1):
        out = tl.load(Z + rows_at(first, ROWS, M)) + tl.load(X + rows_at(first, ROWS, M))
        tl.debug_barrier()
        tl.store(Z + rows_at(first, ROWS, M), out)
    tl.debug_barrier()


@triton.jit
def total(X, M: tl.constexpr):
    """The sum of a matrix over the tile."""
    if M == 16:
        return tl.sum(X, 0, keep_dims=True)
    else:
        return X


@triton.jit
def apply(X, y, LINE, M: tl.constexpr):
    """X y [BB, M] for vectors [BB, M]."""
    if M == 16:
        return tl.sum(X * y[:, None, :], 2)
    else:
        put_lines(LINE, y, y, M)
        apply_place(X, LINE, M)
        return tl.load(LINE + tl.arange(0, M)[None, :])


@triton.jit(noinline=True)
def apply_place(X, LINE, M: tl.constexpr):
    """`apply` in memory: from the second line to the first."""
    y = tl.load(LINE + M + tl.arange(0, M)[None, :])
    for first in tl.range(0, M, ROWS, loop_unroll_factor=1):
        rows = tl.sum(tl.load(X + rows_at(first, ROWS, M)) * y, 1)
        tl.store(LINE + first + tl.arange(0, ROWS), rows)
    tl.debug_barrier()


@triton.jit
def apply_transposed(X, y, LINE, M: tl.constexpr):
    """X' y [BB, M] for vectors [BB, M]."""
    if M == 16:
        return tl.sum(X * y[:, :, None], 1)
    else:
        put_lines(LINE, y, y, M)
        apply_place_transposed(X, LINE, M)
        return tl.load(LINE + M + tl.arange(0, M)[None, :])


@triton.jit(noinline=True)
def apply_place_transposed(X, LINE, M: tl.constexpr):
    """`apply_transposed` in memory: from the first line to the second."""
    out = tl.zeros((1, M), X.dtype.element_ty)
    for first in tl.range(0, M, ROWS, loop_unroll_factor=1):
        y = tl.load(LINE + first + tl.arange(0, ROWS)[:, None])
        out += tl.sum(tl.load(X + rows_at(first, ROWS, M)) * y, 0, keep_dims=True)
    tl.store(LINE + M + tl.arange(0, M)[None, :], out)
    tl.debug_barrier()


@triton.jit
def transpose(X):
    """X' for a tile [BB, M, M]."""
    return tl.permute(X, (0, 2, 1))


@triton.jit
def outer(x, y):
    """X y' [BB, M, M] for vectors [BB, M]."""
    return x[:, :, None] * y[:, None, :]


@triton.jit
def put_lines(LINE, x, y, M: tl.constexpr):
    """Leave two vectors [1, M]."""
    tl.debug_barrier()
    tl.store(LINE + tl.arange(0, M)[None, :], x)
    tl.store(LINE + M + tl.arange(0, M)[None, :], y)
    tl.debug_barrier()


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
def put_rows(START, rows, first, m, M: tl.constexpr):
    """Write rows first to first + ROWS, [ROWS, M], to a matrix [m, m]."""
    i = first + tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, M)[None, :]
    tl.store(START + i * m + j, rows, mask=(i < m) & (j < m))


@triton.jit
def put_vector(START, x, m, M: tl.constexpr):
    """Write [1, M] to a vector [m]."""
    j = tl.arange(0, M)[None, :]
    tl.store(START + j, x, mask=j < m)
