"""Checks of the fields of a `RunConfig`: each alone, then those that constrain each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

import torch

from fastlin import backends, models
from fastlin._checks import choice, kind, real
from fastlin.training import streams
from fastlin.training.optimiser import (
    COUPLED,
    OPTIMISERS,
    SCHEDULES,
    compiled_rule,
    make_optimiser,
    optimiser_class,
)

if TYPE_CHECKING:
    from fastlin.training.config import RunConfig

OF_FEATURES: dict[str, Callable[[int], float]] = {
    "1/sqrt(d+1)": lambda d: (d + 1) ** -0.5,
    "1/(d+1)^1.5": lambda d: (d + 1) ** -1.5,
    "1/sqrt(3(d+1))": lambda d: (3 * (d + 1)) ** -0.5,
    "1/sqrt(3)/(d+1)^2.5": lambda d: 3**-0.5 * (d + 1) ** -2.5,
}
"""Values that depend on the number of features d."""
_MAX_STEPS = 1 << 24


def check_protocol(config: RunConfig) -> None:
    """Check each field that a preset decides."""
    for name in ("steps", "batch", "points"):
        value = getattr(config, name)
        if name == "points" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: got {value!r}, wants an integer >= 1")
    real("lr", config.lr, 0.0)
    real("weight_decay", config.weight_decay, 0.0)
    real("average", config.average, 0.0, 1.0)
    real("residual", config.residual)
    real("start_readout", config.start_readout)
    if config.clip is not None:
        real("clip", config.clip, 0.0)
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        if field.type == "bool" and not isinstance(value, bool):
            raise ValueError(f"{name}: got {value!r}, wants True or False")
        if field.type == "Number":
            choice(name, value, OF_FEATURES) if isinstance(value, str) else real(name, value)
    choice("units", config.units, ("data", "literal"))
    for name in ("start", "start_prompts_as"):
        choice(name, getattr(config, name), ("normal", "uniform"))
    if not callable(config.schedule):
        choice("schedule", config.schedule, SCHEDULES)
    if not callable(config.optimiser):
        known = config.optimiser.lower() if isinstance(config.optimiser, str) else config.optimiser
        choice("optimiser", known, OPTIMISERS)
    if not isinstance(config.optimiser_options, Mapping):
        raise ValueError(f"optimiser_options: got {config.optimiser_options!r}, wants a mapping of names to values")


def check_sources(config: RunConfig) -> None:
    """Check that the task sources are those that the regime's terms name."""
    row, mix, target = config.regime, config.mix, config.target
    for name, source in (("mix", mix), ("target", target)):
        if source is not None and (isinstance(source, type) or not hasattr(source, "sample")):
            raise TypeError(f"{name}: got {kind(source)}, wants a task source such as fastlin.SphereTasks(10)")
    if mix is None:
        raise TypeError("mix: got None, wants a task source such as fastlin.SphereTasks(10)")
    wanted = "target" in {row.judged.source, *(term.source for phase in row.phases for term in phase.objective)}
    if target is None:
        if wanted:
            raise ValueError(f"target: got None, wants a task source: regime {row.name!r} trains on it")
        return
    if not wanted:
        raise ValueError(f"target: got a {type(target).__name__}, wants None: regime {row.name!r} does not train on it")
    if (target.m, target.K) != (mix.m, mix.K):
        raise ValueError(
            f"target: has token width {target.m} and {target.K} tasks, wants {mix.m} and {mix.K}, those of mix"
        )


def check_combinations(config: RunConfig) -> None:
    """Check the fields that constrain each other."""
    row, linear = config.regime, models.KINDS[config.model].linear
    if config.layers > 1 and config.model != "stack":
        raise ValueError(f"layers: got {config.layers} for model {config.model!r}, wants 1, or model='stack'")
    _check_steps(config)
    alone = any(phase.trains == ("prompts",) for phase in row.phases)
    # One step per task ignores the weights of the tasks, which decide the best shared prompt.
    if config.prompts_in_turn and alone and not row.task_prompts and config.mix.K > 1:
        raise ValueError(
            f"prompts_in_turn: got True for regime {row.name!r}, whose {config.mix.K} tasks share one prompt; wants "
            "False, or task_prompts=True"
        )
    if config.shot_scale and not linear:
        raise ValueError(f"shot_scale: got True for model {config.model!r}, which averages tokens anyway; wants False")
    if config.model == "reduced" and not row.task_heads:
        for i, phase in enumerate(row.phases):
            if phase.trains == ("heads",):
                raise ValueError(f"regime.phases[{i}]: trains heads, which the reduced model has fixed; wants more")
    choice("backend", config.backend, ("auto", "reference", *backends.names()))
    config.serving_backend  # noqa: B018  raises where no backend serves
    kind = optimiser_class(config.optimiser)
    if kind is None:
        return
    if kind in COUPLED and config.shape.trials > 1:
        raise ValueError(f"optimiser: {kind.__name__} couples all parameters, so trials would interact; wants trials=1")
    # The first optimiser that torch makes imports its compiler, 0.7 s.
    if compiled_rule(config) is None:
        make_optimiser(config, [torch.nn.Parameter(torch.zeros(1, 1))])


def _check_steps(config: RunConfig) -> None:
    phases = config.regime.phases
    if not len(phases) <= config.steps < _MAX_STEPS:
        raise ValueError(
            f"steps: got {config.steps}, wants {len(phases)} to {_MAX_STEPS - 1}: one or more for each phase"
        )
    terms = max(len(phase.objective) for phase in phases)
    if terms * (config.trials if config.own_data else 1) > streams.FIRST_RESERVED:
        raise ValueError(
            f"trials: got {config.trials} with their own data in {terms} terms, "
            f"wants at most {streams.FIRST_RESERVED} streams"
        )
