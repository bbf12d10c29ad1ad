"""Every contender computes what the op computes, says why it cannot run, and is refused when it is wrong."""

from dataclasses import replace

import pytest
import torch

from fastlin.bench import cases, contenders, forms, jax_peers, sampled_peers, work
from fastlin.bench.cases import Shape
from fastlin.bench.checks import WrongResultError
from fastlin.bench.contenders import Problem, SkippedError, kind

SMALL = {"B": 60, "n": 6, "m": 5}
SLOW = ("compile", "jax")  # compilers: one case of each is enough, below


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("R", [None, 2])
@pytest.mark.parametrize("op", cases.OPS)
def test_contenders_agree_with_the_reference(op, R, dtype):
    shape = Shape(op, **SMALL, R=R, K=3, t=2)
    problem = Problem(shape, dtype)
    labels = [label for label in contenders.labels(shape, ("auto", "eager")) if kind(label) not in SLOW]
    assert labels[:2] == ["fastlin", "fastlin:eager"]
    assert any(kind(label) in contenders.EAGER for label in labels)
    for label in labels:
        problem.check(label, problem.build(label))


@pytest.mark.parametrize("L", [2, 4, 8, 16])
def test_the_check_holds_at_any_depth(L):
    """Where the reference sees the first sequences only, eager in float64 must agree with it to rounding."""
    problem = Problem(Shape("stack_loss", B=300, n=50, L=L), torch.float32, scores=10_000 * L)
    for label in ("fastlin", "eager-gram"):
        problem.check(label, problem.build(label))


def test_a_compiled_contender_agrees():
    problem = Problem(Shape(**SMALL), torch.float32)
    assert set(problem.check("compile", problem.build("compile"))) == {"loss", "dp", "dW", "dv"}


@pytest.mark.parametrize(("op", "label"), [("prompt_loss", "jax"), ("stack_loss", "jax-gram"), ("gram", "jax-gram")])
@pytest.mark.parametrize("R", [None, 2])
def test_jax_agrees(op, label, R, monkeypatch):
    pytest.importorskip("jax")
    monkeypatch.setattr(contenders, "available_cores", torch.get_num_threads)
    problem = Problem(Shape(op, **SMALL, R=R), torch.float32)
    problem.check(label, problem.build(label))


def test_jax_trains():
    """At a rate of zero the loss stays, at another it falls."""
    pytest.importorskip("jax")
    shape = Shape("sampled_loss", B=2000, n=6, m=5, R=2)
    train = jax_peers.training(shape, cases.parameters_of(shape), steps=10)
    expected = sampled_peers.losses(Problem(shape, torch.float32).build("fastlin:eager"), 2, sampled_peers.OP_CALLS)
    sampled_peers.agree(sampled_peers.losses(lambda: train(0.0), 2, sampled_peers.PEER_CALLS), expected)
    for _ in range(20):
        found = train(1e-2)
    assert float(found[0]) / 2 < 0.8 * expected[0]


@pytest.mark.parametrize(
    ("shape", "dtype", "label", "why"),
    [
        (Shape(**SMALL), "float32", "vmap", "there are no trials"),
        (Shape(**SMALL, R=2), "float32", "eager", "vmap does"),
        (Shape(**SMALL, R=2), "float32", "numpy", "what autograd is for"),
        (Shape("sampled_loss", **SMALL), "float32", "reference", "draws no data"),
        (Shape("gram_loss", **SMALL), "float32", "eager", "no form"),
        (Shape(**SMALL), "float64", "jax", "whole process"),
        (Shape(**SMALL), "float32", "fortran", "no contender 'fortran'; there are fastlin, "),
    ],
)
def test_what_is_not_run_says_why(shape, dtype, label, why):
    with pytest.raises(SkippedError, match=why):
        Problem(shape, getattr(torch, dtype)).build(label)


def test_without_jax_it_is_said(monkeypatch):
    def missing(*arguments):
        raise ModuleNotFoundError("No module named 'jax'")

    monkeypatch.setattr(jax_peers, "given", missing)
    monkeypatch.setattr(contenders, "available_cores", torch.get_num_threads)
    with pytest.raises(SkippedError, match="No module named 'jax'; pip install jax"):
        Problem(Shape(**SMALL), torch.float32).build("jax")


def test_jax_is_not_set_beside_other_numbers_of_threads(monkeypatch):
    monkeypatch.setattr(contenders, "available_cores", lambda: torch.get_num_threads() + 1)
    with pytest.raises(SkippedError, match="JAX takes all"):
        Problem(Shape(**SMALL), torch.float32).build("jax")


@pytest.mark.parametrize("op", ["prompt_loss", "predict", "sampled_loss"])
def test_a_wrong_contender_is_refused(op, monkeypatch):
    right = forms.FORMS[op][""]
    monkeypatch.setitem(forms.FORMS[op], "", lambda *x: 1.2 * right(*x))
    contenders.peers.of_form.cache_clear()
    problem = Problem(Shape(op, B=100_000, n=6, m=5), torch.float32)
    with pytest.raises(WrongResultError):
        problem.check("eager", problem.build("eager"))
    contenders.peers.of_form.cache_clear()


def test_work_is_the_least_that_is_known():
    layer = Shape(B=2, n=50, m=11)
    assert work.multiply_adds(layer) == 2 * (4 * 50 * 11 + 2 * 121)  # the query's row
    many = replace(layer, R=50)
    assert work.multiply_adds(many) == 2 * (50 * 66 + 50 * 4 * 121)  # Gram matrices, once for all trials
    assert work.multiply_adds(replace(layer, op="predict")) == 2 * (2 * 50 * 11 + 121)
    assert work.multiply_adds(replace(layer, op="gram")) == 2 * 50 * 66
    assert work.multiply_adds(replace(layer, op="gram_stack_loss", L=3)) == 2 * (4 * 121 + 2 * 10 * 1331)
    assert work.multiply_adds(replace(layer, op="sampled_loss", n=9)) == work.multiply_adds(
        replace(layer, op="sampled_loss", n=900)
    )


def test_bytes_are_those_of_the_data_once():
    layer = Shape(B=2, n=50, m=11)
    assert work.bytes_moved(layer) == 2 * (4 * (550 + 11 + 1) + 8)
    assert work.bytes_moved(layer, 8) == 2 * (8 * (550 + 11 + 1) + 8)
    assert work.bytes_moved(replace(layer, op="gram")) == 2 * (4 * (550 + 121) + 8)
    assert work.bytes_moved(replace(layer, op="sampled_loss")) == 0
