"""Models on disk: safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fastlin import _tensors
from fastlin.models.base import Model, Shape
from fastlin.models.layer import Full, Reduced, Separate
from fastlin.models.softmax import Softmax
from fastlin.models.stack import Stack
from fastlin.models.units import UNITS, Units

KINDS: dict[str, type[Model]] = {kind.name: kind for kind in (Reduced, Full, Separate, Stack, Softmax)}


def save(model: Model, path: str | Path, **also: Any) -> None:
    """Write a model into a safetensors file.

    Parameters
    ----------
    model : Model
    path : str or Path
        Replaced as a whole or not at all.
    **also
        What else its description is to say, in values that JSON has.
    """
    _tensors.write(Path(path), "model", {**model.describe(), **also}, model.state_dict())


def load(path: str | Path) -> Model:
    """The model of a file that `save` wrote.

    Raises
    ------
    FileError
        A ValueError that says what is wrong with the file.
    """
    description, tensors = _tensors.read(Path(path), "model")
    factors = {name: tensors[f"{name}_unit"] for name in UNITS}
    model = KINDS[description["model"]](
        Shape(**description["shape"]),
        Units(**factors, loss=description["unit"]),
        see_query=description["see_query"],
        shot_scale=description.get("shot_scale", False),
        residual=description["residual"],
        trainable_entry=description["trainable_entry"],
        fixed_head=description["fixed_head"],
        dtype=getattr(torch, description["dtype"]),
    )
    model.load_state_dict(tensors)
    return model
