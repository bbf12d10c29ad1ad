"""Rounding errors of the compiled kernels: at most twice eager's in the same dtype, plus a few eps."""

import pytest
import torch
from support.op_cases import DOUBLE, assert_close, assert_within_budget, make, results

import fastlin as fl

SINGLE = torch.float32
PATHS = {
    "streamed": {"op": "prompt_loss"},
    "gram": {"op": "prompt_loss", "R": 9},
    "given gram": {"op": "gram_loss", "R": 2},
    "stack": {"op": "stack_loss"},
}


def problem(path, *, sizes, factor=1.0):
    """A float32 problem with tokens, prompts and queries multiplied by a factor, or by one for each coordinate."""
    case = make(**PATHS[path], **sizes, dtype=SINGLE)
    first = next(iter(case.inputs))
    x, q = case.inputs[first], case.inputs["q"]
    by_column = torch.as_tensor(factor, dtype=SINGLE).expand(x.shape[-1])
    scaled = x * by_column if first == "z" else x * by_column * by_column[:, None]
    tokens = {first: scaled, "q": q * by_column, "p": case.inputs["p"] * by_column}
    changed = type(case)(case.op, {**case.inputs, **tokens}, case.y, case.task, case.options)
    size = float(by_column.abs().max())
    # Attention is cubic in the tokens, and a stack applies it in every layer.
    changed.options["scale"] = 0.1 / size**2 / sizes.get("n", 4) if path == "stack" else 1.0 / size**3
    return changed


def kernel_of(path, instruction_set):
    return f"{instruction_set} float32 {path.removeprefix('given ')}"


SCALES = {"one": 1.0, "large": 1e6, "small": 1e-6, "mixed": torch.logspace(-3, 3, 11).tolist()}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("path", PATHS)
def test_scales(path, scale, instruction_set):
    case = problem(path, sizes={"B": 200, "n": 40, "m": 11}, factor=SCALES[scale])
    exact = results(case.to(DOUBLE), fl.reference)
    found = results(case, kernel=kernel_of(path, instruction_set))
    assert_within_budget(found, results(case, backend="eager"), exact)
    doubles = results(case.to(DOUBLE))
    for name, value in exact.items():
        assert_close(doubles[name], value, what=name)


@pytest.mark.parametrize("path", ["streamed", "gram", "stack"])
def test_long_context(path, instruction_set):
    """Compares with eager in float64: the reference would attend over 10^10 pairs of tokens."""
    case = problem(path, sizes={"B": 3, "n": 100_000, "m": 5, "K": 2, "t": 1})
    exact = results(case.to(DOUBLE), backend="eager")
    found = results(case, kernel=kernel_of(path, instruction_set))
    assert_within_budget(found, results(case, backend="eager"), exact)


@pytest.mark.parametrize("K", [None, 3])
@pytest.mark.parametrize("path", PATHS)
def test_huge_batch(path, K, instruction_set):
    case = problem(path, sizes={"B": 200_000 if "gram" not in path else 50_000, "n": 2, "m": 3, "K": K, "t": 1})
    exact = results(case.to(DOUBLE), fl.reference)
    found = results(case, kernel=kernel_of(path, instruction_set))
    assert_within_budget(found, results(case, backend="eager"), exact)
