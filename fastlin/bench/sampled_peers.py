"""Steps on fresh data: the ops that draw them, and what a user would write: draw tokens, then the loss."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlin.bench import cases, peers
from fastlin.bench.cases import CaseShape, Loss, Step
from fastlin.bench.checks import WrongResultError, relative_error
from fastlin.data.sources import TaskMixture
from fastlin.ops import api

OP_CALLS, PEER_CALLS = 40, 3
ALLOWED_ERRORS = 6.0
"""Standard errors by which the mean log losses of the op's and of a peer's calls may differ: t with the op's 39 degrees
of freedom, once in 10^6. A peer that is right has the op's spread: a few of its calls do, which take seconds. Losses of
the same number of sequences have one distribution, but a stack's has tails in which a single call is all of a mean of
losses; its logarithm has not."""


def source(shape: CaseShape) -> TaskMixture:
    """K Gaussian tasks with different means, identity covariances and equal weights."""
    d, K = shape.m - 1, shape.K
    means = torch.linspace(-1, 1, K * d, dtype=torch.float64).reshape(K, d)
    return TaskMixture(means)


def op(shape: CaseShape, parameters: dict[str, Tensor], backend: str) -> Step:
    mix, leaves = source(shape), tuple(parameters.values())
    public = peers.public(shape.op)
    steps = iter(range(1 << 24))

    def call() -> tuple[Tensor, ...]:
        loss, _ = public(mix, shape.n, shape.B, *leaves, seed=1, step=next(steps), backend=backend)
        total = loss if shape.R is None else loss.sum()
        return (total.detach(), *torch.autograd.grad(total, leaves))

    return call


def tokens(shape: CaseShape, means: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    shape: CaseShape, parameters: dict[str, Tensor], model: Loss, compiled: bool = False, mode: str | None = None
) -> Step:
    """Tokens, then a loss in torch operations; all of it under torch.compile."""
    leaves = tuple(parameters.values())
    means = source(shape).means.to(leaves[0])

    def loss() -> Tensor:
        return model(*tokens(shape, means), *leaves).sum()

    run = torch.compile(loss, dynamic=False, mode=mode) if compiled else loss

    def call() -> tuple[Tensor, ...]:
        value = run()
        return (value.detach(), *torch.autograd.grad(value, leaves))

    return call


def check_op(
    shape: CaseShape, backend: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """Relative error of the op's loss and gradients against eager, in float64, on the data that it draws."""
    # WrongResultError above 1e-3: what the data lose in float32 is far below, what a wrong formula does far above.
    mix = source(shape)
    leaves = [x.detach().to(dtype).requires_grad_() for x in cases.parameters_of(shape, device).values()]
    truth_op = api.gram_stack_loss if shape.op == "sampled_stack_loss" else api.gram_loss
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


def losses(call: Callable[[], Any], trials: int, calls: int) -> list[float]:
    return [float(call()[0]) / trials for _ in range(calls)]


def agree(found: Sequence[float], expected: Sequence[float]) -> None:
    """Raise WrongResultError unless a peer's log losses have the mean of the op's, within the spread of the op's."""
    logs, of_peer = ([math.log(loss) if loss > 0 else -math.inf for loss in given] for given in (expected, found))
    error = statistics.stdev(logs) * (1 / len(found) + 1 / len(expected)) ** 0.5
    mean, of_op = statistics.fmean(of_peer), statistics.fmean(logs)
    if not abs(mean - of_op) <= ALLOWED_ERRORS * error:
        losses = f"typical loss {math.exp(mean):.5g}, the op's is {math.exp(of_op):.5g}"
        raise WrongResultError(f"{losses}; standard error {100 * error:.1g} %")
