"""What a run starts from: its model at initialisation, and the sources that it draws from."""

from __future__ import annotations

from typing import Any

from fastlin import models
from fastlin.data.sources import PointSet
from fastlin.models import Model, Start
from fastlin.ops.sampled import Source
from fastlin.training import streams
from fastlin.training.config import RunConfig


def initial_model(config: RunConfig) -> Model:
    """The model of a run at its initialisation."""
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
            see_query=config.see_query,
            shot_scale=config.shot_scale,
            residual=config.residual,
            trainable_entry=config.trainable_entry,
            fixed_head=config.fixed_head,
            dtype=config.dtype,
            device=config.device,
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


def training_sources(config: RunConfig) -> dict[str, Source]:
    """What the loop draws from: in place of the target, a finite set of its points where the run asks for one."""
    points, target = config.points, config.target
    if points is None or target is None or isinstance(target, PointSet):
        return config.sources
    drawn: Any = PointSet.drawn(target, points, seed=config.seed, stream=streams.POINTS)  # type: ignore[arg-type]
    return {**config.sources, "target": drawn}
