"""What `train_panel` is asked for: every cell, with its configuration, checked before the first one trains."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fastlin import settings
from fastlin._checks import choice, kind
from fastlin._files import digest
from fastlin.data.sources import TaskMixture
from fastlin.figures.panels import Cell
from fastlin.settings import Config
from fastlin.training.config import RunConfig
from fastlin.training.regimes import CLOSED_FORMS, Regime

Sweep = tuple[str, Sequence[Any]]
NAME = "risk"
_OF_A_CALL = ("progress", "checkpoint_seconds", "callback")
_OTHER_WAYS = {"n": "-n", "context_lengths": "-n", "regime": "--regime"}
_OPTIONS = [known.name for known in fields(RunConfig)[4:] if known.name != "distributed"]
_LONGEST = 40  # characters of a value in a folder's name


@dataclass(frozen=True, eq=False)
class Point:
    """A value of the swept field; without a sweep there is one, in the folder itself."""

    value: Any
    folder: str
    place: float
    config: Config
    options: dict[str, Any]


@dataclass(frozen=True, eq=False)
class ExperimentPlan:
    """Everything that a call trains, checked."""

    points: list[Point]
    field: str | None
    rows: list[Regime]
    cells: list[Cell]
    runs: dict[str, RunConfig]  # by the key of the cell

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.points[0].config.context_lengths


def config_of(task: Any, lengths: Sequence[int] | None) -> Config:
    if lengths is not None and not isinstance(lengths, Iterable):
        raise TypeError(f"lengths: got {lengths!r}, wants a list of context lengths")
    if isinstance(task, TaskMixture):
        if lengths is None:
            raise ValueError("lengths: got None beside a TaskMixture, wants the context lengths")
        return settings.of_mixture(task, lengths)
    if not isinstance(task, (str, Path, Config)):
        raise TypeError(
            f"task: got {kind(task)}, wants a TaskMixture, a Config, a CONFIG.toml or the name of a setting"
        )
    config = task if isinstance(task, Config) else settings.load(task)
    return config if lengths is None else config.with_lengths(lengths)


def plan_of(config: Config, rows: list[Regime], sweep: Sweep | None, options: dict[str, Any]) -> ExperimentPlan:
    """Check every cell of a call."""
    if not rows:
        raise ValueError("regimes: got none, wants one or more")
    if sweep is not None and not (
        isinstance(sweep, (tuple, list))
        and len(sweep) == 2
        and isinstance(sweep[1], Iterable)
        and not isinstance(sweep[1], str)
    ):
        raise TypeError(f"sweep: got {sweep!r}, wants (field, values), as in ('noise_std', [0, 1])")
    field = None if sweep is None else sweep[0]
    points = [Point(None, "", 0.0, config, options)] if sweep is None else _points(config, *sweep, options)
    cells, runs = [], {}
    several = len(config.context_lengths) > 1 or sweep is None
    for point in points:
        for row in rows:
            for n in config.context_lengths:
                given = {name: value for name, value in point.options.items() if name not in _OF_A_CALL}
                with_value = f"{field} = {text(point.value)}"
                run = _named_error(field, with_value, RunConfig.resolve, point.config.mixture, row, n, **given)
                form = row.closed_form if run.model != "softmax" else None
                form = form if form in CLOSED_FORMS.values() else None  # pictures and records name the form
                sizes = (run.model, run.layers, run.attention_heads, n, form and form.name)
                key = f"{point.folder}{row.name}-n{n}"
                cells.append(Cell(NAME, key, n if several else point.place, point.config, row.name, *sizes))
                runs[key] = run
    if len(runs) < len(cells):
        raise ValueError(f"regimes: got {', '.join(row.name for row in rows)}, wants different ones")
    return ExperimentPlan(points, field, rows, cells, runs)


def _named_error(field: str | None, prefix: str, make: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Call a function; its errors name the value of the sweep, unless they begin with the field."""
    try:
        return make(*given, **options)
    except (ValueError, TypeError) as error:
        if field is None or str(error).startswith(f"{field}"):
            raise
        raise ValueError(f"{prefix}: {error}") from None


def _points(config: Config, field: str, values: Sequence[Any], options: dict[str, Any]) -> list[Point]:
    if field in _OTHER_WAYS:
        raise ValueError(f"sweep: got {field}, wants another field: {_OTHER_WAYS[field]} has a list of its own")
    choice("sweep", field, [*settings.SWEPT, *_OPTIONS])
    values = [_as_lists(value.tolist() if hasattr(value, "tolist") else value) for value in values]
    if not values:
        raise ValueError(f"sweep: got no values of {field}, wants one or more")
    if field in options:
        raise ValueError(f"sweep: got {field}, which also has the value {options[field]!r}; wants one of both")
    axis = places_of(values)
    points: list[Point] = []
    for value, place in zip(values, axis or range(len(values)), strict=True):
        folder = f"{field}={_file_name(value)}/"
        if any(folder == point.folder or value == point.value for point in points):
            raise ValueError(f"sweep: got {field} = {text(value)} more than once, wants different values")
        at, more = config, {field: value}
        if field in settings.SWEPT:
            at, more = _named_error(field, f"{field} = {text(value)}", config.with_value, field, value), {}
        points.append(Point(_plain(value), folder, float(place), at, {**options, **more}))
    return points


def _as_lists(value: Any) -> Any:
    return [_as_lists(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def places_of(values: Sequence[Any]) -> list[float] | None:
    """Places of numbers on an axis; None where values are not numbers."""
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    return [float(value) for value in values] if numbers else None


def _plain(value: Any) -> Any:
    """A value as records have it: functions and dtypes as text."""
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return getattr(value, "__name__", str(value).removeprefix("torch."))


def text(value: Any) -> str:
    """A value as it stands in legends and folders."""
    plain = _plain(value)
    return plain if isinstance(plain, str) else "none" if plain is None else json.dumps(plain, separators=(",", ":"))


def _file_name(value: Any) -> str:
    whole = text(value)
    inner = whole[1:-1] if whole.startswith("[") else whole
    name = re.sub(r"[^\w.,+-]+", "", inner)[:_LONGEST]
    # Different values have different folders.
    return name if name == inner else f"{name}-{digest({'value': _plain(value)})[:8]}"
