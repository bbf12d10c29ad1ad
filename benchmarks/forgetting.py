"""Figure 5 of the paper on fine-tuning: a stretch of our loop and of eager ones, and the whole figure at their pace.

    python -m benchmarks.forgetting [--steps 50] [--cpu]

The figure is a pretraining and eight fine-tunings of 5,000 steps of 5,000 fresh sequences, 20 shots, five seeds. Ours
is two runs, in which seeds and regimes lie side by side; eager loops train one model after the other.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fastlin as fl
from fastlin.figures.forgetting.regimes import EIGHT, Setting

STEPS, BATCH, SEEDS = 5000, 5000, 5
_SETTING = Setting()


def full_attention(Z: Tensor, W: Tensor, v: Tensor) -> Tensor:
    """The paper's form: all columns of V Z Z'Q Z / N, of which the last is read; Z (B, N, m)."""
    return (Z @ W @ Z.mT @ (Z @ v)[..., None])[:, -1, 0] / Z.shape[1]


def query_row(Z: Tensor, W: Tensor, v: Tensor) -> Tensor:
    """What is left when only the query's column is computed."""
    scores = Z @ (Z[:, -1] @ W)[..., None]
    return (scores[..., 0] * (Z @ v)).sum(1) / Z.shape[1]


def tokens(n: int, theta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens [1; x; y] (B, n+1, m) with the query last, and its labels; theta None is the unit sphere."""
    d = _SETTING.dimension
    if theta is None:
        theta = torch.nn.functional.normalize(torch.randn(BATCH, 1, d), dim=-1)
    x = torch.randn(BATCH, n + 1, d)
    y = (x * theta).sum(-1) + _SETTING.noise_variance**0.5 * torch.randn(BATCH, n + 1)
    Z = torch.cat([torch.ones_like(y)[..., None], x, y[..., None]], -1)
    Z[:, -1, -1] = 0.0
    return Z, y[:, -1]


Form = Callable[[Tensor, Tensor, Tensor], Tensor]
Clock = Callable[[], float]


def check() -> None:
    """Both forms are the op, on the same tokens."""
    Z, y = tokens(3, None)
    W, v = torch.randn(7, 7), torch.randn(7)
    wanted, _ = fl.prompt_loss(Z[:, :-1], Z[:, -1], y, None, None, W, v, see_query=True, scale=0.25)
    for form in (full_attention, query_row):
        torch.testing.assert_close((form(Z, W, v) - y).square().mean(), wanted, rtol=1e-4, atol=0.0)


def eager(form: Form, shots: tuple[int, ...], steps: int, theta: Tensor | None, clock: Clock) -> float:
    """Seconds of a step of one model with SGD: the losses at these shots, their gradients, and the update."""
    m = _SETTING.dimension + 2
    W, v = (0.05 * torch.randn(*size) for size in ((m, m), (m,)))
    parameters = [W.requires_grad_(), v.requires_grad_()]
    optimiser = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    started = 0.0
    for step in range(-2, steps):
        if step == 0:
            started = clock()
        optimiser.zero_grad()
        losses = []
        for n in shots:
            Z, y = tokens(n, theta)
            losses.append((form(Z, W, v) - y).square().mean())
        torch.autograd.backward(torch.stack(losses).sum())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
    return (clock() - started) / steps


def ours(steps: int, clock: Clock) -> tuple[float, float]:
    """Seconds of a step of pretraining, and of the eight fine-tunings together, for all seeds.

    Two lengths of a run, and their difference, leave out what a run does once.
    """
    options: dict[str, Any] = {"trials": SEEDS, "batch": BATCH, "records": 1, "progress": False}
    shots, spent = _SETTING.shots, []
    for length in (2, steps, 3 * steps):  # the first loads what is loaded once
        started = clock()
        first = fl.train(_SETTING.source, "pretrain", shots, steps=length, **options)
        between = clock()
        fl.train(_SETTING.source, EIGHT, shots, target=_SETTING.task, after=first, steps=2 * length, **options)
        spent.append((between - started, clock() - between))
    pretrain, tune = ((long - short) / (2 * steps) for short, long in zip(*spent[1:], strict=True))
    return pretrain, tune


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Figure 5 of the paper on fine-tuning, extrapolated from stretches.")
    parser.add_argument("--steps", type=int, default=50, help="of each stretch that is timed")
    parser.add_argument("--cpu", action="store_true", help="processor time over threads, for a machine that is shared")
    given = parser.parse_args()
    threads = torch.get_num_threads()
    clock: Clock = (lambda: time.process_time() / threads) if given.cpu else time.perf_counter
    check()
    theta = torch.eye(_SETTING.dimension)[0]
    kinds: tuple[tuple[tuple[int, ...], Tensor | None], ...] = (((20,), None), ((0,), theta), ((0, 20), theta))
    pretrain, tune = ours(given.steps, clock)
    whole = STEPS * (pretrain + tune) / 60
    timed = "processor" if given.cpu else "wall"
    print(f"{threads} threads, {timed} time: milliseconds of a step, and the whole figure at that pace")
    print(f"{'':34}{'pretraining':>12}{'zs':>10}{'zs+fs':>10}{'figure':>14}")
    print(f"{'fastlin, all seeds and regimes':34}{1e3 * pretrain:>12.2f}{1e3 * tune:>20.2f}{whole:>10.1f} min")
    for name, form in (("query row", query_row), ("full attention", full_attention)):
        first, zero, both = (eager(form, shots, given.steps, task, clock) for shots, task in kinds)
        total = STEPS * SEEDS * (first + 4 * zero + 4 * both) / 60
        steps = f"{1e3 * first:>12.2f}{1e3 * zero:>10.2f}{1e3 * both:>10.2f}"
        print(f"{f'eager, {name}, one model':34}{steps}{total:>10.1f} min, {total / whole:.0f} times ours")


if __name__ == "__main__":
    main()
