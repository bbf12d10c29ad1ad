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

    Examples
    --------
    >>> import tempfile
    >>> model = fl.models.Full(fl.models.Shape(trials=4, tasks=2, width=3, features=2), fl.models.literal(3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fl.models.save(model, f"{folder}/model.safetensors")
    ...     print(fl.models.load(f"{folder}/model.safetensors").W.shape)
    torch.Size([4, 3, 3])
    """
    _tensors.write(Path(path), "model", {**model.describe(), **also}, model.state_dict())


def load(path: str | Path) -> Model:
    """The model of a file that `save` wrote.

    Raises
    ------
    FileError
        A ValueError that says what is wrong with the file.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    Model
        With its parameters, of leading R.

    Examples
    --------
    >>> import tempfile
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]], torch.eye(2).expand(2, 2, 2), [0.5, 0.5])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = fl.train(mix, "plain", 5, steps=5, batch=64, out=f"{folder}/run", progress=False)
    ...     print(fl.models.load(run.folder / "model.safetensors").W.shape)
    torch.Size([1, 3, 3])
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
