"""CONFIG.toml: a task mixture and the context lengths at which it is looked at.

    name = "Figure 2(c)"
    description = "two tasks"           # optional
    dimension = 10
    means = [2.1, -0.9]                 # per task: a multiple of the all-ones vector, or the vector
    covariances = [1.0, 1.0]            # per task: a multiple of I, the diagonal, or the matrix as a list of rows
    weights = [0.3, 0.7]
    noise_std = 0.0                     # optional
    feature_cov = 1.0                   # optional, written like a covariance
    context_lengths = [1, 10, 20]

The settings of the paper on task-specific prompts ship with the package, under the names of their panels.
"""

from __future__ import annotations

import difflib
import math
import reprlib
import string
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastlin import theory
from fastlin.data.sources import TaskMixture

_SETTINGS = Path(__file__).parent
# A covariance of this size takes 128 MiB; a larger one is a slip of the pen, not a problem for closed forms.
_MAX_DIMENSION = 4096
# The longest context that a task source can be asked for.
_MAX_LENGTH = (1 << 40) - 1

_LENGTHS = f"a list of different integers from 0 to {_MAX_LENGTH}"
FIELDS = {
    "name": "a text that is not empty",
    "description": "a text",
    "dimension": f"an integer from 1 to {_MAX_DIMENSION}",
    "means": "a list with a number or a vector for each task",
    "covariances": "a list with a number, a diagonal or a matrix for each task",
    "weights": "a list with a number for each task",
    "noise_std": "a finite number >= 0",
    "feature_cov": "a number, a diagonal or a matrix",
    "context_lengths": _LENGTHS,
}
_DEFAULTS: dict[str, Any] = {"description": "", "noise_std": 0.0, "feature_cov": 1.0}


class ConfigError(ValueError):
    """A CONFIG.toml that is not there or not right; the message names the file, the field and what is allowed."""


@dataclass(frozen=True, eq=False)
class Config:
    """What a CONFIG.toml says.

    Attributes
    ----------
    name, description : str
    context_lengths : tuple of int
        Increasing.
    mixture : TaskMixture
    values : dict
        The fields as the file has them, with the defaults filled in.
    """

    name: str
    description: str
    context_lengths: tuple[int, ...]
    mixture: TaskMixture
    values: dict[str, Any]

    def with_lengths(self, lengths: Sequence[int]) -> Config:
        """The same at other context lengths."""
        checked = check_lengths("context_lengths", list(lengths))
        return replace(self, context_lengths=checked, values={**self.values, "context_lengths": list(checked)})

    def with_noise(self, variance: float) -> Config:
        """The same with another variance of the label noise."""
        if not 0 <= variance < math.inf:
            raise _wrong("variance", variance, "a finite number >= 0")
        return _parse({**self.values, "noise_std": math.sqrt(variance)})


def shipped() -> dict[str, Path]:
    """The settings that ship with the package: name of a panel to file, where A2abc.toml serves A2a, A2b and A2c."""
    found = {}
    for path in sorted(_SETTINGS.glob("*.toml")):
        figure = path.stem.rstrip(string.ascii_lowercase)
        found.update({figure + panel: path for panel in path.stem[len(figure) :]})
    return found


def load(source: str | Path) -> Config:
    """Read a CONFIG.toml.

    Parameters
    ----------
    source : str or Path
        The name of a shipped setting, or the path of a file. A name wins: ``./2c`` is a file of that name.

    Raises
    ------
    ConfigError
    """
    path = shipped().get(source, Path(source)) if isinstance(source, str) else source
    try:
        return _parse(tomllib.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        names = ", ".join(shipped())
        raise ConfigError(f"{source}: no such file; the settings that ship with fastlin are {names}") from None
    except IsADirectoryError:
        raise ConfigError(f"{source}: is a directory, wants a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None


def check_lengths(where: str, value: Any) -> tuple[int, ...]:
    """Context lengths in increasing order, or an error that names `where`."""
    entries = _entries(where, value, None, _LENGTHS)
    times = Counter(_integer(f"{where}[{i}]", entry, 0, _MAX_LENGTH) for i, entry in enumerate(entries))
    length, most = times.most_common(1)[0]
    if most > 1:
        raise ValueError(f"{where}: has {length} more than once, wants {_LENGTHS}")
    return tuple(sorted(times))


def _parse(given: dict[str, Any]) -> Config:
    """The config of a TOML document; errors name the field, not the file."""
    for field in given:
        if field not in FIELDS:
            close = difflib.get_close_matches(field.lower(), FIELDS, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(f"{field}: unknown field{hint}, wants one of {', '.join(FIELDS)}")
    for field, wants in FIELDS.items():
        if field not in given and field not in _DEFAULTS:
            raise ValueError(f"{field}: missing, wants {wants}")
    values: dict[str, Any] = {field: given[field] if field in given else _DEFAULTS[field] for field in FIELDS}
    for field in ("name", "description"):
        if not isinstance(values[field], str) or (field == "name" and not values[field].strip()):
            raise _wrong(field, values[field], FIELDS[field])
    d = _integer("dimension", values["dimension"], 1, _MAX_DIMENSION)
    entries = _entries("means", values["means"], None, FIELDS["means"])
    means = [_vector(f"means[{k}]", entry, d) for k, entry in enumerate(entries)]
    one_each = f"a list of {len(means)}, one for each of means"
    entries = _entries("covariances", values["covariances"], len(means), one_each)
    covariances = [_matrix(f"covariances[{k}]", entry, d) for k, entry in enumerate(entries)]
    entries = _entries("weights", values["weights"], len(means), one_each)
    weights = [_number(f"weights[{k}]", entry) for k, entry in enumerate(entries)]
    noise_std = _number("noise_std", values["noise_std"], FIELDS["noise_std"])
    feature_cov = _matrix("feature_cov", values["feature_cov"], d)
    lengths = check_lengths("context_lengths", values["context_lengths"])
    # Without a feature covariance the mixture need not multiply by it.
    isotropic = values["feature_cov"] == 1
    mixture = TaskMixture(means, covariances, weights, noise_std, None if isotropic else feature_cov)
    try:
        size = theory.normaliser(mixture)
    except OverflowError:
        size = math.inf
    if not 0 < size < math.inf:
        raise ValueError(f"means, covariances, noise_std: E[y²] of the labels is {size}, wants a finite number > 0")
    return Config(values["name"], values["description"], lengths, mixture, values)


def _vector(where: str, value: Any, d: int) -> list[float]:
    """A vector of d: a number times the all-ones vector, or a list."""
    if not isinstance(value, list):
        return [_number(where, value, f"a finite number or a list of {d}")] * d
    entries = _entries(where, value, d, f"a finite number or a list of {d}")
    return [_number(f"{where}[{i}]", entry) for i, entry in enumerate(entries)]


def _matrix(where: str, value: Any, d: int) -> list[list[float]]:
    """A matrix of d rows: a number times I, a list as the diagonal, or a list of rows."""
    wants = f"a finite number, a list of {d} (the diagonal) or {d} lists of {d} (the matrix)"
    if isinstance(value, list) and value and isinstance(value[0], list):
        rows = _entries(where, value, d, wants)
        return [_row(f"{where}[{i}]", row, d) for i, row in enumerate(rows)]
    if isinstance(value, list):
        entries = _entries(where, value, d, wants)
        diagonal = [_number(f"{where}[{i}]", entry) for i, entry in enumerate(entries)]
    else:
        diagonal = [_number(where, value, wants)] * d
    return [[entry if i == j else 0.0 for j in range(d)] for i, entry in enumerate(diagonal)]


def _row(where: str, value: Any, d: int) -> list[float]:
    entries = _entries(where, value, d, f"a list of {d} finite numbers")
    return [_number(f"{where}[{j}]", entry) for j, entry in enumerate(entries)]


def _entries(where: str, value: Any, count: int | None, wants: str) -> list[Any]:
    """`value` as a list of `count` entries; None is any number but none."""
    if not isinstance(value, list) or not value or count not in (None, len(value)):
        raise _wrong(where, value, wants)
    return value


def _integer(where: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(where, value, f"an integer from {low} to {high}")
    return value


def _number(where: str, value: Any, wants: str = "a finite number") -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(where, value, wants)
    # An integer of TOML has any size, and is compared exactly.
    if not abs(value) <= sys.float_info.max:
        raise _wrong(where, value, wants)
    return float(value)


def _wrong(where: str, value: Any, wants: str) -> ValueError:
    """The error of a value, shown as TOML writes it."""
    if isinstance(value, list):
        shown = f"a list of {len(value)}"
    elif isinstance(value, dict):
        shown = "a table"
    elif isinstance(value, bool):
        shown = str(value).lower()
    else:
        shown = reprlib.repr(value) if isinstance(value, (int, float, str)) else str(value)
    return ValueError(f"{where}: got {shown}, wants {wants}")
