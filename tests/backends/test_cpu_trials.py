"""Many trials: vectors of trials lie in lanes; trials that fill less than three quarters of one run by sequences.

Lanes hold 16 float32 or 8 float64 trials with AVX-512, 8 or 4 with AVX2, from 12 trials on. Sequences of one task run
12 at a time.
"""

import pytest
import torch
from support.op_cases import DOUBLE, assert_close, assert_within_budget, make, results

import fastlin as fl
from fastlin.backends import cpu

TRIALS = (11, 12, 15, 16, 17, 24, 31, 32, 33, 47, 50, 64, 65)
SHAPES = {
    "one task": {"B": 40, "m": 5, "K": None},
    "a prompt": {"B": 33, "m": 11, "K": 2, "t": 1},
    "one sequence": {"B": 1, "m": 5, "K": 2},
    "a part and one more": {"B": 13, "m": 3, "K": 1, "t": None},
    "tasks of one sequence": {"B": 19, "m": 6, "K": 40, "t": 1},
    "several chunks and blocks": {"B": 600, "m": 3, "K": 5, "t": 1},
    "wide": {"B": 20, "m": 25, "K": 2, "t": 0},
    "heads": {"B": 21, "m": 4, "H": 3},
}


def named(instruction_set, dtype, path):
    return f"{instruction_set} {str(dtype).removeprefix('torch.')} {path}"


def check(case, instruction_set, path, of_parameters):
    """All results agree with the reference in both dtypes; `of_parameters` is the path without data gradients."""
    single, double = case.to(torch.float32), case.to(torch.float32).to(DOUBLE)
    exact = results(double, fl.reference)
    for name, value in results(double, kernel=named(instruction_set, DOUBLE, path)).items():
        assert_close(value, exact[name], what=name)
    found = results(single, kernel=named(instruction_set, torch.float32, path))
    assert_within_budget(found, results(single, backend="eager"), exact)
    for ready, dtype in ((single, torch.float32), (double, DOUBLE)):
        parameters = [name for name in case.inputs if name not in "zGq"]
        ready.differentiable(*parameters)()
        assert cpu.backend.last_kernel == named(instruction_set, dtype, of_parameters)


@pytest.mark.parametrize("R", TRIALS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, R, instruction_set):
    op = ("gram_loss", "prompt_loss", "predict")[R % 3]
    options = {"see_query": R % 4 == 0, "scale": 0.7}
    if op.endswith("loss") and R % 2:
        options["weight"] = [0.5 + k % 3 for k in range(SHAPES[shape].get("K", 3) or 1)]
    case = make(op, **SHAPES[shape], n=60, R=R, **options)
    check(case, instruction_set, "gram", "gram trials" if R >= 12 else "gram")


@pytest.mark.parametrize("first_skip", [False, True])
@pytest.mark.parametrize("op", ["stack_loss", "gram_stack_loss", "stack_predict"])
def test_a_stack_of_one_layer(op, first_skip, instruction_set):
    case = make(op, B=37, n=60, m=5, R=35, L=1, first_skip=first_skip, residual=0.5)
    check(case, instruction_set, "gram", "gram trials")


@pytest.mark.parametrize("wants", ["p", "W", "v", "pv", ""])
def test_some_gradients(wants, instruction_set):
    case = make("gram_loss", B=50, m=5, R=35)
    expected = case.differentiable("p", "W", "v")
    exact = torch.autograd.grad(expected(fl.reference)[0].sum(), list(expected.leaves().values()))
    ready = case.differentiable(*wants or "none")
    loss, per_task = ready()
    assert cpu.backend.last_kernel == named(instruction_set, DOUBLE, "gram trials")
    assert_close((loss.detach(), per_task.detach()), case(fl.reference))
    if wants:
        found = torch.autograd.grad(loss.sum(), list(ready.leaves().values()))
        assert_close(found, [grad for name, grad in zip("pWv", exact, strict=True) if name in wants])


@pytest.mark.parametrize("op", ["gram_loss", "prompt_loss"])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize("R", [1, 4, 16, 31, 50])
@pytest.mark.usefixtures("instruction_set")
def test_gradients_do_not_change_the_loss(R, dtype, op):
    case = make(op, B=300, m=11, n=20, K=3, t=1, R=R, dtype=dtype)
    alone = case()
    for wants in ("p", "W", "v", "pWv"):
        assert all(torch.equal(a, b) for a, b in zip(case.differentiable(*wants)(), alone, strict=True))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_trial_that_is_not_finite_is_alone(value, instruction_set):
    case = make("gram_loss", B=50, m=5, R=35).differentiable("p", "W", "v")
    ill = make("gram_loss", B=50, m=5, R=35).differentiable("p", "W", "v")
    for r in (3, 34):
        ill.inputs["W"].data[r, 1, 2] = value
    outcomes = []
    for each in (case, ill):
        loss, per_task = each()
        assert cpu.backend.last_kernel == named(instruction_set, DOUBLE, "gram trials")
        outcomes.append((loss, per_task, *torch.autograd.grad(loss.sum(), list(each.leaves().values()))))
    others = [r for r in range(35) if r not in (3, 34)]
    for well, found in zip(*outcomes, strict=True):
        assert torch.equal(found[others], well[others])
        assert not found[[3, 34]].isfinite().all()


@pytest.mark.usefixtures("instruction_set")
def test_a_sequence_that_is_not_finite_is_of_its_task():
    case = make("gram_loss", B=50, m=5, K=4, R=35)
    well = case()[1]
    case.inputs["G"][20, 1, 1] = float("nan")
    task = int(case.task[20])
    per_task = case()[1]
    assert per_task[:, task].isnan().all()
    assert torch.equal(per_task[:, [k for k in range(4) if k != task]], well[:, [k for k in range(4) if k != task]])


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize("K", [1, 300])
def test_same_bits_for_any_number_of_threads(K, dtype, instruction_set):
    case = make("gram_loss", B=2100, m=5, K=K, R=35, dtype=dtype).differentiable("p", "W", "v")
    before, outcomes = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            loss, per_task = case()
            assert cpu.backend.last_kernel == named(instruction_set, dtype, "gram trials")
            outcomes.append((loss, per_task, *torch.autograd.grad(loss.sum(), list(case.leaves().values()))))
    finally:
        torch.set_num_threads(before)
    for other in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other, strict=True))


@pytest.mark.usefixtures("instruction_set")
def test_float32_of_a_large_batch():
    """Sums of a million terms lose no precision: the loss of each task is right to a few roundings."""
    case = make("gram_loss", B=1_000_000, m=2, n=3, K=3, t=1, R=16, dtype=torch.float32)
    per_task, exact = case()[1], case.to(DOUBLE)()[1]
    assert_close(per_task.double(), exact, 4 * torch.finfo(torch.float32).eps)
