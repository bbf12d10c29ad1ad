"""Training at the paper's scale: stretches of it are timed, and a cell and a figure are stated at their pace.

A cell is one regime at one context length: 50 trials of 20,000 steps of 8192 fresh sequences. Figure 2(d) has 18 of
them. fastlin's steps cost the same for every n, the others' grow linearly in n, so that a figure takes its number of
cells times a cell of its mean length.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastlin import settings
from fastlin.bench import jax_peers, sampled_peers
from fastlin.bench.cases import Shape, parameters_of
from fastlin.bench.checks import WrongResultError, relative_error
from fastlin.bench.contenders import Call, Problem, SkippedError
from fastlin.bench.timing import summary, timed
from fastlin.figures.prompts import PANELS
from fastlin.ops import sampled
from fastlin.training.config import RunConfig
from fastlin.training.loop import Loop
from fastlin.training.start import initial_model

FIGURE = "2d"
TRIALS, STEPS, BATCH = 50, 20_000, 8192
PEERS = ("eager", "vmap-gram", "compile-gram", "jax-gram")


@dataclass(frozen=True)
class Stretch:
    """Something that trains: a call makes `steps` steps of `trials` trials at once."""

    call: Call
    trials: int
    steps: int


def measure(steps: int, batch: int, seconds: float) -> dict[str, Any]:
    """Time stretches of `steps` steps of fastlin's loop, and of its peers'; state a cell and a figure at their pace."""
    lengths = settings.load(PANELS[FIGURE].setting).context_lengths
    cells = len(PANELS[FIGURE].series) * len(lengths)
    shape = Shape("sampled_loss", B=batch, n=round(statistics.fmean(lengths)), R=TRIALS)
    stretches: dict[str, Stretch] = {}
    skipped: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for label in ("fastlin", *PEERS):
        try:
            stretches[label] = fastlin_stretch(shape, steps) if label == "fastlin" else _peer(shape, label)
        except SkippedError as error:
            skipped[label] = str(error)
        except WrongResultError as error:
            wrong[label] = str(error)
        except Exception as error:  # whatever keeps a contender from running is what the record says
            skipped[label] = f"{type(error).__name__}: {error}".splitlines()[0]
    entries = []
    for label, timing in timed({label: one.call for label, one in stretches.items()}, seconds).items():
        one = stretches[label]
        entry = {"label": label, "trials": one.trials, "steps": one.steps, **summary(timing, one.steps)}
        cell = entry["median"] * STEPS * TRIALS / one.trials
        entries.append({**entry, "cell": cell, "figure": cells * cell})
    ours = next((entry["cell"] for entry in entries if entry["label"] == "fastlin"), None)
    for entry in entries:
        entry["times_fastlin"] = None if ours is None else entry["cell"] / ours
    return {
        "figure": FIGURE,
        "cells": cells,
        "n": shape.n,
        **{"trials": TRIALS, "train_steps": STEPS, "batch": batch},
        "extrapolation": (
            f"a cell is {TRIALS} trials of {STEPS:,} steps of {batch} sequences at the pace of the stretches timed, at "
            f"the figure's mean length n = {shape.n}; the figure is {cells} such cells, one after the other"
        ),
        "contenders": entries,
        "skipped": skipped,
        "wrong": wrong,
    }


def fastlin_stretch(shape: Shape, steps: int) -> Stretch:
    """A stretch of fastlin's own loop, checked against plain torch on the ops."""
    training = cell_config(shape, steps, "auto")
    check_loop(training, loop(training), steps)
    return Stretch(lambda: [loop(training)], shape.R or 1, steps)


def cell_config(shape: Shape, steps: int, backend: str) -> RunConfig:
    """The cell in the regime `joint`, with the values that the paper states, and as many steps.

    It ends with one record, which has the exact risk: a stretch of a hundredth of the cell has its share of records.
    """
    return RunConfig.resolve(
        sampled_peers.source(shape),
        "joint",
        shape.n,
        trials=shape.R or 1,
        records=1,
        preset="paper",
        steps=steps,
        batch=shape.B,
        start_attention=0.01,
        start_heads=0.01,
        backend=backend,
    )


def loop(training: RunConfig) -> Loop:
    """The loop, when it has run."""
    made = Loop(training, progress=False)
    made.run()
    return made


def bare(training: RunConfig, steps: int) -> Callable[[], None]:
    """The cell's kernel calls, gradients and fused Adam on the ops' own parameters, in the shortest loop."""
    with torch.no_grad():
        forms = {name: form.clone() for name, form in initial_model(training).forms().items() if form is not None}

    def call() -> None:
        leaves = [form.clone().requires_grad_() for form in forms.values()]
        optimiser = torch.optim.Adam(leaves, lr=training.lr, fused=True)
        for step in range(steps):
            loss = _loss(training, leaves, step)
            optimiser.zero_grad()
            torch.autograd.backward(loss.sum())
            optimiser.step()

    return call


def _loss(training: RunConfig, leaves: list[Tensor], step: int) -> Tensor:
    """The op's loss (R,) on the data of a step."""
    mix: Any = training.mix
    place: dict[str, Any] = {"seed": training.seed, "step": step, "backend": training.backend}
    return sampled.sampled_loss(mix, training.n, training.batch, *leaves, **place)[0]


def check_loop(training: RunConfig, made: Loop, steps: int) -> None:
    """The loop's parameters are those of plain torch on the ops, to float32's rounding over a stretch."""
    with torch.no_grad():
        leaves = [raw.clone() for raw in initial_model(training).parameters()]
    for leaf in leaves:
        leaf.requires_grad_()
    optimiser = torch.optim.Adam(leaves, lr=training.lr)
    W, v, p = leaves
    for step in range(steps):
        heads = v[:, None].expand(-1, p.shape[1], -1)
        loss = _loss(training, [p, W, heads], step)
        optimiser.zero_grad()
        torch.autograd.backward(loss.sum())
        optimiser.step()
    for name, leaf in zip(("W", "v", "p"), leaves, strict=True):
        error = relative_error(getattr(made.model, name), leaf)
        if not error < 1e-3:
            raise WrongResultError(f"{name} differs from plain torch by {error:.2g}")


def training_step(draw_and_derive: Callable[[], tuple[Tensor, ...]], leaves: list[Tensor]) -> Call:
    """A training step in torch: fresh data, loss and gradients, then Adam."""
    optimiser = torch.optim.Adam(leaves, lr=1e-3, fused=True)

    def call() -> tuple[Tensor, ...]:
        loss, *gradients = draw_and_derive()
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        optimiser.step()
        return (loss,)

    return call


def _peer(shape: Shape, label: str) -> Stretch:
    """A peer's stretch, when its typical loss is that of the op: one trial for a form without trials, else all."""
    alone = label == "eager"
    problem = Problem(replace(shape, R=None) if alone else shape, torch.float32)
    step: Any = problem.build(label)
    if label.startswith("jax"):
        train = jax_peers.training(shape, parameters_of(shape))
        problem.check(label, lambda: train(0.0))
        return Stretch(lambda: train(1e-3), shape.R or 1, jax_peers.STEPS)
    problem.check(label, step)
    return Stretch(training_step(step, problem.leaves), 1 if alone else shape.R or 1, 1)
