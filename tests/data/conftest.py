"""Fixtures of the tests of random draws."""

import pytest
import torch


@pytest.fixture
def threads():
    """A function that sets torch's number of threads; the fixture restores the old number."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
