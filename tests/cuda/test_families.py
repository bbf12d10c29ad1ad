"""The fast CUDA kernels: float32, one head, at every compiled width and around it, against the paper in float64.

Each test says which kernels must have run. An error is at most twice eager's own and a band of 4 eps.
"""

from itertools import cycle

import pytest
import torch
from cuda.test_ops import gentle
from support import cuda_kernels, emulation
from support.op_cases import DOUBLE, assert_within_budget, make, poisoned, results
from support.sampled_cases import AT, differentiable, mixture, parameters, sampled
from support.sampled_cases import results as of_drawn

import fastlin as fl
from fastlin.backends import cuda

WIDTHS = (1, 5, 6, 7, 8, 11, 12, 13, 21, 22, 30, 33)
OPS = ("prompt_loss", "predict", "gram_loss", "stack_loss", "stack_predict", "gram_stack_loss")


def check(machine, op, path, **given):
    """Values, and gradients of the parameters alone."""
    single = make(op, **given, dtype=torch.float32, backend="cuda").on(machine)
    exact = results(single.to(DOUBLE), fl.reference)
    found = results(single)
    assert cuda.backend.last_kernel == f"float32 {path}"
    assert_within_budget(found, results(single, backend="eager"), exact)


@pytest.mark.parametrize("m", WIDTHS)
@pytest.mark.parametrize("op", OPS)
def test_widths(op, m, machine):
    """Every compiled width, one below and one above; every length, number of trials and of prompt tokens."""
    choices = zip((0, 1, 9, 24), (None, 3, 1, 7), (2, 1, 0, None), (1, 8, 3, 2), (3, 2, 2, 1), strict=True)
    for i, (n, R, t, K, L) in enumerate(choices):
        options = {"see_query": (i + m) % 2 == 0, "scale": gentle(op, n, m, t, 1)}
        if "loss" in op:
            options["weight"] = None if i % 2 else [0.1 * (k + 1) for k in range(K)]
        depth = L if "stack" in op else 1
        if "stack" in op and depth == 1:
            options["first_skip"] = False
        check(machine, op, cuda_kernels.of_given(op, R, depth), n=n, m=m, B=35, K=K, t=t, R=R, L=depth, **options)


@pytest.mark.parametrize("B", [0, 1, 31, 64, 65, 200])
@pytest.mark.parametrize("op", OPS)
def test_batches(op, B, machine):
    """Around a tile and a chunk; with one task, two, and as many as are served."""
    for K, R in ((None, None), (2, 6), (8, 2)):
        check(machine, op, cuda_kernels.of_given(op, R, 2), B=B, n=3, m=7, K=K, t=1, R=R, scale=gentle(op, 3, 7, 1, 1))


@pytest.mark.parametrize("R", [None, 2])
@pytest.mark.parametrize("op", ["prompt_loss", "gram_loss", "stack_loss"])
def test_many_chunks(op, R, machine):
    """35 chunks of 64 sequences: every warp that adds them up has several, and records come in pieces."""
    options = {"scale": gentle(op, 2, 5, 1, 1), "weight": [0.3, 0.2, 0.5]}
    check(machine, op, cuda_kernels.of_given(op, R, 2), B=2200, n=2, m=5, K=3, t=1, R=R, **options)


@pytest.mark.parametrize("R", [2, 5, 6, 50, 100, 257])
@pytest.mark.parametrize("op", ["prompt_loss", "gram_loss"])
def test_many_trials(op, R, machine):
    """Sets of trials side by side, and slabs of them one after another."""
    check(machine, op, "trials", B=90, n=4, m=11, K=3, t=1, R=R)


def test_wide_trials(machine):
    for m, R in ((22, 50), (33, 20)):
        check(machine, "gram_loss", "trials", B=40, n=4, m=m, K=2, t=1, R=R)


@pytest.mark.parametrize("L", [2, 3, 4])
def test_depths(L, machine):
    for R in (None, 3):
        options = {"residual": 0.7, "first_skip": L != 3, "scale": gentle("stack_loss", 5, 11, 1, 1)}
        check(machine, "stack_loss", "stack", B=40, n=5, m=11, K=3, t=2, R=R, L=L, **options)


def strided(t):
    """Rows are contiguous and far apart, and their addresses are not those of quads."""
    big = t.new_full((*t.shape[:-1], t.shape[-1] + 3), float("nan"))
    return big[..., 2:-1].copy_(t)


@pytest.mark.parametrize("layout", [strided, lambda t: t[:1].expand_as(t)], ids=["strided", "one sequence"])
@pytest.mark.parametrize("op", OPS)
def test_layouts(op, layout, machine):
    for R, n in ((None, 7), (3, 20)):
        case = make(op, B=70, n=n, m=7, R=R, dtype=torch.float32, backend="cuda", scale=gentle(op, n, 7, 2, 1)).on(
            machine
        )
        data = {name: layout(t) for name, t in case.inputs.items() if name in "zGq"}
        case = type(case)(case.op, {**case.inputs, **data}, case.y, case.task, case.options)
        exact = results(case.to(DOUBLE), fl.reference)
        parameters_alone = case.differentiable(*(name for name in case.inputs if name not in "zGq"))
        value = parameters_alone()
        loss = value[0] if isinstance(value, tuple) else value
        grads = torch.autograd.grad((loss * torch.ones_like(loss)).sum(), list(parameters_alone.leaves().values()))
        assert cuda.backend.last_kernel == f"float32 {cuda_kernels.of_given(op, R, 2)}"
        plain = case.to(torch.float32)
        assert all(grad.isfinite().all() for grad in grads)
        name = "loss" if isinstance(value, tuple) else next(iter(exact))
        eager = results(plain, backend="eager")
        assert_within_budget({name: loss.detach()}, {name: eager[name]}, {name: exact[name]})


@pytest.mark.parametrize("R", [None, 3])
def test_a_gram_matrix_counts_as_its_symmetric_part(R, machine):
    case = make("gram_loss", B=40, m=7, R=R, dtype=torch.float32, backend="cuda", see_query=True).on(machine)
    G = case.inputs["G"]
    skew = torch.randn(G.shape, generator=torch.Generator().manual_seed(0)).to(machine)
    for given, expected in zip(case(G=G + skew - skew.mT), case(), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


def kept(op, data, dtype, options):
    """The op on drawn sequences that are kept, by eager."""
    G, q, y, task = data
    rounded = {name: o.to(dtype) if isinstance(o, torch.Tensor) else o for name, o in options.items()}
    loss = getattr(fl, op.replace("sampled", "gram"))
    inputs = [t.to(dtype) for t in (G, q, y)]
    return lambda **given: loss(*inputs, task, *given.values(), **rounded, backend="eager")


SOURCES = {
    "mixture": lambda d: mixture(3, d, noise_std=0.4),
    "mixture, constant": lambda d: mixture(2, d, noise_std=0.4, bias=True),
    "strata, features": lambda d: mixture(3, d, feature_cov=torch.diag(torch.arange(1.0, d + 1.0)), stratify=True),
    "sphere": lambda d: fl.SphereTasks(d, noise_std=0.1),
    "fixed, constant": lambda d: fl.FixedTask(torch.arange(1.0, d + 1.0) / d, bias=True),
    "eight tasks": lambda d: mixture(8, d),
}


DRAWN = [(name, d) for name in SOURCES for d in (5, 10, 20, 32) if d < 32 or "constant" not in name]
"""Kinds of sources, at their compiled widths."""


@pytest.mark.parametrize(("name", "d"), DRAWN)
@pytest.mark.parametrize("op", ["sampled_loss", "sampled_stack_loss"])
def test_drawn(op, name, d, machine):
    """Each kind of source, n below and above d, for one trial and several."""
    source = SOURCES[name](d)
    for (n, R), weighted in zip(((0, None), (3, 4), (d, None), (50, 6)), cycle((False, True))):
        scale = 1 / (n + 1) if op == "sampled_loss" else gentle(op, n, source.m, 1, 1)
        options = {"scale": scale, "see_query": n == 3}
        if weighted:
            options["weight"] = torch.arange(1.0, source.K + 1, device=machine) / source.K
        given = parameters(source, op, R=R, t=1, n=n, L=3)
        single = differentiable(given, torch.float32, machine)
        found = of_drawn(sampled(op, source, n, 150, **options, backend="cuda"), single)
        path = cuda_kernels.of_drawn(op, source.m, source.K, torch.float32, R, L=3)
        assert cuda.backend.last_kernel == f"float32 sampled {path}"
        data = cuda.backend.sample(source.draw(150, n, **AT), True, torch.float32, machine)
        exactly = {name: p.detach().to(DOUBLE).requires_grad_() for name, p in single.items()}
        exact = of_drawn(kept(op, data, DOUBLE, options), exactly)
        eager = of_drawn(kept(op, data, torch.float32, options), single)
        assert_within_budget(found, eager, exact)


LAUNCHES = [
    ("gram_loss", {"R": 5, "K": 8}, 4),
    ("prompt_loss", {"K": 8}, 4),
    ("prompt_loss", {"R": 5, "K": 8}, 4),
    ("stack_loss", {"K": 2, "L": 3, "scale": 0.05}, 4),
    ("prompt_loss", {"K": 300}, 6),
]


@pytest.mark.parametrize(("op", "sizes", "most"), LAUNCHES, ids=str)
def test_launches(op, sizes, most):
    """Of a loss with gradients of its parameters."""
    case = make(op, B=100, m=6, t=1, dtype=torch.float32, backend="cuda", **sizes)
    case = case.differentiable(*(name for name in case.inputs if name not in "zGq"))
    with cuda.emulated(emulation.module()), poisoned():
        before = emulation.launches()
        case()
        assert emulation.launches() - before <= most


@pytest.mark.parametrize("op", ["sampled_loss", "sampled_stack_loss"])
@pytest.mark.parametrize("R", [None, 5])
def test_launches_of_drawn_sequences(op, R):
    source = mixture(8, 5)
    given = differentiable(parameters(source, op, R=R), torch.float32)
    with cuda.emulated(emulation.module()), poisoned():
        before = emulation.launches()
        getattr(fl, op)(source, 9, 100, *given.values(), **AT, scale=0.05, backend="cuda")
        assert emulation.launches() - before <= 4
