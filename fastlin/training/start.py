"""What a run starts from: its initial model or an earlier run, and the task sources that it draws from."""

from __future__ import annotations

from typing import Any

from fastlin import models
from fastlin.data.points import PointSet
from fastlin.models import Model, Start
from fastlin.models.base import OPTIONS
from fastlin.ops.sampled import TaskSource
from fastlin.training import streams
from fastlin.training.config import RunConfig


def initial_model(config: RunConfig) -> Model:
    """The model of a run before its first step."""
    shape = config.shape
    if config.units == "data":
        units = models.measured(
            config.mix,
            config.n,
            seed=config.seed,
            stream=streams.UNITS,
            linear=models.KINDS[config.model].linear,
            shot_scale=config.shot_scale,
        )
    else:
        units = models.literal(shape.width, config.number("scale"))
    if config.heads_averaged:
        units = units._replace(attention=units.attention / shape.attention_heads)
    try:
        model = models.KINDS[config.model](
            shape,
            units,
            dtype=config.dtype,
            device=config.device,
            **{name: getattr(config, name) for name in OPTIONS},
        )
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        sizes = f"trials {shape.trials}, layers {shape.layers}"
        sizes += f", attention_heads {shape.attention_heads}, prompt_tokens {shape.tokens}"
        raise ValueError(f"{sizes}: the model does not fit in memory, wants fewer of them") from None
    starts = {name: config.number(f"start_{name}") for name in ("attention", "values", "heads", "prompts")}
    start = Start(config.start, config.start_prompts_as, readout=config.start_readout, **starts)
    model.start(start, seed=config.seed, stream=streams.START, alike=config.variants)
    return model


def steps_before(config: RunConfig, earlier: dict[str, Any]) -> int:
    """Steps of an earlier run that did the first phases of this one; raises unless all else in its config is equal."""
    earlier, own = dict(earlier), config.describe()
    done, phases = earlier["regime"]["phases"], own["regime"]["phases"]
    if done != phases[: len(done)] or len(done) == len(phases):
        name = earlier["regime"]["name"]
        raise ValueError(f"after: got a run of regime {name!r}, wants the first phases of this one")
    steps = config.steps * len(done) // len(phases)
    if earlier["steps"] != steps:
        got = earlier["steps"]
        raise ValueError(f"after: got a run of {got} steps, wants {steps}: the share of its phases in steps")
    if earlier["regime"].get("variants") and own["regime"]["variants"]:
        raise ValueError("after: got a run of several regimes, wants one of a single regime")
    earlier["sources"] = {**own["sources"], "mix": earlier["sources"]["mix"]}
    for name, value in {"shards": None, **own}.items():
        # Points belong to the target, which the earlier phases do not use.
        if name not in ("regime", "steps", "records", "points") and earlier.get(name) != value:
            raise ValueError(f"after: got a run with {name} = {earlier.get(name)!r}, wants {value!r}, as in this one")
    return steps


def training_sources(config: RunConfig) -> dict[str, TaskSource]:
    """The task sources by name; with `points`, the target is a finite set of its points."""
    points, target = config.points, config.target
    if points is None or target is None or isinstance(target, PointSet):
        return config.sources
    drawn: Any = PointSet.drawn(target, points, seed=config.seed, stream=streams.POINTS)  # type: ignore[arg-type]
    return {**config.sources, "target": drawn}
