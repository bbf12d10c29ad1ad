"""The compiled draws on every instruction set of the machine, against the definitions in numpy."""

import itertools

import numpy as np
import pytest
import torch
from support.op_cases import INSTRUCTION_SETS

from fastlin import _extension
from fastlin.backends import cpu
from fastlin.data import chi, philox, random

SINGLE, DOUBLE = torch.float32, torch.float64
FREEDOM = [0, 1, 2, 3, 10, 50, 51, 10**9, 10**12]
# The batch wraps from the last sequence to the first; no field is zero.
AT = {"seed": 2**63 + 12345, "step": 4, "stream": 0x105, "offset": 2**64 - 100, "block": 7}
SHAPES = [(0, 3), (1, 1), (2, 3), (9, 5), (17, 64), (33, 67), (131, 130)]
EXTREME = np.array(
    [w for k in (0, 29, 30, 31, 32) for w in (2**k - 2, 2**k - 1, 2**k, 2**k + 1) if 0 <= w < 2**32] + [3 * 2**30],
    dtype=np.uint32,
)
DRAWS = {"uniform": random.uniform, "normal": random.normal}


@pytest.fixture(params=INSTRUCTION_SETS, autouse=True)
def kernels(request, monkeypatch):
    """Each instruction set, with the numpy path disabled."""
    for module, name in ((philox, "words"), (random, "chi_oracle")):
        monkeypatch.setattr(module, name, None)
    with cpu.using(request.param):
        yield request.param


def words(rows, columns, at):
    """The words of `philox.words`, which the fixture `kernels` disables."""
    sequences = np.arange(rows, dtype=np.uint64) + np.uint64(at["offset"])
    drawn = philox.words_of(sequences, -(-columns // 4), at["seed"], at["step"], at["stream"], at["block"])
    return drawn[:, :columns]


def exact_pairs(pairs):
    """Radius, cos and sin of word pairs (n, 2) in float64, each accurate to a few ulp for every word."""
    radius, turn = pairs[:, 0], pairs[:, 1].astype(np.int64)
    rest = ((~radius).astype(np.float64) + 0.5) * 2.0**-32
    log = np.where(radius >= 2**31, np.log1p(-rest), np.log((radius + 0.5) * 2.0**-32))
    quarter = (turn + 2**29) >> 30
    a = (turn - (quarter << 30) + 0.5) * 2.0**-30 * (np.pi / 2)
    cos, sin = np.cos(a), np.sin(a)
    which = quarter % 4
    return (
        np.sqrt(-2 * log),
        np.choose(which, [cos, -sin, -cos, sin]),
        np.choose(which, [sin, cos, -sin, -cos]),
    )


def normals_of(pairs, dtype, label):
    """The kernel's normals (n, 2) of given words, in a buffer with poisoned surroundings."""
    pairs = np.ascontiguousarray(pairs)
    out = np.full((len(pairs) + 2, 2), np.nan, dtype)
    _extension.extension().box_muller(out[1:].ctypes.data, pairs.ctypes.data, len(pairs), np.dtype(dtype).name, label)
    assert np.isnan(out[[0, -1]]).all()
    return out[1:-1].astype(np.float64)


@pytest.mark.parametrize("shape", SHAPES)
def test_uniform_bits(shape):
    exact = (words(*shape, AT) + 0.5) * 2.0**-32
    np.testing.assert_array_equal(random.uniform(*shape, **AT, dtype=DOUBLE).numpy(), exact)
    np.testing.assert_array_equal(random.uniform(*shape, **AT).numpy(), exact.astype(np.float32))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_normals_are_those_of_their_words(kernels, shape, dtype):
    """Bit for bit, so the errors measured on chosen words hold for all words."""
    rows, columns = shape
    pairs = words(rows, columns + columns % 2, AT).reshape(-1, 2)
    expected = normals_of(pairs, dtype, kernels).reshape(rows, columns + columns % 2)[:, :columns]
    x = random.normal(rows, columns, **AT, dtype=torch.from_numpy(np.empty(0, dtype)).dtype).numpy()
    np.testing.assert_array_equal(x, expected.astype(dtype))


def chosen_pairs():
    """Every pair of extreme words, each extreme word with random ones, and random pairs."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 2**32, (200_000, 2), dtype=np.uint32)
    # Radii near u = 1 and u = 0 at all scales, where a logarithm loses relative accuracy first.
    small = (rng.integers(0, 2**32, 40_000, dtype=np.uint32) >> rng.integers(0, 32, 40_000)).astype(np.uint32)
    drawn[:40_000, 0], drawn[40_000:80_000, 0] = small, ~small
    drawn[80_000 : 80_000 + len(EXTREME), 0] = EXTREME
    drawn[90_000 : 90_000 + len(EXTREME), 1] = EXTREME
    return np.concatenate([np.stack(np.meshgrid(EXTREME, EXTREME), -1).reshape(-1, 2), drawn])


def test_single_normals_of_any_words(kernels):
    """Within 7 eps r, eps = 2^-23, of the exact value; v = eps / 2 is one rounding.

    -2 log u: u is off by 3 v / 2 at most where the reduction starts from 1 - x, relative to |log u| >= 0.35 that is
    5.2 v; polynomial 0.5 v, its evaluation 3 v, log 2 in float and its product 4 v at e = -1, where the terms cancel by
    half, last sum 1 v. So r is off by half of 13.7 v and its own rounding, below 4 eps. The angle, at most pi/4, has
    four roundings, which is 3.2 v, and the polynomials 1.8 v: 2.5 eps for cos and sin. The product has half an eps.
    """
    pairs = chosen_pairs()
    x, (r, cos, sin) = normals_of(pairs, np.float32, kernels), exact_pairs(pairs)
    assert np.isfinite(x).all()
    assert (np.abs(x[:, 0] - r * cos) <= 7 * 2.0**-23 * r).all()
    assert (np.abs(x[:, 1] - r * sin) <= 7 * 2.0**-23 * r).all()


def test_double_normals_of_any_words(kernels):
    """Within 8 eps r, eps = 2^-52.

    The logarithm has 3 eps (test_chi.py), its root 2 eps; the angle, at most pi/4, two roundings, the polynomials
    of cos and sin two more each and 5e-17: 2 eps. The product, and the same again for the expected value.
    """
    pairs = chosen_pairs()
    x, (r, cos, sin) = normals_of(pairs, np.float64, kernels), exact_pairs(pairs)
    assert np.isfinite(x).all()
    assert (np.abs(x[:, 0] - r * cos) <= 8 * 2.0**-52 * r).all()
    assert (np.abs(x[:, 1] - r * sin) <= 8 * 2.0**-52 * r).all()


@pytest.fixture(scope="module")
def expected_chi():
    return chi.chi(FREEDOM, 20_001, AT)


def test_chi_bits(expected_chi):
    x = random.chi(20_001, FREEDOM, AT)
    assert x.dtype == DOUBLE
    np.testing.assert_array_equal(x.numpy(), expected_chi)


def fill_chi(rows, freedom, dtype, label, **at):
    """The kernel's chi variates (rows, slots), in a buffer with poisoned surroundings."""
    out = np.full((rows + 2, len(freedom)), np.nan, dtype)
    given = {**AT, **at, "instruction_set": label, "threads": 2}
    _extension.extension().fill_chi(out[1:].ctypes.data, rows, freedom, np.dtype(dtype).name, **given)
    assert np.isnan(out[[0, -1]]).all()
    return out[1:-1]


def excess_of_single_chi(found, exact, freedom):
    """Largest error of float32 chi variates (rows, slots) over the bound in fastlin/data/chi.py.

    A variate of another attempt is an independent one: it is within a bound of 1e-5 with a probability below 1e-5.
    """
    k = np.array(freedom, np.float64)
    assert (found[:, k == 0] == 0).all()
    found, exact, k, eps, radius = found[:, k > 0], exact[:, k > 0], k[k > 0], 2.0**-23, 6.77
    t = np.cbrt(exact**2 / np.maximum(k - 2 / 3, 1 / 3))
    bound = eps * np.where(k == 1, 7 * radius, 3 * exact + 5.7 * radius * np.sqrt(t))
    return float((np.abs(found - exact) / bound).max())


def test_single_chi_accepts_the_same_attempts(kernels, expected_chi):
    assert excess_of_single_chi(fill_chi(20_001, FREEDOM, np.float32, kernels), expected_chi, FREEDOM) <= 1
    other = fill_chi(20_001, FREEDOM, np.float32, kernels, step=5)
    assert excess_of_single_chi(other, expected_chi, FREEDOM) > 1e4


@pytest.mark.parametrize("start", range(0, 24, 3))
@pytest.mark.parametrize("freedom", [[1, 2, 3, 4], [5, 6, 7, 9], [11, 15, 20, 50], [99, 1000, 10**6, 10**12]], ids=str)
def test_single_chi_decides_as_double(kernels, freedom, start):
    """10^8 variates of each instruction set against the kernels in float64, whose bits `test_chi_bits` checks."""
    rows = 1 << 18
    for step in range(start, start + 3):
        found, exact = (fill_chi(rows, freedom, dtype, kernels, step=step) for dtype in (np.float32, np.float64))
        assert excess_of_single_chi(found, exact, freedom) <= 1


def test_chi_takes_every_branch():
    """`test_chi_bits` covers rejections, rejections of whole blocks, and decisions by logarithms."""
    slot = FREEDOM.index(2)
    block = AT["block"] + chi.BLOCKS_PER_SLOT * slot
    u = (words(20_001, 4, {**AT, "block": block}) + 0.5) * 2.0**-32
    tries = [chi._attempt(2, x, v)[1] for x, v in zip(chi._normals(u[:, 0], u[:, 1]), u[:, 2:].T, strict=True)]
    x = chi._normals(u[:, 0], u[:, 1])[0]
    by_logarithms = tries[0] & (u[:, 2] >= 1 - 0.0331 * x**4)
    assert (~tries[0]).sum() > 200
    assert (~tries[0] & ~tries[1]).sum() > 10
    assert by_logarithms.sum() > 200


@pytest.mark.parametrize("rows", [1, 3, 8, 15, 64, 65, 200])
def test_kernels_write_only_their_rows(kernels, rows):
    for kernel, columns, given in (("fill_uniform", 7, 7), ("fill_normal", 7, 7), ("fill_chi", 3, [2, 3, 50])):
        for dtype in (np.float32, np.float64):
            out = np.full((rows + 2, columns), np.nan, dtype)
            name, machine = np.dtype(dtype).name, {"instruction_set": kernels, "threads": 2}
            getattr(_extension.extension(), kernel)(out[1:].ctypes.data, rows, given, name, **AT, **machine)
            assert np.isfinite(out[1:-1]).all()
            assert np.isnan(out[[0, -1]]).all()


@pytest.mark.parametrize("count", [2, 3, 7])
def test_threads_and_pieces_have_the_same_bits(threads, count):
    rows, columns = 333, 13
    starts = (0, 5, 64, 130, rows)
    for draw in (
        lambda n, at: random.normal(n, columns, **at),
        lambda n, at: random.normal(n, columns, **at, dtype=DOUBLE),
        lambda n, at: random.uniform(n, columns, **at),
        lambda n, at: random.chi(n, [2, 3, 0, 50], at),
    ):
        threads(1)
        whole = draw(rows, AT)
        threads(count)
        assert torch.equal(draw(rows, AT), whole)
        pieces = [
            draw(end - start, {**AT, "offset": (AT["offset"] + start) % 2**64})
            for start, end in itertools.pairwise(starts)
        ]
        assert torch.equal(torch.cat(pieces), whole)


def test_fewer_columns_are_a_prefix_of_more():
    for name, draw in DRAWS.items():
        for dtype in (SINGLE, DOUBLE):
            whole = draw(11, 140, **AT, dtype=dtype)
            for columns in (1, 2, 3, 5, 8, 63, 65, 129):
                assert torch.equal(draw(11, columns, **AT, dtype=dtype), whole[:, :columns]), (name, columns)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"freedom": [2] * 4, "block": 2**24 - 1000}, r"slots: got 4, wants an integer in \[0, 4\)"),
        ({"stream": 2**16}, r"stream: got 65536"),
        ({"dtype": "float16"}, r"dtype: got 'float16'"),
        ({"address": 0}, r"address: got address 0, wants the address of 4 elements"),
        ({"instruction_set": "mmx"}, r"instruction_set: got 'mmx', which does not run here"),
    ],
)
def test_chi_kernel_refuses(change, message):
    out = np.empty((2, 4))
    valid = {"address": out.ctypes.data, "rows": 2, "freedom": [1, 2], "dtype": "float64", **AT}
    with pytest.raises(ValueError, match=f"^{message}"):
        _extension.extension().fill_chi(**valid | change)


def test_place_draws_chi_from_the_kernel(kernels):
    from fastlin.data.layout import BLOCKS_PER_SECTION, CHI, BatchDraws

    at = {**AT, "block": CHI * BLOCKS_PER_SECTION}
    place = BatchDraws(70, at["seed"], at["step"], at["stream"], at["offset"])
    np.testing.assert_array_equal(place.chi([5, 2]).numpy(), chi.chi([5, 2], 70, at))
