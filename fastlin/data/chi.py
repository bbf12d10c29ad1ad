"""Chi variates, exact for any number of degrees of freedom, with the same bits everywhere.

chi_k^2 is twice a gamma variate of shape k/2, drawn by rejection (Marsaglia and Tsang, 2000): with a normal x and a
uniform u, c = (9 (k/2 - 1/3))^-1/2, t = 1 + c x,

    accept when t > 0 and log u < x^2/2 + (k/2 - 1/3) (1 - t^3 + log t^3)        chi_k = sqrt(2 (k/2 - 1/3) t^3)

and chi_1 = |x|. An attempt is rejected with probability below 0.05. The test u < 1 - 0.0331 x^4 accepts most
attempts without a logarithm. Every implementation must accept the same attempts. Therefore everything here is
float64 in one fixed order of +, -, *, /, sqrt, which IEEE 754 rounds in one way only: log, sin and cos are the
polynomials below, and no operations are fused. A kernel repeats the same operations, and in float64 has the same bits.

A float32 kernel may decide without them, where the error bound of its arithmetic proves that they decide the same
(csrc/core/chi-inl.h). It may then compute the value in float32. With eps = 2^-23 and the radius r <= 6.77 of
the attempt's pair of normals, the value is accurate to eps (3 chi + 5.7 r t^1/2); chi_1 is to 7 eps r.

Slot s of a sequence has 256 blocks, which start at block 256 s of the section. Block j serves attempts 2j and 2j + 1:
words 0 and 1 give the two normals by Box-Muller, words 2 and 3 the two uniforms. Sequences and slots are independent of
each other. 512 rejections in a row have a probability below 1e-600.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastlin.data import philox
from fastlin.data.philox import Coordinates

BLOCKS_PER_SLOT = 256
Array = NDArray[np.float64]

# log t = e log 2 + 2 atanh r: terms 2 r^(2j+1)/(2j+1) with |r| <= 3 - 2 sqrt 2; 12 terms leave an error below 1e-19.
_ATANH = [2.0 / (2 * j + 1) for j in range(12)]
# Taylor series on |a| <= pi/4; the first omitted terms are below 5e-17.
_SIN = [(-1.0) ** j / math.factorial(2 * j + 1) for j in range(8)]
_COS = [(-1.0) ** j / math.factorial(2 * j) for j in range(9)]
_SQRT_HALF = 0.7071067811865476
_LOG_2 = 0.6931471805599453
_HALF_PI = 1.5707963267948966


def chi(freedom: Sequence[int], batch: int, at: Coordinates) -> Array:
    """Chi variates (batch, slots), float64; `freedom` has the degrees of freedom of each slot, and 0 gives 0.

    `at` must have all coordinates; its block is the first of the section.
    """
    out = np.zeros((batch, len(freedom)))
    sequences = np.arange(batch, dtype=np.uint64) + np.uint64(at["offset"])
    for slot, k in enumerate(freedom):
        if k > 0:
            out[:, slot] = _one_slot(k, sequences, at, at["block"] + BLOCKS_PER_SLOT * slot)
    return out


def _one_slot(k: int, sequences: NDArray[np.uint64], at: Coordinates, block: int) -> Array:
    out = np.empty(len(sequences))
    pending = np.arange(len(sequences))
    for j in range(BLOCKS_PER_SLOT):
        words = philox.words_of(sequences[pending], 1, at["seed"], at["step"], at["stream"], block + j)
        u: Array = (words + 0.5) * np.float64(2.0**-32)
        done = np.zeros(len(pending), dtype=bool)
        for x, v in zip(_normals(u[:, 0], u[:, 1]), (u[:, 2], u[:, 3]), strict=True):
            value, accepted = _attempt(k, x, v)
            first = accepted & ~done
            out[pending[first]] = value[first]
            done |= first
        pending = pending[~done]
        if not len(pending):
            return out
    raise AssertionError("512 rejections in a row")


def _attempt(k: int, x: Array, u: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Values of one attempt and which are accepted, both shaped like x."""
    if k == 1:
        return np.abs(x), np.ones(len(x), dtype=bool)
    shape = 0.5 * k - 1.0 / 3.0
    s = x / math.sqrt(9.0 * shape)
    t = 1.0 + s
    positive = t > 0.0
    s, t = np.where(positive, s, 0.0), np.where(positive, t, 1.0)
    cube = t * t * t
    # 1 - t^3 + 3 log t, without the cancellation of t^3 against 1.
    bend = 3.0 * (log1p(s) - s) - (3.0 + s) * s * s
    square = x * x
    accepted = (u < 1.0 - 0.0331 * (square * square)) | (log(u) < 0.5 * square + shape * bend)
    accepted &= positive
    return np.sqrt(2.0 * shape * cube), accepted


def _normals(u0: Array, u1: Array) -> tuple[Array, Array]:
    r = np.sqrt(-2.0 * log(u0))
    cosine, sine = cos_sin(u1)
    return r * cosine, r * sine


def log(t: Array) -> Array:
    """Natural logarithm of t > 0."""
    return log1p(t - 1.0, t)


def log1p(s: Array, t: Array | None = None) -> Array:
    """log(1 + s). Pass t = 1 + s where t is exact and s is not."""
    t = 1.0 + s if t is None else t
    mantissa, exponent = np.frexp(t)
    low = mantissa < _SQRT_HALF
    mantissa = np.where(low, 2.0 * mantissa, mantissa)
    e = exponent - low.astype(exponent.dtype)
    # At e = 0 the mantissa is t, and s is more precise than t - 1.
    numerator = np.where(e == 0, s, mantissa - 1.0)
    r = numerator / (numerator + 2.0)
    value: Array = e * _LOG_2 + r * _horner(_ATANH, r * r)
    return value


def cos_sin(u: Array) -> tuple[Array, Array]:
    """Cos and sin of 2 pi u, for u in [0, 1] with at most 50 bits after the point."""
    quarter = np.floor(4.0 * u + 0.5)
    a = (4.0 * u - quarter) * _HALF_PI
    square = a * a
    sine, cosine = a * _horner(_SIN, square), _horner(_COS, square)
    turn = quarter.astype(np.int64) % 4
    swap = turn % 2 == 1
    cos = np.where(swap, sine, cosine) * np.where((turn == 1) | (turn == 2), -1.0, 1.0)
    sin = np.where(swap, cosine, sine) * np.where(turn >= 2, -1.0, 1.0)
    return cos, sin


def _horner(coefficients: list[float], x: Array) -> Array:
    out = np.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        out = out * x + c
    return out
