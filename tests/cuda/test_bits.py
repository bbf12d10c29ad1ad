"""The same bits whatever the device is like: its multiprocessors, its shared memory, the order of its threads.

The grid of the generic kernels follows the number of multiprocessors, and their arrays lie in shared memory or in the
workspace; partial sums are added in an order that the problem alone decides.
"""

import pytest
import torch
from support import emulation
from support.op_cases import DOUBLE, make, poisoned
from support.op_cases import results as of_given
from support.sampled_cases import SOURCES, differentiable, parameters, sampled
from support.sampled_cases import results as of_drawn

import fastlin as fl
from fastlin.backends import cuda

DEVICES = [
    {"multiprocessors": 1},
    {"multiprocessors": 3, "order": 1},
    {"multiprocessors": 132, "order": 7},
    {"shared_bytes": 227 * 1024, "order": 8},
]
SMALL = {"shared_bytes": 4096, "order": 8}
"""Too small for the fast kernels: the generic ones serve it, with the bits that they have everywhere."""
CASES = {
    "layer": ("prompt_loss", {"n": 7, "R": 3}),
    "heads": ("gram_loss", {"R": 2, "H": 2}),
    "stack": ("stack_loss", {"n": 7, "L": 3, "R": 2, "scale": 0.05}),
    "predictions": ("stack_predict", {"L": 2, "scale": 0.05}),
}


@pytest.fixture(autouse=True)
def served():
    with cuda.emulated(emulation.module()), poisoned():
        yield


def assert_same_bits(call, is_generic=False):
    expected = call()
    for changes in DEVICES + [SMALL] * is_generic:
        with emulation.device(**changes):
            found = call()
        for name, value in expected.items():
            assert value.isfinite().all(), name
            assert torch.equal(found[name], value), (name, changes)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_of_given_sequences(name, dtype):
    op, sizes = CASES[name]
    for K in (None, 5):
        case = make(op, **sizes, B=300, m=5, K=K, dtype=dtype, backend="cuda", see_query=True)
        assert_same_bits(lambda case=case: of_given(case), is_generic=dtype is DOUBLE)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize("op", ["sampled_loss", "sampled_stack_loss"])
def test_of_drawn_sequences(op, dtype):
    given = differentiable(parameters(SOURCES["everything"], op, R=2), dtype)
    call = sampled(op, SOURCES["everything"], 9, 300, backend="cuda")
    assert_same_bits(lambda: of_drawn(call, given), is_generic=dtype is DOUBLE)


def test_of_gram_and_data():
    z = torch.randn(300, 9, 5, dtype=DOUBLE)
    draw = SOURCES["300 tasks"].draw(300, 9, seed=1)

    def both():
        x, q, y, task = cuda.backend.sample(draw, True, torch.float32, torch.device("cpu"))
        return {"G": fl.gram(z, backend="cuda"), "x": x, "q": q, "y": y, "task": task}

    assert_same_bits(both, is_generic=True)


def test_forward_alone_has_the_same_bits():
    # Sums of 1000 trials are so large that there are fewer blocks than tiles.
    case = make("gram_loss", B=1100, m=12, R=1000, backend="cuda")
    found, expected = case(), case.differentiable("p", "W", "v")()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
