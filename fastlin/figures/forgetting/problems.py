"""The problems in which the claims are checked, and the models trained for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlin.data.sources import FixedTask, SphereTasks, TaskMixture
from fastlin.figures.forgetting.regimes import Setting, scalar
from fastlin.theory import forgetting
from fastlin.theory.forgetting import Family, attention_error
from fastlin.training.evaluate import evaluate
from fastlin.training.run import Run, train

REGIMES = ("zs:all", "zs:v")


@dataclass(frozen=True, eq=False)
class TuningProblem:
    name: str
    source: SphereTasks | TaskMixture  # pretraining tasks, with mean zero
    task: FixedTask  # fine-tuning task, with the same features and noise
    task_cov: Tensor  # second moment (d, d) of the pretraining tasks
    m: int  # shots of pretraining

    @property
    def d(self) -> int:
        return self.task.d

    @property
    def cov(self) -> Tensor:
        return self.task.feature_cov

    @property
    def noise_variance(self) -> float:
        return self.task.noise_std**2

    @property
    def data(self) -> dict[str, Any]:
        """Features and noise, as arguments of closed forms."""
        return {"cov": self.cov, "noise_var": self.noise_variance}

    @property
    def known(self) -> dict[str, Any]:
        """Arguments of the closed forms of the pretrained optimum."""
        return {"shots": self.m, **self.data, "task_cov": self.task_cov}

    def theory(self, family: Family, task: FixedTask, n: int) -> Tensor:
        """E_n(task) of a predictor of the paper's family."""
        return forgetting.error(family, task.theta, n, **self.data)

    def described(self) -> str:
        return f"{self.name} (d = {self.d}, σ² = {self.noise_variance:.3g}, m = {self.m})"


def _correlated() -> TuningProblem:
    cov = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, -0.3], [0.0, -0.3, 0.5]], dtype=torch.float64)
    prior = torch.diag(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    same: dict[str, Any] = {"noise_std": 0.3**0.5, "feature_cov": cov, "bias": True}
    source = TaskMixture(torch.zeros(1, 3), prior[None], [1.0], **same)
    return TuningProblem("correlated features", source, FixedTask([1.0, -1.0, 0.5], **same), prior, 12)


_SPHERE = Setting()
AUTHORS = TuningProblem("the unit sphere", _SPHERE.source, _SPHERE.task, _SPHERE.known["task_cov"], _SPHERE.shots)
OTHER = _correlated()


@dataclass(frozen=True, eq=False)
class Models:
    problem: TuningProblem
    pretrained: Run
    tuned: Run  # all of REGIMES, fine-tuned from `pretrained`

    def errors(self, regime: str, task: FixedTask, shots: Sequence[int]) -> Tensor:
        """Exact errors (S, seeds) of a regime; "pretrain" is before fine-tuning."""
        if regime == "pretrain":
            return evaluate(self.pretrained, task, shots, exact=True).error
        return evaluate(self.tuned, task, shots, exact=True).error[:, self.tuned.trials_of(regime)]

    def scalar(self, regime: str) -> Tensor:
        """The free scalar (seeds,), in units where Q is that of the pretrained optimum."""
        Q = forgetting.pretrained(self.problem.d, **self.problem.known).Q
        if regime == "pretrain":
            return scalar(self.pretrained.model, Q)
        return scalar(self.tuned.model, Q)[self.tuned.trials_of(regime)]


class ValueOnly:
    """W (seeds, m, m) and v (seeds, m) of value-only fine-tuning; the features' block of W has the size of S^-1."""

    def __init__(self, models: Models) -> None:
        # (W, v) and (W/s, s v) are the same predictor; closed forms of the scalar assume Q = S^-1.
        rows, wanted = models.tuned.trials_of("zs:v"), torch.linalg.inv(models.problem.cov)
        W, v = models.tuned.params["W"], models.tuned.params["v"]
        assert W is not None
        assert v is not None
        size = (W.double()[rows, 1:-1, 1:-1].mT * wanted).sum((-2, -1)) / wanted.square().sum()
        self.W, self.v = W.double()[rows] / size[:, None, None], v.double()[rows, 0] * size[:, None]
        self._data = models.problem.data

    def error(self, v: Tensor, theta: Tensor, n: int) -> Tensor:
        """Exact error (seeds,) on a task at n shots, with v (seeds, m) in place of the models' own."""
        return attention_error(self.W, v, theta, n, **self._data)

    def at_scalar(self, w: float, theta: Tensor, n: int) -> Tensor:
        """Exact error (seeds,) on a task at n shots, with the free scalar w."""
        return self.error(torch.cat([self.v[:, :-1], torch.full_like(self.v[:, -1:], w)], 1), theta, n)


def train_models(problem: TuningProblem, out: Path, *, trials: int, steps: int, batch: int, seed: int) -> Models:
    """Pretrain, and fine-tune in all of REGIMES at once; reads the runs that have ended."""
    name = problem.name.replace(" ", "-")
    options: dict[str, Any] = {"trials": trials, "batch": batch, "seed": seed, "resume": True, "records": 20}
    source, m = problem.source, problem.m
    pretrained = train(source, "pretrain", m, steps=steps, out=out / f"{name}-pretrain", **options)
    options |= {"target": problem.task, "after": pretrained, "steps": 2 * steps}
    return Models(problem, pretrained, train(source, REGIMES, m, out=out / f"{name}-tuned", **options))
