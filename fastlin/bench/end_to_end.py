"""Training at the paper's scale: stretches of it are timed, and a cell and a figure are stated at their pace.

A cell is one regime at one context length: 50 trials of 20,000 steps of 8192 fresh sequences. Figure 2(d) has 18 of
them. fastlin's steps cost the same for any n, the others' grow linearly in n, so that a figure takes its number of
cells times a cell of its mean length.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastlin import settings
from fastlin.bench import jax_peers, peers, sampled_peers
from fastlin.bench.cases import CaseShape, Loss, parameters_of
from fastlin.bench.checks import WrongResultError, relative_error
from fastlin.bench.contenders import BenchProblem, Call, noting_failure
from fastlin.bench.labels import parse
from fastlin.bench.rows import Row
from fastlin.bench.timing import Contender, in_units, summary, timed
from fastlin.figures.prompts import PANELS
from fastlin.ops import sampled
from fastlin.training.config import RunConfig
from fastlin.training.loop import Loop
from fastlin.training.start import initial_model

FIGURE = "2d"
TRIALS, STEPS, BATCH, RECORDS = 50, 20_000, 8192, 100


def measure(row: Row, quick: bool) -> dict[str, Any]:
    """Time stretches of fastlin's loop and of its peers'; state a cell and a figure at their pace."""
    lengths = settings.load(PANELS[FIGURE].setting).context_lengths
    cells = len(PANELS[FIGURE].series) * len(lengths)
    steps, batch = (2, 64) if quick else (STEPS // RECORDS // 2, BATCH)
    shape = CaseShape("sampled_loss", B=batch, n=round(statistics.fmean(lengths)), R=TRIALS)
    stretches: dict[str, tuple[Contender, int]] = {}  # with its trials at once
    skipped: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for label in row.labels:
        with noting_failure(label, skipped, wrong):
            stretches[label] = _peer(shape, label) if label != "fastlin" else (_checked_loop(shape, steps), TRIALS)
    entries = []
    for label, timing in timed([one for one, _ in stretches.values()], 0.0 if quick else 0.15).items():
        contender, trials = stretches[label]
        seconds = timing.median * STEPS * TRIALS / trials
        about = {"label": label, "trials": trials, "steps": contender.steps}
        entries.append({**about, **summary(timing), "cell": seconds, "figure": cells * seconds})
    ours = next((entry["cell"] for entry in entries if entry["label"] == "fastlin"), None)
    for entry in entries:
        entry["times_fastlin"] = None if ours is None else entry["cell"] / ours
    extrapolation = (
        f"a cell is {TRIALS} trials of {STEPS:,} steps of {batch} sequences at the pace of the stretches timed, at "
        f"the figure's mean length n = {shape.n}; the figure is {cells} such cells, one after the other"
    )
    sizes = {"figure": FIGURE, "cells": cells, "n": shape.n, "trials": TRIALS, "train_steps": STEPS, "batch": batch}
    return {
        **sizes,
        "extrapolation": extrapolation,
        "lines": [extrapolation],
        "table": _table(entries),
        "values": {entry["label"]: entry["cell"] for entry in entries},
        "contenders": entries,
        "skipped": skipped,
        "wrong": wrong,
    }


def _table(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """`_tables.Columns`, and rows."""
    timed = "timed: steps x trials"
    rows = []
    for entry in entries:
        stretch = f"{entry['steps']} x {entry['trials']} in {in_units(entry['median'] * entry['steps'])}"
        times = f"{entry['times_fastlin'] or float('nan'):.3g}"
        rows.append([entry["label"], stretch, *map(in_units, (entry["cell"], entry["figure"])), times])
    return {"widths": {"": -16, timed: 34, "cell": 10, "figure": 10, "times": 8}, "drops": [timed], "rows": rows}


def cell(row: Row, quick: bool) -> dict[str, Any]:
    """The time of a cell of n = 20, from stretches of the loop, beside its kernel and optimiser alone, and eager."""
    # A stretch has its share of what the loop does besides: records with the exact risk, the check of the loss,
    # schedules. Peers train one trial: they would run the cell's trials one after the other.
    steps, batch = (4, 64) if quick else (STEPS // RECORDS, BATCH)
    shape = CaseShape("sampled_loss", B=batch, n=20, R=TRIALS)
    training = cell_config(shape, steps)
    try:
        checked = _checked_loop(shape, steps)
    except WrongResultError as error:
        return {"lines": [], "values": {}, "wrong": {"fastlin": str(error)}}
    contenders = [
        checked,
        Contender("kernel and optimiser", bare(training, steps), steps=steps),
        Contender("eager@trial", _one_trial(shape, peers.of_form("sampled_loss", "", False))),
        Contender("reference@trial", _one_trial(shape, peers.literal("prompt_loss"))),
    ]
    timings = timed(contenders, 0.0 if quick else 5.0)
    times = {name: STEPS * timing.median * (TRIALS if "@" in name else 1) for name, timing in timings.items()}
    lines = [f"{TRIALS} trials, {STEPS:,} steps of {batch}, n = {shape.n}, from stretches of {steps} steps"]
    ours = times["fastlin"]
    lines += [f"{name:22}{in_units(seconds):>10}{seconds / ours:>8.3g}x" for name, seconds in times.items()]
    return {"lines": lines, "values": times, "seconds": {name: timing.seconds for name, timing in timings.items()}}


def _one_trial(shape: CaseShape, loss: Loss) -> Call:
    one = replace(shape, R=None)
    leaves = parameters_of(one)
    return training_step(sampled_peers.eager(one, leaves, loss), [*leaves.values()])


def _checked_loop(shape: CaseShape, steps: int) -> Contender:
    training = cell_config(shape, steps)
    check_loop(training, loop(training), steps)
    return Contender("fastlin", lambda: loop(training), steps=steps)


def cell_config(shape: CaseShape, steps: int) -> RunConfig:
    """The cell in the regime `joint`, with the values that the paper states, and as many steps."""
    # It ends with one record, which has the exact risk: a stretch of a hundredth of the cell has its share of records.
    options: dict[str, Any] = {"steps": steps, "batch": shape.B, "trials": shape.R or 1, "records": 1}
    start: dict[str, Any] = {"start_attention": 0.01, "start_heads": 0.01}
    return RunConfig.resolve(sampled_peers.source(shape), "joint", shape.n, preset="paper", **start, **options)


def loop(training: RunConfig) -> Loop:
    """The loop, when it has run."""
    made = Loop(training, progress=False)
    made.run()
    return made


def bare(training: RunConfig, steps: int) -> Callable[[], None]:
    """The cell's kernel calls, gradients and fused Adam on the ops' own parameters, in the shortest loop."""
    with torch.no_grad():
        forms = [form.clone() for form in initial_model(training).forms().values() if form is not None]

    def call() -> None:
        leaves = [form.clone().requires_grad_() for form in forms]
        _train(training, leaves, lambda: leaves, steps, fused=True)

    return call


def _train(
    training: RunConfig, leaves: list[Tensor], forms: Callable[[], list[Tensor]], steps: int, *, fused: bool
) -> None:
    """Adam on the op's loss of each step's data, given the op's parameters p, W, v as functions of the leaves."""
    optimiser = torch.optim.Adam(leaves, lr=training.lr, fused=fused)
    mix: Any = training.mix
    for step in range(steps):
        place: dict[str, Any] = {"seed": training.seed, "step": step, "backend": training.backend}
        loss = sampled.sampled_loss(mix, training.n, training.batch, *forms(), **place)[0]
        optimiser.zero_grad()
        torch.autograd.backward(loss.sum())
        optimiser.step()


def check_loop(training: RunConfig, made: Loop, steps: int) -> None:
    """The loop's parameters are those of plain torch on the ops, to float32's rounding over a stretch."""
    with torch.no_grad():
        leaves = [raw.clone() for raw in initial_model(training).parameters()]
    W, v, p = (leaf.requires_grad_() for leaf in leaves)
    _train(training, leaves, lambda: [p, W, v[:, None].expand(-1, p.shape[1], -1)], steps, fused=False)
    for name, leaf in zip(("W", "v", "p"), leaves, strict=True):
        error = relative_error(getattr(made.model, name), leaf)
        if not error < 1e-3:
            raise WrongResultError(f"{name} differs from plain torch by {error:.2g}")


def training_step(draw_and_derive: Callable[[], tuple[Tensor, ...]], leaves: list[Tensor]) -> Call:
    optimiser = torch.optim.Adam(leaves, lr=1e-3, fused=True)

    def call() -> tuple[Tensor, ...]:
        loss, *gradients = draw_and_derive()
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        optimiser.step()
        return (loss,)

    return call


def _peer(shape: CaseShape, label: str) -> tuple[Contender, int]:
    """A peer's stretch, when its typical loss is that of the op: one trial for `@trial`, else all."""
    alone = "trial" in parse(label).flags
    problem = BenchProblem(replace(shape, R=None) if alone else shape, torch.float32)
    step: Any = problem.build(label)
    if parse(label).kind == "jax":
        train = jax_peers.training(shape, parameters_of(shape))
        problem.check(label, lambda: train(0.0))
        return Contender(label, lambda: train(1e-3), steps=jax_peers.STEPS), shape.R or 1
    problem.check(label, step)
    return Contender(label, training_step(step, problem.leaves)), 1 if alone else shape.R or 1
