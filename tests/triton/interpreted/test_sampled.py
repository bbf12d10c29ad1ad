"""Drawn sequences in the interpreter against the CPU backend's, and the losses of sequences that nobody keeps."""

import pytest
import torch
from helpers import DOUBLE, EAGER_TOLERANCE, assert_close
from sampled_cases import AT, DTYPES, SOURCES, differentiable, mixture, parameters, results, sampled

import fastlin as fl
from fastlin.backends import cpu, triton

CPU = torch.device("cpu")


def assert_same_sequences(source, n, dtype, batch=21, **at):
    """Tasks are the same; numbers differ by the rounding of normals, 4 eps, and of sums of at most d + 2 = 12 terms."""
    draw = source.draw(batch, n, **{**AT, **at})
    for is_gram in (True, False):
        found, expected = triton.sample(draw, is_gram, dtype, CPU), cpu.sample(draw, is_gram, dtype)
        assert torch.equal(found[3], expected[3])
        for a, b in zip(found[:3], expected[:3], strict=True):
            assert_close(a.double(), b.double(), 16 * torch.finfo(dtype).eps, f"n = {n}, gram {is_gram}")


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("name", SOURCES)
def test_sequences_are_those_of_the_cpu(name, dtype):
    for n in (0, 1, 17):
        assert_same_sequences(SOURCES[name], n, dtype)


def test_sequences_at_the_edges_of_their_counters():
    source = mixture(noise_std=0.3)
    assert_same_sequences(source, 10**12, DOUBLE, batch=0)
    far = {"seed": 2**64 - 1, "step": 2**24 - 1, "stream": 2**16 - 1, "offset": 2**64 - 7}
    assert_same_sequences(source, 3, DOUBLE, **far)
    G, *_ = triton.sample(source.draw(5, 10**12, **AT), True, DOUBLE, CPU)
    assert_close(G, cpu.sample(source.draw(5, 10**12, **AT), True, DOUBLE)[0], 16 * torch.finfo(DOUBLE).eps)


@pytest.mark.parametrize("d", [1, 10, 20])
def test_sequences_of_other_widths(d):
    assert_same_sequences(mixture(2, d, noise_std=0.2, feature_cov=torch.eye(d) * 2), 3, DOUBLE, batch=5)


def test_chi_variates_have_their_bits():
    """A Gram matrix of one feature without noise is chi^2, whose attempts are decided alike everywhere."""
    source = fl.FixedTask([0.0])
    for n in (1, 2, 3, 50):
        draw = source.draw(200, n, **AT)
        assert torch.equal(triton.sample(draw, True, DOUBLE, CPU)[0], cpu.sample(draw, True, DOUBLE)[0])


LAYER = {"plain": {}, "trials": {"R": 3, "t": 1}, "heads": {"R": 2, "H": 2}, "no prompt": {"t": None}}
STACK = {"one layer": {"L": 1}, "three layers": {"R": 2, "L": 3, "t": 1}, "heads": {"R": 1, "H": 2}}
CASES = [("sampled_loss", shape) for shape in LAYER.items()] + [
    ("sampled_stack_loss", shape) for shape in STACK.items()
]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[shape[0] for _, shape in CASES])
def test_losses_are_those_of_the_cpu(case):
    (op, (_, shape)), name = CASES[case], ("everything", "300 tasks", "sphere")[case % 3]
    for n, options in ((9, {}), (0, {"see_query": True, "scale": 0.3})):
        given = differentiable(parameters(SOURCES[name], op, n=n, **shape), DOUBLE)
        triton.last_kernel = None
        found = results(sampled(op, SOURCES[name], n, 6, **options, backend="triton"), given)
        assert triton.last_kernel == "float64 sampled"
        expected = results(sampled(op, SOURCES[name], n, 6, **options, backend="cpu"), given)
        for key, value in expected.items():
            assert_close(found[key], value, EAGER_TOLERANCE, key)


def test_floats_per_task_losses_and_weights():
    source, weight = SOURCES["mixture"], [0.2, 0.5, 0.3]
    given = differentiable(parameters(source, "sampled_loss", R=2), torch.float32)
    options = {"weight": weight, "scale": 0.5}
    found = results(sampled("sampled_loss", source, 5, 30, **options, backend="triton"), given, per_task=True)
    expected = results(sampled("sampled_loss", source, 5, 30, **options, backend="cpu"), given, per_task=True)
    for key, value in expected.items():
        assert_close(found[key], value, 75 * torch.finfo(torch.float32).eps, key)


def test_pieces_add_up(monkeypatch):
    source = SOURCES["mixture"]
    given = differentiable(parameters(source, "sampled_loss"), DOUBLE)
    call = sampled("sampled_loss", source, 4, 25, weight=[0.2, 0.5, 0.3], backend="triton")
    whole = results(call, given)
    monkeypatch.setattr(triton, "_PIECE", 10)
    for key, value in results(call, given).items():
        assert_close(value, whole[key], EAGER_TOLERANCE, key)


def test_an_empty_batch():
    given = differentiable(parameters(SOURCES["mixture"], "sampled_loss"), DOUBLE)
    found = results(sampled("sampled_loss", SOURCES["mixture"], 4, 0, backend="triton"), given)
    assert all(not value.any() for value in found.values())


def test_second_derivatives_draw_the_same():
    given = differentiable(parameters(SOURCES["mixture"], "sampled_loss", t=None), DOUBLE)
    found = []
    for backend in ("triton", "cpu"):
        loss, _ = sampled("sampled_loss", SOURCES["mixture"], 4, 9, backend=backend)(**given)
        (dW,) = torch.autograd.grad(loss, given["W"], create_graph=True)
        found.append(torch.autograd.grad(dW.square().sum(), given["W"])[0])
    assert_close(*found)
