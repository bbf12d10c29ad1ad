"""Forms of the ops, and peers that draw their data: they compute what the op computes, and a wrong op is found."""

import math
import statistics
from dataclasses import replace

import pytest
import torch

from fastlin.bench import cases, jax_peers, peers, sampled_peers
from fastlin.bench.cases import CaseShape, parameters_of
from fastlin.bench.checks import WrongResultError
from fastlin.bench.forms import FORMS
from fastlin.ops import sampled

LAYER = CaseShape("sampled_loss", B=2000, n=6, m=5)
STACK = CaseShape("sampled_stack_loss", B=2000, n=6, m=5, L=3)


@pytest.mark.parametrize(("op", "form"), [(op, form) for op in ("prompt_loss", "stack_loss") for form in FORMS[op]])
@pytest.mark.parametrize("sizes", [{}, {"n": 1, "B": 1}, {"K": 3, "t": 2}])
def test_forms_agree_with_the_reference(op, form, sizes):
    case = cases.make(CaseShape(op, **{"B": 30, "n": 6, "m": 5, **sizes})).to(torch.float64)
    results = case.step(peers.of_form(op, form, False))(), case.step(peers.literal(op))()
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [LAYER, STACK])
def test_the_tokens_of_eager_have_the_distribution_of_the_source(shape):
    """Typical losses agree; one that is 5 of the op's standard deviations away does not, nor one that is no loss."""
    values = parameters_of(shape)
    expected = sampled_peers.losses(sampled_peers.op(shape, values, "eager"), 1, sampled_peers.OP_CALLS)
    torch.manual_seed(0)
    found = sampled_peers.losses(
        sampled_peers.eager(shape, values, peers.of_form(shape.op, "", False)), 1, sampled_peers.PEER_CALLS
    )
    sampled_peers.agree(found, expected)
    away = math.exp(5 * statistics.stdev(map(math.log, expected)))
    for wrong in ([loss * away for loss in found], [0.0, *found], [-1.0, *found], [math.nan, *found]):
        with pytest.raises(WrongResultError, match=r"typical loss .*, the op's is .*; standard error"):
            sampled_peers.agree(wrong, expected)


def test_a_wrong_op_is_found(monkeypatch):
    assert set(sampled_peers.check_op(LAYER, "eager")) == {"loss", "gradient 0", "gradient 1", "gradient 2"}
    right = sampled.sampled_loss
    monkeypatch.setattr(sampled, "sampled_loss", lambda *a, **k: [1.01 * x for x in right(*a, **k)])
    with pytest.raises(WrongResultError, match="relative errors"):
        sampled_peers.check_op(LAYER, "eager")


def test_jax_agrees():
    pytest.importorskip("jax")
    shape = replace(LAYER, R=3)
    values = parameters_of(shape)
    expected = sampled_peers.losses(sampled_peers.op(shape, values, "eager"), 3, sampled_peers.OP_CALLS)
    sampled_peers.agree(sampled_peers.losses(jax_peers.drawn(shape, values, 2), 3, sampled_peers.PEER_CALLS), expected)
