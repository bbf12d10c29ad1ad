"""Checks of the fields of a run, and their description in JSON."""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fastlin.data.philox import integer
from fastlin.training.optimiser import OPTIMISERS, SCHEDULES, Lost

if TYPE_CHECKING:
    from fastlin.training.config import RunConfig

# Values that depend on the number of features d.
OF_FEATURES: dict[str, Callable[[int], float]] = {
    "1/sqrt(d+1)": lambda d: (d + 1) ** -0.5,
    "1/(d+1)^1.5": lambda d: (d + 1) ** -1.5,
    "1/sqrt(3(d+1))": lambda d: (3 * (d + 1)) ** -0.5,
    "1/sqrt(3)/(d+1)^2.5": lambda d: 3**-0.5 * (d + 1) ** -2.5,
}
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


def protocol(config: RunConfig) -> None:
    """Check the fields that a preset decides, one by one."""
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
    for name in _SWITCHES:
        if not isinstance(getattr(config, name), bool):
            raise ValueError(f"{name}: got {getattr(config, name)!r}, wants True or False")
    for name in ("scale", "start_attention", "start_values", "start_heads", "start_prompts"):
        value = getattr(config, name)
        if isinstance(value, str):
            choice(name, value, OF_FEATURES)
        else:
            real(name, value)
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


def real(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise unless `value` is a finite number from `low` to `high`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        span = "" if low == -math.inf else f" >= {low:g}" if high == math.inf else f" from {low:g} to {high:g}"
        raise ValueError(f"{name}: got {value!r}, wants a finite number{span}")


def count(name: str, value: Any) -> int:
    """`value` as an integer >= 1."""
    size = integer(name, value, 1 << 31)
    if size == 0:
        raise ValueError(f"{name}: got 0, wants an integer >= 1")
    return size


def choice(where: str, value: Any, allowed: Iterable[str]) -> str:
    """`value` if it is among those allowed, else an error with the nearest one."""
    names = list(allowed)
    if value in names:
        return str(value)
    close = difflib.get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ValueError(f"{where}: got {value!r}{hint}, wants one of {', '.join(names)}")


def described(value: Any) -> Any:
    """A field's value as JSON has it: objects that describe themselves, dtypes, functions by their names."""
    if isinstance(value, Lost):
        return value.name
    if hasattr(value, "describe"):
        return value.describe()
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if hasattr(value, "sample"):  # a task source of the user's own, by its class
        return {"source": type(value).__qualname__}
    return _function_name(value) if callable(value) else value


def _function_name(function: Any) -> str:
    """The name of a function or class; with a digest of its code, where many have the same name."""
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    code = getattr(function, "__code__", None)
    if "<" not in name or code is None:
        return name
    what = repr((code.co_code, code.co_names, [c for c in code.co_consts if not hasattr(c, "co_code")]))
    return f"{name} {hashlib.sha256(what.encode()).hexdigest()[:16]}"
