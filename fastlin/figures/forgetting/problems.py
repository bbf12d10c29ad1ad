"""Problems that the claims are checked in, and the models that are trained for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlin.data.sources import FixedTask, SphereTasks, TaskMixture
from fastlin.figures.forgetting.regimes import scalar
from fastlin.theory import forgetting
from fastlin.theory.forgetting import Family
from fastlin.training.evaluate import evaluate
from fastlin.training.run import Run, train

REGIMES = ("zs:all", "zs:v")


@dataclass(frozen=True, eq=False)
class Problem:
    """Tasks to pretrain on, one to tune on, and what theory needs to know.

    Attributes
    ----------
    name : str
    source : SphereTasks or TaskMixture
        Of tasks with mean zero.
    task : FixedTask
        Of the same features and noise.
    task_cov : Tensor (d, d)
        Second moment of the tasks.
    m : int
        Shots of pretraining.
    """

    name: str
    source: SphereTasks | TaskMixture
    task: FixedTask
    task_cov: Tensor
    m: int

    @property
    def d(self) -> int:
        """Features."""
        return self.task.d

    @property
    def cov(self) -> Tensor:
        """Covariance of the features."""
        return self.task.feature_cov

    @property
    def noise_variance(self) -> float:
        """Of the labels."""
        return self.task.noise_std**2

    @property
    def known(self) -> dict[str, Any]:
        """Arguments of the closed forms of what pretraining ends in."""
        return {"shots": self.m, "cov": self.cov, "noise_var": self.noise_variance, "task_cov": self.task_cov}

    def theory(self, family: Family, task: FixedTask, n: int) -> Tensor:
        """E_n of a member of the family."""
        return forgetting.error(family, task.theta, n, self.cov, self.noise_variance)

    def described(self) -> str:
        """The problem, in words."""
        return f"{self.name} (d = {self.d}, σ² = {self.noise_variance:.3g}, m = {self.m})"


def _sphere() -> Problem:
    task = FixedTask(torch.eye(5, dtype=torch.float64)[0], noise_std=0.1**0.5, bias=True)
    source = SphereTasks(5, noise_std=0.1**0.5, bias=True)
    return Problem("the unit sphere", source, task, torch.eye(5, dtype=torch.float64) / 5, 20)


def _correlated() -> Problem:
    cov = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, -0.3], [0.0, -0.3, 0.5]], dtype=torch.float64)
    prior = torch.diag(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    same: dict[str, Any] = {"noise_std": 0.3**0.5, "feature_cov": cov, "bias": True}
    source = TaskMixture(torch.zeros(1, 3), prior[None], [1.0], **same)
    return Problem("correlated features", source, FixedTask([1.0, -1.0, 0.5], **same), prior, 12)


AUTHORS, OTHER = _sphere(), _correlated()


@dataclass(frozen=True, eq=False)
class Models:
    """What was trained in a problem.

    Attributes
    ----------
    problem : Problem
    pretrained, tuned : Run
        The second with all of REGIMES.
    """

    problem: Problem
    pretrained: Run
    tuned: Run

    def errors(self, regime: str, task: FixedTask, shots: Sequence[int]) -> Tensor:
        """Exact errors (S, seeds) of a regime; "pretrain" is before tuning."""
        if regime == "pretrain":
            return evaluate(self.pretrained, task, shots, exact=True).error
        return evaluate(self.tuned, task, shots, exact=True).error[:, self.tuned.of(regime)]

    def scalar(self, regime: str) -> Tensor:
        """The free scalar (seeds,) in the units of the pretrained optimum."""
        Q = forgetting.pretrained(self.problem.d, **self.problem.known).Q
        if regime == "pretrain":
            return scalar(self.pretrained.model, Q)
        return scalar(self.tuned.model, Q)[self.tuned.of(regime)]


def rescaled(found: Models, regime: str) -> tuple[Tensor, Tensor]:
    """W (seeds, m, m) and v (seeds, m) of a regime, scaled so that the features' block of W is of the size of S^-1.

    (W, v) and (W/s, s v) are the same predictor; closed forms of the scalar have Q = S^-1.
    """
    rows = found.tuned.of(regime)
    W, v = found.tuned.params["W"], found.tuned.params["v"]
    assert W is not None
    assert v is not None
    W, v = W.double()[rows], v.double()[rows, 0]
    wanted = torch.linalg.inv(found.problem.cov)
    size = (W[:, 1:-1, 1:-1].mT * wanted).sum((-2, -1)) / wanted.square().sum()
    return W / size[:, None, None], v * size[:, None]


def train_models(problem: Problem, out: Path, *, trials: int, steps: int, batch: int, seed: int) -> Models:
    """Pretrain, and fine-tune in all of REGIMES side by side; folders that hold a finished run are read."""
    name = problem.name.replace(" ", "-")
    options: dict[str, Any] = {"trials": trials, "batch": batch, "seed": seed, "resume": True, "records": 20}
    pretrained = train(problem.source, "pretrain", problem.m, steps=steps, out=out / f"{name}-pretrain", **options)
    tuned = train(
        problem.source,
        REGIMES,
        problem.m,
        target=problem.task,
        after=pretrained,
        steps=2 * steps,
        out=out / f"{name}-tuned",
        **options,
    )
    return Models(problem, pretrained, tuned)
