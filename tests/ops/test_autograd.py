"""First and second derivatives, forward mode and torch.func, and that the reverse mode by hand is what runs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.op_cases import LOSSES, PREDICTIONS, assert_close, gradients, make
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import fastlin as fl
from fastlin.backends import eager

OPS = LOSSES + PREDICTIONS
SMALL = {"B": 3, "n": 2, "m": 2, "K": 2, "t": 1}
VARIANTS = [
    {"see_query": True, "scale": 0.5},
    {"R": 2, "H": 2},
    {"L": 3, "shared_head": True, "see_query": True, "scale": 0.2},
    {"L": 1, "R": 2},
]


def ready(op, variant):
    options = {name: value for name, value in variant.items() if "stack" in op or name != "L"}
    case = make(op, **{**SMALL, **options}).differentiable()
    names = list(case.leaves())
    return lambda *tensors: case(**dict(zip(names, tensors, strict=True))), tuple(case.leaves().values())


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_gradcheck(op, variant):
    function, leaves = ready(op, variant)
    assert gradcheck(function, leaves)


@pytest.mark.usefixtures("eager_alone")
@pytest.mark.parametrize("variant", VARIANTS[:3], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_gradgradcheck(op, variant):
    function, leaves = ready(op, variant)
    assert gradgradcheck(function, leaves)


@pytest.mark.usefixtures("any_backend")
def test_gradcheck_gram():
    case = make("predict", **SMALL, R=2).differentiable()
    z, q, p = (case.inputs[name] for name in "zqp")

    def function(z, q, p):
        return fl.gram(z, p, case.task, q, see_query=True)

    assert gradcheck(function, (z, q, p), check_forward_ad=True)
    assert gradgradcheck(function, (z, q, p))


@pytest.mark.parametrize("variant", [VARIANTS[0], {"shared_head": True, "t": None}], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_forward_mode(op, variant):
    function, leaves = ready(op, variant)
    assert gradcheck(function, leaves, check_forward_ad=True, check_backward_ad=False)


@pytest.fixture
def calls(monkeypatch):
    """Counts the runs of eager's forward pass and of its reverse mode."""
    counts = {"_forward": 0, "_reverse": 0}
    for name in counts:
        original = getattr(eager, name)

        def counted(*args, name=name, original=original):
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(eager, name, counted)
    return counts


@pytest.mark.usefixtures("eager_alone")
@pytest.mark.parametrize("op", LOSSES)
def test_parameter_gradients_come_with_the_value(op, calls):
    case = make(op)
    case = case.differentiable(*(name for name in case.inputs if name not in "zGq"))
    loss, _ = case()
    assert calls == {"_forward": 1, "_reverse": 1}
    loss.backward()
    assert calls == {"_forward": 1, "_reverse": 1}


@pytest.mark.usefixtures("eager_alone")
@pytest.mark.parametrize("op", LOSSES)
def test_data_gradients_run_the_reverse_mode_in_the_backward(op, calls):
    loss, _ = make(op).differentiable()()
    assert calls == {"_forward": 1, "_reverse": 0}
    loss.backward()
    assert calls["_reverse"] == 1


@pytest.mark.usefixtures("eager_alone")
@pytest.mark.parametrize("op", OPS)
def test_evaluation_makes_no_gradients(op, calls):
    case = make(op)
    result = case()
    with torch.no_grad():
        case.differentiable()()
    assert calls["_reverse"] == 0
    assert not any(t.requires_grad for t in (result if isinstance(result, tuple) else (result,)))


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize("names", [("p",), ("W",), ("v", "q"), ("z",), ("p", "v")])
def test_some_inputs_alone(names):
    case = make("prompt_loss").differentiable(*names)
    assert_close(gradients(case), gradients(case, fl.reference))


@pytest.mark.usefixtures("any_backend")
def test_only_per_task_is_used():
    case = make("prompt_loss", R=2).differentiable("W")
    found, expected = (torch.autograd.grad(case(module)[1][0, 1], case.inputs["W"])[0] for module in (fl, fl.reference))
    assert_close(found, expected)


@pytest.mark.usefixtures("any_backend")
def test_trials_do_not_mix():
    case = make("prompt_loss", R=3).differentiable("W", "v")
    loss, _ = case()
    dW, dv = torch.autograd.grad(loss[1], [case.inputs["W"], case.inputs["v"]])
    assert (dW[[0, 2]] == 0).all()
    assert (dv[[0, 2]] == 0).all()
    assert (dW[1] != 0).all()


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize("op", LOSSES)
def test_gradient_of_a_gradient_norm(op):
    """Through create_graph, with parameters alone: the case where the first backward only scales."""
    names = ("p", "A", "C", "h") if "stack" in op else ("p", "W", "v")
    results = []
    for module in (fl, fl.reference):
        case = make(op).differentiable(*names)
        leaves = list(case.leaves().values())
        grads = torch.autograd.grad(case(module)[0], leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
    assert_close(*results)


@pytest.mark.parametrize(("name", "tensor"), [("y", "y"), ("weight", "weight")])
def test_what_is_not_differentiated_is_refused(name, tensor):
    case = make("prompt_loss", weight=torch.ones(3, dtype=torch.float64))
    target = case.y if name == "y" else case.options["weight"]
    target.requires_grad_()
    with pytest.raises(ValueError, match=rf"prompt_loss: {tensor} requires grad; wants {tensor}\.detach\(\)"):
        case()


def parameters_of(case, module=fl):
    names = [name for name in case.inputs if name not in "zGq"]
    values = tuple(case.inputs[name] for name in names)
    return values, lambda *p: case(module, **dict(zip(names, p, strict=True)))


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize("op", LOSSES)
def test_func_grad_and_hessian(op):
    case = make(op, **SMALL)
    values, function = parameters_of(case)
    _, literal = parameters_of(case, fl.reference)
    for transform in (torch.func.grad, torch.func.hessian):
        found, expected = (
            transform(lambda *p, f=f: f(*p)[0], tuple(range(len(values))))(*values) for f in (function, literal)
        )
        if transform is torch.func.hessian:
            found, expected = sum(found, ()), sum(expected, ())
        assert_close(found, expected)


@pytest.mark.usefixtures("eager_alone")
@pytest.mark.parametrize("traceable", [True, False])
@pytest.mark.parametrize("form", [{}, {"R": 2}, {"R": 2, "H": 2}, {"shared_head": True, "t": None}])
@pytest.mark.parametrize("op", OPS)
def test_vmap_over_parameters_is_one_call(op, form, traceable, monkeypatch, calls):
    """A batch of parameters becomes a batch of trials, whatever the backend is made of."""
    monkeypatch.setattr(eager.backend, "traceable", traceable)
    check_vmap_over_parameters(op, form)
    assert calls["_forward"] == (1 if op in PREDICTIONS else 2)


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize("form", [{}, {"R": 2}, {"R": 2, "H": 2}, {"shared_head": True, "t": None}])
@pytest.mark.parametrize("op", OPS)
def test_vmap_over_parameters(op, form):
    check_vmap_over_parameters(op, form)


def check_vmap_over_parameters(op, form):
    cases = [make(op, **form, seed=seed) for seed in range(3)]
    names = [name for name in cases[0].inputs if name not in "zGq" and cases[0].inputs[name] is not None]
    batch = [torch.stack([case.inputs[name] for case in cases]) for name in names]

    def call(*parameters):
        return cases[0](**dict(zip(names, parameters, strict=True)))

    found = torch.vmap(call)(*batch)
    rows = [cases[0](fl.reference, **{name: case.inputs[name] for name in names}) for case in cases]
    if op in PREDICTIONS:
        assert_close(found, torch.stack(rows))
        return
    assert_close(found, [torch.stack(column) for column in zip(*rows, strict=True)])
    one = torch.vmap(call, (0, *(None,) * (len(names) - 1)))(batch[0], *(b[0] for b in batch[1:]))
    rows = [cases[0](fl.reference, **{names[0]: case.inputs[names[0]]}) for case in cases]
    assert_close(one, [torch.stack(column) for column in zip(*rows, strict=True)])


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize("traceable", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_vmap_over_data(op, traceable, monkeypatch):
    monkeypatch.setattr(eager.backend, "traceable", traceable)
    case = make(op, B=12)
    first = next(iter(case.inputs))
    x, q, y, task = (t.unflatten(0, (3, 4)) for t in (case.inputs[first], case.inputs["q"], case.y, case.task))
    parameters = [case.inputs[name] for name in case.inputs if name not in "zGq"]

    def call(module, x, q, y, task):
        data = (x, q) if op in PREDICTIONS else (x, q, y)
        return getattr(module, op)(*data, task, *parameters)

    found = torch.vmap(lambda *data: call(fl, *data), (0, 0, 0, 0))(x, q, y, task)
    rows = [call(fl.reference, x[i], q[i], y[i], task[i]) for i in range(3)]
    if op in PREDICTIONS:
        assert_close(found, torch.stack(rows))
    else:
        assert_close(found, [torch.stack(column) for column in zip(*rows, strict=True)])


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize("op", ["prompt_loss", "stack_loss"])
def test_gradients_of_each_sequence(op):
    case = make(op, B=5)
    names = [name for name in case.inputs if name not in "zGq"]
    values = tuple(case.inputs[name] for name in names)

    def of_one(module):
        def loss(parameters, z, q, y, k):
            return getattr(module, op)(z[None], q[None], y[None], k[None], *parameters)[0]

        return torch.func.grad(loss)

    data = (case.inputs["z"], case.inputs["q"], case.y, case.task)
    found = torch.vmap(of_one(fl), (None, 0, 0, 0, 0))(values, *data)
    rows = [of_one(fl.reference)(values, *(t[i] for t in data)) for i in range(5)]
    assert_close(found, [torch.stack(column) for column in zip(*rows, strict=True)])


@pytest.mark.usefixtures("any_backend")
def test_backward_through_vmap():
    case = make("prompt_loss")
    W = torch.stack([case.inputs["W"], -case.inputs["W"]]).requires_grad_()
    found = torch.autograd.grad(torch.vmap(lambda W: case(W=W)[0])(W).sum(), W)
    expected = torch.autograd.grad(sum(case(fl.reference, W=w)[0] for w in W), W)
    assert_close(found, expected)


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize("traceable", [True, False])
def test_vmap_of_gram(traceable, monkeypatch):
    monkeypatch.setattr(eager.backend, "traceable", traceable)
    case = make("predict", B=6)
    z, q, p = (case.inputs[name] for name in "zqp")
    batches = z.unflatten(0, (2, 3)), q.unflatten(0, (2, 3)), case.task.unflatten(0, (2, 3))
    found = torch.vmap(lambda z, q, task: fl.gram(z, p, task, q, see_query=True))(*batches)
    assert_close(found.flatten(0, 1), fl.reference.gram(z, p, case.task, q, see_query=True))


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize("op", LOSSES)
def test_checkpointing(op):
    """torch.utils.checkpoint lets saved tensors be unpacked once."""
    for names in ((), ("p", "A", "C", "h", "W", "v")):
        case = make(op).differentiable(*names)
        leaves = case.leaves()

        def run(*tensors, case=case, leaves=leaves):
            return case(**dict(zip(leaves, tensors, strict=True)))[0]

        loss = checkpoint(run, *leaves.values(), use_reentrant=False)
        found = torch.autograd.grad(loss, list(leaves.values()))
        assert_close(found, torch.autograd.grad(case(fl.reference)[0], list(leaves.values())))


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize("name", ["z", "W", "task"])
def test_inputs_changed_before_the_backward_are_refused(name):
    case = make("prompt_loss").differentiable("W", "v")
    loss, _ = case()
    with torch.no_grad():
        (case.task if name == "task" else case.inputs[name]).mul_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("any_backend")
def test_nested_vmap():
    case = make("prompt_loss")
    W = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    z = torch.randn(2, 6, 4, 5, dtype=torch.float64)

    def expected(z, W):
        rows = [[case(fl.reference, z=a, W=b)[0] for b in row] for a, row in zip(z, W, strict=True)]
        return torch.stack([torch.stack(row) for row in rows])

    same = [case.inputs["z"]] * 2
    assert_close(torch.vmap(torch.vmap(lambda W: case(W=W)[0]))(W), expected(same, W))
    found = torch.vmap(lambda z, W: torch.vmap(lambda W: case(z=z, W=W)[0])(W))(z, W)
    assert_close(found, expected(z, W))


@pytest.mark.usefixtures("any_backend")
def test_two_python_threads():
    cases = [make("stack_loss", seed=seed).differentiable() for seed in range(6)]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(gradients, cases))
    for case, found in zip(cases, results, strict=True):
        assert_close(found, gradients(case, fl.reference))


def forward_results(case, module):
    """Tangents, Jacobians and second Jacobians in the first parameter, all by forward mode."""
    name = next(name for name in case.inputs if name in "WA")
    x = case.inputs[name]

    def function(x):
        result = case(module, **{name: x})
        return result[0] if isinstance(result, tuple) else result

    direction = torch.ones_like(x)
    results = [torch.func.jvp(function, (x,), (direction,))[1], torch.func.jacfwd(function)(x)]
    results.append(torch.func.jacfwd(torch.func.jacfwd(function))(x))
    with forward_ad.dual_level():
        for leaf in (x, x.clone().requires_grad_()):
            dual = function(forward_ad.make_dual(leaf, direction))
            results.append(forward_ad.unpack_dual(dual).tangent.detach())
    return results


@pytest.mark.parametrize("traceable", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_forward_mode_against_the_reference(op, traceable, monkeypatch):
    """Also over itself, where an autograd.Function would give a silent zero, and whatever the backend is made of."""
    monkeypatch.setattr(eager.backend, "traceable", traceable)
    for form in ({}, {"shared_head": True, "t": None}):
        case = make(op, **{**SMALL, **form})
        assert_close(forward_results(case, fl), forward_results(case, fl.reference))


def test_forward_mode_of_gram():
    case = make("predict", **SMALL)
    z = case.inputs["z"]
    for transform in (torch.func.jacfwd, lambda f: torch.func.jacfwd(torch.func.jacfwd(f))):
        assert_close(transform(fl.gram)(z), transform(fl.reference.gram)(z))


@pytest.mark.usefixtures("any_backend")
def test_second_derivatives_without_known_tasks():
    case = make("prompt_loss", **{**SMALL, "t": None, "shared_head": True})
    values, function = parameters_of(case)
    W, v = values[1:]
    found, expected = (
        torch.func.hessian(lambda W, f=f: f(None, W, v)[0])(W) for f in (function, parameters_of(case, fl.reference)[1])
    )
    assert_close(found, expected)
    results = []
    for f in (function, parameters_of(case, fl.reference)[1]):
        leaf = W.clone().requires_grad_()
        (dW,) = torch.autograd.grad(f(None, leaf, v)[0], leaf, create_graph=True)
        results.append(torch.autograd.grad(dW.square().sum(), leaf)[0])
    assert_close(*results)
