"""The kernels that draw sequences, on every instruction set, against the same draws in numpy and torch in float64.

Each number has a bound. `majorant` is the result of the oracle with every term of every sum replaced by its absolute
value, and a normal by the radius of its Box-Muller pair. Let eps be that of the dtype. A normal is accurate to 7 eps of
its radius (test_draws.py; 8 with the error of the oracle in float64). So is a chi variate of chi + 5.7/7 r t^1/2, with
r <= 6.77 (fastlin/data/chi.py). A factor, a mean or a deviation is rounded once,
eps / 2. A sum of k terms adds k eps / 2 to each term:

    features   7.5 + d/2     weights beta   8 + d/2     labels   16 + 3d/2     entries of G   32 + 3d + (d + 2)/2

The largest is at most 33 + 3.5 d. The bound is twice that, for the roundings of the oracle and the terms in eps^2.
"""

import copy
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.op_cases import DOUBLE, INSTRUCTION_SETS

import fastlin as fl
from fastlin import _extension
from fastlin.backends import cpu
from fastlin.data.layout import BETA, BatchDraws, check_draws

DTYPES = (torch.float32, DOUBLE)
BATCH = 130
# No coordinate is zero, step and stream are near their limits, and the batch wraps from the last sequence to the first.
AT = {"seed": 2**63 + 12345, "step": 2**24 - 1, "stream": 2**16 - 2, "offset": 2**64 - 100}
# These show whether the low half of the sequence index carries, and whether parts of stream and seed are exchanged.
OTHER_PLACES = [
    {"seed": 0, "step": 0, "stream": 0, "offset": 0},
    {"seed": 2**64 - 1, "step": 1, "stream": 255, "offset": 2**32 - 65},
    {"seed": 2**32, "step": 2**16, "stream": 256, "offset": 2**63 - 3},
    {"seed": 1, "step": 2**24 - 1, "stream": 2**16 - 1, "offset": 2**64 - 1},
]


def covariances(count, d, seed, rank=None):
    root = torch.randn(
        count, d, d if rank is None else rank, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)
    )
    return root @ root.mT / d


def mixture(d, weights, rank=None, **options):
    weights = torch.tensor(weights, dtype=DOUBLE)
    means = torch.randn(len(weights), d, dtype=DOUBLE, generator=torch.Generator().manual_seed(d))
    return fl.TaskMixture(means, covariances(len(weights), d, 1, rank), weights / weights.sum(), **options)


def everything(d):
    return {"noise_std": 0.7, "feature_cov": covariances(1, d, 2)[0], "bias": True}


MANY = [1.0 + k % 7 for k in range(300)]
SOURCES = {
    "one task": lambda d: mixture(d, [1.0]),
    "one task without spread, everything": lambda d: mixture(d, [1.0], rank=0, **everything(d)),
    "two tasks": lambda d: mixture(d, [2.0, 3.0]),
    "two singular tasks, noise": lambda d: mixture(d, [2.0, 3.0], rank=(d + 1) // 2, noise_std=0.7),
    "two tasks, features": lambda d: mixture(d, [2.0, 3.0], feature_cov=covariances(1, d, 2)[0]),
    "two tasks, singular features": lambda d: mixture(d, [2.0, 3.0], feature_cov=covariances(1, d, 2, (d + 1) // 2)[0]),
    "two tasks, constant": lambda d: mixture(d, [2.0, 3.0], bias=True),
    "a rare task, exact shares": lambda d: mixture(d, [63.0, 1.0], stratify=True),
    "tasks without weight": lambda d: mixture(d, [0.0, 1.0, 0.0, 2.0, 0.0], noise_std=0.1),
    "300 tasks": lambda d: mixture(d, MANY, noise_std=0.3),
    "300 tasks, everything, exact shares": lambda d: mixture(d, MANY, **everything(d), stratify=True),
    "sphere": lambda d: fl.SphereTasks(d, radius=1.5),
    "sphere, everything": lambda d: fl.SphereTasks(d, radius=1.5, **everything(d)),
    "fixed": lambda d: fl.FixedTask(torch.linspace(-1, 2, d)),
    "fixed, everything": lambda d: fl.FixedTask(torch.linspace(-1, 2, d), **everything(d)),
}
CHOSEN = ("two tasks", "300 tasks, everything, exact shares", "a rare task, exact shares", "sphere, everything")


@functools.cache
def source_of(name, d):
    return mixture(d, [1.0, 3.0**0.5], stratify=True) if name == "irrational shares" else SOURCES[name](d)


@pytest.fixture(params=INSTRUCTION_SETS)
def kernels(request):
    with cpu.using(request.param):
        yield request.param


class Radii(BatchDraws):
    """Upper bounds on the draws of a place: the radii of the pairs of normals, and chi with that of its normal."""

    def normal(self, section, columns):
        x = super().normal(section, columns + columns % 2)
        return x.unflatten(1, (-1, 2)).norm(dim=-1).repeat_interleave(2, 1)[:, :columns]

    def chi(self, freedom):
        x, k = super().chi(freedom), torch.tensor(freedom, dtype=DOUBLE)
        root_t = (x / (k - 2 / 3).clamp_min(1 / 3).sqrt()) ** (1 / 3)
        return torch.where(k == 1, 6.77, x + 5.7 / 7 * 6.77 * root_t)


def majorant(source):
    """A copy of the source with absolute values; drawing it with `Radii` gives the bounds."""
    larger = copy.copy(source)
    for name in ("means", "_factors", "theta", "_feature_factor"):
        if getattr(source, name, None) is not None:
            setattr(larger, name, getattr(source, name).abs())
    if isinstance(source, fl.SphereTasks):
        # The error of normals/|normals| is at most twice that of the normals, over their length.
        larger._beta = lambda place, task: (
            2
            * source.radius
            * place.normal(BETA, source.d)
            / BatchDraws.normal(place, BETA, source.d).norm(dim=1)[:, None]
        )
    return larger


@functools.cache
def oracle(name, d, n, form, at):
    """Values and majorants of a batch in float64, drawn by numpy with the extension disabled."""
    source, place = source_of(name, d), check_draws(BATCH, n, **dict(at))[0]
    method = "_gram_in_torch" if form == "gram" else "_tokens"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_extension, "extension", lambda: None)
        return getattr(source, method)(place, n), getattr(majorant(source), method)(Radii(*place), n)[:3]


def draw(source, n, form, batch=BATCH, *, dtype, **place):
    method = source.sample_gram if form == "gram" else source.sample
    return method(batch, n, **{**AT, **place}, dtype=dtype)


def excess(found, name, d, n, form, at=AT):
    """Largest error divided by its bound; tasks must be equal."""
    exact, sizes = oracle(name, d, n, form, tuple(at.items()))
    assert torch.equal(found[3], exact[3])
    bound = 2 * (33 + 3.5 * d) * torch.finfo(found[0].dtype).eps
    worst = 0.0
    for one, value, size in zip(found[:3], exact[:3], sizes, strict=True):
        assert one.shape == value.shape
        assert one.isfinite().all()
        error = (one.to(DOUBLE) - value).abs()
        assert (error[size == 0] == 0).all()
        worst = max(worst, float((error / (bound * size.clamp_min(1e-300))).max()) if error.numel() else 0.0)
    return worst


def assert_same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("d", [1, 2, 7, 10, 33])
@pytest.mark.parametrize("name", SOURCES)
def test_gram_matrices_are_those_of_the_oracle(name, d, kernels):
    for n in sorted({0, 1, d - 1, d, d + 1, 50, 10**9}):
        for dtype in DTYPES:
            cpu.backend.last_sampler = None
            found = draw(source_of(name, d), n, "gram", dtype=dtype)
            assert cpu.backend.last_sampler == f"{kernels} {str(dtype)[6:]} sampled gram"
            assert excess(found, name, d, n, "gram") <= 1, (n, dtype)
            assert torch.equal(found[0], found[0].mT)


@pytest.mark.parametrize("d", [1, 2, 7, 10, 33])
@pytest.mark.parametrize("name", SOURCES)
def test_tokens_are_those_of_the_oracle(name, d, kernels):
    for n in sorted({0, 1, d - 1, d, d + 1, 50}):
        for dtype in DTYPES:
            cpu.backend.last_sampler = None
            found = draw(source_of(name, d), n, "tokens", dtype=dtype)
            assert cpu.backend.last_sampler == f"{kernels} {str(dtype)[6:]} sampled tokens"
            assert excess(found, name, d, n, "tokens") <= 1, (n, dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("at", OTHER_PLACES)
@pytest.mark.parametrize("form", ["gram", "tokens"])
def test_draws_at_other_places(form, at):
    for dtype in DTYPES:
        found = draw(source_of("300 tasks", 7), 9, form, dtype=dtype, **at)
        assert excess(found, "300 tasks", 7, 9, form, at) <= 1


@pytest.mark.parametrize(
    ("change", "form"),
    [({"n": 8}, "gram"), ({"n": 10}, "gram")]
    + [({k: v}, f) for k, v in {"seed": 1, "step": 3, "stream": 254}.items() for f in ("gram", "tokens")]
    + [({"noise_std": 0.701}, "gram"), ({"noise_std": 0.701}, "tokens"), ({"radius": 1.501}, "gram")],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_draws_exceed_the_bounds(change, form, dtype):
    """Draws for another n, place, noise or radius exceed the bounds by far, also in float32."""
    source, at = copy.copy(source_of("sphere, everything", 7)), {k: v for k, v in change.items() if k in AT}
    for name in {"noise_std", "radius"} & change.keys():
        setattr(source, name, change[name])
    found = draw(source, change.get("n", 9), form, dtype=dtype, **at)
    # The bound is 115 eps, 1.4e-5 in float32: 1/700 of noise or weights is 10 bounds or more, a wrong draw 10^4.
    assert excess(found, "sphere, everything", 7, 9, form) > (5 if {"noise_std", "radius"} & change.keys() else 1000)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["gram", "tokens"])
@pytest.mark.parametrize("name", CHOSEN)
def test_batches_that_do_not_fill_lanes_or_blocks(name, form, dtype, monkeypatch):
    """A batch is a prefix of a larger one, bit for bit. Kernels write all of it and nothing around it."""
    whole = draw(source_of(name, 7), 9, form, dtype=dtype)
    buffers = []

    def guarded(shape, dtype):
        size = int(np.prod(shape))
        buffers.append(np.full(size + 128, -77, dtype))
        return buffers[-1][64 : 64 + size].reshape(shape)

    monkeypatch.setattr(cpu, "np", SimpleNamespace(empty=guarded, int64=np.int64))
    for batch in (0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, BATCH):
        buffers.clear()
        assert_same_bits(draw(source_of(name, 7), 9, form, batch, dtype=dtype), [t[:batch] for t in whole])
        assert len(buffers) == 4
        assert all((buffer[:64] == -77).all() and (buffer[-64:] == -77).all() for buffer in buffers)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["gram", "tokens"])
@pytest.mark.parametrize("name", SOURCES)
def test_pieces_have_the_same_bits(name, form, dtype):
    """Wherever the cut is, though a sequence then has another lane and other neighbours."""
    for sizes in ([1, 129], [7, 9, 64, 50], [65, 65], [3] * 43 + [1]):
        assert_pieces(source_of(name, 7), form, dtype, 2**32 - 70, sizes)


def assert_pieces(source, form, dtype, offset, sizes):
    starts = np.cumsum([0, *sizes])[:-1].tolist()
    parts = [
        draw(source, 9, form, size, dtype=dtype, offset=(offset + start) % 2**64)
        for start, size in zip(starts, sizes, strict=True)
    ]
    whole = draw(source, 9, form, sum(sizes), dtype=dtype, offset=offset)
    assert_same_bits([torch.cat(pieces) for pieces in zip(*parts, strict=True)], whole)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("form", ["gram", "tokens"])
@pytest.mark.parametrize(
    "name",
    [
        "300 tasks",
        "sphere, everything",
        "300 tasks, everything, exact shares",
    ],
)
def test_pieces_around_the_last_sequence_have_the_same_bits(name, form):
    assert_pieces(source_of(name, 7), form, DOUBLE, 2**64 - 70, [33, 37, 60])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["gram", "tokens"])
@pytest.mark.parametrize("name", CHOSEN)
def test_any_number_of_threads_has_the_same_bits(name, form, dtype, threads):
    threads(1)
    whole = draw(source_of(name, 10), 13, form, 1000, dtype=dtype)
    for count in (2, 3, 7):
        threads(count)
        assert_same_bits(draw(source_of(name, 10), 13, form, 1000, dtype=dtype), whole)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("form", ["gram", "tokens"])
def test_half_precision_is_rounded_from_float64(form):
    source = source_of("300 tasks, everything, exact shares", 7)
    exact = draw(source, 9, form, dtype=DOUBLE)
    for dtype in (torch.float16, torch.bfloat16):
        assert_same_bits(draw(source, 9, form, dtype=dtype), [*(t.to(dtype) for t in exact[:3]), exact[3]])


@pytest.mark.usefixtures("kernels")
def test_instruction_sets_draw_the_same_tasks():
    """All 300 tasks in every dtype: float64 decides, from the same word."""
    source = source_of("300 tasks", 2)
    expected = source._task(check_draws(20_000, 0, **AT)[0])
    for dtype in DTYPES:
        assert torch.equal(draw(source, 0, "gram", 20_000, dtype=dtype)[3], expected)
    assert len(expected.unique()) == 300


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("offset", [0, 2**16 - 100, 2**40 + 5000])
def test_exact_shares_of_the_longest_period(offset):
    """Weights without a common denominator repeat after 65,536 sequences."""
    source = source_of("irrational shares", 1)
    expected = source._strata[(torch.arange(300) + offset) % 2**16]
    assert torch.equal(draw(source, 0, "gram", 300, dtype=DOUBLE, offset=offset)[3], expected)
