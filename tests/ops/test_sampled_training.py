"""Training on drawn data: the gradient is that of the population loss, and optimisers go down it."""

import pytest
import torch
from support.op_cases import DOUBLE
from support.sampled_cases import SOURCES, differentiable, parameters, sampled

import fastlin as fl
from fastlin.backends import cpu

COVARIANCES = torch.tensor([[[1.0, 0.3], [0.3, 0.5]], [[0.4, -0.2], [-0.2, 0.8]]], dtype=DOUBLE)
MIX = fl.TaskMixture(
    [[1.0, -0.5], [-0.3, 0.8]], COVARIANCES, [0.35, 0.65], noise_std=0.5, feature_cov=[[1.0, 0.2], [0.2, 0.7]]
)
STEPS, BATCH, SHOTS, SCALE = 400, 10_000, 5, 0.8
SHAPES = {
    "prompts and heads": {"t": 1},
    "shared head, no prompt": {"t": None, "shared": True},
    "trials and attention heads": {"R": 2, "H": 2, "t": 3},
}


def gradients(loss, given):
    leaves = [t for t in given.values() if t is not None]
    return torch.cat([grad.flatten().to(DOUBLE) for grad in torch.autograd.grad(loss.sum(), leaves)])


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_mean_gradient_is_that_of_the_population_loss(shape, dtype):
    """4,000,000 sequences: each entry within four standard errors, which 1.05 times it is not.

    The standard error is estimated from 400 steps. Entries that meet the query's label slot are zero in both.
    """
    given = differentiable(parameters(MIX, "sampled_loss", n=SHOTS, **SHAPES[shape]), dtype)
    doubles = {name: t if t is None else t.detach().to(DOUBLE).requires_grad_() for name, t in given.items()}
    exact = gradients(fl.theory.full_population_loss(MIX, SHOTS, *doubles.values(), scale=SCALE), doubles)
    draws = torch.stack(
        [
            gradients(
                fl.sampled_loss(MIX, SHOTS, BATCH, *given.values(), seed=5, step=step, scale=SCALE, backend="cpu")[0],
                given,
            )
            for step in range(STEPS)
        ]
    )
    mean, error = draws.mean(0), draws.std(0) / STEPS**0.5
    # Sums of 10,000 float32 terms and their data are rounded: 1e-6 of the largest entry, far below the errors.
    error = error + 1e-6 * exact.abs().max()
    assert ((mean - exact).abs() < 4 * error).all()
    assert ((mean - 1.05 * exact).abs() > 4 * error).any()
    # One entry that is wrong is seen alone: most of them.
    seen = (mean - 1.05 * exact).abs() > 4 * error
    assert seen[exact != 0].double().mean() > 0.5


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.5)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.02)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


@pytest.mark.parametrize("op", ["sampled_loss", "sampled_stack_loss"])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize("make", [sgd, adam, lbfgs])
@pytest.mark.parametrize("stream", [3, "trial"])
def test_optimisers_go_down(make, op, dtype, stream, any_backend):
    """Ten steps, each on new data; measured on data of a stream that training does not see."""
    source = SOURCES["mixture"]
    given = {k: 0.3 * t for k, t in parameters(source, op, R=2, t=1).items()}
    given = differentiable(given, dtype)

    def test_loss():
        with torch.no_grad():
            return sampled(op, source, 9, 2000, stream=99, scale=0.1)(**given)[0]

    before = test_loss()
    optimiser = make([t for t in given.values() if t is not None])
    for step in range(10):

        def closure(step=step):
            optimiser.zero_grad()
            loss = sampled(op, source, 9, 500, step=step, stream=stream, scale=0.1)(**given)[0].sum()
            loss.backward()
            return loss

        optimiser.step(closure)
    after = test_loss()
    assert after.isfinite().all()
    assert (after < before).all()
    assert (cpu.backend.last_kernel is None) == (any_backend != "cpu")
