"""Calls like an accepted one are not examined again, and a wrong one never passes for it."""

import re

import pytest
import torch
from support.op_cases import assert_close, gradients, make

import fastlin as fl
from fastlin import validation
from fastlin.backends import cpu
from fastlin.ops import call

FLOAT = torch.float32


@pytest.fixture
def examined(monkeypatch):
    """Nothing accepted so far; what is found in the calls that are examined, the reference's apart."""
    counts = []
    original = validation.arguments

    def counted(*args):
        options, weight = original(*args)
        if options.backend != "reference":
            counts.append(options)
        return options, weight

    monkeypatch.setattr(call, "signatures", {})
    monkeypatch.setattr(validation, "arguments", counted)
    return counts


def weights(**changes):
    return torch.ones(3, dtype=torch.float64, **changes)


def test_a_call_is_examined_once(examined):
    for seed in range(3):
        case = make("prompt_loss", seed=seed)
        assert_close(case(), case(fl.reference, backend="reference"))
    assert [options.op for options in examined] == ["prompt_loss"]


@pytest.mark.parametrize(
    "change",
    [{"B": 7}, {"n": 5}, {"t": 3}, {"t": None}, {"R": 2}, {"shared_head": True}, {"dtype": FLOAT}, {"scale": 0.5},
     {"see_query": True}, {"check_finite": True}, {"backend": "eager"}, {"weight": weights()}],
    ids=str,
)  # fmt: skip
def test_another_call_is_examined_and_right(examined, change):
    make("prompt_loss")()
    case = make("prompt_loss", **change)
    tolerance = 1e-5 if "dtype" in change else 1e-11
    for _ in range(2):
        assert_close(case(), case(fl.reference, backend="reference"), tolerance)
    assert len(examined) == 2


# Each is equal to what was accepted, or has its shape.
WRONG = [
    ("prompt_loss", {"scale": 1.0}, {"scale": True}, TypeError, "scale is True, a bool; wants a real number"),
    ("prompt_loss", {"see_query": True}, {"see_query": 1}, TypeError, "see_query is 1; wants True or False"),
    ("prompt_loss", {"see_query": False}, {"see_query": 0.0}, TypeError, "see_query is 0.0; wants True or False"),
    ("prompt_loss", {"check_finite": True}, {"check_finite": 1}, TypeError, "check_finite is 1; wants True or False"),
    ("stack_loss", {"first_skip": True}, {"first_skip": 1}, TypeError, "first_skip is 1; wants None, True or False"),
    ("stack_loss", {"residual": 1.0}, {"residual": True}, TypeError, "residual is True, a bool; wants a real number"),
    ("prompt_loss", {}, {"backend": ["auto"]}, ValueError, "backend is ['auto']; wants one of"),
    ("prompt_loss", {}, {"scale": torch.ones(())}, TypeError, "scale is tensor(1.), a Tensor; wants a real number"),
    ("prompt_loss", {}, {"q": torch.zeros(6, 5)}, TypeError, "q has dtype torch.float32; wants torch.float64"),
    ("prompt_loss", {}, {"q": torch.zeros(5, 6, dtype=torch.float64)}, ValueError, "q has shape (5, 6); wants (B, m)"),
    ("prompt_loss", {}, {"W": torch.zeros(5, 5, dtype=torch.float64).numpy()}, TypeError, "W is a ndarray; wants a"),
    ("prompt_loss", {}, {"W": weights(device="meta")}, ValueError, "W is on device meta; wants cpu, as z is"),
    ("prompt_loss", {"weight": weights()}, {"weight": [1.0, 1.0]}, ValueError, "weight has shape (2,); wants (K,)"),
    ("prompt_loss", {"weight": weights()}, {"weight": 3}, TypeError, "weight is a int; wants a torch.Tensor or a list"),
]


@pytest.mark.parametrize(("op", "right", "wrong", "error", "message"), WRONG, ids=[row[-1] for row in WRONG])
def test_a_wrong_call_after_a_right_one(op, right, wrong, error, message):
    case = make(op, **right)
    expected = case()
    for _ in range(2):
        with pytest.raises(error, match="^" + re.escape(f"{op}: {message}")):
            case(**wrong)
        assert_close(case(), expected, 0.0)


def test_task_indices_are_looked_at_in_every_call():
    for B in (6, 60):  # one by one, and by a reduction
        case = make("prompt_loss", B=B)
        case()
        case.task[-1] = 3
        with pytest.raises(ValueError, match="prompt_loss: task holds the index 3; wants 0 <= task < K = 3"):
            case()
        case.task[-1] = -1
        with pytest.raises(ValueError, match="prompt_loss: task holds the index -1; wants 0 <= task < K = 3"):
            case()


@pytest.mark.parametrize("name", ["y", "weight"])
def test_constants_that_come_to_require_grad(name):
    case = make("prompt_loss", weight=weights())
    expected = case()
    constant = case.y if name == "y" else case.options["weight"]
    constant.requires_grad_()
    with pytest.raises(ValueError, match=f"prompt_loss: {name} requires grad"):
        case()
    with torch.no_grad():
        assert_close(case(), expected, 0.0)
    with pytest.raises(ValueError, match=f"prompt_loss: {name} requires grad"):
        case()
    constant.requires_grad_(False)
    assert_close(case(), expected, 0.0)


def test_parameters_that_come_to_require_grad(examined):
    case = make("prompt_loss", backend="eager")
    assert not case()[0].requires_grad
    for names in (("W",), ("p", "v"), ("z",), ("p", "W", "v")):
        ready = case.differentiable(*names)
        for per_task in (True, False):
            expected = gradients(ready, fl.reference, per_task=per_task, backend="reference")
            assert_close(gradients(ready, per_task=per_task), expected)
    assert not case()[0].requires_grad
    assert len(examined) == 1


def test_a_source_that_knows_more(examined):
    """The sizes that a task source tells are part of the call."""
    p, W, v = None, torch.eye(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    one, two = (fl.TaskMixture(torch.ones(K, 2), torch.eye(2).expand(K, 2, 2), [1 / K] * K) for K in (1, 2))
    for mix in (one, two, one, two):
        assert fl.sampled_loss(mix, 4, 8, p, W, v, seed=0, step=0)[1].shape == (mix.K,)
    assert len(examined) == 2


def test_as_many_are_kept_as_the_bound_says(examined, monkeypatch):
    monkeypatch.setattr(call, "MOST_SIGNATURES", 4)
    for n in range(11):
        make("prompt_loss", n=n)()
        assert 1 <= len(call.signatures) <= 4
    assert len(examined) == 11


def test_tracing_neither_reads_nor_writes_what_was_accepted(examined):
    torch._dynamo.reset()
    case = make("prompt_loss")
    function = torch.compile(lambda W: case(W=W)[0], fullgraph=True, backend="aot_eager")
    found = function(case.inputs["W"])
    assert not call.signatures
    assert_close(found, case()[0], 0.0)
    assert len(call.signatures) == 1


@pytest.fixture
def packings(monkeypatch):
    """Calls of the CPU's kernels that were packed from their problem, not prepared."""
    found = []
    original = cpu.packed

    def counted(problem, results, *rest):
        if results:
            found.append(problem)
        return original(problem, results, *rest)

    monkeypatch.setattr(cpu, "packed", counted)
    return found


@pytest.mark.parametrize("op", ["prompt_loss", "gram_loss"])
@pytest.mark.parametrize(
    "change",
    [{}, {"R": 2}, {"R": 2, "H": 3}, {"t": None}, {"weight": weights()}, {"n": 0}, {"shared_head": True},
     {"shared_head": True, "t": None, "K": None}],
    ids=str,
)  # fmt: skip
def test_the_second_call_is_prepared(packings, op, change):
    for seed in range(3):
        case = make(op, seed=seed, backend="cpu", **change)
        assert_close(case(), case(fl.reference, backend="reference"))
        ready = case.differentiable("p", "W", "v") if case.inputs["p"] is not None else case.differentiable("W", "v")
        expected = gradients(ready, fl.reference, per_task=False, backend="reference")
        assert_close(gradients(ready, per_task=False), expected)
    assert len(packings) == 2  # without gradients, and with them


def test_a_shared_head_without_prompts_has_as_many_tasks_as_the_indices_say(packings):
    case = make("prompt_loss", shared_head=True, t=None, B=9, backend="cpu").differentiable("W", "v")
    for largest in (2, 5, 0, 5):
        case.task[:] = torch.arange(9) % (largest + 1)
        assert case()[1].shape == (largest + 1,)
        expected = gradients(case, fl.reference, per_task=False, backend="reference")
        assert_close(gradients(case, per_task=False), expected)
    assert len(packings) == 3  # one for each number of tasks


def test_a_prepared_loss_takes_every_layout(packings):
    """It copies parameters that are not contiguous; tokens that are not, and negated tensors, are packed."""
    case = make("prompt_loss", backend="cpu")
    expected = case()
    assert len(packings) == 1
    z, W = case.inputs["z"], case.inputs["W"]
    for other in (W.mT.contiguous().mT, torch.stack([W, W], -1)[..., 0]):
        assert_close(case(W=other), expected)
    assert len(packings) == 1
    assert_close(case(W=torch.complex(W, -W).conj().imag), expected)
    assert len(packings) == 1
    assert_close(case(W=torch._neg_view(-W)), expected)
    assert_close(case(z=torch.stack([z, z], -1)[..., 0]), expected)
    assert len(packings) == 3
    assert_close(case(W=torch.nn.Parameter(W)), expected)
    assert len(packings) == 4  # its gradient is wanted
    assert_close(case(), expected, 0.0)
    assert len(packings) == 4


def test_tokens_of_half_precision(packings):
    case = make("prompt_loss", dtype=FLOAT, backend="cpu")
    half = case.inputs["z"].half()
    for _ in range(2):
        assert_close(case(z=half), case(fl.reference, z=half, backend="reference"), 1e-3)
    assert len(packings) == 1


def test_plans_of_a_signature_are_bounded():
    """K, where the task indices alone say it, may differ in every call."""
    case = make("prompt_loss", shared_head=True, t=None, B=9, backend="cpu")
    for largest in range(200):
        case.task[0] = largest
        case()
    assert max(len(signature.plans) for signature in call.signatures.values()) <= 64
