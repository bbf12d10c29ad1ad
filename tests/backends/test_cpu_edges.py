"""Rare but legal inputs of the kernels."""

import pytest
import torch
from support.op_cases import DOUBLE, assert_close, make
from torch.utils._pytree import tree_map_only

import fastlin as fl
from fastlin.backends import cpu


class Wrapped(torch.Tensor):
    """A tensor without memory: it wraps another."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Wrapped, lambda w: w.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapped, func(*args, **kwargs))


@pytest.mark.parametrize("B", [1, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("op", ["prompt_loss", "gram_loss", "stack_loss"])
def test_an_infinite_loss_is_not_nan_for_any_number_of_sequences(op, B):
    # Idle lanes must not turn the infinity of the last sequence into NaN.
    case = make(op, B=B, m=3, K=None, t=None, L=2, dtype=torch.float32)
    q = case.inputs["q"].clone()
    q[-1] = 1e30
    case = case.differentiable("W" if "W" in case.inputs else "A")
    found, expected = (case(q=q, backend=backend)[0].detach() for backend in ("cpu", "eager"))
    assert torch.isposinf(expected)
    assert torch.isposinf(found)


@pytest.mark.parametrize("op", ["prompt_loss", "stack_loss", "predict", "stack_predict"])
@pytest.mark.parametrize("shared_head", [False, True])
def test_results_can_be_added_to_in_place(op, shared_head, any_backend):
    case = make(op, shared_head=shared_head).differentiable()
    result = case()
    result = result[0] if isinstance(result, tuple) else result
    expected = result.detach() + 1
    result += 1
    assert_close(result, expected)
    result.sum().backward()


@pytest.mark.parametrize("letter", ["z", "q", "W", "v"])
def test_a_tensor_without_memory_goes_to_eager_or_is_refused(letter):
    case = make("prompt_loss")
    wrapped = {letter: Wrapped(case.inputs[letter])}
    loss, _ = case(**wrapped)
    assert_close(loss.held, case(fl.reference)[0])
    with pytest.raises(fl.BackendError, match=r"prompt_loss: backend 'cpu' cannot serve .* memory of their own"):
        case(backend="cpu", **wrapped)


def test_zeros_without_memory_are_zeros():
    case = make("prompt_loss", K=2)
    nothing = torch._efficientzerotensor((2,), dtype=DOUBLE)
    assert float(case(backend="cpu", weight=nothing)[0]) == 0.0
    heads = torch._efficientzerotensor(case.inputs["v"].shape, dtype=DOUBLE)
    assert_close(case(backend="cpu", v=heads), case(fl.reference, v=torch.zeros_like(case.inputs["v"])))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_function_runs_the_kernel_again():
    case = make("predict")
    z, q, p, W, v = case.inputs.values()
    traced = torch.jit.trace(lambda x: fl.predict(x, q, case.task, p, W, v), (z,), check_trace=False)
    assert_close(traced(2 * z), fl.reference.predict(2 * z, q, case.task, p, W, v))


def test_a_stack_that_trains_its_heads_alone():
    case = make("stack_loss", L=3, B=20).differentiable("h")
    results = []
    for module, options in ((fl, {"backend": "cpu"}), (fl.reference, {})):
        results.append(torch.autograd.grad(case(module, **options)[0], case.inputs["h"])[0])
    assert_close(*results)


def test_elements_beyond_two_to_the_31():
    z = torch.randn(1, 70_000, 8).expand(4000, -1, -1)
    assert z.numel() > 2**31
    q, W, v = torch.randn(4000, 8), torch.randn(8, 8), torch.randn(8)
    found = fl.predict(z, q, None, None, W, v, backend="cpu")
    assert cpu.backend.last_kernel.endswith("streamed columns")
    expected = (q.double() @ W.double()) @ (z[0].double().mT @ (z[0].double() @ v.double()))
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
