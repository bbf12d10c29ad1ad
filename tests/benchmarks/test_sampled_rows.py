"""The rows of the sampled ops: peers compute what the op computes, and a wrong contender is not timed."""

from dataclasses import replace

import pytest
import torch

import fastlin as fl
from benchmarks import cases, peers, sampled, sampled_peers
from benchmarks.cases import Shape
from benchmarks.checks import WrongResultError

LAYER = Shape("sampled_loss", B=2000, n=6, m=5)
STACK = Shape("sampled_stack_loss", B=2000, n=6, m=5, L=3)


@pytest.mark.parametrize("model", [sampled_peers.stack_on_tokens, sampled_peers.linear_stack_on_tokens])
def test_stacks_on_tokens_agree_with_the_reference(model):
    case = cases.make(Shape("stack_loss", B=30, n=6, m=5, L=3)).to(torch.float64)
    for found, expected in zip(case.step(model)(), case.step(peers.literal("stack_loss"))(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [LAYER, STACK])
def test_the_tokens_of_eager_have_the_distribution_of_the_source(shape):
    """Mean losses agree; a mean that is 20 standard errors away does not."""
    values = sampled.parameters(shape)
    expected = sampled.mean_loss(sampled_peers.op(shape, values, "eager"), 1)
    torch.manual_seed(0)
    sampled.agree(sampled.mean_loss(sampled_peers.eager(shape, values), 1), expected)
    with pytest.raises(WrongResultError, match=r"mean loss .*, the op's is .*; standard error"):
        sampled.agree((expected[0] + 20 * expected[1], expected[1]), expected)


def test_a_wrong_op_is_found(monkeypatch):
    assert set(sampled.check_op(LAYER, "eager")) == {"loss", "gradient 0", "gradient 1", "gradient 2"}
    right = fl.sampled_loss
    monkeypatch.setattr(fl, "sampled_loss", lambda *a, **k: [1.01 * x for x in right(*a, **k)])
    with pytest.raises(WrongResultError, match="relative errors"):
        sampled.check_op(LAYER, "eager")


def test_jax_agrees():
    pytest.importorskip("jax")
    shape = replace(LAYER, R=3)
    values = sampled.parameters(shape)
    expected = sampled.mean_loss(sampled_peers.op(shape, values, "eager"), 3)
    sampled.agree(sampled.mean_loss(sampled_peers.jax_gram(shape, values, 2), 3), expected)
