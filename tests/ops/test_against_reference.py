"""Every backend against the paper taken literally, in float64: values and all gradients."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from support.op_cases import DOUBLE, FORMS, LOSSES, PREDICTIONS, assert_close, check, gradients, make

import fastlin as fl

SHAPES = [
    {"B": 1, "n": 1, "m": 1, "K": 1, "t": 1},
    {"B": 5, "n": 0, "m": 3},
    {"B": 0, "n": 4, "m": 3},
    {"B": 0, "n": 0, "m": 3, "K": None},
    {"B": 9, "n": 7, "m": 8, "K": 4, "t": 1},
    {"B": 4, "n": 40, "m": 9, "K": 2, "t": 3},
    {"B": 3, "n": 20, "m": 21, "K": 1},
    {"B": 2, "n": 50, "m": 33, "t": None},
    {"B": 7, "n": 5, "m": 6, "K": None, "t": 1},
    {"B": 7, "n": 5, "m": 6, "K": None, "t": None},
    {"B": 6, "n": 2, "m": 4, "t": 0},
    {"B": 300, "n": 3, "m": 2, "K": 100},
]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("see_query", [False, True])
@pytest.mark.parametrize("weight", [None, [0.2, 0.5, 0.3]])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", ["prompt_loss", "gram_loss"])
def test_layers(op, form, weight, see_query):
    check(make(op, **FORMS[form], weight=weight, see_query=see_query, scale=0.7))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("first_skip", [None, True, False])
@pytest.mark.parametrize("L", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", ["stack_loss", "gram_stack_loss"])
def test_stacks(op, form, L, first_skip):
    for see_query, (weight, residual) in product((False, True), ((None, 1.0), ([0.2, 0.5, 0.3], 2.0))):
        options = {"weight": weight, "see_query": see_query, "residual": residual, "first_skip": first_skip}
        check(make(op, **FORMS[form], L=L, scale=0.7, **options))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("see_query", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_predictions(form, see_query):
    check(make("predict", **FORMS[form], scale=0.7, see_query=see_query))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("first_skip", [None, True, False])
@pytest.mark.parametrize("L", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_stack_predictions(form, L, first_skip):
    for see_query in (False, True):
        options = {"see_query": see_query, "residual": 1.7, "first_skip": first_skip}
        check(make("stack_predict", **FORMS[form], L=L, scale=0.7, **options))


@pytest.mark.parametrize("op", [*LOSSES, *PREDICTIONS])
def test_every_option_reaches_the_named_reference(op):
    options = {"scale": 0.3, "see_query": True}
    options |= {"first_skip": False, "residual": 1.7} if "stack" in op else {}
    options |= {"weight": [0.2, 0.5, 0.3]} if op in LOSSES else {}
    case = make(op, **options)
    assert_close(case(backend="reference"), case(fl.reference), 0.0)
    for name in options:
        other = {key: value for key, value in options.items() if key != name}
        assert not torch.equal(_first(make(op, **other)(fl.reference)), _first(case(fl.reference))), name


def _first(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("B", [100_000, 1_000_000])
@pytest.mark.parametrize("weight", [None, [0.5, 0.5]])
def test_huge_batches_in_float32(B, weight, backend):
    """Sums over a million sequences of one task, against float64: blocks of 1024 added one by one, then pairwise.

    Each of the 1024 + log2(B / 1024) additions rounds by at most 2^-24 of the sum of absolute values.
    """
    B = B // 10 if backend == "cuda" else B  # a million sequences take 20 s in emulation
    case = make("prompt_loss", B=B, n=0, m=2, K=2, t=1, dtype=torch.float32, weight=weight).differentiable(
        "p", "W", "v"
    )
    exact = case.to(DOUBLE).differentiable("p", "W", "v")
    bound = (1024 + 10 + 30) * 2.0**-24
    for found, expected in zip(case(), exact(), strict=True):
        assert ((found.double() - expected).abs() <= bound * expected.abs()).all()
    found, expected = gradients(case), gradients(exact)
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).abs().max() <= bound * 3 * b.abs().max()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(f"{k}{v}" for k, v in shape.items()))
@pytest.mark.parametrize("op", LOSSES + PREDICTIONS)
def test_shapes(op, shape):
    check(make(op, **shape))
    check(make(op, **shape, R=2, H=2))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("t", [None, 2])
@pytest.mark.parametrize("op", LOSSES + PREDICTIONS)
def test_shared_head(op, t):
    check(make(op, t=t, shared_head=True))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("op", LOSSES)
def test_deep_and_many_trials(op):
    """Enough trials that eager forms G instead of streaming tokens, and more layers than the paper has."""
    check(make(op, R=7, L=5, m=4, n=9, seed=3))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("form", ["plain", "R"])
@pytest.mark.parametrize(("task", "t"), [(True, 2), (None, 1), (True, None), (None, None)])
def test_gram(form, task, t):
    case = make("predict", **FORMS[form], K=3 if task else None, t=t).differentiable()
    z, q, p = (case.inputs[name] for name in "zqp")
    for see_query in (False, True):
        named = fl.gram(z, p, case.task, q, see_query=see_query, backend="reference")
        assert_close(named, fl.reference.gram(z, p, case.task, q, see_query=see_query), 0.0)
        found, expected = (module.gram(z, p, case.task, q, see_query=see_query) for module in (fl, fl.reference))
        assert_close(found, expected)
        leaves = [z, q] if p is None else [z, q, p]
        upstream = torch.randn(expected.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
        found, expected = (
            torch.autograd.grad(G, leaves, upstream, allow_unused=True, materialize_grads=True)
            for G in (found, expected)
        )
        assert_close(found, expected)
    assert_close(fl.gram(z), fl.reference.gram(z))


GOLDEN = [
    (op, *skips) for op in ("stack_loss", "gram_stack_loss") for skips in (("skip_all", True), ("no_skip_first", False))
]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("op", "name", "first_skip"), GOLDEN)
def test_golden_stack(op, name, first_skip):
    check_golden(op, name, first_skip=first_skip)


@pytest.mark.parametrize(("op", "name", "first_skip"), GOLDEN)
def test_golden_stack_of_the_reference(op, name, first_skip):
    check_golden(op, name, first_skip=first_skip, backend="reference")


def check_golden(op, name, **options):
    """Wq, Wk, Wv, prompt and head gradients to the ten digits that are stored."""
    golden = json.loads((Path(__file__).parents[1] / "data/golden.json").read_text())["gram_stack"]
    leaves = {key: torch.tensor(golden[key], dtype=DOUBLE, requires_grad=True) for key in ("Wq", "Wk", "Wv", "p", "h")}
    X, y, x = (torch.tensor(golden[key], dtype=DOUBLE) for key in ("X", "y", "x"))
    z = torch.cat([X, y[:, None]], 1)[None]
    q = torch.cat([x, x.new_zeros(1)])[None]
    target = torch.tensor([golden["target"]], dtype=DOUBLE)
    A, C = leaves["Wq"] @ leaves["Wk"].mT, leaves["Wv"]
    arguments = (q, target, None, leaves["p"][None, None], A, C, leaves["h"])
    first = z if op == "stack_loss" else fl.gram(z)
    loss, per_task = getattr(fl, op)(first, *arguments, **options)
    assert loss.item() == pytest.approx(golden[name]["loss"], rel=1e-9)
    assert per_task[0].item() == loss.item()
    loss.backward()
    for key, leaf in leaves.items():
        expected = torch.tensor(golden[name][f"g_{key}"], dtype=DOUBLE)
        assert_close(leaf.grad, expected, 1e-9, f"g_{key}")
