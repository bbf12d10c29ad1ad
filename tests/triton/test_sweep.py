"""Wide tokens, and combinations of ops, sizes and options, in the interpreter or on a GPU."""

from itertools import product

import pytest
from support.op_cases import LOSSES, PREDICTIONS, TRITON_DEVICE, assert_close, make, needs_triton, results
from support.selection import cover

import fastlin as fl

pytestmark = needs_triton

WIDTHS, LENGTHS = (3, 7, 11, 12, 21, 33), (0, 1, 17)
SWEEP = [
    {"op": op, "m": m, "n": n, "L": L, "R": R, "H": H, "see_query": see_query}
    for op, m, n, (R, H), see_query in product(
        LOSSES + PREDICTIONS, WIDTHS, LENGTHS, ((None, None), (2, None), (2, 2)), (False, True)
    )
    for L in ((1, 2, 3) if "stack" in op else (1,))
]


def _name(problem):
    return "-".join(f"{name}{value}" for name, value in problem.items() if value not in (None, False))


def pytest_generate_tests(metafunc):
    if "problem" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--triton-sweep")
        names = [{name: str(value) for name, value in problem.items()} for problem in SWEEP]
        metafunc.parametrize("problem", SWEEP if whole else [SWEEP[i] for i in sorted(cover(names))], ids=_name)


def check(**problem):
    case = make(**problem).on(TRITON_DEVICE)
    found, exact = results(case, backend="triton"), results(case, fl.reference)
    for name, value in exact.items():
        assert_close(found[name], value, what=name)


def test_sweep(problem):
    """Every pair of sizes, or all of their combinations with --triton-sweep, which takes an hour."""
    check(**problem, B=5)


def test_the_widest():
    check(op="stack_loss", m=64, n=17, B=2, K=1, t=1, L=2)


@pytest.mark.parametrize("op", ["stack_loss", "gram_loss"])
def test_wide_tokens_with_trials_and_heads(op):
    """Matrices in memory, which trials, heads and layers use one after the other."""
    check(op=op, R=2, H=2, m=18, n=3, B=2, K=1, L=3, t=2, see_query=True, scale=0.4)
