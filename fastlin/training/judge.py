"""The risk of a run's model, exact where a closed form covers it and sampled elsewhere, and the optimum beside it."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlin import models, theory
from fastlin._threads import one_thread
from fastlin.data.sources import FixedTask, SphereTasks, TaskMixture
from fastlin.models import Model
from fastlin.ops.sampled import Source
from fastlin.theory import forgetting
from fastlin.theory.forgetting import FamilyOptimum
from fastlin.training import streams
from fastlin.training.config import RunConfig
from fastlin.training.evaluate import Predictor, covers, exact_error
from fastlin.training.regimes import REGIMES
from fastlin.training.team import ALONE, Team

Theory = theory.Optimum | theory.Bound | FamilyOptimum

_OPTIMA = {
    "plain": theory.plain,
    "fine-tune": theory.fine_tuned,
    "one-prompt": theory.one_prompt,
    "joint": theory.joint,
    "joint+heads": theory.decoupled,
}


@dataclass(frozen=True)
class Sample:
    """A sample that risk is taken on: a stream, how many batches, and which part of a batch each is."""

    stream: int
    batches: int
    part: int = 1


_EVALUATION_BATCH = 8192
# The first is looked at on the way, and decides nothing.
ON_THE_WAY = Sample(streams.SELECT, 4, part=4)
# The choice of a trial sees more than the report: a tail that one batch in a hundred shows must not be chosen.
SELECT, REPORT = Sample(streams.SELECT, 128), Sample(streams.REPORT, 64)
# Numbers that a batch of tokens may have, where these are drawn.
_TOKENS = 1 << 23
# Share of the largest of 64 or more batches in their sum that counts as a heavy tail; light ones have 0.016 or less.
LARGEST_SHARE = 0.1


class Estimate(NamedTuple):
    """A risk, and what a sample says of its error.

    Predictions of a stack are polynomials of its data, of degree 3^L: the mean of their squared errors may rest on few
    sequences, and its standard error then means little. The share of the largest batch in the sum tells, and the median
    over batches is what is met most of the time.

    Attributes
    ----------
    risk, error : Tensor (R,)
        Mean over all sequences, and its standard error; zero where the risk is exact.
    tail : Tensor (R,)
        The largest batch's share of the sum: 1 / batches of light tails, zero where the risk is exact.
    typical : Tensor (R,)
        Median of the means of batches.
    """

    risk: Tensor
    error: Tensor
    tail: Tensor
    typical: Tensor


class Judge:
    """What a run is measured by.

    Parameters
    ----------
    config : RunConfig
    team : Team
        The processes that share the batches of a sampled risk.
    """

    def __init__(self, config: RunConfig, team: Team = ALONE) -> None:
        self.config, self.team = config, team

    def on_the_way(self, model: Model, prompts: bool) -> tuple[Tensor, Tensor]:
        """Population risk (R,) and its standard error, for the records."""
        found = self.evaluate(model, prompts, ON_THE_WAY)
        return found.risk, found.error

    def final(self, model: Model, prompts: bool) -> tuple[Estimate, int]:
        """The risk that a run reports, and its best trial, which is chosen on other data."""
        selected = self.evaluate(model, prompts, SELECT)
        # Of two trials of the same mean, the one whose mean is sure; one that rests on a single batch if no other does.
        upper = torch.where(torch.isfinite(selected.risk), selected.risk + 2.0 * selected.error, torch.inf)
        light = torch.where(selected.tail <= LARGEST_SHARE, upper, torch.inf)
        found = self.evaluate(model, prompts, REPORT)
        heavy = (found.tail > LARGEST_SHARE).nonzero()[:, 0].tolist()
        if heavy:
            message = (
                f"train: the sampled risk of trials {heavy} has heavy tails: one batch in 64 is up to "
                f"{100 * float(found.tail.max()):.0f} % of the sum, and the standard error is not to be trusted"
            )
            warnings.warn(message, stacklevel=2)
        return found, int((light if bool(torch.isfinite(light).any()) else upper).argmin())

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

    def _sampled(self, model: Model, source: Source, n: int, prompts: bool, sample: Sample, batch: int) -> Estimate:
        """Risk on fresh sequences, from the means of batches, which the processes share."""
        device = model.attention_unit.device
        losses = torch.zeros(sample.batches, model.shape.trials, dtype=torch.float64, device=device)
        place: dict[str, Any] = {"seed": self.config.seed, "stream": sample.stream, "backend": self.config.backend}
        with torch.no_grad():
            for i in self.team.share(sample.batches):
                losses[i] = model.loss(source, n, batch, step=i, prompts=prompts, **place)[0]
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
        """The task source as the closed forms take it; None where none covers the source and the model."""
        config = self.config
        mix: Any = config.judged[0]
        if type(mix) is FixedTask:
            zero = torch.zeros(1, mix.d, mix.d, dtype=torch.float64)
            mix = TaskMixture(mix.theta[None], zero, [1.0], mix.noise_std, mix.feature_cov, bias=mix.bias)
        seen = config.see_query or config.shot_scale
        covered = models.KINDS[config.model].linear and config.layers == 1 and not seen
        return mix if covered and type(mix) is TaskMixture and not mix.bias else None

    @cached_property
    def optimum(self) -> Theory | None:
        """The paper's closed form of the regime, where it has one for this source and a single layer."""
        config, regime = self.config, self.config.regime
        if REGIMES.get(regime.name) != regime:
            return None
        if regime.study == "forgetting":
            return self._family_optimum()
        find = _OPTIMA.get(regime.name) if isinstance(config.mix, TaskMixture) else None
        if find is None or self._gaussian is None:
            return None
        try:
            with one_thread():
                return find(self._gaussian, config.n)
        except theory.NotAttained as error:
            return theory.Bound(error.infimum)

    def _family_optimum(self) -> FamilyOptimum | None:
        """The optimum of pretraining, of full and of value-only fine-tuning; None where theory has none.

        The few-shot loss of zs+fs has no weight in the end: its optimum is that of zs. Several attention heads are
        another model, whose optimum is known for full fine-tuning only: it is the noise.
        """
        config, mix = self.config, self.config.mix
        T = _task_moment(mix)
        name, _, part = config.regime.name.partition(":")
        one_layer = models.KINDS[config.model].linear and config.layers == 1 and config.model != "reduced"
        if T is None or not (one_layer and config.see_query and config.shot_scale):
            return None
        assert isinstance(mix, (SphereTasks, TaskMixture))
        one_head = config.attention_heads == 1
        of_mix: dict[str, Any] = {"cov": mix.feature_cov, "noise_var": mix.noise_std**2, "task_cov": T}
        if name == "pretrain":
            loss = float(forgetting.pretraining_loss(mix.d, config.n, **of_mix))
            return FamilyOptimum(forgetting.pretrained(mix.d, config.n, **of_mix), loss) if one_head else None
        target = config.target
        if type(target) is not FixedTask or not torch.equal(target.feature_cov, mix.feature_cov):
            return None
        noise = target.noise_std**2
        if part == "all":
            return FamilyOptimum(forgetting.fully_tuned(target.theta), noise)
        if part != "v" or not one_head:
            return None
        family = forgetting.value_tuned(target.theta, shots=config.n, **of_mix)
        return FamilyOptimum(family, float(forgetting.error(family, target.theta, 0, mix.feature_cov, noise)))


def _task_moment(mix: Any) -> Tensor | None:
    """E[theta theta'] of a source with a constant coordinate whose tasks have mean zero; None of others."""
    if type(mix) is SphereTasks and mix.bias:
        return torch.eye(mix.d, dtype=torch.float64) * (mix.radius**2 / mix.d)
    centred = type(mix) is TaskMixture and mix.bias and mix.K == 1 and not bool(mix.means.any())
    return mix.covariances[0] if centred else None


def _as_layer(model: Model, prompts: bool) -> dict[str, Any]:
    """p, W, v of a model that is one layer; v = C h of a stack."""
    forms = {name: None if form is None else form.cpu() for name, form in model.forms(prompts).items()}
    if "A" not in forms:
        return forms
    A, C, h = forms["A"], forms["C"], forms["h"]
    assert A is not None
    assert C is not None
    assert h is not None
    if model.shape.attention_heads > 1:
        h = h.unsqueeze(1)
    return {"p": forms["p"], "W": A[:, 0], "v": h @ C[:, 0].mT}
