"""Every op, in the interpreter or on a GPU: the paper taken literally in float64, and eager's budget in float32."""

import pytest
import torch
from support import op_cases
from support.op_cases import DOUBLE, LOSSES, TRITON_DEVICE, assert_close, assert_within_budget, gradients, results

import fastlin as fl
from fastlin.backends import triton

IS_INTERPRETED = TRITON_DEVICE.type == "cpu"
pytestmark = op_cases.needs_triton

# Widths on both sides of the padded ones, 16, 32 and 64, lengths around a block of 16 tokens, batches around a tile of
# 4, 2 or 1 sequences (float64).
WIDTHS = (3, 7, 11, 12, 21, 33)
LENGTHS = (17, 1, 0)
OPTIONS = {
    "plain": {},
    "query": {"see_query": True, "scale": 0.7},
    "weight": {"weight": [0.2, 0.5, 0.3], "scale": 0.3},
}
SKIPS = ({}, {"first_skip": True, "residual": 1.7}, {"first_skip": False, "residual": 0.5})


def make(op, **given):
    """A problem where the kernels run."""
    return op_cases.make(op, **given).on(TRITON_DEVICE)


def check(case, path=None):
    """Values and gradients, of parameters alone and of the data too, whatever is weighted."""
    triton.backend.last_kernel = None
    found, exact = results(case, backend="triton"), results(case, fl.reference)
    assert triton.backend.last_kernel is not None
    if path is not None:
        assert triton.backend.last_kernel == f"{str(case.y.dtype).removeprefix('torch.')} {path}"
    for name, value in exact.items():
        assert_close(found[name], value, what=f"{case.op} {name}")


def check_floats(case):
    """The same in float32."""
    single = case.to(torch.float32)
    exact = results(single.to(DOUBLE), fl.reference)
    assert_within_budget(results(single, backend="triton"), results(single, backend="eager"), exact)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("m", WIDTHS)
def test_one_layer(m, n):
    """Two sequences of one task in a tile and a task apart, one pass over the tokens."""
    options = list(OPTIONS.values())[(m + n) % 3]
    check(make("prompt_loss", B=5, n=n, m=m, t=1 + n % 2, seed=m, **options), "streamed")


@pytest.mark.parametrize("L", [3, 2, 1])
@pytest.mark.parametrize("m", WIDTHS)
def test_a_stack(m, L):
    n = LENGTHS[(m + L) % 3]
    options = {**OPTIONS["query"], **SKIPS[(m + L) % 3]}
    small = {"B": 3, "K": 2, "t": 1} if m > 16 else {}
    check(make("gram_stack_loss" if (m + L) % 2 else "stack_loss", n=n, m=m, L=L, seed=m, **small, **options))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("form", [{"R": 3}, {"R": 2, "H": 2}, {"R": 1, "H": 3}], ids=["R", "RH", "1H"])
@pytest.mark.parametrize("op", LOSSES)
def test_trials_and_heads(op, form, options):
    check(make(op, **form, **OPTIONS[options], m=5, n=3, B=5, L=2, t=1))


@pytest.mark.parametrize("form", [{}, {"R": 2, "H": 2}], ids=["plain", "RH"])
@pytest.mark.parametrize(
    ("op", "skips"), [("predict", {}), *(("stack_predict", skips) for skips in SKIPS)], ids=lambda value: str(value)
)
def test_predictions(op, skips, form):
    check(make(op, **form, **skips, m=5, n=3, B=5, L=2, t=1, see_query=True))


@pytest.mark.parametrize("op", LOSSES)
def test_per_task_losses(op):
    case = make(op, B=7, m=4, n=2, R=2, backend="triton").differentiable("p")
    assert_close(case(), case(fl.reference))
    assert_close(gradients(case), gradients(case, fl.reference))


@pytest.mark.parametrize(
    "shape",
    [
        {"B": 1, "n": 1, "m": 1, "K": 1, "t": 1},
        {"B": 0, "n": 4, "m": 3},
        {"B": 4, "n": 0, "m": 3, "K": None, "t": None},
        {"B": 9, "n": 40, "m": 9, "K": 2, "t": 3},
        {"B": 6, "n": 2, "m": 4, "t": 0},
        {"B": 20, "n": 3, "m": 2, "K": 30},
        {"B": 6, "n": 3, "m": 3, "shared_head": True},
        {"B": 2, "n": 20, "m": 16},
    ],
    ids=lambda shape: "-".join(f"{k}{v}" for k, v in shape.items()),
)
@pytest.mark.parametrize("op", ["prompt_loss", "stack_loss"])
def test_shapes(op, shape):
    check(make(op, **shape))


@pytest.mark.parametrize("op", ["prompt_loss", "stack_loss", "gram_loss"])
@pytest.mark.parametrize("m", [11, 21])
def test_floats(op, m):
    check_floats(make(op, B=9, m=m, n=17, K=2, t=1, R=2, L=2, scale=0.3))


def test_floats_of_one_pass():
    check_floats(make("prompt_loss", B=20, m=11, n=17, K=2, t=1))


@pytest.mark.parametrize("layout", ["sliced", "permuted", "expanded"])
@pytest.mark.parametrize("op", ["prompt_loss", "stack_loss", "gram_loss"])
def test_inputs_are_read_where_they_are(op, layout):
    case = make(op, B=5, m=5, n=3, t=1)
    first = next(iter(case.inputs))
    for name in (first, "q"):
        x = case.inputs[name]
        if layout == "sliced":
            wide = x.new_full((x.shape[0] * 2, *x.shape[1:-1], x.shape[-1] + 3), torch.nan)
            wide[::2, ..., 1:-2] = x
            view = wide[::2, ..., 1:-2]
        elif layout == "permuted":
            view = x.mT.contiguous().mT
        else:
            view = x[:1].expand_as(x)
        case.inputs[name] = view
    exact = case.differentiable()
    assert_close(case(backend="triton"), case(fl.reference))
    assert_close(gradients(exact, backend="triton"), gradients(exact, fl.reference))


def test_entries_that_are_far_apart_are_copied():
    """Kernels count the entries of a token in 32 bits; a tensor without memory shows what would be read in place."""
    from fastlin.backends.triton import launch

    far, near = 2**27, 2**27 - 1  # a width of 3 is padded to 16
    for shape, strides, inner, is_copied in (
        ((2, 4, 3), (4, 1, far), 1, True),
        ((2, 4, 3), (4, 1, near), 1, False),
        ((2, 4, 3), (2**40, far, 1), 1, False),  # tokens may be anywhere
        ((2, 3, 3), (3, far, 1), 2, True),
        ((2, 3, 3), (3, 1, far), 2, True),
        ((2, 3, 3), (2**40, near, 1), 2, False),
        ((2, 3), (1, far), 1, True),
    ):
        given = torch.empty_strided(shape, strides, device="meta")
        assert (launch._readable(given, inner).stride() != strides) == is_copied, (shape, strides)


@pytest.mark.parametrize("B", [5, 0])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("m", [3, 11, 33])
def test_gram(m, n, B):
    case = make("predict", B=B, n=n, m=m, R=2)
    z, q, p = (case.inputs[name] for name in "zqp")
    for arguments in ((z,), (z, p, case.task, q)):
        found = fl.gram(*arguments, see_query=len(arguments) > 1, backend="triton")
        assert_close(found, fl.reference.gram(*arguments, see_query=len(arguments) > 1))


def test_a_batch_in_pieces(monkeypatch):
    """Partial sums that have no room are made piece by piece, and many of them are added in two stages."""
    from fastlin.backends.triton import launch, plan

    launches = []
    inner = launch._launch
    monkeypatch.setattr(launch, "_launch", lambda kernel, *a, **k: (launches.append(kernel), inner(kernel, *a, **k)))
    monkeypatch.setattr(plan, "PARTIAL_BYTES", 1 << 11)
    monkeypatch.setattr(plan, "ROWS", 2)
    for op in ("prompt_loss", "gram_stack_loss"):
        launches.clear()
        check(make(op, B=70, m=5, n=2, K=4, t=1))
        assert len([k for k in launches if k in (launch.stream_kernel, launch.attention_kernel)]) > 6
        assert len([k for k in launches if k is launch.sum_runs_kernel]) > 40


def test_groups_of_trials_change_no_bit(monkeypatch):
    """Programs that share a tile's trials, or a program's tiles, give what one program gives."""
    from fastlin.backends.triton import plan

    case = make("stack_loss", B=9, m=4, n=2, R=3, t=1, dtype=torch.float32)
    found = []
    for programs in (1, 4, 1000):
        monkeypatch.setattr(plan, "PROGRAMS", programs)
        found.append(results(case, backend="triton"))
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())


def test_named_precisions():
    assert triton.precision() == "ieee"
    with triton.using(precision="tf32"):
        assert triton.precision() == "tf32"
    with pytest.raises(ValueError, match="precision is 'fp8'; wants one of 'ieee', 'tf32'"), triton.using("fp8"):
        pass
    assert triton.precision() == "ieee"


def test_what_it_does_not_serve():
    assert triton.backend.supports("prompt_loss", TRITON_DEVICE, torch.float32, 64) is None
    assert triton.backend.supports("prompt_loss", TRITON_DEVICE, torch.float32, 65) == "m = 65 is above 64"
    assert "wants torch.float32 or torch.float64" in triton.backend.supports(
        "prompt_loss", TRITON_DEVICE, torch.float16, 3
    )
    other = torch.device("cuda" if IS_INTERPRETED else "cpu")
    wanted = "wants the cpu, where Triton's interpreter" if IS_INTERPRETED else "wants a GPU"
    assert wanted in triton.backend.supports("prompt_loss", other, torch.float32, 3)
    with pytest.raises(fl.BackendError, match="backend 'triton' cannot serve this call: m = 65 is above 64"):
        make("prompt_loss", m=65, backend="triton")()


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", ["prompt_loss", "stack_loss"])
def test_tokens_in_half_precision(op, half):
    """The kernel converts what it loads: the same bits as from float32."""
    case = make(op, B=5, n=17, m=5, t=1, dtype=torch.float32, backend="triton").differentiable("p")
    z = case.inputs["z"].to(half)
    assert_close(case(z=z), case(z=z.float()), 0.0)
    assert_close(gradients(case, z=z), gradients(case, z=z.float()), 0.0)
    assert torch.equal(fl.gram(z, backend="triton"), fl.gram(z.float(), backend="triton"))
