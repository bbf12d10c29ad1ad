"""Risk on fresh sequences, with what can be said of its error."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlin.models import Model
from fastlin.ops.sampled import Source
from fastlin.training.memory import chunks
from fastlin.training.team import ALONE, Team


class Estimate(NamedTuple):
    """A risk that a sample gives.

    Predictions of a stack are polynomials of its data, of degree 3^L: the mean of their squared errors may rest on few
    sequences, and its standard error then means little. The share of the largest batch in the sum tells, and the median
    over batches is what is met most of the time.

    Attributes
    ----------
    risk, error : Tensor (R,)
        Mean over all sequences, and its standard error.
    tail : Tensor (R,)
        The largest batch's share of the sum: 1 / batches of light tails.
    typical : Tensor (R,)
        Median of the means of batches.
    """

    risk: Tensor
    error: Tensor
    tail: Tensor
    typical: Tensor


def sampled_risk(
    model: Model,
    source: Source,
    n: int,
    *,
    seed: int,
    stream: int,
    batches: int,
    batch: int,
    prompts: bool,
    backend: str,
    team: Team = ALONE,
    trials_at_once: int | None = None,
) -> Estimate:
    """Risk on fresh sequences, from the means of batches, which the processes of a team share."""
    losses = torch.zeros(batches, model.shape.trials, dtype=torch.float64, device=model.attention_unit.device)
    place: dict[str, Any] = {"seed": seed, "stream": stream, "prompts": prompts, "backend": backend}
    parts = chunks(model.shape.trials, trials_at_once)
    rows = [None if len(parts) == 1 else torch.tensor(part, device=losses.device) for part in parts]
    with torch.no_grad():
        for i in team.share(batches):
            own = [model.loss(source, n, batch, step=i, rows=some, **place)[0] for some in rows]
            losses[i] = torch.cat(own)
    team.add(losses)
    return Estimate(
        losses.mean(0),
        losses.std(0) / math.sqrt(batches),
        losses.max(0).values / losses.sum(0),
        losses.quantile(0.5, dim=0),
    )
