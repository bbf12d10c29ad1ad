"""Task sources from their descriptions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from fastlin.data.sources import FixedTask, PointSet, Source, SphereTasks, TaskMixture

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (TaskMixture, SphereTasks, FixedTask, PointSet)}


def restored(described: Mapping[str, Any]) -> Source | None:
    """The source of a description that `Source.describe` made; None where that does not hold all of it.

    Parameters
    ----------
    described : mapping
        Of a source of fastlin; a class of the user's own and arrays that are described by their digest give None.
    """
    kind = _KINDS.get(described.get("source", ""))
    if kind is None or any(isinstance(value, dict) for value in described.values()):
        return None
    arguments = inspect.signature(kind).parameters
    values = {name: value for name, value in described.items() if name in arguments}
    if values.get("feature_cov") == torch.eye(described["d"]).tolist():
        del values["feature_cov"]
    made: Source = kind(**values)
    return made
