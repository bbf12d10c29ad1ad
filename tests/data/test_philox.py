import numpy as np
import pytest
import torch
from scipy import stats
from support.op_cases import INSTRUCTION_SETS

from fastlin import _extension
from fastlin.backends import cpu
from fastlin.data import philox, random

SINGLE, DOUBLE = torch.float32, torch.float64
SHAPES = [(0, 0), (0, 5), (3, 0), (1, 1), (2, 3), (5, 4), (3, 7), (4, 33)]
COORDINATES = [
    {},
    {"seed": 2**64 - 1, "step": 2**24 - 1, "stream": 2**16 - 1, "block": 2**24 - 32},
    {"seed": 2**32, "step": 1, "stream": 0x100, "offset": 2**32 - 2},
    {"seed": 7, "step": 12345, "stream": 0x1234, "offset": 2**40 + 17, "block": 3},
    {"seed": 7, "stream": 0xFF, "offset": 2**64 - 2},
]

# Random123's kat_vectors, philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.fixture
def compiled():
    module = _extension.extension()
    assert module is not None, _extension.why_missing()
    return module


@pytest.fixture(params=["compiled", "numpy"])
def path(request, monkeypatch):
    """Each path of `random.uniform` and `random.normal`, with the other path disabled."""
    if request.param == "numpy":
        monkeypatch.setattr(_extension, "extension", lambda: None)
    else:
        request.getfixturevalue("compiled")
        monkeypatch.setattr(philox, "words", None)
    return request.param


def radii(rows, columns, **at):
    """The Box-Muller radius behind each normal."""
    u = philox.uniforms(rows, columns + columns % 2, **at)
    return np.repeat(np.sqrt(-2 * np.log(u[:, ::2])), 2, axis=1)[:, :columns]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter, key, answer):
    assert tuple(philox.philox4x32(counter, key)) == answer


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
@pytest.mark.parametrize("label", INSTRUCTION_SETS)
def test_known_answers_compiled(label, counter, key, answer):
    """The coordinates that the layout maps to these counters and keys."""
    at = {"block": counter[0] & 0xFFFFFF, "offset": counter[1] | counter[2] << 32, "step": counter[3] & 0xFFFFFF}
    at |= {"stream": counter[0] >> 24 | counter[3] >> 24 << 8, "seed": key[0] | key[1] << 32}
    with cpu.using(label):
        u = random.uniform(1, 4, **at, dtype=DOUBLE)[0]
    assert tuple((u * 2**32 - 0.5).long().tolist()) == answer


def test_documented_layout():
    at = {"seed": 0xA1B2C3D4_E5F60718, "step": 0x567890, "stream": 0x1234, "offset": 0x11223344_55667788}
    counter, key = (0x34000002, 0x55667788, 0x11223344, 0x12567890), (0xE5F60718, 0xA1B2C3D4)
    np.testing.assert_array_equal(philox.words(1, 12, **at)[0, 8:], philox.philox4x32(counter, key))


@pytest.mark.parametrize("word", range(4))
@pytest.mark.parametrize("bit", [0, 8, 23, 24, 31])
def test_every_field_of_the_layout_matters(word, bit):
    counter = np.zeros(4, np.uint32)
    flipped = counter.copy()
    flipped[word] = 1 << bit
    assert (philox.philox4x32(counter, (0, 0)) != philox.philox4x32(flipped, (0, 0))).all()


@pytest.mark.parametrize("at", COORDINATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_uniform_bits(path, shape, at):
    words = np.zeros(shape, np.uint32)
    for i in range(shape[0]):
        sequence = (at.get("offset", 0) + i) % 2**64
        for j in range(shape[1]):
            stream, seed = at.get("stream", 0), at.get("seed", 0)
            counter = (
                at.get("block", 0) + j // 4 | (stream & 0xFF) << 24,
                sequence & 0xFFFFFFFF,
                sequence >> 32,
                at.get("step", 0) | (stream >> 8) << 24,
            )
            words[i, j] = philox.philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))[j % 4]
    exact = (words + 0.5) / 2**32
    for dtype, expected in ((DOUBLE, exact), (SINGLE, exact.astype(np.float32))):
        u = random.uniform(*shape, **at, dtype=dtype)
        assert u.dtype == dtype
        assert u.is_contiguous()
        np.testing.assert_array_equal(u.numpy(), expected, strict=True)


@pytest.mark.parametrize("at", COORDINATES)
@pytest.mark.parametrize("shape", [*SHAPES, (301, 125)])
def test_normals_agree(compiled, shape, at):
    """Compiled against numpy.

    Both compute r·cos θ from the same u and the same rounded θ. With ε = 2⁻⁵² and k ulp for log, sin and cos,
    the relative error of r is at most (k/2 + 1/2)ε, of the product (3k/2 + 1)ε, taken relative to r so that a
    library whose sin and cos are accurate absolutely also passes. numpy's vector functions promise k ≤ 4,
    the kernels' polynomials k ≤ 1: 7ε + 2.5ε < 10ε. In float32 test_draws.py derives 7·2⁻²³ for the kernels.
    """
    expected = philox.normals(*shape, **at)
    budget = 10 * 2.0**-52 * radii(*shape, **at)
    x = random.normal(*shape, **at, dtype=DOUBLE).numpy()
    assert (np.abs(x - expected) <= budget).all()
    rounded = random.normal(*shape, **at, dtype=SINGLE).numpy()
    assert (np.abs(rounded - expected) <= 7 * 2.0**-23 * radii(*shape, **at)).all()


def test_normal_formula(path):
    """Both components of a pair, from uniforms, to the budget of `test_normals_agree`."""
    at = {"seed": 3, "offset": 9}
    u = philox.uniforms(50, 8, **at) if path == "numpy" else random.uniform(50, 8, **at, dtype=DOUBLE).numpy()
    r, angle = np.sqrt(-2 * np.log(u[:, ::2])), 2 * np.pi * u[:, 1::2]
    x = random.normal(50, 8, **at, dtype=DOUBLE).numpy()
    assert (np.abs(x[:, ::2] - r * np.cos(angle)) <= 10 * 2.0**-52 * r).all()
    assert (np.abs(x[:, 1::2] - r * np.sin(angle)) <= 10 * 2.0**-52 * r).all()


def test_last_draw_of_a_sequence(compiled):
    last = random.uniform(1, 7, seed=5, offset=3, block=2**24 - 2)[0, -3:]
    words = philox.philox4x32((2**24 - 1, 3, 0, 0), (5, 0))[:3]
    np.testing.assert_array_equal(last.numpy(), ((words + 0.5) / 2**32).astype(np.float32))


@pytest.mark.parametrize("draw", [random.uniform, random.normal])
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
@pytest.mark.parametrize("offset", [0, 2**32 - 5, 2**64 - 5])
def test_pieces_have_the_same_bits(path, draw, dtype, offset):
    at = {"seed": 11, "step": 2, "stream": 3, "dtype": dtype}
    whole = draw(9, 13, offset=offset, **at)
    pieces = [draw(rows, 13, offset=(offset + start) % 2**64, **at) for start, rows in ((0, 4), (4, 1), (5, 4))]
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(draw(9, 6, offset=offset, **at), whole[:, :6])


@pytest.mark.parametrize(
    "changed", [{"seed": 2}, {"step": 2}, {"stream": 2}, {"stream": 257}, {"offset": 64}, {"block": 64}]
)
def test_changed_coordinates_are_uncorrelated(path, changed):
    """Correlation of N independent normals has standard deviation N^-½; five of them are allowed."""
    at = {"seed": 1, "step": 1, "stream": 1, "offset": 0}
    x, other = (random.normal(64, 256, **c, dtype=DOUBLE).flatten() for c in (at, at | changed))
    assert abs(torch.corrcoef(torch.stack([x, other]))[0, 1]) < 5 * (64 * 256) ** -0.5


def test_rows_are_uncorrelated_and_a_reused_counter_is_seen(path):
    fresh = random.normal(16, 4096, dtype=DOUBLE)
    reused = torch.cat([fresh[:8], random.normal(8, 4096, offset=7, dtype=DOUBLE)])

    def worst(x):
        return (torch.corrcoef(x) - torch.eye(16, dtype=DOUBLE)).abs().max()

    assert worst(fresh) < 5 * 4096**-0.5
    assert worst(reused) > 0.999


def test_normal_distribution(path):
    x = random.normal(100, 1001, seed=2024, dtype=DOUBLE).numpy().ravel()
    # Standard errors of the moments of N standard normals: 1, √2, √15 and √96 over √N.
    moments = [(x, 0, 1), (x**2, 1, 2), (x**3, 0, 15), (x**4, 3, 96)]
    for power, mean, variance in moments:
        assert abs(power.mean() - mean) < 4 * (variance / x.size) ** 0.5
    assert stats.kstest(x, "norm").pvalue > 0.01


def test_uniform_distribution(path):
    u = random.uniform(100, 1001, seed=2024, dtype=DOUBLE).numpy().ravel()
    assert stats.kstest(u, "uniform").pvalue > 0.01
    assert u.min() > 0
    assert u.max() < 1


@pytest.mark.parametrize("draw", [random.uniform, random.normal, philox.words, philox.uniforms, philox.normals])
@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("seed", -1, 2**64),
        ("seed", 2**64, 2**64),
        ("step", 2**24, 2**24),
        ("stream", 2**16, 2**16),
        ("offset", 2**64, 2**64),
        ("rows", -1, 2**60 // 3),
        ("columns", 2**26 + 1, 2**26 + 1),
        ("block", 2**24, 2**24),
    ],
)
def test_out_of_range(draw, name, value, limit):
    arguments = {"rows": 2, "columns": 3} | {name: value}
    with pytest.raises(ValueError, match=rf"^{name}: got {value}, wants an integer in \[0, {limit}\)$"):
        draw(**arguments)


def test_wrong_types():
    with pytest.raises(TypeError, match=r"^step: got 1\.5 \(float\), wants an integer$"):
        random.uniform(2, 3, step=1.5)
    with pytest.raises(ValueError, match=r"^dtype: got torch\.float16, wants torch\.float32 or torch\.float64$"):
        random.normal(2, 3, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"^counter: got shape \(3,\), wants \(\.\.\., 4\)$"):
        philox.philox4x32((0, 0, 0), (0, 0))
    with pytest.raises(ValueError, match=r"^key: got shape \(1,\), wants \(2,\)$"):
        philox.philox4x32((0, 0, 0, 0), (0,))


def test_integers_of_any_kind(path):
    at = {"seed": np.uint64(2**63), "step": np.int32(4), "stream": torch.tensor(5)}
    expected = random.uniform(2, 3, seed=2**63, step=4, stream=5)
    assert torch.equal(random.uniform(np.int64(2), 3, **at), expected)


@pytest.mark.parametrize("kernel", ["fill_uniform", "fill_normal"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 2**24}, r"step: got 16777216, wants an integer in \[0, 16777216\)"),
        ({"step": -1}, r"step: got -1, wants"),
        ({"stream": 2**16}, r"stream: got 65536, wants an integer in \[0, 65536\)"),
        ({"columns": 2**26 + 1}, r"columns: got 67108865, wants an integer in \[0, 67108865\)"),
        ({"columns": 9, "block": 2**24 - 2}, r"columns: got 9, wants an integer in \[0, 9\)"),
        ({"block": -1}, r"block: got -1, wants an integer in \[0, 16777216\)"),
        ({"rows": -1}, r"rows: got -1, wants"),
        ({"rows": 2**62}, r"rows: got 4611686018427387904, wants"),
        ({"dtype": "float16"}, r"dtype: got 'float16', wants 'float32' or 'float64'"),
        ({"address": 0}, r"address: got address 0, wants the address of 6 elements"),
        ({"address": 12}, r"address: got address 12, wants a multiple of 8"),
    ],
)
def test_kernels_refuse(compiled, kernel, change, message):
    out = torch.empty(2, 3, dtype=DOUBLE)
    valid = {"address": out.data_ptr(), "rows": 2, "columns": 3, "dtype": "float64"}
    with pytest.raises(ValueError, match=f"^{message}"):
        getattr(compiled, kernel)(**{**valid, "seed": 0, "step": 0, "stream": 0, "offset": 0, "block": 0, **change})
