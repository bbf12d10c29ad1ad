"""The ops that draw their own data: the same as drawing it and calling the others."""

import re

import pytest
import torch
from support.op_cases import DOUBLE, assert_close

import fastlin as fl
from fastlin.backends import cpu

EYE = torch.eye(3, dtype=DOUBLE)
MIX = fl.TaskMixture([[1.0, 2.0, 0.0], [0.0, 1.0, -1.0]], torch.stack([EYE, 2 * EYE]), [0.4, 0.6], noise_std=0.3)
PLACE = {"seed": 3, "step": 4, "stream": 5, "offset": 6}
# A loss on the rows of drawn factors against one on their Gram matrices: entries are rounded twice, 2 * 87 eps at d = 3
# (test_sampler_kernels.py), and a square has twice their error.
ROWS = 4 * 87 * 2.0**-52
SOURCES = {
    "mixture": MIX,
    "sphere": fl.SphereTasks(3, noise_std=0.1),
    "fixed": fl.FixedTask([1.0, 2.0, 3.0]),
    "points": fl.PointSet(torch.randn(30, 3, generator=torch.Generator().manual_seed(0)), torch.arange(30.0) / 10),
}


def parameters(op, K, lead=(), heads=(), dtype=DOUBLE):
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return (0.3 * torch.randn(*shape, dtype=DOUBLE, generator=generator)).to(dtype).requires_grad_()

    if op == "sampled_loss":
        return [normal(*lead, K, 2, 4), normal(*lead, *heads, 4, 4), normal(*lead, *heads, K, 4)]
    return [normal(*lead, K, 2, 4), normal(*lead, 2, *heads, 4, 4), normal(*lead, 2, *heads, 4, 4), normal(*lead, K, 4)]


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize("n", [0, 2, 7])
@pytest.mark.parametrize(("lead", "heads"), [((), ()), ((3,), ()), ((2,), (2,))])
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("op", ["sampled_loss", "sampled_stack_loss"])
def test_is_sampling_then_loss(op, name, lead, heads, n, monkeypatch):
    """Bit for bit, unless the kernel streams the rows of the drawn factor, and never forms the Gram matrix."""
    monkeypatch.setattr(cpu.backend, "last_kernel", None)
    source = SOURCES[name]
    given = parameters(op, source.K, lead, heads)
    options = {"scale": 0.2, "see_query": True, "weight": [1.0 / source.K] * source.K}
    stack = "stack_" if "stack" in op else ""
    if name == "points":
        data, other = source.sample(9, n, **PLACE, dtype=DOUBLE), "stack_loss" if stack else "prompt_loss"
    else:
        data, other = source.sample_gram(9, n, **PLACE, dtype=DOUBLE), f"gram_{stack}loss"
    found = getattr(fl, op)(source, n, 9, *given, **PLACE, **options)
    rows = (cpu.backend.last_kernel or "").endswith("sampled rows")
    assert_close(found, getattr(fl, other)(*data, *given, **options), ROWS if rows else 0.0)
    literal = getattr(fl.reference, op)(source, n, 9, *given, **PLACE, **options)
    assert_close(found, literal)
    assert_close(getattr(fl, op)(source, n, 9, *given, **PLACE, **options, backend="reference"), literal, 0.0)
    grads = [torch.autograd.grad(loss.sum(), given) for loss, _ in (found, literal)]
    assert_close(*grads)


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize("op", ["sampled_loss", "sampled_stack_loss"])
def test_pieces_by_offset_add_up(op):
    given = parameters(op, 2)
    whole, _ = getattr(fl, op)(MIX, 4, 100, *given, seed=1, step=2)
    parts = [getattr(fl, op)(MIX, 4, 50, *given, seed=1, step=2, offset=start)[0] for start in (0, 50)]
    assert_close(sum(parts) / 2, whole, 1e-13)


def test_every_task_of_the_source_is_reported():
    W, v = torch.eye(4), torch.ones(4)
    for backend in ("eager", "reference"):
        _, per_task = fl.sampled_loss(MIX, 3, 1, None, W, v, seed=0, step=0, backend=backend)
        assert per_task.shape == (2,)
        _, per_task = fl.sampled_loss(MIX, 3, 0, None, W, v, seed=0, step=0, backend=backend)
        assert per_task.tolist() == [0.0, 0.0]


@pytest.mark.usefixtures("any_backend")
def test_float32_follows_the_parameters():
    loss, _ = fl.sampled_loss(MIX, 5, 8, *parameters("sampled_loss", 2, dtype=torch.float32), seed=0, step=0)
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("n", [5, 10**9])
def test_the_best_predictor_reaches_its_loss(n):
    """The decoupled optimum, with heads and prompts, within four standard errors of its closed form."""
    optimum = fl.theory.decoupled(MIX, n)
    p, W, v = optimum.attention()
    losses = torch.stack([fl.sampled_loss(MIX, n, 2000, p, W, v, seed=7, step=step)[0] for step in range(20)])
    error = losses.std() / 20**0.5
    assert abs(losses.mean() - optimum.loss) < 4 * error


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mix": 3}, TypeError, "mix is a int; wants a task source such as fastlin.SphereTasks(10)"),
        ({"W": torch.zeros(5, 5, dtype=DOUBLE)}, ValueError, "W has shape (5, 5); wants (m, m) with m = 4 (from mix)"),
        (
            {"v": torch.zeros(3, 4, dtype=DOUBLE)},
            ValueError,
            "v has shape (3, 4); wants (K, m) beside W (m, m) with K = 2 (from mix), m = 4 (from mix)",
        ),
        ({"p": torch.zeros(2, 4, dtype=DOUBLE)}, ValueError, "p has shape (2, 4); wants (K, t, m) beside W (m, m)"),
        ({"v": torch.zeros(2, 4)}, TypeError, "v has dtype torch.float32; wants torch.float64, as W has"),
        ({"W": torch.zeros(4, 4, dtype=torch.int64)}, TypeError, "W has dtype torch.int64; wants torch.float32 or"),
        ({"weight": [1.0]}, ValueError, "weight has shape (1,); wants (K,) with K = 2 (from mix)"),
        ({"backend": "fast"}, ValueError, "backend is 'fast'; wants one of"),
        ({"n": -1}, ValueError, "n: got -1, wants an integer"),
        ({"batch": 2.5}, TypeError, "batch: got 2.5 (float), wants an integer"),
        ({"step": -1}, ValueError, "step: got -1, wants an integer"),
    ],
)
def test_wrong_calls(change, error, message):
    p, W, v = parameters("sampled_loss", 2)
    arguments = {"mix": MIX, "n": 3, "batch": 4, "p": p, "W": W, "v": v, "seed": 0, "step": 0}
    fl.sampled_loss(**arguments)
    with pytest.raises(error, match=re.escape(message)):
        fl.sampled_loss(**{**arguments, **change})


@pytest.mark.usefixtures("any_backend")
def test_transforms():
    """torch.func works through sampling, and torch.compile breaks the graph around it."""
    p, W, v = (t.detach() for t in parameters("sampled_loss", 2))

    def function(W, module=fl):
        return module.sampled_loss(MIX, 4, 20, p, W, v, seed=1, step=2)[0]

    expected = torch.func.grad(lambda W: function(W, fl.reference))(W)
    assert_close(torch.func.grad(function)(W), expected)
    batch = torch.stack([W, 2 * W])
    assert_close(torch.vmap(function)(batch), torch.stack([function(w, fl.reference) for w in batch]))
    torch._dynamo.reset()
    # The graph breaks around the sampling: Gram matrices in place of the rows of their factors.
    assert_close(torch.compile(function, backend="aot_eager")(W), function(W), ROWS)
