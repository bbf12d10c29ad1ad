"""CONFIG.toml: a task mixture and context lengths.

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
from fastlin.data.checks import check_means
from fastlin.data.sources import TaskMixture

_SETTINGS = Path(__file__).parent
# A covariance of this size takes 128 MiB; a larger dimension is taken for a typing error.
_MAX_DIMENSION = 4096
# The longest context of a task source.
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
SWEPT = ("dimension", "means", "covariances", "weights", "noise_std", "feature_cov")
"""Fields that describe the task mixture."""
_DEFAULTS: dict[str, Any] = {"description": "", "noise_std": 0.0, "feature_cov": 1.0}


class ConfigError(ValueError):
    """A missing or invalid CONFIG.toml; the message names the file, the field and what it wants."""


@dataclass(frozen=True, eq=False)
class Config:
    """The contents of a CONFIG.toml."""

    name: str
    description: str
    context_lengths: tuple[int, ...]  # increasing
    mixture: TaskMixture
    values: dict[str, Any]  # the fields of the file, with defaults filled in

    def with_lengths(self, lengths: Sequence[int]) -> Config:
        """A copy with other context lengths."""
        checked = check_lengths("context_lengths", list(lengths))
        return replace(self, context_lengths=checked, values={**self.values, "context_lengths": list(checked)})

    def with_noise(self, variance: float) -> Config:
        """A copy with another variance of the label noise."""
        if not 0 <= variance < math.inf:
            raise _wrong("variance", variance, "a finite number >= 0")
        return _parse({**self.values, "noise_std": math.sqrt(variance)})

    def with_value(self, field: str, value: Any) -> Config:
        """A copy with another value of a field of `SWEPT`, written as in the file."""
        return _parse({**self.values, field: value})


def shipped() -> dict[str, Path]:
    """Files of the settings that ship with the package, by panel: A2abc.toml serves A2a, A2b and A2c."""
    files = {}
    for path in sorted(_SETTINGS.glob("*.toml")):
        figure = path.stem.rstrip(string.ascii_lowercase)
        files.update({figure + panel: path for panel in path.stem[len(figure) :]})
    return files


def load(source: str | Path) -> Config:
    """Read a CONFIG.toml: a shipped setting by name, or a file by path. ``2c`` is the setting, ``./2c`` a file."""
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


def of_mixture(mixture: TaskMixture, lengths: Sequence[int]) -> Config:
    """The config of a mixture that was made in Python."""
    if type(mixture) is not TaskMixture or mixture.bias or mixture.stratify:
        wants = "wants a CONFIG.toml, or a TaskMixture without bias and stratify"
        raise TypeError(f"task: got a {type(mixture).__name__}, {wants}")
    checked = check_lengths("lengths", list(lengths))
    arrays = {name: getattr(mixture, name).tolist() for name in ("means", "covariances", "weights", "feature_cov")}
    about = {"name": "own tasks", "description": "", "dimension": mixture.d, "noise_std": mixture.noise_std}
    return Config("own tasks", "", checked, mixture, {**about, **arrays, "context_lengths": list(checked)})


def check_lengths(where: str, value: Any) -> tuple[int, ...]:
    """Context lengths in increasing order; errors name `where`."""
    entries = _entries(where, value, None, _LENGTHS)
    counts = Counter(_integer(f"{where}[{i}]", entry, 0, _MAX_LENGTH) for i, entry in enumerate(entries))
    length, most = counts.most_common(1)[0]
    if most > 1:
        raise ValueError(f"{where}: has {length} more than once, wants {_LENGTHS}")
    return tuple(sorted(counts))


def _parse(document: dict[str, Any]) -> Config:
    """The config of a TOML document; errors name the field, not the file."""
    for field in document:
        if field not in FIELDS:
            close = difflib.get_close_matches(field.lower(), FIELDS, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(f"{field}: unknown field{hint}, wants one of {', '.join(FIELDS)}")
    for field, wants in FIELDS.items():
        if field not in document and field not in _DEFAULTS:
            raise ValueError(f"{field}: missing, wants {wants}")
    values: dict[str, Any] = {field: document[field] if field in document else _DEFAULTS[field] for field in FIELDS}
    for field in ("name", "description"):
        if not isinstance(values[field], str) or (field == "name" and not values[field].strip()):
            raise _wrong(field, values[field], FIELDS[field])
    d = _integer("dimension", values["dimension"], 1, _MAX_DIMENSION)
    entries = _entries("means", values["means"], None, FIELDS["means"])
    for k, entry in enumerate(entries):
        _check_vector(f"means[{k}]", entry, d, f"a finite number or a list of {d}")
    one_each = f"a list of {len(entries)}, one for each of means"
    for k, entry in enumerate(_entries("covariances", values["covariances"], len(entries), one_each)):
        _check_matrix(f"covariances[{k}]", entry, d)
    weights = _numbers("weights", values["weights"], len(entries), one_each)
    noise_std = _number("noise_std", values["noise_std"], FIELDS["noise_std"])
    _check_matrix("feature_cov", values["feature_cov"], d)
    lengths = check_lengths("context_lengths", values["context_lengths"])
    means = check_means("means", entries, d)
    # With None the mixture does not multiply by the covariance.
    feature_cov = None if values["feature_cov"] == 1 else values["feature_cov"]
    mixture = TaskMixture(means, values["covariances"], weights, noise_std, feature_cov)
    try:
        size = theory.normaliser(mixture)
    except OverflowError:
        size = math.inf
    if not 0 < size < math.inf:
        raise ValueError(f"means, covariances, noise_std: E[y²] of the labels is {size}, wants a finite number > 0")
    return Config(values["name"], values["description"], lengths, mixture, values)


def _check_vector(where: str, value: Any, d: int, wants: str) -> None:
    if isinstance(value, list):
        _numbers(where, value, d, wants)
    else:
        _number(where, value, wants)


def _check_matrix(where: str, value: Any, d: int) -> None:
    wants = f"a finite number, a list of {d} (the diagonal) or {d} lists of {d} (the matrix)"
    if isinstance(value, list) and value and isinstance(value[0], list):
        for i, row in enumerate(_entries(where, value, d, wants)):
            _numbers(f"{where}[{i}]", row, d, f"a list of {d} finite numbers")
    else:
        _check_vector(where, value, d, wants)


def _numbers(where: str, value: Any, count: int, wants: str) -> list[float]:
    return [_number(f"{where}[{i}]", entry) for i, entry in enumerate(_entries(where, value, count, wants))]


def _entries(where: str, value: Any, count: int | None, wants: str) -> list[Any]:
    """`value` as a list of `count` entries; None: one or more."""
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
    # TOML integers have any size; Python compares them with floats exactly.
    if not abs(value) <= sys.float_info.max:
        raise _wrong(where, value, wants)
    return float(value)


def _wrong(where: str, value: Any, wants: str) -> ValueError:
    """An error that shows a value as TOML writes it."""
    if isinstance(value, list):
        shown = f"a list of {len(value)}"
    elif isinstance(value, dict):
        shown = "a table"
    elif isinstance(value, bool):
        shown = str(value).lower()
    else:
        shown = reprlib.repr(value) if isinstance(value, (int, float, str)) else str(value)
    return ValueError(f"{where}: got {shown}, wants {wants}")
