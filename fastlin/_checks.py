"""Checks of sizes, numbers and choices, for the whole package. Errors say what they got and what they want."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable
from typing import Any


def integer(name: str, value: Any, limit: int) -> int:
    """`value` as an int in [0, limit)."""
    if type(value) is int and 0 <= value < limit:
        return value
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}), wants an integer")
    if not 0 <= number < limit:
        raise ValueError(f"{name}: got {number}, wants an integer in [0, {limit})")
    return number


def count(name: str, value: Any, limit: int = 1 << 31) -> int:
    """`value` as an int in [1, limit)."""
    size = integer(name, value, limit)
    if size == 0:
        raise ValueError(f"{name}: got 0, wants an integer >= 1")
    return size


def real(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise unless `value` is a finite number from `low` to `high`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        span = "" if low == -math.inf else f" >= {low:g}" if high == math.inf else f" from {low:g} to {high:g}"
        raise ValueError(f"{name}: got {value!r}, wants a finite number{span}")


def kind(value: Any) -> str:
    """What an argument of the wrong type is; a class is often given where its object is meant."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """`value` if it is among those allowed, else an error with the nearest one."""
    names = list(allowed)
    if value in names:
        return str(value)
    close = difflib.get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ValueError(f"{name}: got {value!r}{hint}, wants one of {', '.join(names)}")
