"""Numbers that are large, small, mixed, many or not finite, by the CUDA kernels."""

import pytest
import torch
from backends.test_cpu_numerics import PATHS, SCALES, problem
from support.op_cases import DOUBLE, assert_close, assert_within_budget, make, results

import fastlin as fl


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("path", PATHS)
def test_scales(path, scale, machine):
    case = problem(path, sizes={"B": 70, "n": 40, "m": 11}, factor=SCALES[scale]).on(machine)
    exact = results(case.to(DOUBLE), fl.reference)
    assert_within_budget(results(case, backend="cuda"), results(case, backend="eager"), exact)
    doubles = results(case.to(DOUBLE), backend="cuda")
    for name, value in exact.items():
        assert_close(doubles[name], value, what=name)


@pytest.mark.parametrize("path", ["streamed", "gram", "stack"])
def test_long_context(path, machine):
    """Here eager in float64 is the judge: the reference would attend over 4 10^8 pairs of tokens."""
    case = problem(path, sizes={"B": 3, "n": 20_000, "m": 5, "K": 2, "t": 1}).on(machine)
    exact = results(case.to(DOUBLE), backend="eager")
    assert_within_budget(results(case, backend="cuda"), results(case, backend="eager"), exact)


@pytest.mark.parametrize("path", PATHS)
def test_numbers_that_are_not_finite_stay_in_their_sequence(path, machine):
    """Lanes, tiles and blocks are shared; NaN is where eager has it, and nowhere else."""
    case = make(**PATHS[path], B=70, m=6, K=4).on(machine)
    for place in (0, 31, 69):
        x = next(iter(case.inputs.values())).clone()
        x[place, 0] = float("nan")
        broken = type(case)(case.op, {**case.inputs, next(iter(case.inputs)): x}, case.y, case.task, case.options)
        found, expected = (results(broken, backend=name) for name in ("cuda", "eager"))
        for name, value in expected.items():
            assert torch.equal(found[name].isnan(), value.isnan()), name
            assert_close(found[name].nan_to_num(), value.nan_to_num(), what=name)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_trial_that_is_not_finite_is_alone(value, machine):
    outcomes = []
    for is_ill in (False, True):
        case = make("gram_loss", B=50, m=5, R=7, backend="cuda").on(machine).differentiable("p", "W", "v")
        if is_ill:
            case.inputs["W"].data[[3, 6], 1, 2] = value
        loss, per_task = case()
        outcomes.append((loss, per_task, *torch.autograd.grad(loss.sum(), list(case.leaves().values()))))
    others = [0, 1, 2, 4, 5]
    for well, found in zip(*outcomes, strict=True):
        assert torch.equal(found[others], well[others])
        assert not found[[3, 6]].isfinite().all()
