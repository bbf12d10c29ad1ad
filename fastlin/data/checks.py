"""What the task sources accept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastlin.data import philox
from fastlin.data.place import Place

# Products of batch, n and m stay below 2^63.
_MOST = 1 << 40
# Of a source's array, 2 GiB in float64: a million tasks in 16 dimensions. More is a slip of the pen.
_MOST_NUMBERS = 1 << 28


def check_place(batch: int, n: int, seed: int, step: int, stream: int, offset: int) -> tuple[Place, int]:
    """The arguments that all samplers share, as Python integers."""
    n = philox.integer("n", n, _MOST)
    batch = philox.integer("batch", batch, _MOST)
    _, _, at = philox.validate(batch, 0, seed=seed, step=step, stream=stream, offset=offset, block=0)
    return Place(batch, at["seed"], at["step"], at["stream"], at["offset"]), n


def check_size(name: str, value: int) -> int:
    """`value` as an integer from 1 on."""
    size = philox.integer(name, value, _MOST)
    if size == 0:
        raise ValueError(f"{name}: got 0, wants an integer >= 1")
    return size


def check_dimension(name: str, value: int) -> int:
    """`value` as a number of features, whose covariance a source has."""
    size = check_size(name, value)
    if size * size > _MOST_NUMBERS:
        raise ValueError(f"{name}: got {size}, wants at most {math.isqrt(_MOST_NUMBERS)}: its covariance is an array")
    return size


def check_number(name: str, value: float) -> float:
    """`value` as a finite float that is not negative."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: got {value!r}, wants a finite number >= 0") from None
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name}: got {value!r}, wants a finite number >= 0")
    return number


def check_array(name: str, value: Any, shape: Sequence[int | str]) -> Tensor:
    """`value` as a finite float64 tensor (a copy, on the CPU) whose shape fits; a name stands for any size >= 1."""
    numbers = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 0)
    if isinstance(numbers, int) and numbers > _MOST_NUMBERS:
        raise ValueError(f"{name}: got {numbers} numbers, wants at most {_MOST_NUMBERS}")
    try:
        tensor = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach().clone()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: got {value!r}, wants an array of numbers") from None
    fits = tensor.ndim == len(shape) and all(
        size >= 1 if isinstance(wanted, str) else size == wanted
        for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wants = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, wants ({wants})")
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name}: got values that are not finite, wants finite numbers")
    return tensor


def check_covariances(name: str, value: Any, shape: Sequence[int]) -> Tensor:
    """`value` as float64 covariances (..., d, d), or an error that says which is none and why."""
    tensor = check_array(name, value, shape)
    for i, matrix in enumerate(tensor.reshape(-1, *tensor.shape[-2:])):
        which = f"{name}[{i}]" if tensor.ndim > 2 else name
        size = float(matrix.abs().max())
        skew = float((matrix - matrix.T).abs().max())
        if skew > 1e-9 * size:
            raise ValueError(f"{which}: differs from its transpose by {skew:.3g}, wants a symmetric matrix")
        lowest = float(torch.linalg.eigvalsh(matrix)[0])
        if lowest < -1e-9 * size:
            raise ValueError(f"{which}: has the eigenvalue {lowest:.3g}, wants a positive semi-definite matrix")
    return tensor
