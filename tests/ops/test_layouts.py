"""Inputs that are sliced, permuted, expanded or empty; task indices of any integer type; float32."""

import pytest
import torch
from support.op_cases import LOSSES, PREDICTIONS, assert_close, gradients, make

import fastlin as fl

OPS = LOSSES + PREDICTIONS


def sliced(t):
    """Every second element of a larger tensor, in each dimension."""
    big = t.new_full([2 * s for s in t.shape], float("nan"))
    view = big[tuple(slice(None, None, 2) for _ in t.shape)]
    return view.copy_(t)


def permuted(t):
    """The last dimension strides most."""
    return t.movedim(-1, 0).contiguous().movedim(0, -1)


def expanded(t):
    """One row, repeated without memory."""
    return t[:1].expand_as(t)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("R", [None, 2])
@pytest.mark.parametrize("layout", [sliced, permuted, expanded])
@pytest.mark.parametrize("op", OPS)
def test_strides(op, layout, R):
    case = make(op, R=R)
    inputs = {name: layout(t) for name, t in case.inputs.items()}
    assert any(not t.is_contiguous() for t in inputs.values())
    plain = {name: t.clone(memory_format=torch.contiguous_format) for name, t in inputs.items()}
    assert_close(case(**inputs), case(fl.reference, **plain))
    leaves = [t.detach().requires_grad_() for t in inputs.values()]
    found = case(**dict(zip(inputs, leaves, strict=True)))
    total = sum(r.sum() for r in (found if isinstance(found, tuple) else (found,)))
    literal = [t.requires_grad_() for t in plain.values()]
    expected = case(fl.reference, **plain)
    reference = sum(r.sum() for r in (expected if isinstance(expected, tuple) else (expected,)))
    assert_close(torch.autograd.grad(total, leaves), torch.autograd.grad(reference, literal))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("op", OPS)
def test_inputs_are_not_written(op):
    case = make(op).differentiable()
    before = {name: t.detach().clone() for name, t in case.inputs.items()}
    versions = {name: t._version for name, t in case.inputs.items()}
    gradients(case)
    for name, t in case.inputs.items():
        assert torch.equal(t.detach(), before[name])
        assert t._version == versions[name]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_task_dtypes(dtype):
    case = make("prompt_loss")
    other = type(case)(**{**vars(case), "task": case.task.to(dtype)})
    for module in (fl, fl.reference):
        assert_close(other(module), case(module), 0.0)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("op", LOSSES)
def test_empty_batch(op):
    case = make(op, B=0, R=2).differentiable()
    loss, per_task = case()
    assert loss.tolist() == [0.0, 0.0]
    assert per_task.tolist() == [[0.0] * 3] * 2
    for grad in gradients(case):
        assert (grad == 0).all()
    weighted, _ = case(weight=[1.0, 1.0, 1.0])
    assert weighted.tolist() == [0.0, 0.0]


@pytest.mark.usefixtures("backend")
def test_empty_batch_without_known_tasks():
    case = make("prompt_loss", B=0, t=None, shared_head=True)
    for module in (fl, fl.reference):
        loss, per_task = case(module)
        assert loss.item() == 0.0
        assert per_task.tolist() == [0.0]


@pytest.mark.usefixtures("backend")
def test_tasks_from_the_largest_index():
    case = make("prompt_loss", K=5, t=None, shared_head=True)
    _, per_task = case()
    assert per_task.shape == (int(case.task.max()) + 1,)
    assert case(weight=[0.2] * 7)[1].shape == (7,)
    assert_close(case(weight=[0.2] * 7), case(fl.reference, weight=[0.2] * 7))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("form", [{}, {"R": 3}, {"R": 2, "H": 2}])
@pytest.mark.parametrize("op", OPS)
def test_float32(op, form):
    """Values within the forward error bound of the formulas.

    A result is a sum of products of the inputs' entries. With every entry replaced by its absolute value the same
    formulas give S, and k roundings in a row, each of at most eps = 2^-24, move the result by at most k eps S. A layer
    has inner products over m (twice) and over n + t tokens, then the heads; a stack repeats products over m, four to
    a layer.
    """
    L, n, m, t = 3, 12, 5, 2
    case = make(op, n=n, m=m, t=t, L=L, B=8, **form)
    single = case.to(torch.float32)
    magnitude = type(case)(
        case.op, {name: x.abs() for name, x in case.inputs.items()}, -case.y.abs(), case.task, case.options
    )
    roundings = 2 * (n + t + 4 * m * (L if "stack" in op else 1) + 8)
    found, expected, bound = single(), single.to(torch.float64)(fl.reference), magnitude(fl.reference)
    for a, b, s in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, expected, bound)), strict=True):
        assert a.dtype == torch.float32
        assert ((a.double() - b).abs() <= roundings * 2.0**-24 * s.abs()).all()


@pytest.mark.usefixtures("backend")
def test_float32_gradients_have_their_dtype():
    case = make("stack_loss", dtype=torch.float32).differentiable()
    for leaf, grad in zip(case.leaves().values(), gradients(case), strict=True):
        assert grad.dtype == torch.float32
        assert grad.shape == leaf.shape


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("op", OPS)
def test_autocast_does_not_touch_the_precision(op):
    case = make(op, dtype=torch.float32).differentiable()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, grads = case(), gradients(case)
        G = fl.gram(make("predict", dtype=torch.float32).inputs["z"])
    assert_close(found, case(), 0.0)
    assert_close(grads, gradients(case), 0.0)
    assert_close(G, fl.gram(make("predict", dtype=torch.float32).inputs["z"]), 0.0)


@pytest.mark.parametrize("op", OPS)
def test_meta_tensors(op):
    """Shapes without numbers, as for planning memory."""
    case = make(op, R=2)
    expected = case()
    inputs = {name: t.to("meta") for name, t in case.inputs.items()}
    other = type(case)(case.op, inputs, case.y.to("meta"), case.task.to("meta"), case.options)
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (other(), expected)), strict=True):
        assert a.is_meta
        assert a.shape == b.shape
    assert fl.gram(make("predict").inputs["z"].to("meta")).shape == (6, 5, 5)
