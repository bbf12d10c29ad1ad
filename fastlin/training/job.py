"""What a loop is to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fastlin.models import Model
from fastlin.ops.sampled import Source
from fastlin.training.protocol import Protocol
from fastlin.training.record import Folder
from fastlin.training.regimes import Regime
from fastlin.training.team import ALONE, Team

# (model, whether prompts are prepended) -> risk and standard error, both (R,).
Risk = Callable[[Model, bool], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Job:
    """What a loop is to do.

    Attributes
    ----------
    model : Model
        Initialised.
    regime, protocol
    sources : dict
        "mix", and "target" where the regime wants it.
    n, seed : int
    risk : callable
        Risk and standard error on the way.
    optimum : float or None
        The risk that progress is shown against.
    backend : str
    record_every : int
        Steps between records.
    folder : Folder or None
        Of the process that writes.
    checkpoint_seconds : float
    progress : bool or None
        None: when the output is a terminal.
    team : Team
        The processes that share each batch.
    shards : int or None
        Pieces of a batch whose sums are added in order, whatever the number of processes; None is one a process.
    seeds_at_once : int or None
        Trials that a step takes in one go, all variants of each; None is all.
    """

    model: Model
    regime: Regime
    protocol: Protocol
    sources: dict[str, Source]
    n: int
    seed: int
    risk: Risk
    optimum: float | None
    backend: str
    record_every: int
    folder: Folder | None
    checkpoint_seconds: float
    progress: bool | None
    team: Team = ALONE
    shards: int | None = None
    seeds_at_once: int | None = None
