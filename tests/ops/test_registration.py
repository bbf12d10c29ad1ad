"""The registered ops: opcheck, fake kernels, torch.compile and torch.export."""

import pytest
import torch
from support.op_cases import LOSSES, PREDICTIONS, assert_close, gradients, make
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import fastlin as fl
from fastlin.backends.problem import LETTERS, Options

FORMS = [{}, {"R": 2}, {"R": 2, "H": 2, "see_query": True}, {"shared_head": True, "t": None}]
NAMED = [("eager", form) for form in FORMS] + [("cpu", FORMS[0]), ("cpu", FORMS[2])]


def flat(case, extra=(), backend="auto", tasks=3):
    """Arguments of the registered op."""
    given = {"x": next(iter(case.inputs.values())), "task": case.task, **case.inputs}
    options = {"scale": 0.5, "first_skip": 1.0, "skip": 1.0, "see_query": True, "check_finite": False}
    tensors = [given.get(letter) for letter in LETTERS]
    return (*tensors, *extra, *Options(case.op, tasks, **options, backend=backend))


@pytest.mark.parametrize(("backend", "form"), NAMED, ids=str)
@pytest.mark.parametrize("op", LOSSES)
def test_opcheck_loss(op, backend, form):
    case = make(op, **form)
    parameters = [name for name in case.inputs if name not in "zGq"]
    wants = "".join(name for name in parameters if case.inputs[name] is not None)
    weight = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    opcheck(torch.ops.fastlin.loss, flat(case.differentiable(*parameters), (case.y, None, wants), backend))
    opcheck(torch.ops.fastlin.loss, flat(case.differentiable(), (case.y, weight, ""), backend))


@pytest.mark.parametrize(("backend", "form"), NAMED, ids=str)
@pytest.mark.parametrize("op", PREDICTIONS)
def test_opcheck_predict(op, backend, form):
    case = make(op, **form)
    gy = torch.ones_like(case())
    wants = "xq" + "".join(name for name in case.inputs if name not in "zGq" and case.inputs[name] is not None)
    opcheck(torch.ops.fastlin.predict, flat(case.differentiable(), backend=backend))
    opcheck(torch.ops.fastlin.predict_bwd, flat(case, (gy, wants), backend))


@pytest.mark.parametrize("op", LOSSES)
def test_opcheck_with_unknown_tasks(op):
    """K from the data: sizes that tracing cannot know, which torch's partitioner does not differentiate."""
    case = make(op, shared_head=True, t=None)
    opcheck(torch.ops.fastlin.loss, flat(case, (case.y, None, ""), tasks=-1))


def flat_gram(z, p=None, task=None, q=None, *, tasks, see_query=False, check_finite=False, backend="auto"):
    options = Options("gram", tasks, 1.0, 0.0, 1.0, see_query, check_finite, backend)
    return (z, q, task, p, *[None] * 5, *options)


@pytest.mark.parametrize("R", [None, 2])
def test_opcheck_gram(R):
    case = make("predict", R=R).differentiable()
    z, q, p = (case.inputs[name] for name in "zqp")
    for backend in ("auto", "eager"):
        opcheck(torch.ops.fastlin.gram, flat_gram(z, p, case.task, q, tasks=3, see_query=True, backend=backend))
    opcheck(torch.ops.fastlin.gram, flat_gram(z, tasks=-1, check_finite=True, backend="cpu"))


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    return lambda function: torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(("backend", "form"), NAMED, ids=str)
@pytest.mark.parametrize("op", LOSSES + PREDICTIONS)
def test_compile(op, backend, form, compiler):
    case = make(op, **form, backend=backend).differentiable()
    names = list(case.leaves())

    class Module:
        """The ops, compiled."""

    def call(*arguments, **options):
        return getattr(fl, op)(*arguments, **options)

    setattr(Module, op, staticmethod(compiler(call)))
    assert_close(case(Module), case(), 0.0)
    for leaves in (names, [name for name in names if name not in "zGq"]):
        ready = case.differentiable(*leaves)
        for per_task in (True, False):
            assert_close(gradients(ready, Module, per_task=per_task), gradients(ready, per_task=per_task), 1e-14)


@pytest.mark.usefixtures("any_backend")
def test_compile_gram(compiler):
    case = make("predict").differentiable()
    z, q, p = (case.inputs[name] for name in "zqp")

    def function(z, q, p):
        return fl.gram(z, p, case.task, q, see_query=True).square().sum()

    found, expected = (torch.autograd.grad(f(z, q, p), (z, q, p)) for f in (compiler(function), function))
    assert_close(found, expected, 0.0)


def test_compile_inductor():
    """The default backend of torch.compile, in a training step with the ordinary torch around the op."""
    torch._dynamo.reset()
    case = make("prompt_loss").differentiable("p", "v")
    Wq, Wk = (torch.randn(5, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def step(Wq, Wk, p, v):
        return case(W=Wq @ Wk.T, p=p, v=v)[0]

    leaves = (Wq, Wk, case.inputs["p"], case.inputs["v"])
    found = torch.autograd.grad(torch.compile(step, fullgraph=True)(*leaves), leaves)
    assert_close(found, torch.autograd.grad(step(*leaves), leaves), 1e-14)


def test_compile_dynamic_batch(compiler):
    """A second batch size compiles once more, with symbolic sizes, and further ones not at all."""
    function = compiler(lambda z, q, y, task, p, W, v: fl.prompt_loss(z, q, y, task, p, W, v))
    for B in (5, 6):
        case = make("prompt_loss", B=B)
        z, q, *parameters = case.inputs.values()
        assert_close(function(z, q, case.y, case.task, *parameters), case(), 0.0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for B in (7, 11):
            case = make("prompt_loss", B=B)
            z, q, *parameters = case.inputs.values()
            assert_close(function(z, q, case.y, case.task, *parameters), case(), 0.0)


def test_compile_of_torch_func(compiler):
    """By eager's torch operations, which torch can compile, under any transform."""
    case = make("prompt_loss", scale=0.3)

    def gradient(W):
        return torch.func.grad(lambda W: case(W=W)[0])(W)

    W = case.inputs["W"]
    assert_close(compiler(gradient)(W), torch.func.grad(lambda W: case(fl.reference, W=W)[0])(W))
    batch = torch.stack([W, 2 * W])
    assert_close(compiler(torch.vmap(gradient))(batch), torch.vmap(gradient)(batch), 1e-13)
    z = case.inputs["z"]
    assert_close(compiler(torch.func.grad(lambda z: fl.gram(z).square().sum()))(z), 4 * z @ fl.gram(z), 1e-13)
    assert_close(compiler(torch.vmap(lambda z: fl.gram(z[None])))(z)[:, 0], fl.gram(z), 1e-13)


@pytest.mark.parametrize("wrong", [-1, 3])
def test_compiled_torch_func_checks_tasks(compiler, wrong):
    case = make("prompt_loss")

    def gradient(W, task):
        return torch.func.grad(lambda W: fl.prompt_loss(*_data(case), task, case.inputs["p"], W, case.inputs["v"])[0])(
            W
        )

    function = compiler(gradient)
    assert_close(function(case.inputs["W"], case.task), gradient(case.inputs["W"], case.task), 1e-13)
    with pytest.raises(RuntimeError, match=r"prompt_loss: task holds an index outside 0 <= task < K = 3"):
        function(case.inputs["W"], torch.full_like(case.task, wrong))


def test_compile_with_changing_numbers(compiler):
    """Sizes and options that vary from call to call, the scale among them: FF's is 1/(n + 1)."""

    def call(z, q, y, task, p, W, v, residual):
        return fl.prompt_loss(z, q, y, task, p, W, v, scale=residual / (z.shape[1] + 1))

    function = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, residual in ((3, 1.0), (4, 0.5), (7, 0.25), (0, 2.0)):
        case = make("prompt_loss", n=n, B=n + 2)
        z, q, *parameters = case.inputs.values()
        arguments = (z, q, case.y, case.task, *parameters, residual)
        assert_close(function(*arguments), call(*arguments), 0.0)


def test_errors_reach_the_caller_of_compiled_code(compiler):
    case = make("prompt_loss")
    function = compiler(lambda task: fl.prompt_loss(*_data(case), task, *_parameters(case))[0])
    assert_close(function(case.task), case()[0], 0.0)
    with pytest.raises(ValueError, match="prompt_loss: task holds the index 9; wants 0 <= task < K = 3"):
        function(case.task + 9 - case.task.max())


def _data(case):
    return case.inputs["z"], case.inputs["q"], case.y


def _parameters(case):
    return [case.inputs[name] for name in case.inputs if name not in "zGq"]


@pytest.mark.parametrize("op", LOSSES + PREDICTIONS)
def test_fake_tensors(op):
    case = make(op, R=2)
    expected = case()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = {name: mode.from_tensor(t) for name, t in case.inputs.items()}
        found = case(**inputs)
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, expected)), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype


def test_export():
    case = make("prompt_loss")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.W = torch.nn.Parameter(case.inputs["W"])

        def forward(self, z, q, y):
            return fl.prompt_loss(z, q, y, case.task, case.inputs["p"], self.W, case.inputs["v"])[0]

    program = torch.export.export(Model(), _data(case))
    assert "fastlin.loss" in str(program.graph)
    assert_close(program.module()(*_data(case)), case()[0], 0.0)


def registered(name, case, extra=()):
    """The registered op on flat arguments, with its results in one list."""

    def call(*arguments):
        results = getattr(torch.ops.fastlin, name)(*arguments)
        if name == "loss":
            return [*results[:2], *results[2]]
        return [results] if isinstance(results, torch.Tensor) else results

    return call, flat(case, extra)


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize("form", [{}, {"R": 2, "H": 2}])
@pytest.mark.parametrize("batched", ["W", "x", "task"])
@pytest.mark.parametrize("name", ["predict", "predict_bwd", "predict_bwd of data", "loss"])
def test_vmap_of_registered_ops(name, batched, form):
    """A batch of parameters (trials), of tokens, of task indices: as one call for each."""
    name, _, of_data = name.partition(" of ")
    case = make("prompt_loss" if name == "loss" else "predict", **form)
    gy = torch.randn_like(make("predict", **form)())
    extra = {"predict": (), "predict_bwd": (gy, "xqW" if of_data else "pWv"), "loss": (case.y, None, "pWv")}[name]
    call, arguments = registered(name, case, extra)
    position = LETTERS.index(batched)
    entries = [arguments[position], arguments[position].flip(0)]
    dims = [0 if i == position else None for i in range(len(arguments))]
    replaced = [torch.stack(entries) if i == position else a for i, a in enumerate(arguments)]
    found = torch.vmap(call, tuple(dims))(*replaced)
    rows = [call(*(e if i == position else a for i, a in enumerate(arguments))) for e in entries]
    assert_close(found, [torch.stack(column) for column in zip(*rows, strict=True)], 1e-13)


@pytest.mark.usefixtures("any_backend")
def test_vmap_of_upstream_gradients():
    """Jacobians: a batch of gy alone."""
    case = make("predict", R=2)
    gy = torch.randn(3, 2, 6, dtype=torch.float64)
    call, arguments = registered("predict_bwd", case, (gy, "pWv"))
    position = len(LETTERS)
    dims = tuple(0 if i == position else None for i in range(len(arguments)))
    found = torch.vmap(call, dims)(*arguments)
    rows = [call(*(g if i == position else a for i, a in enumerate(arguments))) for g in gy]
    assert_close(found, [torch.stack(column) for column in zip(*rows, strict=True)], 1e-13)


@pytest.mark.usefixtures("any_backend")
def test_vmap_of_registered_gram():
    case = make("predict", B=6)
    z, q, p = (case.inputs[name] for name in "zqp")
    data = (z.unflatten(0, (2, 3)), case.task.unflatten(0, (2, 3)), q.unflatten(0, (2, 3)))
    found = torch.vmap(lambda z, k, q: torch.ops.fastlin.gram(*flat_gram(z, p, k, q, tasks=3, see_query=True)))(*data)
    assert_close(found.flatten(0, 1), fl.reference.gram(z, p, case.task, q, see_query=True))
