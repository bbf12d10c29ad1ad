"""The closed forms against sampled sequences through the literal reference: within four standard errors.

Predictions are the paper taken literally (`fastlin.reference`), data the task sources' tokens; nothing of the theory is
used to draw or to predict.
"""

import pytest
import torch

import fastlin as fl
from fastlin import theory
from fastlin.theory import forgetting

DOUBLE = torch.float64
B = 60_000


def covariance(d, seed):
    root = torch.randn(d, d, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))
    return root @ root.T / d + 0.2 * torch.eye(d, dtype=DOUBLE)


def mixture(noise_std=0.6):
    """Nothing commutes."""
    means = [[1.0, -0.5, 0.3], [-0.4, 0.8, 0.6]]
    covariances = torch.stack([covariance(3, 1), 2 * covariance(3, 2)])
    return fl.TaskMixture(means, covariances, [0.35, 0.65], noise_std=noise_std, feature_cov=covariance(3, 3))


def assert_mean(squares, expected):
    """The mean of squared errors (..., B) is the expected risk (...)."""
    error = squares.std(-1) / squares.shape[-1] ** 0.5
    z = (squares.mean(-1) - torch.as_tensor(expected, dtype=DOUBLE)) / error
    assert (z.abs() < 4).all(), f"off by {z.tolist()} standard errors"


def squared_errors(mix, n, p, W, v, **options):
    z, q, y, task = mix.sample(B, n, seed=17, step=n, dtype=DOUBLE)
    return (fl.reference.predict(z, q, task, p, W, v, **options) - y).square()


@pytest.mark.parametrize("n", [0, 1, 4, 9])
@pytest.mark.parametrize("optimum", ["plain", "fine_tuned", "joint", "decoupled", "shared_shift", "scaled_heads"])
def test_optima(optimum, n):
    mix = mixture()
    found = getattr(theory, optimum)(mix, n)
    p, W, v = found.attention()
    assert_mean(squared_errors(mix, n, p, W, v), found.loss)


@pytest.mark.parametrize("n", [0, 1, 6])
def test_population_losses(n):
    mix = mixture()
    g = torch.Generator().manual_seed(n)
    W, prompts = 0.05 * torch.randn(3, 3, dtype=DOUBLE, generator=g), torch.randn(2, 3, dtype=DOUBLE, generator=g)
    p, full_W, v = theory.Optimum(W, prompts, None, 0.0).attention()
    assert_mean(squared_errors(mix, n, p, full_W, v), theory.population_loss(mix, n, W, prompts))

    R, H, t = 2, 2, 2
    p, W, v = (
        0.3 * torch.randn(*shape, dtype=DOUBLE, generator=g) for shape in ((R, 2, t, 4), (R, H, 4, 4), (R, H, 2, 4))
    )
    expected = theory.full_population_loss(mix, n, p, W, v, scale=0.3)
    assert_mean(squared_errors(mix, n, p, W, v, scale=0.3), expected)


def test_normaliser():
    mix = mixture()
    assert_mean(mix.sample(B, 0, seed=5, dtype=DOUBLE)[2].square(), theory.normaliser(mix))


def families(d, theta0, S):
    g = torch.Generator().manual_seed(4)
    v_x, Q = torch.randn(d, dtype=DOUBLE, generator=g), torch.randn(d, d, dtype=DOUBLE, generator=g)
    return {
        "any": forgetting.Family(0.5 * v_x, 0.7, 0.4, 0.3 * Q),
        "pretrained": forgetting.pretrained(d, shots=12, cov=S, noise_var=0.16),
        "limit": forgetting.pretrained(d, cov=S),
        "fully tuned": forgetting.fully_tuned(theta0, c=0.6),
        "value tuned": forgetting.value_tuned(theta0, c=0.8, cov=S),
        "value tuned, m": forgetting.value_tuned(theta0, shots=12, cov=S, noise_var=0.16),
    }


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("name", ["any", "pretrained", "limit", "fully tuned", "value tuned", "value tuned, m"])
@pytest.mark.parametrize("full", [False, True])
def test_forgetting(name, n, full):
    """FF's model: constant coordinate first, the query among the keys, scale 1/(n + 1)."""
    d, theta = 3, [0.8, -0.3, 0.5]
    S = covariance(d, 6) if full else torch.diag(torch.tensor([0.5, 1.0, 2.0], dtype=DOUBLE))
    family = families(d, [0.2, 0.9, -0.4], S)[name]
    source = fl.FixedTask(theta, noise_std=0.4, feature_cov=S, bias=True)
    W, v = family.attention()
    squares = squared_errors(source, n, None, W, v, scale=1 / (n + 1), see_query=True)
    assert_mean(squares, forgetting.error(family, theta, n, S, 0.16))


@pytest.mark.parametrize("shots", [0, 4])
def test_pretraining_loss_on_the_sphere(shots):
    d, eye = 3, torch.eye(3, dtype=DOUBLE)
    source = fl.SphereTasks(d, noise_std=0.3, bias=True)
    W, v = forgetting.pretrained(d, shots, noise_var=0.09, task_cov=eye / d).attention()
    squares = squared_errors(source, shots, None, W, v, scale=1 / (shots + 1), see_query=True)
    assert_mean(squares, forgetting.pretraining_loss(d, shots, noise_var=0.09, task_cov=eye / d))
