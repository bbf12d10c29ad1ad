"""Drawn sequences, in the interpreter or on a GPU, against the CPU's, and the losses of sequences that nobody keeps."""

import pytest
import torch
from support.op_cases import DOUBLE, EAGER_TOLERANCE, TRITON_DEVICE, assert_close, needs_triton
from support.sampled_cases import AT, DTYPES, SOURCES, differentiable, mixture, parameters, results, sampled

import fastlin as fl
from fastlin.backends import cpu, triton
from fastlin.backends.triton import plan

CPU = torch.device("cpu")
pytestmark = needs_triton


def sample(draw, is_gram, dtype):
    return [t.cpu() for t in triton.backend.sample(draw, is_gram, dtype, TRITON_DEVICE)]


def losses(backend, op, source, n, batch, given, dtype=DOUBLE, per_task=False, **options):
    """Loss, per-task losses and gradients of parameters that are given on the CPU."""
    leaves = differentiable(given, dtype, TRITON_DEVICE if backend == "triton" else "cpu")
    found = results(sampled(op, source, n, batch, **options, backend=backend), leaves, per_task)
    return {name: value.cpu() for name, value in found.items()}


def assert_same_sequences(source, n, dtype, batch=21, **at):
    """Tasks are the same; numbers differ by the rounding of normals, 4 eps, and of sums of at most d + 2 = 12 terms."""
    draw = source.draw(batch, n, **{**AT, **at})
    for is_gram in (True, False):
        found, expected = sample(draw, is_gram, dtype), cpu.backend.sample(draw, is_gram, dtype, CPU)
        assert torch.equal(found[3], expected[3])
        for a, b in zip(found[:3], expected[:3], strict=True):
            assert_close(a.double(), b.double(), 16 * torch.finfo(dtype).eps, f"n = {n}, gram {is_gram}")


@pytest.mark.parametrize("n", [0, 1, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("name", SOURCES)
def test_sequences_are_those_of_the_cpu(name, dtype, n):
    assert_same_sequences(SOURCES[name], n, dtype)


def test_sequences_at_the_edges_of_their_counters():
    source = mixture(noise_std=0.3)
    assert_same_sequences(source, 10**12, DOUBLE, batch=0)
    far = {"seed": 2**64 - 1, "step": 2**24 - 1, "stream": 2**16 - 1, "offset": 2**64 - 7}
    assert_same_sequences(source, 3, DOUBLE, **far)
    G, *_ = sample(source.draw(5, 10**12, **AT), True, DOUBLE)
    assert_close(
        G, cpu.backend.sample(source.draw(5, 10**12, **AT), True, DOUBLE, CPU)[0], 16 * torch.finfo(DOUBLE).eps
    )


@pytest.mark.parametrize("d", [1, 10, 20])
def test_sequences_of_other_widths(d):
    assert_same_sequences(mixture(2, d, noise_std=0.2, feature_cov=torch.eye(d) * 2), 3, DOUBLE, batch=5)


@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_chi_variates_have_their_bits(n):
    """A Gram matrix of one feature without noise is chi^2, whose attempts are decided alike everywhere."""
    draw = fl.FixedTask([0.0]).draw(64, n, **AT)
    assert torch.equal(sample(draw, True, DOUBLE)[0], cpu.backend.sample(draw, True, DOUBLE, CPU)[0])


LAYER = {"plain": {}, "trials": {"R": 3, "t": 1}, "heads": {"R": 2, "H": 2}, "no prompt": {"t": None}}
STACK = {"one layer": {"L": 1}, "three layers": {"R": 2, "L": 3, "t": 1}, "heads": {"R": 1, "H": 2}}
CASES = [("sampled_loss", shape) for shape in LAYER.items()] + [
    ("sampled_stack_loss", shape) for shape in STACK.items()
]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[shape[0] for _, shape in CASES])
def test_losses_are_those_of_the_cpu(case):
    (op, (_, shape)), name = CASES[case], ("everything", "300 tasks", "sphere")[case % 3]
    for n, options in ((9, {}), (0, {"see_query": True, "scale": 0.3})):
        given = parameters(SOURCES[name], op, n=n, **shape)
        triton.backend.last_kernel = None
        found = losses("triton", op, SOURCES[name], n, 6, given, **options)
        assert triton.backend.last_kernel == "float64 sampled"
        expected = losses("cpu", op, SOURCES[name], n, 6, given, **options)
        for key, value in expected.items():
            assert_close(found[key], value, EAGER_TOLERANCE, key)


@pytest.mark.parametrize("op", ["sampled_loss", "sampled_stack_loss"])
def test_wide_sequences_are_drawn_apart(op, monkeypatch):
    """A kernel draws the Gram matrices, another reads them, a piece of the batch at a time."""
    source = mixture(2, 18, noise_std=0.2, feature_cov=torch.eye(18) * 2)
    given = parameters(source, op, R=2)
    found = [losses("triton", op, source, 9, 5, given, see_query=True)]
    m = given["p"].shape[-1]
    monkeypatch.setattr(plan, "DRAWN_BYTES", 2 * 8 * m * m)
    found.append(losses("triton", op, source, 9, 5, given, see_query=True))
    expected = losses("cpu", op, source, 9, 5, given, see_query=True)
    for key, value in expected.items():
        assert_close(found[0][key], value, EAGER_TOLERANCE, key)
        assert_close(found[1][key], value, EAGER_TOLERANCE, key)


@pytest.mark.parametrize("op", ["sampled_loss", "sampled_stack_loss"])
def test_floats_per_task_losses_and_weights(op):
    """In float32 one kernel draws and computes."""
    source, weight = SOURCES["mixture"], [0.2, 0.5, 0.3]
    given = parameters(source, op, R=2)
    options = {"dtype": torch.float32, "per_task": True, "weight": weight, "scale": 0.5}
    found, expected = (losses(name, op, source, 5, 30, given, **options) for name in ("triton", "cpu"))
    for key, value in expected.items():
        assert_close(found[key], value, 75 * torch.finfo(torch.float32).eps, key)


def test_pieces_add_up(monkeypatch):
    source = SOURCES["mixture"]
    call = ("triton", "sampled_loss", source, 4, 25, parameters(source, "sampled_loss"))
    whole = losses(*call, weight=[0.2, 0.5, 0.3])
    monkeypatch.setattr(triton, "_PIECE", 10)
    for key, value in losses(*call, weight=[0.2, 0.5, 0.3]).items():
        assert_close(value, whole[key], EAGER_TOLERANCE, key)


def test_an_empty_batch():
    source = SOURCES["mixture"]
    found = losses("triton", "sampled_loss", source, 4, 0, parameters(source, "sampled_loss"))
    assert all(not value.any() for value in found.values())


def test_second_derivatives_draw_the_same():
    found = []
    for backend in ("triton", "cpu"):
        device = TRITON_DEVICE if backend == "triton" else "cpu"
        given = differentiable(parameters(SOURCES["mixture"], "sampled_loss", t=None), DOUBLE, device)
        loss, _ = sampled("sampled_loss", SOURCES["mixture"], 4, 9, backend=backend)(**given)
        (dW,) = torch.autograd.grad(loss, given["W"], create_graph=True)
        found.append(torch.autograd.grad(dW.square().sum(), given["W"])[0].cpu())
    assert_close(*found)
