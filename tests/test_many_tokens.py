import pytest
import torch

import fastlin as fl


def test_more_tokens_than_32_bits_count():
    """One number, 2^31 + 5 times."""
    n = (1 << 31) + 5
    z = torch.full((1, 1, 1), 0.5, dtype=torch.float64).expand(1, n, 1)
    assert fl.gram(z).item() == pytest.approx(0.25 * n, rel=1e-12)
