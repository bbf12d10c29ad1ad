"""Optimisers and learning-rate schedules of a run, by name, class or function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fastlin.backends.update import UpdateRule

if TYPE_CHECKING:
    from fastlin.training.config import RunConfig


def _one_cycle(progress: float) -> float:
    if progress < 0.3:
        return 0.04 + 0.48 * (1.0 - math.cos(math.pi * progress / 0.3))
    return 0.5 * (1.0 + math.cos(math.pi * (progress - 0.3) / 0.7))


SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "one-cycle": _one_cycle,
}
"""Learning-rate multiplier at `progress` in [0, 1] within a phase."""

OPTIMISERS: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
"""The classes of torch.optim by their names in lower case."""
# A step of one parameter depends on all of them, so trials would interact.
COUPLED = {torch.optim.LBFGS, torch.optim.Adafactor}
# These take fused=True: one pass over all parameters.
_FUSED = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD}


def multiplier(config: RunConfig, progress: float) -> float:
    """Learning-rate multiplier at `progress` in [0, 1] within a phase."""
    schedule = config.schedule
    return SCHEDULES[schedule](progress) if isinstance(schedule, str) else float(schedule(progress))


def optimiser_class(optimiser: Any) -> type[torch.optim.Optimizer] | None:
    """The class of an optimiser by its name, or the class itself; None for a function or an unknown name."""
    if isinstance(optimiser, str):
        return OPTIMISERS.get(optimiser.lower())
    return optimiser if isinstance(optimiser, type) and issubclass(optimiser, torch.optim.Optimizer) else None


def make_optimiser(config: RunConfig, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser of a run for these parameters."""
    kind = optimiser_class(config.optimiser)
    if kind is None:
        function: Any = config.optimiser
        made: torch.optim.Optimizer = function(parameters)
        return made
    options: dict[str, Any] = {"lr": config.lr, **({"fused": True} if kind in _FUSED else {})}
    # The default decay of a class may be other than 0.
    if config.weight_decay or "weight_decay" in inspect.signature(kind).parameters:
        options["weight_decay"] = config.weight_decay
    make: Any = kind
    try:
        made = make(parameters, **{**options, **config.optimiser_options})
        return made
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimiser: {kind.__name__} does not take {config.optimiser_options!r}: {error}") from error


def compiled_rule(config: RunConfig, gradient_scale: float = 1.0) -> UpdateRule | None:
    """The optimiser of a run for compiled updates; None where they lack its class or an option, or a value is wrong."""
    kind, options = optimiser_class(config.optimiser), dict(config.optimiser_options)
    try:
        if kind is torch.optim.Adam:
            (beta1, beta2), eps = options.pop("betas", (0.9, 0.999)), options.pop("eps", 1e-8)
        elif kind is torch.optim.SGD:
            beta1, beta2, eps = options.pop("momentum", 0.0), 0.0, 0.0
        else:
            return None
        numbers = (float(beta1), float(beta2), float(eps))
    except (TypeError, ValueError):
        return None
    limits = (1.0, 1.0, math.inf) if kind is torch.optim.Adam else (math.inf, 1.0, 1.0)
    if options or not all(0.0 <= number < limit for number, limit in zip(numbers, limits, strict=True)):
        return None
    clip = -1.0 if config.clip is None else config.clip
    return UpdateRule(kind is torch.optim.Adam, gradient_scale, *numbers, config.weight_decay, clip)


@dataclass(frozen=True)
class Lost:
    """Stands for a function in a run that was read from a folder, which stores its name only."""

    name: str

    def __call__(self, *_: Any) -> Any:
        """Raise: only the name is known."""
        raise RuntimeError(f"{self.name}: the run's folder holds the name of this function only, not the function")

    @classmethod
    def unless_known(cls, field: str, value: Any) -> Any:
        """The value itself if it is a known name, else a `Lost` function."""
        known = value in SCHEDULES if field == "schedule" else optimiser_class(value) is not None
        return value if known or not isinstance(value, str) else cls(value)
