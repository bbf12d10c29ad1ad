"""Task mixtures, and the reference values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlin as fl


def build(
    means: Any, covariances: Any, weights: Any, noise_std: float = 0.0, feature_cov: Any = None, bias: bool = False
) -> fl.TaskMixture:
    return fl.TaskMixture(means, covariances, weights, noise_std, feature_cov, bias)


def spd(d: int, generator: torch.Generator, floor: float = 0.2) -> Tensor:
    root = torch.randn(d, d, generator=generator, dtype=torch.float64)
    return root @ root.mT / d + floor * torch.eye(d, dtype=torch.float64)


def draw(seed: int, d: int = 3, K: int = 2, noise_std: float = 0.7) -> fl.TaskMixture:
    """A mixture in which no matrices commute."""
    g = torch.Generator().manual_seed(seed)
    weights = 0.2 + torch.rand(K, generator=g, dtype=torch.float64)
    return fl.TaskMixture(
        torch.randn(K, d, generator=g, dtype=torch.float64),
        torch.stack([spd(d, g) * (1.0 + 2.0 * k) for k in range(K)]),
        weights / weights.sum(),
        noise_std,
        spd(d, g),
    )


@pytest.fixture(scope="session")
def mixture() -> Callable[..., fl.TaskMixture]:
    return build


@pytest.fixture(scope="session")
def random_mixture() -> Callable[..., fl.TaskMixture]:
    return draw


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    path = Path(__file__).parents[1] / "data" / "golden.json"
    return json.loads(path.read_text())


@pytest.fixture(scope="session")
def paper() -> dict[str, fl.TaskMixture]:
    """The paper's experiments with reference values, and a problem in which no matrices commute."""
    one, eye = torch.ones(10, dtype=torch.float64), torch.eye(10, dtype=torch.float64)
    star = torch.diag(torch.tensor([0.9, *(0.9**-i for i in range(1, 10))], dtype=torch.float64))

    def two(first: float, second: float, covariances: list[Tensor], noise_var: float = 0.0) -> fl.TaskMixture:
        means = torch.stack([first * one, second * one])
        return build(means, torch.stack(covariances), [0.3, 0.7], noise_var**0.5)

    case = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())["PB_noncommuting"][0]
    return {
        "fig2a": two(1.7, -1.3, [eye, eye]),
        "fig2c": two(2.1, -0.9, [eye, eye]),
        "D1_2a_sigma5": two(1.7, -1.3, [eye, eye], 5.0),
        "E2_noisy": two(1.7, -1.3, [star, 2 * star], 5.0),
        "noncommuting": build(case["mu"], case["Sb"], case["pi"], case["sigma2"] ** 0.5, case["Sx"]),
    }
