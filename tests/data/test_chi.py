"""Chi variates: their distribution, their fixed operations, and their bits."""

import hashlib

import numpy as np
import pytest
from scipy import stats

from fastlin.data import chi, philox

AT = {"seed": 3, "step": 4, "stream": 5, "offset": 0, "block": 0}
EPSILON = 2.0**-52


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 9, 40, 1000, 10**6, 10**9])
def test_distribution(k):
    """Kolmogorov-Smirnov at level 1e-3, which a neighbouring number of degrees of freedom fails up to k = 40."""
    x = chi.chi([k], 100_000, AT)[:, 0]
    assert stats.kstest(x**2, stats.chi2(k).cdf).pvalue > 1e-3
    if k <= 40:
        assert stats.kstest(x**2, stats.chi2(k + 1).cdf).pvalue < 1e-6


def test_moments_at_large_k():
    """Mean and variance of chi^2_k at k = 10^9, within five standard errors."""
    k, B = 10**9, 100_000
    deviation = (chi.chi([k], B, AT)[:, 0] ** 2 - k) / (2 * k) ** 0.5
    assert abs(deviation.mean()) < 5 / B**0.5
    assert abs(deviation.var() - 1) < 5 * (2 / B) ** 0.5


def test_no_freedom_gives_zero():
    assert (chi.chi([0, 0], 3, AT) == 0).all()
    assert chi.chi([], 3, AT).shape == (3, 0)


def test_log():
    """Within 3 ulp for a result of any size: two roundings of r, one of the last product, one of the last sum."""
    rng = np.random.default_rng(0)
    t = np.exp(rng.uniform(-40, 40, 100_000))
    s = rng.uniform(-0.9, 3.0, 100_000) * 10.0 ** rng.uniform(-14, 0, 100_000)
    assert (np.abs(chi.log(t) - np.log(t)) <= 3 * EPSILON * np.abs(np.log(t))).all()
    assert (np.abs(chi.log1p(s) - np.log1p(s)) <= 3 * EPSILON * np.abs(np.log1p(s))).all()
    assert chi.log(np.array([1.0]))[0] == 0.0


def test_cos_sin():
    """Within 2 ulp of one where the angle is exact; elsewhere the rounding of 2 pi u in numpy adds 2 pi eps."""
    exact = np.arange(9) / 8
    cosine, sine = chi.cos_sin(exact)
    half = 0.5**0.5
    np.testing.assert_allclose(cosine, [1, half, 0, -half, -1, -half, 0, half, 1], rtol=0, atol=2 * EPSILON)
    np.testing.assert_allclose(sine, [0, half, 1, half, 0, -half, -1, -half, 0], rtol=0, atol=2 * EPSILON)
    u = philox.uniforms(1, 100_000)[0]
    cosine, sine = chi.cos_sin(u)
    np.testing.assert_allclose(cosine, np.cos(2 * np.pi * u), rtol=0, atol=(2 + 2 * np.pi) * EPSILON)
    np.testing.assert_allclose(sine, np.sin(2 * np.pi * u), rtol=0, atol=(2 + 2 * np.pi) * EPSILON)


def by_hand(k, sequence, slot):
    """One variate from the documented words, attempt by attempt, and how many attempts it took."""
    for attempt in range(512):
        block = chi.BLOCKS_PER_SLOT * slot + attempt // 2
        words = philox.words(1, 4, seed=3, step=4, stream=5, offset=sequence, block=block)[0]
        u = (words.astype(np.float64) + 0.5) / 2**32
        cosine, sine = chi.cos_sin(u[1:2])
        x = np.sqrt(-2.0 * chi.log(u[:1]))[0] * (cosine, sine)[attempt % 2][0]
        if k == 1:
            return abs(x), attempt
        d = k / 2 - 1 / 3
        t = 1 + x / np.sqrt(9 * d)
        if t > 0 and np.log(u[2 + attempt % 2]) < x * x / 2 + d * (1 - t**3 + 3 * np.log(t)):
            return np.sqrt(2 * d * t**3), attempt
    raise AssertionError


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_documented_attempts(k):
    found = chi.chi([5, 0, k], 600, AT)[:, 2]
    values, attempts = zip(*(by_hand(k, i, 2) for i in range(600)), strict=True)
    np.testing.assert_allclose(found, values, rtol=1e-14)
    assert max(attempts) >= {1: 0, 2: 2, 3: 2, 7: 1}[k]


def test_sequences_and_slots_are_separate():
    whole = chi.chi([3, 8, 2], 300, AT)
    pieces = [chi.chi([3, 8, 2], 100, {**AT, "offset": start}) for start in (0, 100, 200)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    np.testing.assert_array_equal(chi.chi([9, 8], 300, AT)[:, 1], whole[:, 1])
    assert abs(np.corrcoef(chi.chi([5, 5], 20_000, AT).T)[0, 1]) < 5 / 20_000**0.5


def test_bits_are_the_same_everywhere():
    """IEEE 754 leaves no choice in +, -, *, / and sqrt, so this hash holds on any machine."""
    values = chi.chi([1, 2, 3, 10, 101, 10**9], 500, {**AT, "offset": 2**64 - 100})
    assert (
        hashlib.sha256(values.tobytes()).hexdigest()
        == "dac0a1c7ddb3679d30687e3112b73c60ae19b4f927e744b2f318f9a0ec371bab"
    )
