"""Every public op by the CUDA kernels, against the paper taken literally in float64.

Sizes straddle the 32 sequences of a tile, the widths that the mapping has paths for, and the warps that share trials.
In float32 an error is at most twice eager's own and a band of 4 eps.
"""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from support import cuda_kernels
from support.op_cases import (
    DOUBLE,
    FORMS,
    LOSSES,
    PREDICTIONS,
    assert_close,
    assert_within_budget,
    check,
    gradients,
    make,
    results,
)

import fastlin as fl
from fastlin.backends import cuda

OPS = LOSSES + PREDICTIONS
STACKS = tuple(op for op in OPS if "stack" in op)
WIDTHS = (3, 6, 7, 11, 12, 21, 33)
LENGTHS = (0, 1, 17)


def gentle(op, n, m, t, H):
    """A scale at which the layers of a stack about double what they get, so that float32 holds them."""
    return (n + 1) ** 0.5 / (H * (n**0.5 + m**0.5 + (t or 0) + 1) ** 2) if "stack" in op else 0.7


def check_both(machine, op, path, **given):
    """Values and all gradients of a problem of float32 numbers, in both dtypes; `path` makes those of parameters."""
    single = make(op, **given, dtype=torch.float32, backend="cuda").on(machine)
    double = single.to(DOUBLE)
    exact = results(double, fl.reference)
    found = results(double)
    for name, value in exact.items():
        assert_close(found[name], value, what=name)
    assert_within_budget(results(single), results(single, backend="eager"), exact)
    assert cuda.backend.last_kernel == f"float32 {path}"


@pytest.mark.parametrize("m", WIDTHS)
@pytest.mark.parametrize("op", OPS)
def test_widths_and_lengths(op, m, machine):
    """K, t, R > 1, H = 2 and each depth; every width meets every length, every depth and both kinds of query."""
    depths = cycle((1, 2, 3) if "stack" in op else (1,))
    for i, n in enumerate(LENGTHS):
        options = {"see_query": (i + m) % 2 == 0, "scale": gentle(op, n, m, 2, 2)}
        if op in LOSSES:
            options["weight"] = (None, [0.2, 0.5, 0.3])[i % 2]
        check_both(machine, op, "generic", n=n, m=m, B=6, K=3, t=2, R=3, H=2, L=next(depths), **options)


@pytest.mark.parametrize("B", [0, 1, 31, 32, 33, 70])
@pytest.mark.parametrize("op", OPS)
def test_batches_around_a_tile(op, B, machine):
    for K in (None, 3, 40):
        case = make(op, B=B, m=4, n=3, K=K, t=1, R=2, scale=0.3, backend="cuda").on(machine)
        found, exact = results(case), results(case, fl.reference)
        for name, value in exact.items():
            assert_close(found[name], value, what=f"{name}, K = {K}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", OPS)
def test_forms_and_options(op, form, machine):
    """Gradients of the losses and of the per-task losses, in data and parameters."""
    for see_query in (False, True):
        options = {"see_query": see_query, "scale": 0.3, "backend": "cuda"}
        if op in LOSSES:
            options["weight"] = [0.2, 0.5, 0.3] if see_query else None
        if op in STACKS:
            options |= {"first_skip": not see_query, "residual": 1.7}
        for L in (1, 3) if op in STACKS else (1,):
            check(make(op, **FORMS[form], L=L, **options).on(machine))


@pytest.mark.parametrize("sizes", [{"t": None}, {"t": 0}, {"K": None, "t": 1}, {"shared_head": True}], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_absent_parts(op, sizes, machine):
    check(make(op, **sizes, backend="cuda").on(machine))


@pytest.mark.parametrize("R", [4, 5, 33])
@pytest.mark.parametrize("op", ["prompt_loss", "gram_loss", "stack_loss"])
def test_trials_share_warps(op, R, machine):
    """One for each warp of a block, one more, and many."""
    check_both(machine, op, cuda_kernels.of_given(op, R, L=2), B=35, m=5, n=4, R=R, scale=gentle(op, 4, 5, 2, 1))


@pytest.mark.parametrize("op", LOSSES)
def test_many_tasks(op, machine):
    """More tasks than sequences: most are absent, every run is short, and the task's number needs two bytes."""
    case = make(op, B=100, n=2, m=3, K=300, t=1, R=2, backend="cuda", scale=0.3).on(machine)
    found, exact = results(case), results(case, fl.reference)
    for name in exact:
        assert_close(found[name], exact[name], what=name)
    absent = torch.ones(300, dtype=torch.bool, device=machine).index_fill(0, case.task, False)
    assert (found["per_task"][:, absent] == 0).all()
    assert (found["dp"][:, absent] == 0).all()


def test_tasks_that_begin_at_a_tile(machine):
    """Sums of 1300 trials are so large that a block has two tiles. A task has one tile, and often begins in a block."""
    case = make("gram_loss", B=1088, m=12, K=34, t=1, R=1300, scale=0.1, backend="cuda")
    case = replace(case, task=torch.arange(1088) // 32).on(machine)
    few = replace(case, inputs={name: t if name in ("G", "q") else t[:2] for name, t in case.inputs.items()})
    for found, exact in zip(case(), few(fl.reference), strict=True):
        assert torch.isfinite(found).all()
        assert_close(found[:2], exact)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize("m", WIDTHS)
def test_gram(m, dtype, machine):
    for B, n in ((0, 3), (1, 0), (33, 17), (5, 1)):
        z = torch.randn(B, n, m, dtype=dtype, generator=torch.Generator().manual_seed(m)).to(machine)
        G = fl.gram(z, backend="cuda")
        assert torch.equal(G, G.mT)
        assert_close(G.double(), fl.reference.gram(z.double()), 1e-11 if dtype is DOUBLE else 1e-5)
    case = make("predict", m=m, R=2, dtype=dtype).on(machine)
    z, q, p = (case.inputs[name] for name in "zqp")
    found = fl.gram(z, p, case.task, q, see_query=True, backend="cuda")
    exact = fl.reference.gram(z.double(), p.double(), case.task, q.double(), see_query=True)
    assert_close(found.double(), exact, 1e-11 if dtype is DOUBLE else 1e-5)


def sliced(t):
    """Every second element of a larger tensor, in each dimension."""
    big = t.new_full([2 * s for s in t.shape], float("nan"))
    return big[tuple(slice(None, None, 2) for _ in t.shape)].copy_(t)


def row_strided(t):
    """Rows are contiguous and far apart, as in a part of wider tokens."""
    big = t.new_full((*t.shape[:-1], t.shape[-1] + 3), float("nan"))
    return big[..., 2:-1].copy_(t)


@pytest.mark.parametrize("layout", [sliced, row_strided, lambda t: t[:1].expand_as(t), lambda t: t.mT.contiguous().mT])
@pytest.mark.parametrize("op", OPS)
def test_strides(op, layout, machine):
    """Inputs that are sliced, parts of wider rows, expanded, permuted; nothing between them is read."""
    case = make(op, R=2, B=9, backend="cuda").on(machine)
    inputs = {name: layout(t) for name, t in case.inputs.items()}
    plain = {name: t.clone(memory_format=torch.contiguous_format).requires_grad_() for name, t in inputs.items()}
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    found, expected = (
        gradients(type(case)(case.op, given, case.y, case.task, case.options), module)
        for given, module in ((leaves, fl), (plain, fl.reference))
    )
    assert_close(found, expected)
    assert_close(case(**inputs), case(fl.reference, **plain))
