"""Philox4x32-10 in numpy: the definition of every random number, independent of the kernels.

A number is a pure function of (seed, step, stream, sequence, draw):

=========  ===================================================
key 0      seed, low 32 bits
key 1      seed, high 32 bits
counter 0  draw block, 24 bits, and ``(stream & 0xff) << 24``
counter 1  sequence, low 32 bits
counter 2  sequence, high 32 bits
counter 3  step, 24 bits, and ``(stream >> 8) << 24``
=========  ===================================================

Draw j of a sequence is word j % 4 of block j // 4. Arrays here are (rows, columns): row i is sequence
``offset + i`` modulo 2⁶⁴, column j is draw 4 ``block`` + j.
"""

from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fastlin._checks import integer

MAX_BLOCKS = 1 << 24
MAX_STEPS = 1 << 24
MAX_STREAMS = 1 << 16
_MAX_WORD64 = 1 << 64
_LOW = 0xFFFFFFFF
_LOW64, _HALF = np.uint64(_LOW), np.uint64(32)


class Drawn(TypedDict, total=False):
    """Which sequences are drawn; an absent one is 0."""

    seed: int
    step: int
    stream: int
    offset: int


class Coordinates(Drawn, total=False):
    """Position in the generator, apart from row and column; `validate` gives an absent coordinate the value 0."""

    block: int


def philox4x32(counter: ArrayLike, key: ArrayLike) -> NDArray[np.uint32]:
    """Ten rounds of Philox: counter (..., 4) and key (2,), all uint32, give words (..., 4) uint32."""
    counter = np.asarray(counter, dtype=np.uint32)
    key = np.asarray(key, dtype=np.uint32)
    if counter.shape[-1:] != (4,):
        raise ValueError(f"counter: got shape {counter.shape}, wants (..., 4)")
    if key.shape != (2,):
        raise ValueError(f"key: got shape {key.shape}, wants (2,)")
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = int(key[0]), int(key[1])
    for _ in range(10):
        even, odd = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (odd >> _HALF) ^ c1 ^ np.uint64(k0), odd & _LOW64
        c2, c3 = (even >> _HALF) ^ c3 ^ np.uint64(k1), even & _LOW64
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def validate(
    rows: int, columns: int, *, seed: int = 0, step: int = 0, stream: int = 0, offset: int = 0, block: int = 0
) -> tuple[int, int, Coordinates]:
    """Rows, columns and coordinates as Python ints, or an error for one that the bit layout cannot hold."""
    block = integer("block", block, MAX_BLOCKS)
    columns = integer("columns", columns, 4 * (MAX_BLOCKS - block) + 1)
    # This limit keeps a float64 result below 2⁶³ bytes.
    rows = integer("rows", rows, (1 << 60) // max(columns, 1))
    coordinates: Coordinates = {
        "seed": integer("seed", seed, _MAX_WORD64),
        "step": integer("step", step, MAX_STEPS),
        "stream": integer("stream", stream, MAX_STREAMS),
        "offset": integer("offset", offset, _MAX_WORD64),
        "block": block,
    }
    return rows, columns, coordinates


def words(rows: int, columns: int, **at: Unpack[Coordinates]) -> NDArray[np.uint32]:
    """Raw words (rows, columns) uint32: draw 4 block + j of sequence offset + i."""
    rows, columns, at = validate(rows, columns, **at)
    blocks = -(-columns // 4)
    sequences = np.arange(rows, dtype=np.uint64) + np.uint64(at["offset"])
    drawn = words_of(sequences, blocks, at["seed"], at["step"], at["stream"], at["block"])
    return np.ascontiguousarray(drawn[:, :columns])


def words_of(
    sequences: NDArray[np.uint64], blocks: int, seed: int, step: int, stream: int, block: int
) -> NDArray[np.uint32]:
    """Words (len(sequences), 4 blocks) uint32 of arbitrary sequences. The caller has checked the ranges."""
    counter = np.empty((len(sequences), blocks, 4), dtype=np.uint32)
    counter[..., 0] = np.arange(block, block + blocks, dtype=np.uint32) | (stream & 0xFF) << 24
    counter[..., 1] = (sequences & _LOW)[:, None]
    counter[..., 2] = (sequences >> 32)[:, None]
    counter[..., 3] = step | (stream >> 8) << 24
    return philox4x32(counter, (seed & _LOW, seed >> 32)).reshape(len(sequences), 4 * blocks)


def uniforms(
    rows: int, columns: int, *, dtype: DTypeLike = np.float64, **at: Unpack[Coordinates]
) -> NDArray[np.floating[Any]]:
    """Uniforms (rows, columns), (w + ½)·2⁻³²: exact in float64; rounding to float32 can give 1."""
    exact: NDArray[np.floating[Any]] = (words(rows, columns, **at) + 0.5) * 2.0**-32
    return exact.astype(dtype)


def normals(
    rows: int, columns: int, *, dtype: DTypeLike = np.float64, **at: Unpack[Coordinates]
) -> NDArray[np.floating[Any]]:
    """Standard normals (rows, columns) by Box-Muller in float64, rounded to `dtype`.

    Draws 2i and 2i+1 give columns 2i and 2i+1. An odd last column uses both draws and drops its partner.
    """
    rows, columns, at = validate(rows, columns, **at)
    pairs = (columns + 1) // 2
    u = uniforms(rows, 2 * pairs, **at).reshape(rows, pairs, 2)
    r, angle = np.sqrt(-2.0 * np.log(u[..., 0])), 2.0 * np.pi * u[..., 1]
    x = np.stack([r * np.cos(angle), r * np.sin(angle)], axis=-1).reshape(rows, 2 * pairs)
    return np.ascontiguousarray(x[:, :columns], dtype=dtype)
