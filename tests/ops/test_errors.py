"""Wrong calls: each gets an error that names the argument, what it got and what it wants."""

import math
import re

import numpy as np
import pytest
import torch
from support.op_cases import LOSSES, assert_close, make

import fastlin as fl

FLOAT, DOUBLE = torch.float32, torch.float64


def zeros(*shape, dtype=DOUBLE):
    return torch.zeros(*shape, dtype=dtype)


def with_nan(*shape):
    out = zeros(*shape)
    out.view(-1)[-1] = math.nan
    return out


# B = 6, n = 4, m = 5, K = 3, t = 2; (op, form, what is replaced, error, message).
LAYER, STACK, TRIALS = "prompt_loss", "stack_loss", {"R": 2}
HEADS = {"R": 2, "H": 2}
TABLE = [
    (LAYER, {}, {"z": [[1.0]]}, TypeError, "z is a list; wants a torch.Tensor"),
    (LAYER, {}, {"z": None}, TypeError, "z is a NoneType; wants a torch.Tensor"),
    (LAYER, {}, {"z": zeros(4, 5)}, ValueError, "z has shape (4, 5); wants (B, n, m)"),
    (LAYER, {}, {"z": zeros(6, 4, 0)}, ValueError, "z has shape (6, 4, 0), so m = 0; wants m >= 1"),
    (LAYER, {}, {"z": zeros(6, 4, 5, dtype=torch.float16)}, TypeError, "q has dtype torch.float64; wants torch.float32 beside tokens in half precision"),
    (LAYER, {}, {"z": zeros(6, 4, 5, dtype=torch.int64)}, TypeError, "z has dtype torch.int64; wants torch.float32"),
    (LAYER, {}, {"z": zeros(6, 4, 5, dtype=FLOAT)}, TypeError, "q has dtype torch.float64; wants torch.float32, as z has"),
    (LAYER, {}, {"q": zeros(5, 5)}, ValueError, "q has shape (5, 5); wants (B, m) with B = 6 (from z), m = 5 (from z)"),
    (LAYER, {}, {"q": zeros(6, 4)}, ValueError, "q has shape (6, 4); wants (B, m) with B = 6 (from z), m = 5 (from z)"),
    (LAYER, {}, {"q": zeros(6, 1, 5)}, ValueError, "q has shape (6, 1, 5); wants (B, m)"),
    (LAYER, {}, {"q": torch.zeros(6, 5, dtype=DOUBLE, device="meta")}, ValueError, "q is on device meta; wants cpu, as z is"),
    (LAYER, {}, {"y": zeros(5)}, ValueError, "y has shape (5,); wants (B,) with B = 6 (from z)"),
    (LAYER, {}, {"y": zeros(6, 1)}, ValueError, "y has shape (6, 1); wants (B,) with B = 6 (from z)"),
    (LAYER, {}, {"y": torch.zeros(6, dtype=torch.int64)}, TypeError, "y has dtype torch.int64; wants torch.float64, as z has"),
    (LAYER, {}, {"task": [0] * 6}, TypeError, "task is a list; wants a torch.Tensor"),
    (LAYER, {}, {"task": zeros(6)}, TypeError, "task has dtype torch.float64; wants an integer dtype"),
    (LAYER, {}, {"task": torch.zeros(6, dtype=torch.bool)}, TypeError, "task has dtype torch.bool; wants an integer dtype"),
    (LAYER, {}, {"task": torch.zeros(7, dtype=torch.int64)}, ValueError, "task has shape (7,); wants (B,) with B = 6 (from z)"),
    (LAYER, {}, {"task": torch.tensor([0, 1, 2, 3, 0, 0])}, ValueError, "task holds the index 3; wants 0 <= task < K = 3"),
    (LAYER, {}, {"task": torch.tensor([0, 1, -1, 2, 0, 0])}, ValueError, "task holds the index -1; wants 0 <= task < K = 3"),
    (LAYER, {}, {"task": None}, ValueError, "task is None, which is one task, but p has K = 3; wants task (B,)"),
    (LAYER, {"t": None}, {"task": None}, ValueError, "task is None, which is one task, but v has K = 3; wants task (B,)"),
    (LAYER, {}, {"p": zeros(3, 2)}, ValueError, "p has shape (3, 2); wants (K, t, m) beside W (m, m) with m = 5 (from z)"),
    (LAYER, {}, {"p": zeros(3, 2, 4)}, ValueError, "p has shape (3, 2, 4); wants (K, t, m) beside W (m, m) with m = 5 (from z)"),
    (LAYER, {}, {"p": zeros(0, 2, 5)}, ValueError, "p has shape (0, 2, 5), so K = 0; wants K >= 1"),
    (LAYER, {}, {"p": zeros(2, 3, 2, 5)}, ValueError, "p has shape (2, 3, 2, 5); wants (K, t, m) beside W (m, m)"),
    (LAYER, TRIALS, {"p": zeros(3, 2, 5)}, ValueError, "p has shape (3, 2, 5); wants (R, K, t, m) beside W (R, m, m)"),
    (LAYER, TRIALS, {"p": zeros(4, 3, 2, 5)}, ValueError, "p has shape (4, 3, 2, 5); wants (R, K, t, m) beside W (R, m, m) with R = 2 (from W)"),
    (LAYER, {}, {"W": zeros(5)}, ValueError, "W has shape (5,); wants (m, m) or (R, m, m) or (R, H, m, m) with m = 5 (from z)"),
    (LAYER, {}, {"W": zeros(5, 4)}, ValueError, "W has shape (5, 4); wants (m, m) with m = 5 (from z)"),
    (LAYER, {}, {"W": zeros(1, 1, 1, 5, 5)}, ValueError, "W has shape (1, 1, 1, 5, 5); wants (m, m) or (R, m, m) or"),
    (LAYER, {}, {"W": zeros(0, 5, 5)}, ValueError, "W has shape (0, 5, 5), so R = 0; wants R >= 1"),
    (LAYER, {}, {"W": None}, TypeError, "W is a NoneType; wants a torch.Tensor"),
    (LAYER, {}, {"W": zeros(5, 5, dtype=FLOAT)}, TypeError, "W has dtype torch.float32; wants torch.float64, as z has"),
    (LAYER, {}, {"v": zeros(4, 5)}, ValueError, "v has shape (4, 5); wants (K, m) beside W (m, m) with K = 3 (from p), m = 5 (from z)"),
    (LAYER, {}, {"v": zeros(4)}, ValueError, "v has shape (4,); wants (m,) beside W (m, m) with m = 5 (from z)"),
    (LAYER, {}, {"v": zeros(2, 3, 5)}, ValueError, "v has shape (2, 3, 5); wants (K, m) or (m,) beside W (m, m)"),
    (LAYER, TRIALS, {"v": zeros(2, 5)}, ValueError, "v has shape (2, 5); wants (R, K, m) beside W (R, m, m)"),
    (LAYER, HEADS, {"v": zeros(2, 3, 5)}, ValueError, "v has shape (2, 3, 5); wants (R, H, K, m) beside W (R, H, m, m)"),
    (LAYER, HEADS, {"v": zeros(2, 3, 3, 5)}, ValueError, "v has shape (2, 3, 3, 5); wants (R, H, K, m) beside W (R, H, m, m) with R = 2 (from W), H = 2 (from W)"),
    (LAYER, {}, {"weight": zeros(2)}, ValueError, "weight has shape (2,); wants (K,) with K = 3 (from p)"),
    (LAYER, {}, {"weight": [0.5, 0.5]}, ValueError, "weight has shape (2,); wants (K,) with K = 3 (from p)"),
    (LAYER, {}, {"weight": zeros(3, dtype=FLOAT)}, TypeError, "weight has dtype torch.float32; wants torch.float64, as z has"),
    (LAYER, {}, {"weight": 0.5}, TypeError, "weight is a float; wants a torch.Tensor or a list of K numbers"),
    (LAYER, {}, {"weight": ["a", "b", "c"]}, TypeError, "weight[0] is 'a', a str; wants a torch.Tensor or a list of K numbers"),
    (LAYER, {}, {"scale": "big"}, TypeError, "scale is 'big', a str; wants a real number"),
    (LAYER, {}, {"scale": True}, TypeError, "scale is True, a bool; wants a real number"),
    (LAYER, {}, {"scale": 10**400}, ValueError, "scale is 1000"),
    (LAYER, {}, {"task": torch.zeros(6, dtype=torch.int64, device="meta")}, ValueError, "task is on device meta; wants cpu, as z is"),
    (LAYER, {}, {"scale": math.inf}, ValueError, "scale is inf; wants a finite number"),
    (LAYER, {}, {"see_query": 1}, TypeError, "see_query is 1; wants True or False"),
    (LAYER, {}, {"check_finite": "yes"}, TypeError, "check_finite is 'yes'; wants True or False"),
    (LAYER, {}, {"backend": "gpu"}, ValueError, "backend is 'gpu'; wants one of 'auto', 'reference', "),
    (LAYER, {}, {"z": with_nan(6, 4, 5), "check_finite": True}, ValueError, "z holds 1 values that are not finite, of 120; wants finite values"),
    (LAYER, {}, {"q": with_nan(6, 5), "check_finite": True}, ValueError, "q holds 1 values that are not finite"),
    (LAYER, {}, {"y": with_nan(6), "check_finite": True}, ValueError, "y holds 1 values that are not finite"),
    (LAYER, {}, {"p": with_nan(3, 2, 5), "check_finite": True}, ValueError, "p holds 1 values that are not finite"),
    (LAYER, {}, {"W": zeros(5, 5) / 0.0, "check_finite": True}, ValueError, "W holds 25 values that are not finite, of 25"),
    (LAYER, {}, {"v": with_nan(3, 5), "check_finite": True}, ValueError, "v holds 1 values that are not finite"),
    (LAYER, {}, {"weight": with_nan(3), "check_finite": True}, ValueError, "weight holds 1 values that are not finite"),
    (STACK, {}, {"A": zeros(5, 5)}, ValueError, "A has shape (5, 5); wants (L, m, m) or (R, L, m, m) or (R, L, H, m, m)"),
    (STACK, {}, {"A": zeros(0, 5, 5)}, ValueError, "A has shape (0, 5, 5), so L = 0; wants L >= 1"),
    (STACK, {}, {"A": zeros(2, 5, 4)}, ValueError, "A has shape (2, 5, 4); wants (L, m, m) with m = 5 (from z)"),
    (STACK, {}, {"C": zeros(3, 5, 5)}, ValueError, "C has shape (3, 5, 5); wants (L, m, m) beside A (L, m, m) with L = 2 (from A), m = 5 (from z)"),
    (STACK, HEADS, {"C": zeros(2, 2, 3, 5, 5)}, ValueError, "C has shape (2, 2, 3, 5, 5); wants (R, L, H, m, m) beside A (R, L, H, m, m)"),
    (STACK, {}, {"h": zeros(2, 5)}, ValueError, "h has shape (2, 5); wants (K, m) beside A (L, m, m) with K = 3 (from p), m = 5 (from z)"),
    (STACK, TRIALS, {"h": zeros(3, 5)}, ValueError, "h has shape (3, 5); wants (R, K, m) beside A (R, L, m, m)"),
    (STACK, {}, {"first_skip": 1}, TypeError, "first_skip is 1; wants None, True or False"),
    (STACK, {}, {"residual": None}, TypeError, "residual is None, a NoneType; wants a real number"),
    (STACK, {}, {"residual": math.nan}, ValueError, "residual is nan; wants a finite number"),
    (STACK, {}, {"h": with_nan(3, 5), "check_finite": True}, ValueError, "h holds 1 values that are not finite"),
    (STACK, {}, {"A": with_nan(2, 5, 5), "check_finite": True}, ValueError, "A holds 1 values that are not finite"),
    ("gram_loss", {}, {"G": zeros(6, 5, 4)}, ValueError, "G has shape (6, 5, 4); wants (B, m, m)"),
    ("gram_loss", {}, {"G": with_nan(6, 5, 5), "check_finite": True}, ValueError, "G holds 1 values that are not finite"),
    ("gram_stack_loss", {}, {"G": zeros(6, 5)}, ValueError, "G has shape (6, 5); wants (B, m, m)"),
    ("predict", {}, {"q": None}, TypeError, "q is a NoneType; wants a torch.Tensor"),
    ("predict", {}, {"task": torch.full((6,), 3)}, ValueError, "task holds the index 3; wants 0 <= task < K = 3"),
    ("predict", {"t": None, "shared_head": True}, {"task": torch.full((6,), -2)}, ValueError, "task holds the index -2"),
    ("stack_predict", {}, {"backend": "fast"}, ValueError, "backend is 'fast'; wants one of"),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    ("op", "form", "change", "error", "message"), TABLE, ids=[f"{row[0]}: {row[-1]}" for row in TABLE]
)
def test_wrong_call(op, form, change, error, message, backend):
    case = make(op, **form, backend=backend)
    case()
    fields = {name: change[name] for name in ("y", "task") if name in change}
    rest = {name: value for name, value in change.items() if name not in fields}
    case = type(case)(**{**vars(case), **fields})
    with pytest.raises(error, match="^" + re.escape(f"{op}: {message}")):
        case(**rest)


GRAM_TABLE = [
    ({"z": 3}, TypeError, "z is a int; wants a torch.Tensor"),
    ({"z": zeros(6, 5)}, ValueError, "z has shape (6, 5); wants (B, n, m)"),
    (
        {"z": zeros(6, 4, 5, dtype=torch.bfloat16)},
        TypeError,
        "p has dtype torch.float64; wants torch.float32 beside tokens in half precision",
    ),
    (
        {"p": zeros(3, 5)},
        ValueError,
        "p has shape (3, 5); wants (K, t, m) or (R, K, t, m) with m = 5 (from z)",
    ),
    ({"task": None}, ValueError, "task is None, which is one task, but p has K = 3; wants task (B,)"),
    ({"task": torch.full((6,), 5)}, ValueError, "task holds the index 5; wants 0 <= task < K = 3"),
    ({"q": zeros(6, 4)}, ValueError, "q has shape (6, 4); wants (B, m) with B = 6 (from z), m = 5 (from z)"),
    ({"q": None, "see_query": True}, ValueError, "q is None; wants q (B, m) when see_query is True"),
    ({"see_query": None}, TypeError, "see_query is None; wants True or False"),
    (
        {"p": with_nan(3, 2, 5), "check_finite": True},
        ValueError,
        "p holds 1 values that are not finite, of 30",
    ),
]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("change", "error", "message"), GRAM_TABLE, ids=[row[-1] for row in GRAM_TABLE])
def test_wrong_gram(change, error, message, backend):
    case = make("predict")
    arguments = {name: case.inputs[name] for name in "zpq"} | {"task": case.task, "backend": backend}
    fl.gram(**arguments)
    with pytest.raises(error, match="^" + re.escape(f"gram: {message}")):
        fl.gram(**{**arguments, **change})


@pytest.mark.parametrize("op", LOSSES)
def test_check_finite_lets_finite_input_pass(op):
    case = make(op)
    assert_close(case(check_finite=True), case(), 0.0)


def test_non_finite_input_passes_unless_checked():
    """A diverged trial gives a non-finite loss, and leaves the others as they are."""
    case = make("prompt_loss", R=3)
    W = case.inputs["W"].clone()
    W[1] = math.inf
    loss, per_task = case(W=W)
    assert not loss[1].isfinite()
    expected = case()
    assert_close((loss[[0, 2]], per_task[[0, 2]]), (expected[0][[0, 2]], expected[1][[0, 2]]))


def test_numbers_that_are_not_floats_are_taken():
    case = make("prompt_loss", weight=(1, 2, 0.5))
    expected = case(fl.reference, weight=torch.tensor([1, 2, 0.5], dtype=DOUBLE))
    assert_close(case(), expected)
    assert_close(case(weight=np.array([1, 2, 0.5])), expected)
    assert_close(case(scale=2)[0], case(fl.reference, scale=2.0)[0])
