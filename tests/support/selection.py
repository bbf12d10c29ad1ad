"""Which tests `make test` leaves to `make test-all`: those get the marker `long`, by the rules of this file alone.

A test is long because of its folder or file (LONG_PATHS), a fixture (LONG_FIXTURES) or an instruction set that is
neither the best of the machine nor the next one. Of what is left, a test function with more than FEW cases keeps a
cover of them: every pair of parameter values where no two parameters have more than PAIRS, else every value once.
Every test in Triton's interpreter, where a case takes about a second, keeps every value once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import pytest
from support.op_cases import INSTRUCTION_SETS

LONG_PATHS = (
    "cpp",  # compilers and sanitizers
    "cuda/test_resources.py",
    "cuda/test_sanitizers.py",
    "cuda/test_shim.py",
    "triton/test_compiled.py",
    "triton/test_sweep.py",
    "docs",  # pages, docstrings and examples
    "processes",  # real ones: kills, Ctrl-C, torchrun, memory
    "faults/test_sweeps.py",  # kills and full disks
    "test_many_tokens.py",  # 15 s
    "bench/test_suite.py",  # pytest in pytest, and compilers
    "bench/test_functions.py",
    "fuzz",
)
LONG_FIXTURES = frozenset({"forker", "wheel"})
FEW = 8
PAIRS = 24  # six ops on four backends
OTHER_INSTRUCTION_SETS = frozenset(INSTRUCTION_SETS[2:]) | {f"cpu-{name}" for name in INSTRUCTION_SETS[2:]}

TESTS = Path(__file__).parents[1]


def mark_long(items: Sequence[pytest.Item]) -> None:
    """Add the marker `long` to the tests that `make test` leaves out."""
    cases_of = defaultdict(list)
    for item in items:
        if _is_long(item):
            item.add_marker("long")
        elif hasattr(item, "callspec"):
            # Cases that need a GPU are covered on their own: without one they are skipped.
            needs_gpu = item.get_closest_marker("gpu") is not None
            cases_of[item.nodeid.partition("[")[0], needs_gpu].append(item)
    for (name, _), cases in cases_of.items():
        few, pairs = (1, 0) if name.startswith("tests/triton/") else (FEW, PAIRS)
        if len(cases) > few:
            # Stacked parametrisations share their values, which are told apart by id: not all can be hashed.
            kept = cover([{name: id(value) for name, value in item.callspec.params.items()} for item in cases], pairs)
            for index in set(range(len(cases))) - kept:
                cases[index].add_marker("long")


def _is_long(item: pytest.Item) -> bool:
    if any(item.path.is_relative_to(TESTS / path) for path in LONG_PATHS):
        return True
    if not LONG_FIXTURES.isdisjoint(item.fixturenames):
        return True
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any(isinstance(value, str) and value in OTHER_INSTRUCTION_SETS for value in values)


def cover(cases: Sequence[Mapping[str, object]], most: float = math.inf) -> set[int]:
    """Indices of cases, given as value by parameter, that have every pair of values, or every value, of all cases.

    Values alone where two parameters have more than `most` pairs. Greedy: next comes the case with most of what is
    missing; of these the one with most new pairs; of these the one whose values were taken least.
    """
    pairs = [set(combinations(sorted(case.items()), 2)) for case in cases]
    counts = Counter((first[0], second[0]) for first, second in set().union(*pairs))
    by_pairs = bool(counts) and max(counts.values()) <= most
    wanted = pairs if by_pairs else [set(case.items()) for case in cases]
    missing, new_pairs, taken, kept = set().union(*wanted), set().union(*pairs), Counter(), set()

    def gain(index: int) -> tuple[int, int, int]:
        repeated = sum(taken[value] for value in cases[index].items())
        return len(wanted[index] & missing), len(pairs[index] & new_pairs), -repeated

    while missing:
        best = max(range(len(cases)), key=gain)
        kept.add(best)
        missing -= wanted[best]
        new_pairs -= pairs[best]
        taken.update(cases[best].items())
    return kept
