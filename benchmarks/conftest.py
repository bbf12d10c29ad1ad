"""Options of the suite: `pytest benchmarks`."""

from __future__ import annotations

import pytest
import torch

from fastlin.bench import rows


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--smoke`."""
    parser.addoption("--smoke", action="store_true", help="a few sequences: to see that the suite runs, not to compare")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each contender of each op in the default run, without curves."""
    table = [row for row in rows.default(torch.get_num_threads()) if row.shape is not None and row.axis is None]
    if metafunc.config.getoption("--smoke"):
        table = [row.small() for row in table]
    pairs = [pytest.param(row, label, id=f"{row.name}-{label}") for row in table for label in row.labels]
    metafunc.parametrize(("row", "label"), pairs)
