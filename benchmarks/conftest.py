"""Options of the suite: `pytest benchmarks`."""

from __future__ import annotations

import pytest
import torch

from fastlin.bench import suite


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--smoke`."""
    parser.addoption("--smoke", action="store_true", help="a few sequences: to see that the suite runs, not to compare")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each contender of each case of the table."""
    specs = [spec for spec in suite.default(torch.get_num_threads()) if spec.part == suite.TABLE]
    if metafunc.config.getoption("--smoke"):
        specs = [spec.small() for spec in specs]
    pairs = [pytest.param(spec, label, id=f"{spec.name}-{label}") for spec in specs for label in spec.labels]
    metafunc.parametrize(("spec", "label"), pairs)
