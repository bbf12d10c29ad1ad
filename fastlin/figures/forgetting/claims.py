"""The claims of the paper on fine-tuning, checked by theory, samples and trained models."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlin._info import info
from fastlin.figures.claims.entry import Claim, Number, entries, percent
from fastlin.figures.forgetting.axes import Axes, line, points
from fastlin.figures.forgetting.problems import AUTHORS, OTHER, Models, TuningProblem, ValueOnly, train_models
from fastlin.figures.forgetting.regimes import mean
from fastlin.theory import forgetting
from fastlin.theory.forgetting import task_points
from fastlin.training.evaluate import evaluate

# Relative distances from theory that count as reached: of losses that training minimises, and of quantities that also
# depend on flat directions of the loss.
_MINIMISED, _DERIVED = 0.005, 0.02
_COSINES = (-1.0, -0.5, 0.0, 0.5, 1.0)
_LONG = 10**6
_STEPS = (0.03, 0.1, 0.3)
EFFORT = "forgetting"
"""Key of the effort in `SCALES`."""
_STATEMENTS = {
    "Optima": "Theorems 4.1, 4.3 and 4.6: the optima of pretraining, full and value-only fine-tuning.",
    "Threshold of shots": "Theorem 4.2: the pretrained optimum beats zero-shot exactly for n > d(1 + σ²/‖θ‖²) − 1.",
    "Degradation under full fine-tuning": "Theorem 4.3: after full fine-tuning at zero shots E_n(θ0) > E_0(θ0) = σ² "
    "for every n ≥ 1, and tends to ‖θ0‖² + σ².",
    "Minimal update": "The update of the value matrix with the smallest Frobenius norm keeps its scalar w = 1; so does "
    "gradient descent at zero shots, whose gradient in w is zero.",
    "Task-wise and task-averaged scalars": "The best scalar is w*_n(θ) for one task, lower for θ0 than for others, and "
    "(n+1)T/[(n+d+1)T + dσ²] on average, which tends to 1.",
    "Excess error against the cosine": "With the scalar that is best for θ0, the excess on another task of its size "
    "grows like (1 − cos)².",
    "The auxiliary step": "A gradient step η on the few-shot loss from the value-only zero-shot optimum raises the "
    "zero-shot error by η²(d+2)(d+4)‖g‖².",
}
"""What the paper says, by the name of the claim."""


def compute(
    out: Path, *, seed: int = 0, report: Callable[[dict[str, Any]], object] = lambda entry: None, **effort: int
) -> dict[str, Any]:
    """Check all claims, with the arguments and the record of `fastlin.figures.claims.compute`; steps are per phase.

    Models are in the folder cells/ff-claims of `out`. The record lists `axes` in place of a picture.
    """
    cells = out / "cells" / "ff-claims"
    ours, other = (train_models(problem, cells, seed=seed, **effort) for problem in (AUTHORS, OTHER))
    axes: list[Axes] = []
    checks: list[Callable[[], Claim]] = [
        lambda: reached([ours, other]),
        lambda: threshold(ours, seed),
        lambda: degradation(ours, seed),
        lambda: minimal_update(ours),
        lambda: scalars(ours, axes),
        lambda: cosine(ours, axes),
        lambda: auxiliary_step(ours),
    ]
    checked = entries(checks, report)
    return {
        "paper": "Fine-Tuning Without Forgetting In-Context Learning (arXiv 2602.23197)",
        "about": "Errors of trained models are exact, and ± is the standard error over seeds, unless said to be "
        "sampled. Models have one layer with merged Q, trained on samples with the preset tuned.",
        "training": {**effort, "seed": seed},
        "claims": checked,
        "title": "Value-only fine-tuning: the best scalar, and what it costs on other tasks",
        "caption": [
            f"Lines: closed forms. Points: {effort['trials']} trained seeds, with standard errors. Left: the scalar w "
            "that is best at n shots for a task, or for all. Right: excess error at 20 shots of the scalar that is "
            "best for θ0."
        ],
        "axes": [asdict(one) for one in axes],
        "versions": info()["versions"],
    }


def _measured(quantity: str, n: int | None, values: Tensor, expected: float | None = None) -> list[Number]:
    centre, error = mean(values)
    return [Number(quantity, n, float(centre), expected), Number(f"{quantity}, standard error", n, float(error))]


def _far(values: Tensor, expected: float) -> float:
    return abs(float(mean(values)[0]) / expected - 1.0)


def _claim(name: str, finding: str, holds: bool, yes: str, no: str, numbers: list[Number]) -> Claim:
    return Claim(name, _STATEMENTS[name], finding, yes if holds else no, holds, numbers)


def _within(far: float, allowed: float, what: str, name: str, finding: str, numbers: list[Number]) -> Claim:
    yes, no = (f"{what} {within} {percent(allowed)} of theory: {percent(far)}." for within in ("within", "not within"))
    return _claim(name, finding, far <= allowed, yes, no, numbers)


def reached(models: Sequence[Models]) -> Claim:
    """Whether training reaches the closed forms."""
    numbers, worst = [], 0.0
    for trained in models:
        problem = trained.problem
        pretraining = evaluate(trained.pretrained, problem.source, problem.m).error[0]
        value_only, full = (trained.errors(regime, problem.task, [0])[0] for regime in ("zs:v", "zs:all"))
        family = forgetting.value_tuned(problem.task.theta, **problem.known)
        optimum = float(forgetting.pretraining_loss(problem.d, **problem.known))
        for name, n, values, expected in (
            ("pretraining loss", problem.m, pretraining, optimum),
            ("value-only, zero-shot error", 0, value_only, float(problem.theory(family, problem.task, 0))),
            ("full fine-tuning, zero-shot error", 0, full, problem.noise_variance),
        ):
            numbers += _measured(f"{problem.name}: {name}", n, values, expected)
            worst = max(worst, _far(values, expected))
    names = " and ".join(trained.problem.described() for trained in models)
    finding = f"Models trained in {names} are at most {percent(worst)} from the closed forms."
    return _within(worst, _MINIMISED, "Losses that training minimises are", "Optima", finding, numbers)


def threshold(models: Models, seed: int) -> Claim:
    """How many shots a pretrained model needs to beat its zero-shot error."""
    problem = models.problem
    task, limit = problem.task, forgetting.pretrained(problem.d, cov=problem.cov)
    exact = float(forgetting.threshold_shots(task.theta, problem.cov, problem.noise_variance))
    below, above = math.ceil(exact) - 1, math.floor(exact) + 1
    sampled = evaluate(limit, task, [0, below, above], exact=False, seed=seed)
    numbers = [Number("threshold d(1 + σ²/‖θ‖²) − 1, many pretraining shots", None, exact)]
    gaps = []
    for i, n in enumerate((below, above), 1):
        gap = float(sampled.error[i, 0] - sampled.error[0, 0])
        error = float(sampled.standard_error[[0, i], 0].square().sum().sqrt())
        expected = float(problem.theory(limit, task, n) - problem.theory(limit, task, 0))
        gaps.append((gap, error))
        numbers += [Number("sampled E_n − E_0 of the limit", n, gap, expected), Number("its standard error", n, error)]
    shots = list(range(problem.m + 1))
    errors = mean(models.errors("pretrain", task, shots))[0]
    family = forgetting.pretrained(problem.d, **problem.known)
    theory = torch.stack([problem.theory(family, task, n) for n in shots])
    first, expected_first = (next((n for n in shots[1:] if e[n] < e[0]), -1) for e in (errors, theory))
    numbers.append(Number(f"first n with E_n < E_0, trained at m = {problem.m}", None, first, expected_first))
    sides = gaps[0][0] > 3 * gaps[0][1] and gaps[1][0] < -3 * gaps[1][1]
    finding = (
        f"{problem.described()}: the threshold is {exact:g}. Sampled, n = {below} is {gaps[0][0]:+.3f} ± "
        f"{gaps[0][1]:.3f} from zero-shot and n = {above} is {gaps[1][0]:+.3f} ± {gaps[1][1]:.3f}. Models pretrained "
        f"at m = {problem.m} first beat zero-shot at n = {first}, their closed form at n = {expected_first}."
    )
    yes, no = "Both sides of the threshold are as stated.", "The threshold was not met."
    return _claim("Threshold of shots", finding, sides and first == expected_first, yes, no, numbers)


def degradation(models: Models, seed: int) -> Claim:
    """Whether full fine-tuning raises every few-shot error above the zero-shot error."""
    problem, task = models.problem, models.problem.task
    shots = [0, 1, 2, 5, 10, problem.m]
    errors = models.errors("zs:all", task, shots)
    rises = errors[1:] - errors[0]
    numbers = [number for i, n in enumerate(shots) for number in _measured("trained E_n(θ0)", n, errors[i])]
    limit = float(task.theta @ problem.cov @ task.theta) + problem.noise_variance
    numbers += _measured("trained E_n(θ0)", _LONG, models.errors("zs:all", task, [_LONG])[0])
    long = evaluate(forgetting.fully_tuned(task.theta), task, [_LONG], exact=False, seed=seed)
    value, error = float(long.error[0, 0]), float(long.standard_error[0, 0])
    numbers += [
        Number("sampled E_n(θ0) of the family", _LONG, value, limit),
        Number("its standard error", _LONG, error),
    ]
    sure = min(float(centre) / float(spread) for centre, spread in zip(*mean(rises), strict=True))
    holds = bool((rises > 0).all()) and abs(value - limit) < 5 * error
    finding = (
        f"{problem.described()}: of {errors.shape[1]} seeds each has a higher error at every n tried; the mean rise is "
        f"at least {sure:.0f} standard errors. The family at n = 10⁶ has {value:.4f} ± {error:.4f}, theory "
        f"{limit:.4f}; the trained models are other minimisers, with other limits."
    )
    yes, no = "Few shots never help after full fine-tuning.", "Some few-shot error is not above zero-shot."
    return _claim("Degradation under full fine-tuning", finding, holds, yes, no, numbers)


def minimal_update(models: Models) -> Claim:
    """Whether value-only fine-tuning keeps the free scalar of pretraining."""
    before, after = (models.scalar(regime) for regime in ("pretrain", "zs:v"))
    moved = (after - before).abs() / before
    start = forgetting.pretrained(models.problem.d, **models.problem.known)
    expected = float(forgetting.minimal_update_scalar(start))
    numbers = [
        *_measured("w after pretraining", None, before, expected),
        *_measured("w after value-only fine-tuning", None, after, expected),
        Number("largest relative change", None, float(moved.max()), 0.0),
    ]
    far = max(_far(before, expected), _far(after, expected))
    holds = float(moved.max()) < 1e-6 and far <= _DERIVED
    finding = (
        f"Fine-tuning changed w by at most {float(moved.max()):.1g} of itself, and both are {percent(far)} from 1."
    )
    return _claim("Minimal update", finding, holds, "Fine-tuning keeps w.", "w moved, or was not 1.", numbers)


def _vertex(error: Callable[[float], Tensor]) -> Tensor:
    """The minimiser of a parabola in w, from its values at 0, 1/2 and 1."""
    low, half, high = error(0.0), error(0.5), error(1.0)
    return 0.5 * (3.0 * low - 4.0 * half + high) / (2.0 * low - 4.0 * half + 2.0 * high)


def scalars(models: Models, axes: list[Axes]) -> Claim:
    """The best scalar at n shots, for one task and for the average over tasks."""
    problem, task, value_only = models.problem, models.problem.task, ValueOnly(models)
    sphere = task_points(problem.d, radius=1.0)
    tasks = {"θ0": task.theta, "−θ0": -task.theta, "a task at right angles": task.at_cosine(0.0).theta}
    shots, numbers, worst, curves = (2, 5, 10, 20, 40), [], 0.0, []
    n_line = torch.arange(1, 41)
    for colour, name in enumerate([*tasks, "all tasks"], 1):
        rows, theta = [], tasks.get(name)
        for n in shots:

            def error(w: float, theta: Tensor | None = theta, n: int = n) -> Tensor:
                if theta is None:
                    return sphere.mean(value_only.at_scalar(w, sphere.theta, n))
                return value_only.at_scalar(w, theta, n)

            best = _vertex(error)
            expected = float(_scalar_theory(problem, theta, n))
            numbers += _measured(f"best w for {name}", n, best, expected)
            worst = max(worst, _far(best, expected))
            rows.append(best)
        curves += [
            line(name, n_line.tolist(), _scalar_theory(problem, theta, n_line), colour),
            points(name, shots, *mean(torch.stack(rows)), colour),
        ]
    axes.append(Axes("the best scalar", "test shots n", "w", curves))
    finding = (
        f"{problem.described()}: minima over w of the trained value-only models are at most {percent(worst)} from the "
        f"formulas, over {len(tasks) + 1} tasks and n = {', '.join(map(str, shots))}."
    )
    what, name = "The best scalars of trained models are", "Task-wise and task-averaged scalars"
    return _within(worst, _DERIVED, what, name, finding, numbers)


def _scalar_theory(problem: TuningProblem, theta: Tensor | None, n: Any) -> Tensor:
    if theta is not None:
        return forgetting.best_scalar(problem.task.theta, theta, n, problem.cov, problem.noise_variance)
    return forgetting.average_scalar(problem.d, n, problem.cov, problem.noise_variance, problem.known["task_cov"])


def cosine(models: Models, axes: list[Axes]) -> Claim:
    """The excess error, on other tasks, of the scalar that is best for theta0."""
    problem, task, m, data = models.problem, models.problem.task, models.problem.m, models.problem.data
    value_only = ValueOnly(models)
    numbers, far, rows = [], 0.0, []
    for n in (m, _LONG):
        used = float(forgetting.best_scalar(task.theta, task.theta, n, **data))
        for cos in _COSINES:
            theta = task.at_cosine(cos).theta
            error = partial(value_only.at_scalar, theta=theta, n=n)
            least = torch.stack([error(float(w))[i] for i, w in enumerate(_vertex(error))])
            excess = error(used) - least
            expected = float(forgetting.excess_error(task.theta, theta, n, used, **data))
            numbers += _measured(f"excess at cosine {cos:g}", n, excess, expected)
            if cos <= 0:
                far = max(far, _far(excess, expected))
            if n == m:
                rows.append(excess)
    for cos in _COSINES:
        limit = float(forgetting.cosine_excess(task.theta, task.at_cosine(cos).theta, task.feature_cov))
        numbers.append(Number(f"limit (‖θ0‖²/(d+4)²)(1 − cos)² at cosine {cos:g}", None, limit))
    used = float(forgetting.best_scalar(task.theta, task.theta, m, **data))
    grid = [i / 20 for i in range(-20, 21)]
    theory = [float(forgetting.excess_error(task.theta, task.at_cosine(c).theta, m, used, **data)) for c in grid]
    curves = [
        line("scalar of θ0", grid, torch.tensor(theory), 1),
        points("scalar of θ0", _COSINES, *mean(torch.stack(rows)), 1),
    ]
    axes.append(Axes(f"excess error at {m} shots", "cosine between the task and θ0", "excess error", curves))
    finding = (
        f"{problem.described()}: at n = {m} and in the limit the excess of trained value-only models is at most "
        f"{percent(far)} from theory where it is not nearly zero."
    )
    what, name = "Excess errors at cosines of 0 and less are", "Excess error against the cosine"
    return _within(far, 5 * _DERIVED, what, name, finding, numbers)


def auxiliary_step(models: Models) -> Claim:
    """How much a gradient step on the few-shot loss raises the zero-shot error."""
    problem, task, value_only = models.problem, models.problem.task, ValueOnly(models)
    v = value_only.v.clone().requires_grad_(True)
    few = value_only.error(v, task.theta, problem.m).sum()
    gradient = torch.autograd.grad(few, v)[0][:, 1:-1]
    zero = value_only.error(value_only.v, task.theta, 0)
    numbers, worst = [], 0.0
    for step in _STEPS:
        moved = value_only.v.clone()
        moved[:, 1:-1] -= step * gradient
        rise = value_only.error(moved, task.theta, 0) - zero
        expected = forgetting.auxiliary_step_effect(gradient, step, problem.cov)
        numbers += _measured(f"rise of E_0(θ0), step {step:g}", 0, rise, float(expected.mean()))
        worst = max(worst, _far(rise, float(expected.mean())))
    finding = (
        f"{problem.described()}: steps of {', '.join(f'{step:g}' for step in _STEPS)} on the {problem.m}-shot loss of "
        f"trained models raise their zero-shot errors by amounts that are at most {percent(worst)} from the formula."
    )
    return _within(worst, 5 * _DERIVED, "Rises of the zero-shot error are", "The auxiliary step", finding, numbers)
