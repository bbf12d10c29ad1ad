"""A protocol: how a run trains, as named values that are checked."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fastlin.training.regimes import choice

# Values that depend on the number of features d.
_OF_FEATURES: dict[str, Callable[[int], float]] = {
    "1/sqrt(d+1)": lambda d: (d + 1) ** -0.5,
    "1/(d+1)^1.5": lambda d: (d + 1) ** -1.5,
    "1/sqrt(3(d+1))": lambda d: (3 * (d + 1)) ** -0.5,
    "1/sqrt(3)/(d+1)^2.5": lambda d: 3**-0.5 * (d + 1) ** -2.5,
}
Number = float | str
"""A number, or a name of one that depends on d: "1/sqrt(d+1)", "1/(d+1)^1.5" and the like."""


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
"""Factor of the learning rate at a share of a phase, from 0 to 1."""

OPTIMISERS: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
"""The classes of torch.optim by their names in lower case."""
# Those in which a step of one parameter depends on all of them, so that trials would meet.
COUPLED = {torch.optim.LBFGS, torch.optim.Adafactor}
_SWITCHES = (
    "batch_per_task",
    "prompts_in_turn",
    "own_data",
    "see_query",
    "shot_scale",
    "heads_averaged",
    "trainable_entry",
    "fixed_head",
)
# Those that update all parameters in one pass when asked to.
_FUSED = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD}


@dataclass(frozen=True)
class Protocol:
    """How a run trains. Every field can be given to `fastlin.train` by its name.

    Attributes
    ----------
    steps : int
        Optimiser steps in all; phases share them equally.
    batch : int
        Fresh sequences in each step; of each task with `batch_per_task`.
    lr : float
        Largest learning rate.
    optimiser : str, class or function
        The name of a class of torch.optim in any case, a class, or a function of a list of parameters that returns an
        optimiser, whose learning rates then are the largest.
    optimiser_options : mapping
        What else a class is called with, such as {"betas": (0.9, 0.99)}.
    weight_decay : float
        Of a class.
    schedule : str or callable
        "constant", "linear", "cosine", "one-cycle" (up over 30 % of a phase, then down), or a function of the share of
        the phase that is done; it gives the factor of the learning rate.
    clip : float or None
        Largest norm of each trial's gradient; None does not clip.
    average : float
        Share of each phase, at its end, over which parameters are averaged; 0 takes the last ones.
    batch_per_task : bool
        Whether each task has `batch` sequences and its loss the task's weight, or tasks are drawn by their weights.
    prompts_in_turn : bool
        Whether a phase that trains prompts alone takes in each step an optimiser step for one task after the other.
    own_data : bool
        Whether each trial draws its own data, or all share them.
    units : str
        "data": parameters in the units of the data (`fastlin.models.units`); "literal": as they are, with `scale`.
    scale : Number
        Factor of the attention scores in literal units.
    see_query : bool
        Whether the query is among keys and values.
    shot_scale : bool
        Whether scores are divided by the number of columns n + 1, in each term of an objective by its own.
    heads_averaged : bool
        Whether attention heads are averaged, or added.
    points : int or None
        Train on the target by drawing with replacement from this many points of it; None draws fresh ones.
    residual : float
        Factor of the identity in the layers of a stack.
    trainable_entry : bool
        Of the reduced model: whether its prompt is a product of a vector and a trainable last entry.
    start, start_prompts_as : str
        Distribution of the initial parameters, "normal" or "uniform", and that of the prompts.
    fixed_head : bool
        Of models that have value matrices: whether a head that tasks share is e_m, and these train alone.
    start_attention, start_values, start_heads, start_prompts : Number
        Their standard deviations, or bounds: of W, Wq, Wk or A; of Wv or C; of v or h; of p.
    start_readout : float
        What heads start with on the label's coordinate, and value matrices on their diagonal.

    Examples
    --------
    >>> from fastlin.training.protocol import Protocol
    >>> Protocol(steps=100, batch=64, lr=1e-3, schedule="cosine").factor(0.5)
    0.5
    """

    steps: int
    batch: int
    lr: float
    optimiser: str | Callable[..., torch.optim.Optimizer] = "Adam"
    optimiser_options: Mapping[str, Any] = field(default_factory=dict)
    weight_decay: float = 0.0
    schedule: str | Callable[[float], float] = "constant"
    clip: float | None = None
    average: float = 0.0
    batch_per_task: bool = False
    prompts_in_turn: bool = False
    own_data: bool = False
    units: str = "literal"
    scale: Number = 1.0
    see_query: bool = False
    shot_scale: bool = False
    heads_averaged: bool = False
    points: int | None = None
    residual: float = 1.0
    trainable_entry: bool = False
    start: str = "uniform"
    start_prompts_as: str = "normal"
    fixed_head: bool = False
    start_attention: Number = "1/sqrt(d+1)"
    start_values: Number = "1/sqrt(d+1)"
    start_heads: Number = "1/sqrt(d+1)"
    start_prompts: Number = 1.0
    start_readout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "points"):
            value = getattr(self, name)
            if name == "points" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: got {value!r}, wants an integer >= 1")
        _real("lr", self.lr, 0.0)
        _real("weight_decay", self.weight_decay, 0.0)
        _real("average", self.average, 0.0, 1.0)
        _real("residual", self.residual)
        _real("start_readout", self.start_readout)
        if self.clip is not None:
            _real("clip", self.clip, 0.0)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: got {getattr(self, name)!r}, wants True or False")
        for name in ("scale", "start_attention", "start_values", "start_heads", "start_prompts"):
            value = getattr(self, name)
            if isinstance(value, str):
                choice(name, value, _OF_FEATURES)
            else:
                _real(name, value)
        choice("units", self.units, ("data", "literal"))
        for name in ("start", "start_prompts_as"):
            choice(name, getattr(self, name), ("normal", "uniform"))
        if not callable(self.schedule):
            choice("schedule", self.schedule, SCHEDULES)
        if not callable(self.optimiser):
            name = self.optimiser.lower() if isinstance(self.optimiser, str) else self.optimiser
            choice("optimiser", name, OPTIMISERS)
        if not isinstance(self.optimiser_options, Mapping):
            raise ValueError(f"optimiser_options: got {self.optimiser_options!r}, wants a mapping of names to values")

    def number(self, name: str, features: int) -> float:
        """The value of a field that may depend on the number of features."""
        value = getattr(self, name)
        return _OF_FEATURES[value](features) if isinstance(value, str) else float(value)

    def factor(self, progress: float) -> float:
        """Of the learning rate, at a share of a phase."""
        return SCHEDULES[self.schedule](progress) if isinstance(self.schedule, str) else float(self.schedule(progress))

    @property
    def optimiser_class(self) -> type[torch.optim.Optimizer] | None:
        """The class of the optimiser; None for a function that makes one."""
        given = self.optimiser
        if isinstance(given, str):
            return OPTIMISERS[given.lower()]
        return given if isinstance(given, type) and issubclass(given, torch.optim.Optimizer) else None

    def make_optimiser(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """An optimiser of these parameters."""
        kind = self.optimiser_class
        if kind is None:
            function: Any = self.optimiser
            made: torch.optim.Optimizer = function(parameters)
            return made
        options: dict[str, Any] = {"lr": self.lr, **({"fused": True} if kind in _FUSED else {})}
        # A class may have a decay of its own, which is not the 0 that is said here.
        if self.weight_decay or "weight_decay" in inspect.signature(kind).parameters:
            options["weight_decay"] = self.weight_decay
        make: Any = kind
        try:
            made = make(parameters, **{**options, **self.optimiser_options})
            return made
        except (TypeError, ValueError) as error:
            raise ValueError(f"optimiser: {kind.__name__} does not take {self.optimiser_options!r}: {error}") from error

    def describe(self) -> dict[str, Any]:
        """The values as JSON has them; functions by their names."""
        return {name: _named(value) if callable(value) else value for name, value in vars(self).items()}


def _real(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        span = "" if low == -math.inf else f" >= {low:g}" if high == math.inf else f" from {low:g} to {high:g}"
        raise ValueError(f"{name}: got {value!r}, wants a finite number{span}")


def _named(function: Any) -> str:
    """The name of a function or class; with what it does, where many have the same name."""
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    code = getattr(function, "__code__", None)
    if "<" not in name or code is None:
        return name
    what = repr((code.co_code, code.co_names, [c for c in code.co_consts if not hasattr(c, "co_code")]))
    return f"{name} {hashlib.sha256(what.encode()).hexdigest()[:16]}"
