"""The rows of `fastlin bench` under pytest-benchmark: a group for each row, JSON, and comparison with a run before.

    pytest benchmarks --benchmark-json F            --benchmark-autosave keeps it in .benchmarks
    pytest benchmarks --benchmark-compare --benchmark-compare-fail=median:20%
    pytest benchmarks -k "loss-50 and eager"    --smoke runs all with few sequences

Its times are absolute, for one machine and one afternoon; `fastlin bench --compare` has ratios, for all others.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from fastlin.bench.contenders import BenchProblem, SkippedError
from fastlin.bench.labels import parse
from fastlin.bench.rows import Row


@functools.lru_cache(maxsize=1)  # tests of a row follow each other
def _problem(row: Row) -> BenchProblem:
    assert row.shape is not None
    return BenchProblem(row.shape, getattr(torch, row.dtype))


def test_contender(benchmark: Any, row: Row, label: str) -> None:
    """Checked against the float64 reference, then timed."""
    problem, threads = _problem(row), torch.get_num_threads()
    torch.set_num_threads(parse(label).threads or row.threads or threads)
    try:
        call = problem.build(label)
        errors = problem.check(label, call)
        benchmark.group = f"{row.name}: {row.title(threads)}"
        benchmark.extra_info.update(label=label, steps=problem.steps(label), error=max(errors.values(), default=None))
        benchmark(call)
    except SkippedError as error:
        pytest.skip(str(error))
    finally:
        torch.set_num_threads(threads)
