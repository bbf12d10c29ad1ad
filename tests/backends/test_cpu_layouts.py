"""Compiled kernels accept any layout of any argument, and copy only what they must."""

import pytest
import torch
from support.op_cases import DOUBLE, assert_close, gradients, make, results
from torch import Tensor

import fastlin as fl


def sliced(t):
    """Every second element of a larger tensor that is NaN elsewhere."""
    view = t.new_full([2 * s for s in t.shape], float("nan"))[tuple(slice(None, None, 2) for _ in t.shape)]
    return view.copy_(t)


def transposed(t):
    """The last two dimensions are transposed in memory."""
    return t.mT.contiguous().mT if t.ndim > 1 else sliced(t)


def permuted(t):
    """The first dimension has the smallest stride."""
    return t.movedim(0, -1).contiguous().movedim(-1, 0)


def expanded(t):
    """The same numbers along the first dimension, with stride zero."""
    return t[:1].expand_as(t)


def expanded_rows(t):
    """The same numbers along the last dimension but one, with stride zero."""
    return t[..., :1, :].expand_as(t) if t.ndim > 1 else expanded(t)


def repeated(t):
    """The same numbers along the last dimension, with stride zero."""
    return t[..., :1].expand_as(t)


def offset(t):
    """Inside a larger storage, aligned only to the element size."""
    storage = t.new_full((t.numel() + 7,), float("nan"))
    return storage[3 : 3 + t.numel()].view_as(t).copy_(t)


def row_strided(t):
    """With gaps between rows and between sequences."""
    if t.ndim < 2:
        return sliced(t)
    wide = t.new_full((*t.shape[:-2], t.shape[-2] + 2, t.shape[-1] + 3), float("nan"))
    view = wide[..., 1 : 1 + t.shape[-2], 2 : 2 + t.shape[-1]]
    return view.copy_(t)


LAYOUTS = [sliced, transposed, permuted, expanded, expanded_rows, repeated, offset, row_strided]
PATHS = {
    "streamed": {"op": "prompt_loss"},
    "gram": {"op": "prompt_loss", "R": 9, "n": 20},
    "given gram": {"op": "gram_loss", "R": 2, "H": 2},
    "stack": {"op": "stack_loss", "R": 2, "H": 2, "L": 3, "scale": 0.1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", PATHS)
def test_each_argument(path, layout, instruction_set):
    case = make(**PATHS[path], B=11, weight=[0.2, 0.5, 0.3])
    weight = torch.tensor(case.options["weight"], dtype=DOUBLE)
    for name in (*case.inputs, "y", "weight"):
        parts = {**case.inputs, "y": case.y, "weight": weight}
        changed = layout(parts[name])
        plain = changed.clone(memory_format=torch.contiguous_format)
        found, expected = (
            results(_replaced(case, {**parts, name: t}), module) for t, module in ((changed, fl), (plain, fl.reference))
        )
        for key, value in expected.items():
            assert_close(found[key], value, what=f"{name} {key}")


def _replaced(case, parts):
    inputs = {name: parts[name] for name in case.inputs}
    ready = type(case)(case.op, inputs, parts["y"], case.task, {**case.options, "weight": parts["weight"]})
    # `differentiable` clones, which would lose the layout.
    return _Detached(**vars(ready))


class _Detached(type(make("predict"))):
    """A case whose leaves keep their strides."""

    def differentiable(self, *names):
        names = names or tuple(self.inputs)
        ready = {name: t if t is None else t.detach().requires_grad_(name in names) for name, t in self.inputs.items()}
        return type(self)(self.op, ready, self.y, self.task, self.options)


@pytest.mark.parametrize("layout", [sliced, expanded, offset])
def test_task_indices(layout, instruction_set):
    case = make("prompt_loss", B=11)
    task = case.task[:1].expand_as(case.task) if layout is expanded else layout(case.task.double()).long()
    big = torch.full((22,), 2**40)
    big[::2] = task
    for changed in (task, big[::2]):
        other = type(case)(**{**vars(case), "task": changed})
        assert_close(other(), type(case)(**{**vars(case), "task": changed.clone()})(fl.reference))


@pytest.mark.parametrize("layout", [Tensor.contiguous, offset, row_strided, expanded, expanded_rows])
@pytest.mark.parametrize("path", PATHS)
def test_data_are_read_in_place(path, layout, instruction_set, monkeypatch):
    """Neither forward nor backward copies contiguous rows."""
    case = make(**PATHS[path], B=11)
    first = next(iter(case.inputs))
    x, q = (layout(case.inputs[name]).requires_grad_() for name in (first, "q"))
    copied = []
    original = Tensor.contiguous

    def contiguous(tensor, *args, **kwargs):
        result = original(tensor, *args, **kwargs)
        if result.data_ptr() != tensor.data_ptr():
            copied.append(tuple(tensor.shape))
        return result

    monkeypatch.setattr(Tensor, "contiguous", contiguous)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        loss, _ = case(**{first: x, "q": q})
        loss.sum().backward()
    assert tuple(x.shape) not in copied
    assert tuple(q.shape) not in copied
    copies = [event for event in profile.events() if event.name in ("aten::copy_", "aten::clone")]
    assert not any(list(x.shape) in event.input_shapes for event in copies)


@pytest.mark.parametrize("form", [{}, {"R": 9}, {"R": 2, "H": 2}])
@pytest.mark.parametrize(
    "sizes", [{"B": 0}, {"n": 0}, {"B": 0, "n": 0}, {"n": 0, "t": None}, {"n": 0, "t": 0}], ids=str
)
@pytest.mark.parametrize(
    "op", ["prompt_loss", "gram_loss", "stack_loss", "gram_stack_loss", "predict", "stack_predict"]
)
def test_nothing(op, sizes, form, instruction_set):
    case = make(op, **form, **sizes, see_query=True).differentiable()
    result = case()
    for found, expected in zip(
        *((r if isinstance(r, tuple) else (r,)) for r in (result, case(fl.reference))), strict=True
    ):
        assert_close(found, expected)
    assert_close(gradients(case), gradients(case, fl.reference))


@pytest.mark.parametrize("path", PATHS)
def test_numbers_that_are_not_finite_stay_in_their_sequence(path, instruction_set):
    """A NaN does not spread to other sequences of its lanes, tile or block: the results have NaN where eager has it."""
    case = make(**PATHS[path], B=300, m=6, K=4)
    for place in (0, 5, 256, 299):
        x = next(iter(case.inputs.values())).clone()
        x[place, 0] = float("nan")
        broken = type(case)(case.op, {**case.inputs, next(iter(case.inputs)): x}, case.y, case.task, case.options)
        found, expected = results(broken), results(broken, backend="eager")
        for name, value in expected.items():
            assert torch.equal(found[name].isnan(), value.isnan()), name
            assert_close(found[name].nan_to_num(), value.nan_to_num(), what=name)


def test_a_view_that_torch_negates_when_it_reads():
    """The imaginary part of a conjugate is stored with the opposite sign."""
    case = make("prompt_loss", B=4, m=1, t=1, backend="cpu")
    for name, tensor in case.inputs.items():
        view = torch.complex(torch.zeros_like(tensor), tensor).conj().imag
        assert view.is_neg()
        assert_close(case(**{name: view}), case(fl.reference, **{name: view.clone()}), what=name)
    z = torch.complex(torch.zeros_like(case.inputs["z"]), case.inputs["z"]).conj().imag
    assert_close(fl.gram(z, backend="cpu"), fl.reference.gram(z.clone()))
