"""The compiled kernels at sizes on both sides of every edge: lanes, register tiles, groups of tokens, chunks, blocks.

Lanes hold 8 float32 or 4 float64 sequences with AVX2. Products run in tiles of 4 x 3 entries and rows of 6. Tokens
come in groups of 8 or 4; sums are split beyond 128 (streamed) or 512 (Gram) tokens. A chunk has at most 256
sequences, a block at least as many, and the runs of tasks cross both.
"""

import random
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from support.op_cases import DOUBLE, assert_close, assert_within_budget, make, results

import fastlin as fl
from fastlin.backends import cpu

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 21, 22, 28, 29, 33, 56, 57, 65)
LENGTHS = (0, 1, 3, 4, 5, 7, 8, 9, 17, 129, 257, 513, 1030)
BATCHES = (1, 3, 4, 5, 7, 8, 9, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 1000)
TASKS = (1, 2, 5, "B", None)
TRIALS = (1, 2, 3, 8, 9, 50)
FEW = (1, 2, 3, 5)

# (B, n): long contexts with few sequences, large batches with short contexts. The reference attends over all pairs.
PLACES = [
    *zip(BATCHES, cycle((3, 0, 8, 5, 17, 1, 4, 9, 7)), strict=False),
    *zip(cycle((5, 3, 9, 1)), LENGTHS, strict=False),
    (65, 129),
    (9, 257),
]


def path_of(op, n, m, R, H, L):
    """The path that a problem should take; None near the border between streaming and forming G."""
    if "stack" in op and L > 1:
        return "stack"
    if op.startswith("gram"):
        return "gram"
    streamed, formed = 4 * n * R * H, n * (m + 1) / 2 + 2 * m * R * H
    if R * H == 1 or streamed < 0.7 * formed:
        return "streamed"
    return "gram" if streamed > 1.4 * formed else None


def cost(op, B, n, m, R, H, L):
    """Multiply-adds of the reference: attention over all pairs of tokens, and matrix products."""
    attended = B * (n + 3) ** 2 * m
    matrices = B * m * m * (m if "stack" in op or op.startswith("gram") else 1)
    return R * H * (L if "stack" in op else 1) * (attended + matrices)


def sample(path, ops):
    """Problems that take a path. Each adds a size that the ones before lack, until all sizes are covered."""
    source = random.Random(path + "".join(ops))
    found, seen = [], set()
    for _ in range(2000):
        B, n = source.choice(PLACES)
        R, H = source.choice([(R, 1) for R in TRIALS] + [(1, H) for H in FEW] + [(2, 2), (3, 5)])
        m, K, L, t, op = (source.choice(values) for values in (WIDTHS, TASKS, FEW, (None, 0, 1, 2), ops))
        sizes = {"B": B, "n": n, "m": m, "K": K, "t": t, "R": R, "H": H, "L": L}
        fresh = set(sizes.items())
        if path_of(op, n, m, R, H, L) == path and cost(op, B, n, m, R, H, L) < 1e8 and fresh - seen:
            seen |= fresh
            found.append((op, {**sizes, "K": B if K == "B" else K}))
    return found


SAMPLES = [
    *(("streamed", *s) for s in sample("streamed", ["prompt_loss", "predict"])),
    *(("gram", *s) for s in sample("gram", ["prompt_loss", "predict"])),
    *(("gram", *s) for s in sample("gram", ["gram_loss"])),
    *(("stack", *s) for s in sample("stack", ["stack_loss", "gram_stack_loss", "stack_predict"])),
]


def assert_right(single, instruction_set, path):
    """Values and gradients of a float32 problem agree with the reference in both precisions, on that path."""
    double = single.to(DOUBLE)
    exact = results(double, fl.reference)
    found = results(double, kernel=f"{instruction_set} float64 {path}")
    for name, value in exact.items():
        assert_close(found[name], value, what=name)
    found = results(single, kernel=f"{instruction_set} float32 {path}")
    assert_within_budget(found, results(single, backend="eager"), exact)


def _name(value):
    return "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else value


@pytest.mark.parametrize(("path", "op", "sizes"), SAMPLES, ids=_name)
def test_values_and_gradients(path, op, sizes, instruction_set):
    options = {"see_query": sizes["m"] % 2 == 0, "scale": gentle(op, **sizes)}
    if op.endswith("loss") and sizes["B"] % 3 == 0:
        options["weight"] = [0.5 + k % 3 for k in range(sizes["K"] or 1)]
    single = make(op, **sizes, **options, dtype=torch.float32)
    assert_right(single, instruction_set, path)


@pytest.mark.parametrize("m", [4, 5, 7, 8, 27, 28, 29, 31, 55, 56, 57, 60])
@pytest.mark.parametrize("n", [1, 3, 4, 7, 8, 9, 12, 130])
def test_streamed_widths_and_lengths(m, n, instruction_set):
    """Quads that overlap or not, narrow tokens (in registers) and wide ones (read twice), full and partial groups."""
    single = make("prompt_loss", B=35, n=n, m=m, K=2, t=1, scale=0.7, dtype=torch.float32)
    assert_right(single, instruction_set, "streamed")


@pytest.mark.parametrize("m", range(3, 26))
@pytest.mark.parametrize(
    ("op", "sizes", "options"),
    [
        ("prompt_loss", {"B": 70, "K": 2, "t": 1}, {}),
        ("prompt_loss", {"B": 1000, "K": 3, "t": 2}, {"see_query": True, "weight": [0.5, 1.5, 2.0]}),
        ("prompt_loss", {"B": 1000, "K": 20, "t": 1}, {}),
        ("prompt_loss", {"B": 1000, "K": 30, "t": 2}, {"see_query": True}),
        ("prompt_loss", {"B": 1000, "K": 300, "t": 1}, {"see_query": True, "weight": [0.5, 1.5, 2.0] * 100}),
        ("prompt_loss", {"B": 1000, "K": 100, "t": 2, "shared_head": True}, {}),
        ("prompt_loss", {"B": 33, "K": None, "t": None}, {"see_query": True}),
        ("predict", {"B": 101, "K": 3, "t": 1}, {"see_query": True}),
        ("predict", {"B": 300, "K": 80, "t": 1}, {}),
        ("stack_loss", {"B": 67, "K": 1, "t": 1, "L": 1}, {"first_skip": True}),
        ("stack_loss", {"B": 1000, "K": 90, "t": 1, "L": 1}, {"first_skip": True}),
    ],
    ids=[
        "loss",
        "blocks",
        "some tasks",
        "more tasks",
        "tasks",
        "shared",
        "one task",
        "predict",
        "predict tasks",
        "skip",
        "skip tasks",
    ],
)
def test_columns_in_lanes(op, sizes, options, m, instruction_set):
    """Groups of several tasks, full and partial, in several chunks and blocks, few or many tasks, overlapping quads."""
    n = (0, 1, 2, 3, 5, 9, 130, 300)[(m + len(op)) % (4 if sizes["B"] == 1000 else 8)]
    single = make(op, **sizes, m=m, n=n, **options, scale=0.7, dtype=torch.float32)
    double = single.to(DOUBLE)
    parameters = [name for name in single.inputs if name not in "zq"]
    for case in (single, double):
        case.differentiable(*parameters)(backend="cpu")
        dtype = str(case.y.dtype).removeprefix("torch.")
        has_fours = instruction_set != "scalar" and (instruction_set, dtype) != ("neon", "float64")
        columns = " columns" if 4 <= m <= 24 and has_fours else ""
        assert cpu.backend.last_kernel == f"{instruction_set} {dtype} streamed{columns}"
    exact, found = results(double, fl.reference), results(double, backend="cpu")
    for name, value in exact.items():
        assert_close(found[name], value, what=name)
    assert_within_budget(results(single, backend="cpu"), results(single, backend="eager"), exact)


@pytest.mark.parametrize(
    ("B", "K"), [(1000, 2), (1000, 40), (1000, 2000), (20_000, 1), (20_000, 2), (20_000, 20), (20_000, 2000)]
)
def test_tasks_in_order(B, K, instruction_set):
    """Most consecutive groups have the same tasks; blocks of the larger batch have two chunks."""
    case = make("prompt_loss", B=B, K=K, t=3, m=7, n=2, dtype=torch.float32)
    single = replace(case, task=torch.arange(B) // 70 * (K - 1) // (B // 70))
    double = single.to(DOUBLE)
    exact, found = results(double, fl.reference), results(double, backend="cpu")
    assert cpu.backend.last_kernel.startswith(instruction_set)
    for name, value in exact.items():
        assert_close(found[name], value, what=name)
    assert_within_budget(results(single, backend="cpu"), results(single, backend="eager"), exact)


@pytest.mark.parametrize("broken", [0, 1, 2])
@pytest.mark.parametrize("K", [3, 20, 40, 300])
def test_what_is_not_finite_stays_in_its_task(broken, K, instruction_set):
    """An infinity in one task does not reach others, though a group holds sequences of several tasks."""
    case = make("prompt_loss", B=120, K=K, t=1, m=11, n=5).differentiable("p", "v")
    case = replace(case, task=torch.arange(120) % 7 % 3)  # 52, 34 and 34
    case.inputs["z"][case.task == broken] = float("inf")
    leaves = [case.inputs["p"], case.inputs["v"]]
    loss, per_task = case(backend="cpu")
    assert cpu.backend.last_kernel.startswith(f"{instruction_set} float64 streamed")
    expected = case(fl.reference)[1]
    others = [k for k in range(3) if k != broken]
    assert not per_task[broken].isfinite()
    assert_close(per_task[others], expected[others])
    share = torch.bincount(case.task, minlength=K).double() / 120
    truth = torch.autograd.grad((expected * share)[others].sum(), leaves)
    for found, gradient in zip(torch.autograd.grad(loss, leaves), truth, strict=True):
        assert_close(found[others], gradient[others])


def gentle(op, n, m, t, H, **_):
    """A scale at which each layer of a stack about doubles its input, so that float32 does not overflow."""
    return (n + 1) ** 0.5 / (H * (n**0.5 + m**0.5 + (t or 0) + 1) ** 2) if "stack" in op else 0.7


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize("m", WIDTHS)
def test_gram(m, dtype, instruction_set):
    for B, n in PLACES:
        if n == 0:
            continue
        z = torch.randn(B, n, m, dtype=dtype, generator=torch.Generator().manual_seed(m))
        G = fl.gram(z)
        assert cpu.backend.last_kernel == f"{instruction_set} {str(dtype).removeprefix('torch.')} gram"
        assert torch.equal(G, G.mT)
        assert_close(G.double(), fl.reference.gram(z.double()), 1e-11 if dtype is DOUBLE else 1e-5)


@pytest.mark.parametrize("B", [0, 3])
def test_gram_without_tokens(B, instruction_set):
    z = torch.zeros(B, 0, 5, dtype=DOUBLE)
    assert_close(fl.gram(z), torch.zeros(B, 5, 5, dtype=DOUBLE), 0.0)
    p = torch.randn(2, 0, 5, dtype=DOUBLE)
    assert_close(fl.gram(z, p, torch.zeros(B, dtype=torch.int64)), torch.zeros(B, 5, 5, dtype=DOUBLE), 0.0)


@pytest.mark.parametrize(
    ("op", "path", "m"), [("prompt_loss", "streamed", 512), ("gram_loss", "gram", 512), ("stack_loss", "stack", 200)]
)
def test_a_wide_token(op, path, m, instruction_set):
    case = make(op, m=m, B=3, n=2, t=1)
    found, exact = results(case, kernel=f"{instruction_set} float64 {path}"), results(case, fl.reference)
    for name in exact:
        assert_close(found[name], exact[name], what=name)


@pytest.mark.parametrize("K", [2, 3000])
def test_a_batch_whose_sums_are_kept_in_parts(K):
    """With many tasks, 300,000 sequences run in several passes: 2 MB hold the records of a few."""
    case = make("prompt_loss", B=300_000, n=1, m=5, K=K, t=1, weight=torch.linspace(0.5, 2, K, dtype=DOUBLE))
    case.differentiable("p", "W", "v")()
    assert cpu.backend.last_kernel.endswith("columns") or cpu.instruction_set() in ("scalar", "neon")
    found = results(case, backend="cpu")
    for name, value in results(case, backend="eager").items():
        assert_close(found[name], value, what=name)


@pytest.mark.parametrize("m", [3, 5])
@pytest.mark.parametrize("R", [None, 1, 2])
@pytest.mark.parametrize("op", ["prompt_loss", "gram_loss", "stack_loss"])
def test_many_tasks(op, R, m, instruction_set):
    """More tasks than sequences: most tasks are absent, and every run is short."""
    case = make(op, B=3000, n=2, m=m, K=10_000, t=1, R=R)
    found, exact = results(case), results(case, fl.reference)
    for name in exact:
        assert_close(found[name], exact[name], what=name)
    absent = torch.ones(10_000, dtype=torch.bool).index_fill(0, case.task, False)
    assert (found["per_task"][..., absent] == 0).all()
    assert (found["dp"][..., absent, :, :] == 0).all()
