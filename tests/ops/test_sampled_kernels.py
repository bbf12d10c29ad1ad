"""The losses whose kernels draw their own data, on every instruction set, against the same data drawn and kept."""

import pytest
import torch
from support.op_cases import DOUBLE, INSTRUCTION_SETS, assert_close
from support.sampled_cases import (
    AT,
    DTYPES,
    SOURCES,
    assert_equal_to_kept,
    differentiable,
    kept,
    parameters,
    results,
    sampled,
)

import fastlin as fl
from fastlin.backends import cpu

LAYER = {
    "plain": {},
    "one trial": {"R": 1},
    "three trials": {"R": 3, "t": 3},
    "nine trials": {"R": 9, "t": 1},
    "many trials": {"R": 50, "t": 1},
    "many trials and heads": {"R": 19, "H": 2},
    "heads": {"R": 2, "H": 2},
    "no prompt": {"t": None},
    "empty prompt": {"t": 0},
    "shared head": {"shared": True, "t": 1},
}
STACK = {
    "one layer": {"L": 1, "t": 1},
    "two layers, one trial": {"R": 1},
    "three layers": {"R": 3, "L": 3},
    "nine trials": {"R": 9},
    "heads": {"R": 2, "H": 2, "L": 2},
    "no prompt": {"t": None, "L": 3},
    "shared head": {"shared": True},
}


def layer_of(R=1, H=1, **_):
    """What serves one layer of drawn data: trials in lanes, or few vectors on the rows of the factor."""
    return " trials" if R >= 16 else " rows" if R * H <= 2 else ""


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("shape", LAYER)
def test_one_layer_is_that_of_kept_data(shape, name, dtype, instruction_set):
    label = f"{instruction_set} {str(dtype)[6:]} sampled" + layer_of(**LAYER[shape])
    for n, options in ((9, {}), (0, {"see_query": True}), (2, {"scale": 0.3, "see_query": True})):
        assert_equal_to_kept("sampled_loss", name, dtype, n, 150, LAYER[shape], options, label=label)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("name", ["everything", "300 tasks", "fixed"])
@pytest.mark.parametrize("shape", STACK)
def test_a_stack_is_that_of_kept_data(shape, name, dtype, instruction_set):
    # A stack of one layer without residual is a layer, and is served as one.
    label = f"{instruction_set} {str(dtype)[6:]} sampled" + (" stack" if STACK[shape].get("L", 2) > 1 else " rows")
    for n, options in ((9, {}), (0, {"see_query": True}), (2, {"first_skip": False, "residual": 0.5})):
        assert_equal_to_kept("sampled_stack_loss", name, dtype, n, 150, STACK[shape], options, label=label)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("op", ["sampled_loss", "sampled_stack_loss"])
@pytest.mark.parametrize("batch", [0, 1, 7, 9, 17, 63, 65, 300])
def test_batches_and_weights(batch, op):
    """Batches that do not fill lanes or blocks; a weight for each task, absent ones included."""
    for name in ("mixture", "300 tasks"):
        K = SOURCES[name].K
        weight = [(k % 5) / K for k in range(K)]
        for options in ({}, {"weight": weight}, {"weight": torch.tensor(weight, dtype=DOUBLE)}):
            assert_equal_to_kept(op, name, DOUBLE, 5, batch, {"R": 3}, options)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("op", ["sampled_loss", "sampled_stack_loss"])
def test_gradients_of_per_task_losses(op):
    """The backward draws the data again."""
    for dtype in DTYPES:
        for options in ({}, {"weight": [0.2, 0.3, 0.5]}):
            assert_equal_to_kept(op, "mixture", dtype, 9, 150, {"R": 3}, options, per_task=True)


@pytest.mark.usefixtures("instruction_set")
def test_absent_tasks_have_no_loss_and_no_gradient():
    source, batch = SOURCES["300 tasks"], 100
    given = differentiable(parameters(source, "sampled_loss"), DOUBLE)
    found = results(sampled("sampled_loss", source, 9, batch), given)
    count = torch.bincount(source.sample_gram(batch, 9, **AT)[3], minlength=300)
    assert (count == 0).sum() > 200
    for name in ("per_task", "dp", "dv"):
        is_zero = (found[name].reshape(300, -1) == 0).all(1)
        assert torch.equal(is_zero, count == 0), name


@pytest.mark.usefixtures("instruction_set")
def test_exact_shares_weigh_the_tasks_exactly():
    """With task k in weight_k of the batch, the loss is the weighted sum of the per-task losses."""
    source = fl.TaskMixture(torch.eye(3), torch.stack([torch.eye(3)] * 3), [0.5, 0.375, 0.125], stratify=True)
    given = parameters(source, "sampled_loss")
    for offset in (0, 3):
        loss, per_task = sampled("sampled_loss", source, 9, 800, offset=offset)(**given)
        assert_close(per_task @ source.weights, loss, 1e-14)
        assert_close(
            sampled("sampled_loss", source, 9, 800, offset=offset, weight=source.weights)(**given)[0], loss, 1e-14
        )


@pytest.mark.parametrize("op", ["sampled_loss", "sampled_stack_loss"])
def test_forward_alone_has_the_same_bits(op, instruction_set):
    given = differentiable(parameters(SOURCES["mixture"], op, R=3), torch.float32)
    call = sampled(op, SOURCES["mixture"], 9, 150)
    expected = call(**given)
    assert all(value.requires_grad for value in expected)
    with torch.no_grad():
        found = call(**given)
    assert cpu.backend.last_kernel.startswith(f"{instruction_set} float32 sampled")
    for a, b in zip(found, expected, strict=True):
        assert not a.requires_grad
        assert torch.equal(a, b)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("op", ["sampled_loss", "sampled_stack_loss"])
def test_only_what_is_asked_for_is_differentiated(op):
    given = differentiable(parameters(SOURCES["mixture"], op), DOUBLE)
    whole = results(sampled(op, SOURCES["mixture"], 9, 50), given)
    for name in given:
        alone = {k: t.detach().requires_grad_(k == name) for k, t in given.items()}
        found = results(sampled(op, SOURCES["mixture"], 9, 50), alone)
        assert found.keys() == {"loss", "per_task", f"d{name}"}
        assert_close(found[f"d{name}"], whole[f"d{name}"], 1e-13)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("op", ["sampled_loss", "sampled_stack_loss"])
@pytest.mark.parametrize("weight", [None, [0.2, 0.3, 0.5]])
def test_second_derivatives(op, weight):
    """Of loss and per-task losses: a product of the Hessian with a vector."""
    source = SOURCES["mixture"]
    products = []
    for call in (
        sampled(op, source, 9, 40, weight=weight),
        kept(op, source, 9, 40, DOUBLE, weight=weight, backend="eager"),
    ):
        given = differentiable(parameters(source, op, R=2), DOUBLE)
        loss, per_task = call(**given)
        total = loss.square().sum() + (per_task * torch.arange(1, 7, dtype=DOUBLE).view(2, 3)).sum()
        grads = torch.autograd.grad(total, list(given.values()), create_graph=True)
        along = sum((g * (torch.arange(g.numel(), dtype=DOUBLE) + 1).cos().view(g.shape)).sum() for g in grads)
        products.append([*grads, *torch.autograd.grad(along, list(given.values()))])
    assert_close(*products)
    # Prompts of the task that never comes have none; every letter has others.
    assert all(product.abs().max() > 1e-6 for product in products[0])


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("op", ["sampled_loss", "sampled_stack_loss"])
def test_parameters_need_not_be_contiguous(op):
    given = parameters(SOURCES["mixture"], op, R=3)
    expected = results(sampled(op, SOURCES["mixture"], 9, 50), differentiable(given, DOUBLE))
    other = {name: t.mT.contiguous().mT.requires_grad_() for name, t in given.items()}
    assert not any(t.is_contiguous() for t in other.values())
    found = results(sampled(op, SOURCES["mixture"], 9, 50), other)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("op", "names"), [("sampled_loss", "pWv"), ("sampled_stack_loss", "pACh")])
def test_numbers_that_are_not_finite(op, names, instruction_set):
    """They raise when that is asked for, and spread otherwise."""
    source = SOURCES["mixture"]
    for name in names:
        given = parameters(source, op)
        given[name].view(-1)[0] = torch.nan
        with pytest.raises(ValueError, match=f"{op}: {name} "):
            sampled(op, source, 9, 50, check_finite=True)(**given)
        assert sampled(op, source, 9, 50)(**given)[0].isnan()
    loss, _ = sampled(op, source, 9, 50, check_finite=True)(**parameters(source, op))
    assert loss.isfinite()
    assert cpu.backend.last_kernel.startswith(f"{instruction_set} float64 sampled")


def test_instruction_sets_agree():
    """float64 to 1e-12: nothing but the order of sums and the last bits of the draws differ."""
    source = SOURCES["everything"]
    found = []
    for label in INSTRUCTION_SETS:
        with cpu.using(label):
            given = differentiable(parameters(source, "sampled_loss", R=2), DOUBLE)
            found.append(results(sampled("sampled_loss", source, 9, 300, backend="cpu"), given))
            assert cpu.backend.last_kernel.split()[0] == label
    for other in found[1:]:
        assert_close(list(other.values()), list(found[0].values()), 1e-12)
