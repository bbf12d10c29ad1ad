"""The cpu backend: the kernel it reports, its errors, and torch's modes and transforms."""

import re

import pytest
import torch
from support.op_cases import DOUBLE, INSTRUCTION_SETS, LOSSES, PREDICTIONS, assert_close, gradients, make, poisoned
from torch.autograd import gradcheck

import fastlin as fl
from fastlin import _extension
from fastlin.backends import cpu

OPS = LOSSES + PREDICTIONS


def test_the_best_instruction_set_is_taken():
    assert cpu.instruction_set() == cpu.instruction_sets()[0]
    assert cpu.instruction_sets()[-1] == "scalar"
    make("prompt_loss")()
    assert cpu.backend.last_kernel.startswith(f"{cpu.instruction_set()} float64 streamed")


def test_info_names_the_instruction_set():
    assert fl.info()["instruction_set"] == cpu.instruction_set()
    with cpu.using("scalar"):
        assert fl.info()["instruction_set"] == "scalar"
    assert fl.info()["backends"]["cpu"] == {"available": True, "reason": None, "auto": True}
    assert fl.info()["auto"]["cpu"] == ["cpu", "eager"]


def test_instruction_sets_are_chosen_by_name_for_a_while():
    case = make("prompt_loss")
    with cpu.using("scalar"):
        case()
        assert cpu.backend.last_kernel == "scalar float64 streamed"
        with cpu.using(INSTRUCTION_SETS[0]):
            assert cpu.instruction_set() == INSTRUCTION_SETS[0]
        assert cpu.instruction_set() == "scalar"
        with pytest.raises(ZeroDivisionError), cpu.using(INSTRUCTION_SETS[0]):
            raise ZeroDivisionError
        assert cpu.instruction_set() == "scalar"
    assert cpu.instruction_set() == INSTRUCTION_SETS[0]


def test_an_unknown_instruction_set_is_refused():
    message = f"instruction set 'nonsense' does not run here; wants one of {', '.join(INSTRUCTION_SETS)}"
    with pytest.raises(ValueError, match="^" + re.escape(message)), cpu.using("nonsense"):
        pass
    module = _extension.extension()
    with pytest.raises(ValueError, match="instruction_set: got 'nonsense', which does not run here"):
        module.gram("nonsense", True, 1, (0, 0, 1, 0, 0), (0, 0))
    with pytest.raises(ValueError, match="instruction_set: got 'nonsense', which does not run here"):
        module.attention("nonsense", True, 1, (0,) * 9, (0,) * 3, (0.0,) * 4, (False,) * 3, [0] * 13, [0] * 11, None)


def test_instruction_sets_that_the_machine_lacks_are_refused():
    lacking = [name for name, runs_here in _extension.extension().instruction_sets() if not runs_here]
    for name in lacking:
        with pytest.raises(ValueError, match=f"instruction_set: got '{name}', which does not run here"):
            _extension.extension().gram(name, True, 1, (0, 0, 1, 0, 0), (0, 0))
        with pytest.raises(ValueError, match=f"instruction set '{name}' does not run here"), cpu.using(name):
            pass


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_instruction_sets_agree(dtype):
    for op in OPS:
        case = make(op, B=70, n=20, m=9, scale=0.02, dtype=dtype).differentiable()
        found = []
        for name in INSTRUCTION_SETS:
            with cpu.using(name), poisoned():
                found.append(gradients(case, backend="cpu"))
        for other in found[1:]:
            assert_close(other, found[0], 1e-12 if dtype is DOUBLE else 1e-4)


def test_supports():
    device = torch.device("cpu")
    assert cpu.backend.supports("prompt_loss", device, torch.float32, 11) is None
    assert cpu.backend.supports("gram", device, torch.float64, 1) is None
    assert (
        cpu.backend.supports("prompt_loss", torch.device("meta"), torch.float32, 3)
        == "the data are on meta; wants the cpu"
    )
    reason = "the data have dtype torch.bfloat16; wants torch.float32 or torch.float64"
    assert cpu.backend.supports("prompt_loss", device, torch.bfloat16, 3) == reason


def test_a_missing_extension(monkeypatch):
    monkeypatch.setattr(_extension, "why_missing", lambda: "it was left out")
    monkeypatch.setattr(fl.backends, "_warned", set())
    assert cpu.backend.supports("predict", torch.device("cpu"), DOUBLE, 3) == "it was left out"
    case = make("prompt_loss")
    with pytest.raises(fl.BackendError, match="prompt_loss: backend 'cpu' cannot serve this call: it was left out"):
        case(backend="cpu")
    cpu.backend.last_kernel = None
    message = r"prompt_loss: backend 'cpu' does not serve this call \(it was left out\); eager serves it"
    with pytest.warns(RuntimeWarning, match=message):
        assert_close(case(), case(fl.reference))
    assert cpu.backend.last_kernel is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("op", OPS)
def test_modes_without_gradients(op, mode, instruction_set):
    case = make(op, R=2)
    expected = case(fl.reference)
    ready = case.differentiable()
    with mode():
        found = ready()
        made_inside = {name: t.clone() for name, t in case.inputs.items()}
        again = case(**made_inside)
    assert_close(found, expected)
    assert_close(again, expected)
    assert not any(t.requires_grad for t in (found if isinstance(found, tuple) else (found,)))


@pytest.mark.parametrize("form", [{}, {"R": 9, "see_query": True}, {"R": 2, "H": 2, "shared_head": False}], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_gradcheck_on_every_path(op, form, instruction_set):
    case = make(op, B=3, n=3, m=2, K=2, t=1, **form, backend="cpu", scale=0.3).differentiable()
    names = list(case.leaves())
    assert gradcheck(
        lambda *tensors: case(**dict(zip(names, tensors, strict=True))), tuple(case.leaves().values()), fast_mode=True
    )


@pytest.mark.parametrize("op", LOSSES)
def test_second_derivatives_are_those_of_the_reference(op):
    """Second derivatives in all inputs, including the data, are right and never a silent zero."""
    seconds = []
    for module in (fl, fl.reference):
        case = make(op, B=4, m=3, backend="cpu", scale=0.3).differentiable()
        leaves = list(case.leaves().values())
        first = torch.autograd.grad(case(module)[0], leaves, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    assert all(second.abs().max() > 0 for second in seconds[0])
    assert_close(*seconds)


@pytest.mark.parametrize("op", ["prompt_loss", "gram_stack_loss"])
def test_transforms_of_the_named_backend(op):
    case = make(op, backend="cpu", scale=0.3)
    name = "A" if "stack" in op else "W"
    x = case.inputs[name]

    def loss(x, module=fl):
        return case(module, **{name: x})[0]

    def literal(x):
        return loss(x, fl.reference)

    assert_close(torch.func.grad(loss)(x), torch.func.grad(literal)(x))
    assert_close(torch.func.jacrev(loss)(x), torch.func.jacrev(literal)(x))
    batch = torch.stack([x, -x, 2 * x])
    assert_close(torch.vmap(loss)(batch), torch.stack([literal(row) for row in batch]))
    rows = torch.stack([torch.func.grad(literal)(row) for row in batch])
    assert_close(torch.vmap(torch.func.grad(loss))(batch), rows)
    assert_close(torch.func.jacrev(torch.func.jacrev(loss))(x), torch.func.jacrev(torch.func.jacrev(literal))(x))
    assert_close(torch.func.jacfwd(loss)(x), torch.func.jacfwd(literal)(x))


def test_compiled_transforms_of_the_named_backend():
    torch._dynamo.reset()
    case = make("prompt_loss", backend="cpu")
    W = case.inputs["W"]
    function = torch.compile(lambda W: case(W=W)[0], fullgraph=True, backend="aot_eager")
    cpu.backend.last_kernel = None
    assert_close(function(W), case(fl.reference)[0])
    assert cpu.backend.last_kernel.startswith(f"{cpu.instruction_set()} float64 streamed")


def test_a_dtype_that_has_no_chains_is_refused():
    with pytest.raises(ValueError, match="dtype: got 'float16', wants 'float32' or 'float64'"):
        _extension.extension().fma_chains(1, "float16")
