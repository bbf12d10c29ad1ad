"""Models on disk: safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from msgspec import Struct

from fastlin import _tensors
from fastlin._files import FileError, checked
from fastlin.models.base import OPTIONS, Model, Shape
from fastlin.models.layer import Full, Reduced, Separate
from fastlin.models.softmax import Softmax
from fastlin.models.stack import Stack
from fastlin.models.units import UNITS, Units

KINDS: dict[str, type[Model]] = {kind.name: kind for kind in (Reduced, Full, Separate, Stack, Softmax)}


class Description(Struct, frozen=True):
    """The description in the file of a model; `Model.describe` writes it."""

    model: str
    shape: Shape
    see_query: bool
    residual: float
    trainable_entry: bool
    fixed_head: bool
    unit: float
    dtype: Literal["float32", "float64"]
    shot_scale: bool = False


def save(model: Model, path: str | Path, **also: Any) -> None:
    """Write a model into a safetensors file.

    Parameters
    ----------
    model : Model
    path : str or Path
        Replaced as a whole or not at all.
    **also
        Further entries of its description, in values that JSON has.

    Examples
    --------
    >>> import tempfile
    >>> shape = fl.models.Shape(trials=4, tasks=2, width=3, features=2)
    >>> model = fl.models.Full(shape, fl.models.literal(3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fl.models.save(model, f"{folder}/model.safetensors")
    ...     print(fl.models.load(f"{folder}/model.safetensors").W.shape)
    torch.Size([4, 3, 3])
    """
    _tensors.write(Path(path), "model", {**model.describe(), **also}, model.state_dict())


def load(path: str | Path) -> Model:
    """The model in a file that `save` or `fastlin.train` wrote; a FileError names what is wrong with the file.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    Model

    Examples
    --------
    >>> import tempfile, pathlib
    >>> run = fl.train(fl.SphereTasks(2), "plain", 5, steps=5, batch=64, progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "model.safetensors"
    ...     fl.models.save(run.model, path)
    ...     print(fl.models.load(path).W.shape)
    torch.Size([1, 3, 3])
    """
    described, tensors = _tensors.read(Path(path), "model")
    try:
        about = checked(described, Description)
        if about.model not in KINDS:
            raise ValueError(f"model: got {about.model!r}, wants one of {', '.join(KINDS)}")
        model = KINDS[about.model](
            about.shape,
            Units(**{name: tensors[f"{name}_unit"] for name in UNITS}, loss=about.unit),
            dtype=getattr(torch, about.dtype),
            **{name: getattr(about, name) for name in OPTIONS},
        )
        model.load_state_dict(tensors)
    except (ValueError, KeyError, RuntimeError) as error:
        reason = f"has no tensor {error}" if isinstance(error, KeyError) else str(error).replace("\n", " ")
        raise FileError(f"{path}: damaged, or not a model of fastlin: {reason}") from None
    return model
