"""Figure 5 of the paper on fine-tuning: a stretch of our loop and of eager ones, and the whole figure at their pace.

The figure is a pretraining and eight fine-tunings of 5,000 steps of 5,000 fresh sequences, 20 shots, five seeds. Ours
is two runs, in which seeds and regimes lie side by side; eager loops train one model after the other.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlin.bench.rows import Row
from fastlin.figures.forgetting.regimes import EIGHT, Setting
from fastlin.ops import api
from fastlin.training.run import train

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


def check() -> None:
    """Both forms are the op, on the same tokens."""
    Z, y = tokens(3, None)
    W, v = torch.randn(7, 7), torch.randn(7)
    wanted, _ = api.prompt_loss(Z[:, :-1], Z[:, -1], y, None, None, W, v, see_query=True, scale=0.25)
    for form in (full_attention, query_row):
        torch.testing.assert_close((form(Z, W, v) - y).square().mean(), wanted, rtol=1e-4, atol=0.0)


def eager(form: Form, shots: tuple[int, ...], steps: int, theta: Tensor | None) -> float:
    """Seconds of a step of one model with SGD: the losses at these shots, their gradients, and the update."""
    m = _SETTING.dimension + 2
    W, v = (0.05 * torch.randn(*size) for size in ((m, m), (m,)))
    parameters = [W.requires_grad_(), v.requires_grad_()]
    optimiser = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    started = 0.0
    for step in range(-2, steps):
        if step == 0:
            started = time.perf_counter()
        optimiser.zero_grad()
        losses = []
        for n in shots:
            Z, y = tokens(n, theta)
            losses.append((form(Z, W, v) - y).square().mean())
        torch.autograd.backward(torch.stack(losses).sum())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
    return (time.perf_counter() - started) / steps


def ours(steps: int) -> tuple[float, float]:
    """Seconds of a step of pretraining, and of the eight fine-tunings together, for all seeds."""
    # Two lengths of a run, and their difference, leave out what a run does once.
    options: dict[str, Any] = {"trials": SEEDS, "batch": BATCH, "records": 1, "progress": False}
    shots, spent = _SETTING.shots, []
    for length in (2, steps, 3 * steps):  # the first loads what is loaded once
        started = time.perf_counter()
        first = train(_SETTING.source, "pretrain", shots, steps=length, **options)
        between = time.perf_counter()
        train(_SETTING.source, EIGHT, shots, target=_SETTING.task, after=first, steps=2 * length, **options)
        spent.append((between - started, time.perf_counter() - between))
    pretrain, tune = ((long - short) / (2 * steps) for short, long in zip(*spent[1:], strict=True))
    return pretrain, tune


def measure(row: Row, quick: bool) -> dict[str, Any]:
    """Milliseconds of a step, and minutes of the whole figure at that pace."""
    steps = 2 if quick else 50
    check()
    theta = torch.eye(_SETTING.dimension)[0]
    kinds: tuple[tuple[tuple[int, ...], Tensor | None], ...] = (((20,), None), ((0,), theta), ((0, 20), theta))
    pretrain, tune = ours(steps)
    whole = STEPS * (pretrain + tune) / 60
    lines = [
        f"{'milliseconds of a step':28}{'pretraining':>12}{'zs':>8}{'zs+fs':>8}{'figure':>12}{'times':>7}",
        f"{'fastlin, all seeds, regimes':28}{1e3 * pretrain:>12.2f}{1e3 * tune:>16.2f}{whole:>8.1f} min{1:>7}",
    ]
    values = {"fastlin": 60 * whole}
    for name, form in (("eager", query_row), ("reference", full_attention)):
        first, zero, both = (eager(form, shots, steps, task) for shots, task in kinds)
        total = STEPS * SEEDS * (first + 4 * zero + 4 * both) / 60
        times = f"{1e3 * first:>12.2f}{1e3 * zero:>8.2f}{1e3 * both:>8.2f}"
        lines.append(f"{f'{name}, one model':28}{times}{total:>8.1f} min{total / whole:>7.0f}")
        values[name] = 60 * total
    return {"lines": lines, "values": values}
