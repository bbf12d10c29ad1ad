"""Steps on fresh data: the ops that draw them, and what a user would write: draw tokens, then the loss."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlin.bench import cases, peers
from fastlin.bench.cases import Loss, Shape, Step
from fastlin.bench.checks import WrongResultError, relative_error
from fastlin.data.sources import TaskMixture
from fastlin.ops import functional

CHECKS = 10
ALLOWED_ERRORS = 8.0
"""Standard errors by which the mean losses of `CHECKS` calls may differ: t with 18 degrees of freedom, once in 10^6."""


def source(shape: Shape) -> TaskMixture:
    """K Gaussian tasks with different means, identity covariances and equal weights."""
    d, K = shape.m - 1, shape.K
    means = torch.linspace(-1, 1, K * d, dtype=torch.float64).reshape(K, d)
    return TaskMixture(
        means, torch.eye(d, dtype=torch.float64).expand(K, d, d), torch.full((K,), 1 / K, dtype=torch.float64)
    )


def op(shape: Shape, parameters: dict[str, Tensor], backend: str) -> Step:
    """The sampled op; every call is another step of the generator."""
    mix, leaves = source(shape), tuple(parameters.values())
    public = peers.public(shape.op)
    steps = iter(range(1 << 24))

    def call() -> tuple[Tensor, ...]:
        loss, _ = public(mix, shape.n, shape.B, *leaves, seed=1, step=next(steps), backend=backend)
        total = loss if shape.R is None else loss.sum()
        return (total.detach(), *torch.autograd.grad(total, leaves))

    return call


def tokens(shape: Shape, means: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z, q, y, task of a batch, by torch's generator, in the dtype of the means."""
    d = shape.m - 1
    like: dict[str, Any] = {"device": means.device, "dtype": means.dtype}
    task = torch.randint(0, shape.K, (shape.B,), device=means.device)
    beta = means[task] + torch.randn(shape.B, d, **like)
    X = torch.randn(shape.B, shape.n + 1, d, **like)
    Y = torch.einsum("bnd,bd->bn", X, beta)
    z = torch.cat([X[:, : shape.n], Y[:, : shape.n, None]], -1)
    q = torch.cat([X[:, shape.n], torch.zeros(shape.B, 1, **like)], -1)
    return z, q, Y[:, shape.n], task


def eager(
    shape: Shape,
    parameters: dict[str, Tensor],
    compiled: bool = False,
    mode: str | None = None,
    model: Loss | None = None,
) -> Step:
    """Tokens, then a loss in torch operations (the first form of the op); all of it under torch.compile."""
    leaves = tuple(parameters.values())
    means = source(shape).means.to(leaves[0])
    of_tokens = model or peers.of_form(shape.op, "", shape.R is not None)

    def loss() -> Tensor:
        return of_tokens(*tokens(shape, means), *leaves).sum()

    run = torch.compile(loss, dynamic=False, mode=mode) if compiled else loss

    def call() -> tuple[Tensor, ...]:
        value = run()
        return (value.detach(), *torch.autograd.grad(value, leaves))

    return call


def check_op(shape: Shape, backend: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Relative error of the op's loss and gradients against eager, in float64, on the data that it draws.

    Raises
    ------
    WrongResultError
        When it is above 1e-3: what the data lose in float32 is far below, what a wrong formula does far above.
    """
    mix = source(shape)
    leaves = [x.detach().to(dtype).requires_grad_() for x in cases.parameters_of(shape, device).values()]
    truth_op = functional.gram_stack_loss if shape.op == "sampled_stack_loss" else functional.gram_loss
    place: dict[str, Any] = {"seed": 1, "step": 5}
    loss, _ = peers.public(shape.op)(mix, shape.n, shape.B, *leaves, **place, backend=backend)
    found = (loss, *torch.autograd.grad(loss.sum(), leaves))
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    data = mix.sample_gram(shape.B, shape.n, **place, dtype=torch.float64, device=device)
    true_loss, _ = truth_op(*data, *doubles, backend="eager")
    truth = (true_loss, *torch.autograd.grad(true_loss.sum(), doubles))
    names = ("loss", *(f"gradient {i}" for i in range(len(leaves))))
    errors = {name: relative_error(a, b) for name, a, b in zip(names, found, truth, strict=True)}
    wrong = {name: error for name, error in errors.items() if not error < 1e-3}
    if wrong:
        raise WrongResultError(f"relative errors {wrong}")
    return errors


def mean_loss(call: Callable[[], Any], trials: int) -> tuple[float, float]:
    """Mean loss of a trial over `CHECKS` calls, and its standard error."""
    losses = [float(call()[0]) / trials for _ in range(CHECKS)]
    return statistics.fmean(losses), statistics.stdev(losses) / CHECKS**0.5


def agree(found: tuple[float, float], expected: tuple[float, float]) -> None:
    """Raise WrongResultError unless two mean losses agree."""
    error = (found[1] ** 2 + expected[1] ** 2) ** 0.5
    if not abs(found[0] - expected[0]) <= ALLOWED_ERRORS * error:
        means = f"mean loss {found[0]:.5g}, the op's is {expected[0]:.5g}"
        raise WrongResultError(f"{means}; standard error {error:.1g}")
