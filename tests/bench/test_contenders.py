"""Every contender computes what the op computes, says why it cannot run, and is refused when it is wrong."""

from dataclasses import replace

import pytest
import torch

from fastlin.bench import cases, contenders, forms, jax_peers, sampled_peers
from fastlin.bench.cases import CaseShape
from fastlin.bench.checks import WrongResultError
from fastlin.bench.contenders import BenchProblem, SkippedError
from fastlin.bench.labels import EAGER, KINDS, Label, parse, split

SMALL = {"B": 60, "n": 6, "m": 5}
SLOW = ("compile", "jax")  # compilers: one case of each is enough, below


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("R", [None, 2])
@pytest.mark.parametrize("op", cases.OPS)
def test_contenders_agree_with_the_reference(op, R, dtype):
    shape = CaseShape(op, **SMALL, R=R, K=3, t=2)
    problem = BenchProblem(shape, dtype)
    labels = [label for label in contenders.labels(shape, ("auto", "eager")) if parse(label).kind not in SLOW]
    assert labels[:2] == ["fastlin", "fastlin:eager"]
    assert any(parse(label).kind in EAGER for label in labels)
    one = "eager" if R is None else "vmap"
    labels += [f"{one}-{form}" for form in ("product", "linear") if form in forms.FORMS[op]]
    for label in labels:
        problem.check(label, problem.build(label))


@pytest.mark.parametrize("L", [2, 4, 8, 16])
def test_the_check_holds_at_any_depth(L):
    """Where the reference sees the first sequences only, eager in float64 must agree with it to rounding."""
    problem = BenchProblem(CaseShape("stack_loss", B=300, n=50, L=L), torch.float32, scores=10_000 * L)
    for label in ("fastlin", "eager-gram"):
        problem.check(label, problem.build(label))


def test_a_compiled_contender_agrees():
    problem = BenchProblem(CaseShape(**SMALL), torch.float32)
    assert set(problem.check("compile", problem.build("compile"))) == {"loss", "dp", "dW", "dv"}


@pytest.mark.parametrize(("op", "label"), [("prompt_loss", "jax"), ("stack_loss", "jax-gram"), ("gram", "jax-gram")])
@pytest.mark.parametrize("R", [None, 2])
def test_jax_agrees(op, label, R, monkeypatch):
    pytest.importorskip("jax")
    monkeypatch.setattr(contenders, "available_cores", torch.get_num_threads)
    problem = BenchProblem(CaseShape(op, **SMALL, R=R), torch.float32)
    problem.check(label, problem.build(label))


def test_jax_trains():
    """At a rate of zero the loss stays, at another it falls."""
    pytest.importorskip("jax")
    shape = CaseShape("sampled_loss", B=2000, n=6, m=5, R=2)
    train = jax_peers.training(shape, cases.parameters_of(shape), steps=10)
    expected = sampled_peers.losses(
        BenchProblem(shape, torch.float32).build("fastlin:eager"), 2, sampled_peers.OP_CALLS
    )
    sampled_peers.agree(sampled_peers.losses(lambda: train(0.0), 2, sampled_peers.PEER_CALLS), expected)
    for _ in range(20):
        found = train(1e-2)
    assert float(found[0]) / 2 < 0.8 * expected[0]


@pytest.mark.parametrize(
    ("shape", "dtype", "label", "why"),
    [
        (CaseShape(**SMALL), "float32", "vmap", "there are no trials"),
        (CaseShape(**SMALL, R=2), "float32", "eager", "vmap does"),
        (CaseShape(**SMALL, R=2), "float32", "numpy", "what autograd is for"),
        (CaseShape("sampled_loss", **SMALL), "float32", "reference", "draws no data"),
        (CaseShape("gram_loss", **SMALL), "float32", "eager", "no form"),
        (CaseShape(**SMALL), "float64", "jax", "whole process"),
        (CaseShape("sampled_loss", **SMALL), "float32", "fastlin@fresh", "reads no tokens"),
        (CaseShape(**SMALL), "float32", "fastlin:cuda", "cannot serve: "),
    ],
)
def test_what_is_not_run_says_why(shape, dtype, label, why):
    with pytest.raises(SkippedError, match=why):
        BenchProblem(shape, getattr(torch, dtype)).build(label)


def test_without_jax_it_is_said(monkeypatch):
    def missing(*arguments):
        raise ModuleNotFoundError("No module named 'jax'")

    monkeypatch.setattr(jax_peers, "given", missing)
    monkeypatch.setattr(contenders, "available_cores", torch.get_num_threads)
    with pytest.raises(SkippedError, match="No module named 'jax'; pip install jax"):
        BenchProblem(CaseShape(**SMALL), torch.float32).build("jax")


def test_jax_is_not_set_beside_other_numbers_of_threads(monkeypatch):
    monkeypatch.setattr(contenders, "available_cores", lambda: torch.get_num_threads() + 1)
    with pytest.raises(SkippedError, match="JAX takes all"):
        BenchProblem(CaseShape(**SMALL), torch.float32).build("jax")


@pytest.mark.parametrize("op", ["prompt_loss", "predict", "sampled_loss"])
def test_a_wrong_contender_is_refused(op, monkeypatch):
    right = forms.FORMS[op][""]
    monkeypatch.setitem(forms.FORMS[op], "", lambda *x: 1.2 * right(*x))
    contenders.peers.of_form.cache_clear()
    problem = BenchProblem(CaseShape(op, B=100_000, n=6, m=5), torch.float32)
    with pytest.raises(WrongResultError):
        problem.check("eager", problem.build("eager"))
    contenders.peers.of_form.cache_clear()


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("fastlin", Label("fastlin")),
        ("fastlin:eager", Label("fastlin", backend="eager")),
        ("compile-gram@graphs", Label("compile", "gram", flags=frozenset({"graphs"}), plain=False)),
        ("fastlin@K=100,float64", Label("fastlin", dtype="float64", K=100, plain=False)),
        ("read@fresh,threads=1", Label("read", flags=frozenset({"fresh"}), threads=1, plain=False)),
    ],
)
def test_labels_are_parsed(text, label):
    assert parse(text) == label
    assert split(f"eager,{text},numpy") == ("eager", text, "numpy")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fortran", f"got 'fortran', wants one of {', '.join(KINDS)}"),
        ("eager-fast", "got 'fast', wants one of gram, product, linear"),
        ("numpy-gram", "got 'gram', wants one of numpy without a form"),
        ("eager:cpu", "got a backend, wants one only after fastlin"),
        ("fastlin@K=many", "got 'K=many'"),
        ("two words", r"wants KIND\[-FORM\]"),
    ],
)
def test_what_is_no_label_says_what_is_wanted(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_modifiers_change_the_problem(monkeypatch):
    problem = BenchProblem(CaseShape(B=40, n=6, m=5, R=2), torch.float32)
    loss, dp, *_ = problem.build("fastlin@K=7,float64")()
    assert (loss.dtype, dp.shape) == (torch.float64, (2, 7, 1, 5))
    assert problem.build("fastlin@trial")()[1].shape == (2, 1, 5)
    assert len(problem.build("fastlin@call")()) == 1
    problem.check("fastlin@call", problem.build("fastlin@call"))
    assert problem.build("read")()[0].shape == ()


def test_fresh_tokens_are_others_in_each_call(monkeypatch):
    problem, seen = BenchProblem(CaseShape(B=8, n=3), torch.float32), []
    z = problem._case.data["z"]
    monkeypatch.setattr(contenders, "last_level_cache", lambda: z.nbytes)
    monkeypatch.setattr(contenders, "_LEAST_CACHE", 1)
    monkeypatch.setattr(contenders.torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(contenders.peers, "op", lambda op, backend: lambda z, *rest: seen.append(z))
    call = problem.build("fastlin@call,fresh")
    for _ in range(6):
        call()
    assert len({tokens.data_ptr() for tokens in seen}) == 5  # twice the caches of two threads, and one more
    assert all(torch.equal(tokens, z) and tokens.data_ptr() != z.data_ptr() for tokens in seen)
    assert seen[0] is seen[5]


def test_work_is_the_least_that_is_known():
    layer = CaseShape(B=2, n=50, m=11)
    assert cases.multiply_adds(layer) == 2 * (4 * 50 * 11 + 2 * 121)  # the query's row
    many = replace(layer, R=50)
    assert cases.multiply_adds(many) == 2 * (50 * 66 + 50 * 4 * 121)  # Gram matrices, once for all trials
    assert cases.multiply_adds(replace(layer, op="predict")) == 2 * (2 * 50 * 11 + 121)
    assert cases.multiply_adds(replace(layer, op="gram")) == 2 * 50 * 66
    assert cases.multiply_adds(replace(layer, op="gram_stack_loss", L=3)) == 2 * (4 * 121 + 2 * 10 * 1331)
    assert cases.multiply_adds(replace(layer, op="sampled_loss", n=9)) == cases.multiply_adds(
        replace(layer, op="sampled_loss", n=900)
    )


def test_bytes_are_those_of_the_data_once():
    layer = CaseShape(B=2, n=50, m=11)
    assert cases.bytes_moved(layer) == 2 * (4 * (550 + 11 + 1) + 8)
    assert cases.bytes_moved(layer, 8) == 2 * (8 * (550 + 11 + 1) + 8)
    assert cases.bytes_moved(replace(layer, op="gram")) == 2 * (4 * (550 + 121) + 8)
    assert cases.bytes_moved(replace(layer, op="sampled_loss")) == 0
