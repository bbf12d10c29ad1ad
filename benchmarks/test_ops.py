"""The cases of `fastlin bench` under pytest-benchmark: a group for each case, JSON, and comparison with a run before.

    pytest benchmarks --benchmark-json F            --benchmark-autosave keeps it in .benchmarks
    pytest benchmarks --benchmark-compare --benchmark-compare-fail=median:20%
    pytest benchmarks -k "prompt_loss and eager"    --smoke runs all with few sequences

Its times are absolute, for one machine and one afternoon; `fastlin bench --compare` has ratios, for all others.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from fastlin.bench.contenders import Problem, SkippedError
from fastlin.bench.suite import Spec


@functools.lru_cache(maxsize=1)  # tests of a case follow each other
def _problem(spec: Spec) -> Problem:
    return Problem(spec.shape, getattr(torch, spec.dtype))


def test_contender(benchmark: Any, spec: Spec, label: str) -> None:
    """Checked against the float64 reference, then timed."""
    problem = _problem(spec)
    try:
        call = problem.build(label)
        errors = problem.check(label, call)
    except SkippedError as error:
        pytest.skip(str(error))
    benchmark.group = spec.name
    benchmark.extra_info.update(label=label, steps=problem.steps(label), error=max(errors.values(), default=None))
    benchmark(call)
