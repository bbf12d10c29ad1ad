"""The risk of a run's model, exact where a closed form covers it and else sampled, and the optimum of its regime."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastlin import models, theory
from fastlin._threads import one_thread
from fastlin.data.sources import FixedTask, SphereTasks, TaskMixture
from fastlin.models import Model
from fastlin.ops.sampled import TaskSource
from fastlin.theory import forgetting
from fastlin.theory.forgetting import FamilyOptimum
from fastlin.training import streams
from fastlin.training.config import RunConfig
from fastlin.training.evaluate import Predictor, covers, exact_error
from fastlin.training.regimes import REGIMES
from fastlin.training.team import ALONE, Team

Theory = theory.Optimum | theory.Bound | FamilyOptimum

_Risk = TypeVar("_Risk", float, Tensor)


def excess(risk: _Risk, optimum: float) -> _Risk:
    """Excess of a risk over its optimum, as a fraction of the optimum."""
    return risk / optimum - 1.0


def excess_percent(risk: float | None, optimum: float | None) -> float | None:
    """`excess` in percent; None where the risk is not finite, or no optimum above zero is known."""
    if risk is None or not optimum or not math.isfinite(risk):
        return None
    return 100.0 * excess(risk, optimum)


BELOW_THEORY = (
    "An excess below zero is possible: the closed form is the optimum of the reduced model, and that of the full model "
    "lies below it where task means are not zero, for joint in figure 2(a) by 1.5 % at n = 10 and 3.6 % at n = 50. "
    "That of fine-tune starts at the exact optimum of plain, and a first phase that ends elsewhere can lead below it."
)


def below_theory(percents: Iterable[float | None]) -> list[str]:
    """`BELOW_THEORY` where an excess in percent is below zero in the three decimals that tables show."""
    return [BELOW_THEORY] if any(round(percent or 0.0, 3) < 0 for percent in percents) else []


class Sample(NamedTuple):
    """Where a risk is sampled: the stream, the number of batches, and the fraction 1/part of a full batch in each."""

    stream: int
    batches: int
    part: int = 1


_EVALUATION_BATCH = 8192
# For the records during training; decides nothing.
_CURRENT = Sample(streams.SELECT, 4, part=4)
# Selection uses twice the batches of the report: a trial whose tail shows in one batch of a hundred must not win.
_SELECT, _REPORT = Sample(streams.SELECT, 128), Sample(streams.REPORT, 64)
# Most numbers in a batch of tokens, where the model needs tokens.
_TOKENS = 1 << 23
# A tail is heavy where the largest of 64 or more batches exceeds this share of their sum; light tails have <= 0.016.
LARGEST_SHARE = 0.1


class Estimate(NamedTuple):
    """Risk, standard error, tail and typical risk of each trial, all (R,), as in `fastlin.Run`.

    A stack predicts with polynomials of degree 3^L in its data. Few sequences may then dominate the mean squared error,
    and its standard error is unreliable. The share of the largest batch detects this; the median over batches is
    robust.
    """

    risk: Tensor
    risk_error: Tensor
    tail: Tensor
    typical: Tensor


class Judge:
    """Measures the model of a run; the processes of `team` share the batches of a sampled risk."""

    def __init__(self, config: RunConfig, team: Team = ALONE) -> None:
        self.config, self.team = config, team

    def current(self, model: Model, prompts: bool) -> tuple[Tensor, Tensor]:
        """Population risk (R,) and its standard error, for the records during training."""
        estimate = self.evaluate(model, prompts, _CURRENT)
        return estimate.risk, estimate.risk_error

    def final(self, model: Model, prompts: bool) -> tuple[Estimate, int]:
        """The risk that a run reports, and its best trial, which is selected on other data."""
        selection = self.evaluate(model, prompts, _SELECT)
        # A mean with a small error wins over an equal one; a heavy tail wins only where all tails are heavy.
        upper = torch.where(torch.isfinite(selection.risk), selection.risk + 2.0 * selection.risk_error, torch.inf)
        light = torch.where(selection.tail <= LARGEST_SHARE, upper, torch.inf)
        report = self.evaluate(model, prompts, _REPORT)
        heavy = (report.tail > LARGEST_SHARE).nonzero()[:, 0].tolist()
        if heavy:
            message = (
                f"train: the sampled risk of trials {heavy} has heavy tails: one batch in 64 is up to "
                f"{100 * float(report.tail.max()):.0f} % of the sum, so the standard error is unreliable"
            )
            warnings.warn(message, stacklevel=2)
        return report, int((light if bool(torch.isfinite(light).any()) else upper).argmin())

    def evaluate(self, model: Model, prompts: bool, sample: Sample) -> Estimate:
        """Population risk, exact where a closed form covers the model on its source."""
        source, n = self.config.judged
        exact = self._exact(model, prompts)
        if exact is not None:
            return Estimate(exact, torch.zeros_like(exact), torch.zeros_like(exact), exact)
        batch = _EVALUATION_BATCH // sample.part
        if not (model.linear and hasattr(source, "sample_gram")):
            batch = max(min(batch, _TOKENS // max(n * source.m, 1)), 16)
        return self._sampled(model, source, n, prompts, sample, batch)

    def _sampled(self, model: Model, source: TaskSource, n: int, prompts: bool, sample: Sample, batch: int) -> Estimate:
        device = model.attention_unit.device
        losses = torch.zeros(sample.batches, model.shape.trials, dtype=torch.float64, device=device)
        options: dict[str, Any] = {"seed": self.config.seed, "stream": sample.stream, "backend": self.config.backend}
        with torch.no_grad():
            for i in self.team.share(sample.batches):
                losses[i] = model.loss(source, n, batch, step=i, prompts=prompts, **options)[0]
        self.team.add(losses)
        return Estimate(
            losses.mean(0),
            losses.std(0) / math.sqrt(sample.batches),
            losses.max(0).values / losses.sum(0),
            losses.quantile(0.5, dim=0),
        )

    def _exact(self, model: Model, prompts: bool) -> Tensor | None:
        """Population risk (R,) by a closed form; None where none covers the model on its source."""
        source, n = self.config.judged
        if self._gaussian is not None:
            with one_thread():
                return theory.full_population_loss(self._gaussian, n, **_as_layer(model, prompts))
        predictor = Predictor(model.op, model.forms(prompts), model.op_options)
        return exact_error(predictor, source, n) if self.config.shot_scale and covers(predictor, source) else None

    @cached_property
    def _gaussian(self) -> TaskMixture | None:
        """The task source as a mixture for the closed forms; None where none covers the source and the model."""
        config = self.config
        mix: Any = config.judged[0]
        if type(mix) is FixedTask:
            zero = torch.zeros(1, mix.d, mix.d, dtype=torch.float64)
            mix = TaskMixture(mix.theta[None], zero, [1.0], mix.noise_std, mix.feature_cov, bias=mix.bias)
        one_layer = models.KINDS[config.model].linear and config.layers == 1
        covered = one_layer and not (config.see_query or config.shot_scale)
        return mix if covered and type(mix) is TaskMixture and not mix.bias else None

    @cached_property
    def optimum(self) -> Theory | None:
        """The closed form of the regime, where it has one for this source and a single layer."""
        config = self.config
        regime = REGIMES.get(config.regime.name)
        if regime is None or regime != config.regime:
            return None
        if regime.study == "forgetting":
            return self._family_optimum()
        if regime.closed_form is None or self._gaussian is None or not isinstance(config.mix, TaskMixture):
            return None
        try:
            with one_thread():
                return regime.closed_form.optimum(self._gaussian, config.n)
        except theory.NotAttained as error:
            return theory.Bound(error.infimum)

    def _family_optimum(self) -> FamilyOptimum | None:
        """The optimum of pretraining, of full and of value-only fine-tuning; None where theory has none."""
        # The few-shot loss of zs+fs ends with weight 0: its optimum is that of zs. For several attention heads only the
        # optimum of full fine-tuning is known: the noise.
        config, mix = self.config, self.config.mix
        T = _task_moment(mix)
        name, _, part = config.regime.name.partition(":")
        one_layer = models.KINDS[config.model].linear and config.layers == 1 and config.model != "reduced"
        if T is None or not (one_layer and config.see_query and config.shot_scale):
            return None
        assert isinstance(mix, (SphereTasks, TaskMixture))
        one_head = config.attention_heads == 1
        source: dict[str, Any] = {"cov": mix.feature_cov, "noise_var": mix.noise_std**2, "task_cov": T}
        if name == "pretrain":
            loss = float(forgetting.pretraining_loss(mix.d, config.n, **source))
            return FamilyOptimum(forgetting.pretrained(mix.d, config.n, **source), loss) if one_head else None
        target = config.target
        if type(target) is not FixedTask or not torch.equal(target.feature_cov, mix.feature_cov):
            return None
        noise = target.noise_std**2
        if part == "all":
            return FamilyOptimum(forgetting.fully_tuned(target.theta), noise)
        if part != "v" or not one_head:
            return None
        family = forgetting.value_tuned(target.theta, shots=config.n, **source)
        return FamilyOptimum(family, float(forgetting.error(family, target.theta, 0, mix.feature_cov, noise)))


def _task_moment(mix: Any) -> Tensor | None:
    """E[theta theta'] of a source with a constant coordinate and tasks of mean zero; None for other sources."""
    if type(mix) is SphereTasks and mix.bias:
        return torch.eye(mix.d, dtype=torch.float64) * (mix.radius**2 / mix.d)
    centred = type(mix) is TaskMixture and mix.bias and mix.K == 1 and not bool(mix.means.any())
    return mix.covariances[0] if centred else None


def _as_layer(model: Model, prompts: bool) -> dict[str, Any]:
    """p, W, v of a model of one layer; a stack has v = C h."""
    forms: dict[str, Any] = {name: None if form is None else form.cpu() for name, form in model.forms(prompts).items()}
    if "A" not in forms:
        return forms
    A, C, h = forms["A"], forms["C"], forms["h"]
    if model.shape.attention_heads > 1:
        h = h.unsqueeze(1)
    return {"p": forms["p"], "W": A[:, 0], "v": h @ C[:, 0].mT}
