"""Philox words, normals and chi variates: the draws of `fastlin.data`, whose docstrings say which is which and why.

Whether a chi variate's attempt is accepted is decided in float64 by the operations of `fastlin.data.chi` in their
order. What calls these functions is therefore compiled with enable_fp_fusion=False: a fused multiply-add rounds once
where the others round twice. Where fusing is harmless and cheap, tl.fma says so.

Every draw is computed where it is used, from its own counter: of a block's four words a normal uses two, and of their
pair of normals one. A quarter of the words are useful, but no lane waits for another; 100 integer and 40 float
operations a normal.
"""

import triton
import triton.language as tl

LOG_2 = tl.constexpr(0.6931471805599453)
HALF_PI = tl.constexpr(1.5707963267948966)
BLOCKS_PER_SLOT = tl.constexpr(256)
SECTION = tl.constexpr(1 << 21)
TASK, BETA, QUERY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FEATURES, NOISE, FACTOR, CHI = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)


@triton.jit
def wide(low, high):
    """A uint64 from its halves, int32."""
    return (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def words_of(block, sequence, PLACE):
    """The four words of blocks of sequences (uint64), which broadcast.

    PLACE is six int32: low and high half of the seed, what the stream adds to counter 0, counter 3, low and high half
    of the offset.
    """
    c0 = block.to(tl.uint32) | PLACE[2].to(tl.uint32, bitcast=True)
    low = (sequence & 0xFFFFFFFF).to(tl.uint32)
    high = (sequence >> 32).to(tl.uint32)
    return tl.philox(wide(PLACE[0], PLACE[1]), c0, low, high, PLACE[3].to(tl.uint32, bitcast=True))


@triton.jit
def sequence_of(b, PLACE):
    """Index in the source (uint64) of sequence b of a call."""
    return wide(PLACE[4], PLACE[5]) + b.to(tl.uint64)


@triton.jit
def uniform(word):
    """(w + 1/2) 2^-32, exact."""
    return (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def log(t, s, HAS_S: tl.constexpr):
    """Log t for t > 0, or log(1 + s) with t = 1 + s rounded."""
    HALF: tl.constexpr = 0x3FE6A09E667F3BCD  # bits of 1/sqrt 2
    d = t.to(tl.int64, bitcast=True) - HALF + 0x3FF0000000000000
    mantissa = ((d & 0x000FFFFFFFFFFFFF) + HALF).to(tl.float64, bitcast=True)
    e = (d >> 52).to(tl.float64) - 1023.0
    numerator = mantissa - 1.0
    if HAS_S:
        numerator = tl.where(e == 0.0, s, numerator)
    r = numerator / (numerator + 2.0)
    x = r * r
    series = tl.full(x.shape, 2.0 / 23, tl.float64)
    for i in tl.static_range(11):
        series = series * x + 2.0 / (21 - 2 * i)
    return e * LOG_2 + r * series


@triton.jit
def fixed_normals(w0, w1):
    """The two normals of two words, float64, by the fixed operations."""
    u0 = uniform(w0)
    r = tl.sqrt(-2.0 * log(u0, u0, False))
    u1 = uniform(w1)
    quarter = tl.floor(4.0 * u1 + 0.5)
    a = (4.0 * u1 - quarter) * HALF_PI
    x = a * a
    sine = tl.full(x.shape, -1.0 / 1307674368000.0, tl.float64)
    sine = sine * x + 1.0 / 6227020800.0
    sine = sine * x + -1.0 / 39916800
    sine = sine * x + 1.0 / 362880
    sine = sine * x + -1.0 / 5040
    sine = sine * x + 1.0 / 120
    sine = sine * x + -1.0 / 6
    sine = sine * x + 1.0
    sine = a * sine
    cosine = tl.full(x.shape, 1.0 / 20922789888000.0, tl.float64)
    cosine = cosine * x + -1.0 / 87178291200.0
    cosine = cosine * x + 1.0 / 479001600
    cosine = cosine * x + -1.0 / 3628800
    cosine = cosine * x + 1.0 / 40320
    cosine = cosine * x + -1.0 / 720
    cosine = cosine * x + 1.0 / 24
    cosine = cosine * x + -1.0 / 2
    cosine = cosine * x + 1.0
    turn = quarter.to(tl.int32) & 3
    swap = (turn & 1) == 1
    first = tl.where(swap, sine, cosine) * tl.where((turn == 1) | (turn == 2), -1.0, 1.0)
    second = tl.where(swap, cosine, sine) * tl.where(turn >= 2, -1.0, 1.0)
    return r * first, r * second


@triton.jit
def float_normals(w0, w1):
    """The two normals of two words, float32: csrc/core/normal-inl.h, where the errors are."""
    word = w0.to(tl.int32, bitcast=True)
    sign = word >> 31  # ones where u > 1/2
    x = tl.fma((word ^ sign).to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10)
    u = tl.where(sign != 0, 1.0 - x, x)
    HALF: tl.constexpr = 0x3F3504F3  # bits of 1/sqrt 2
    d = u.to(tl.int32, bitcast=True) - HALF
    e = d >> 23
    mantissa = ((d & 0x007FFFFF) + HALF).to(tl.float32, bitcast=True)
    f = tl.where(e < 0, mantissa - 1.0, -x)
    f2 = f * f
    q01 = tl.fma(f, -0.66667902, 0.99999982)
    q23 = tl.fma(f, -0.39924082, 0.50003499)
    q45 = tl.fma(f, -0.29837015, 0.33141288)
    q67 = tl.fma(f, -0.17463814, 0.28613213)
    q = tl.fma(tl.fma(q67, f2, q45), f2 * f2, tl.fma(q23, f2, q01))
    minus_two_log = tl.fma(e.to(tl.float32), -1.38629436, f * tl.fma(q, f, -2.0))
    r = tl.sqrt_rn(minus_two_log)

    angle = w1.to(tl.int32, bitcast=True)
    UNIT: tl.constexpr = 2.3283064365386963e-10 * 1.57079633
    a = tl.fma((angle << 2).to(tl.float32), UNIT, 2 * UNIT)
    z = a * a
    s = tl.fma(tl.fma(z, -1.9517267e-4, 8.332178e-3), z, -0.16666655)
    c = tl.fma(tl.fma(z, 2.4438415e-5, -1.3887368e-3), z, 4.1666646e-2)
    sine = tl.fma(a * z, s, a)
    cosine = tl.fma(tl.fma(c, z, -0.5), z, 1.0)
    turn = ((w1 + 0x20000000) >> 30).to(tl.int32)
    swap = (turn & 1) == 1
    first = tl.where(swap, sine, cosine) * tl.where((turn == 1) | (turn == 2), -1.0, 1.0)
    second = tl.where(swap, cosine, sine) * tl.where(turn >= 2, -1.0, 1.0)
    return r * first, r * second


@triton.jit
def normals(section: tl.constexpr, index, sequence, PLACE, DT: tl.constexpr):
    """Normals of a section, by their index in it and their sequence, which broadcast."""
    w0, w1, w2, w3 = words_of((index >> 2) + section * SECTION, sequence, PLACE)
    late = (index & 2) != 0
    radius = tl.where(late, w2, w0)
    angle = tl.where(late, w3, w1)
    if tl.float64 == DT:
        first, second = fixed_normals(radius, angle)
    else:
        first, second = float_normals(radius, angle)
    return tl.where((index & 1) != 0, second, first)


@triton.jit
def attempt(x, u, k, shape, scale):
    """Value of an attempt at a chi variate with k degrees of freedom, and whether it is accepted."""
    s = x / scale
    t = 1.0 + s
    positive = t > 0.0
    s = tl.where(positive, s, 0.0)
    t = tl.where(positive, t, 1.0)
    cube = t * t * t
    bend = 3.0 * (log(1.0 + s, s, True) - s) - (3.0 + s) * s * s
    square = x * x
    soon = u < 1.0 - 0.0331 * (square * square)
    accepted = soon | (log(u, u, False) < 0.5 * square + shape * bend)
    value = tl.where(k == 1, tl.abs(x), tl.sqrt(2.0 * shape * cube))
    return value, (k == 1) | (accepted & positive)


@triton.jit
def chi(slot, freedom, sequence, PLACE):
    """Chi variates, float64, of slots with int64 degrees of freedom, 0 where there is none; all three broadcast."""
    shape = 0.5 * tl.maximum(freedom, 1).to(tl.float64) - 1.0 / 3.0
    scale = tl.sqrt(9.0 * shape)
    value = tl.zeros(freedom.shape, tl.float64)
    waiting = (freedom > 0).to(tl.int32)
    j = 0
    while tl.sum(tl.ravel(waiting), 0) > 0:
        w0, w1, w2, w3 = words_of(slot * BLOCKS_PER_SLOT + j + CHI * SECTION, sequence, PLACE)
        first, second = fixed_normals(w0, w1)
        made, accepted = attempt(first, uniform(w2), freedom, shape, scale)
        value = tl.where((waiting != 0) & accepted, made, value)
        waiting = tl.where(accepted, 0, waiting)
        made, accepted = attempt(second, uniform(w3), freedom, shape, scale)
        value = tl.where((waiting != 0) & accepted, made, value)
        waiting = tl.where(accepted, 0, waiting)
        j += 1
    return value
