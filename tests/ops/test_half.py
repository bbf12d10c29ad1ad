"""Tokens in half precision beside float32: what they say is multiplied and added in float32, by every backend."""

import pytest
import torch
from support.op_cases import assert_close, make

import fastlin as fl


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", ["prompt_loss", "stack_loss", "predict", "stack_predict"])
def test_tokens_in_half_precision(op, half):
    check(op, half)


def check(op, half, **options):
    """Exactly what the same tokens give in float32; their gradient is rounded once."""
    # Small, so that no gradient is beyond float16.
    case = make(op, dtype=torch.float32, R=2, scale=0.1).differentiable()
    halved = case.inputs["z"].detach().to(half)
    results = []
    for dtype in (half, torch.float32):
        z = halved.to(dtype).requires_grad_()
        found = case(z=z, **options)
        found = found if isinstance(found, tuple) else (found,)
        leaves = [z, *(t for name, t in case.leaves().items() if name != "z")]
        results.append([*found, *torch.autograd.grad(found[0].sum(), leaves)])
    first, exact = results
    place = len(exact) - len(case.inputs)
    assert first[place].dtype == half
    exact[place] = exact[place].to(half)
    assert all(a.dtype == b.dtype for a, b in zip(first, exact, strict=True))
    assert_close([t.float() for t in first], [t.float() for t in exact], 0.0)


@pytest.mark.usefixtures("any_backend")
def test_gram_of_half_precision():
    z = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    G = fl.gram(z)
    assert_close(G, fl.gram(z.float()), 0.0)
    assert_close(G, fl.reference.gram(z), 1e-6)
    G.sum().backward()
    assert z.grad.dtype == torch.bfloat16


def test_the_reference_takes_them():
    case = make("prompt_loss", dtype=torch.float32)
    z = case.inputs["z"].bfloat16()
    assert_close(case(fl.reference, z=z), case(fl.reference, z=z.float()), 0.0)
    assert_close(case(z=z, backend="reference"), case(fl.reference, z=z), 0.0)


def test_compiled():
    case = make("prompt_loss", dtype=torch.float32)
    z = case.inputs["z"].bfloat16()
    compiled = torch.compile(lambda z: case(z=z), fullgraph=True, backend="eager")
    assert_close(compiled(z), case(z=z), 0.0)


def test_what_stands_beside_them():
    case = make("prompt_loss")
    with pytest.raises(TypeError, match=r"prompt_loss: q has dtype torch.float64; wants torch.float32 beside tokens"):
        case(z=case.inputs["z"].half())
    with pytest.raises(TypeError, match=r"gram: p has dtype torch.float64; wants torch.float32 beside tokens"):
        fl.gram(case.inputs["z"].half(), case.inputs["p"], case.task)
