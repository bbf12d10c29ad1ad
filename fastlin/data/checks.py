"""Checks of the arguments of task sources, and their description."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastlin._checks import count
from fastlin.data.place import MOST

# Limit of one array: 2 GiB in float64, the covariances of a million tasks in 16 dimensions. A larger size is a typo.
_MOST_NUMBERS = 1 << 28
# A description writes out arrays of up to this many numbers: the covariances of 32 tasks with 20 features.
_LARGEST_WRITTEN = 12_800


def check_dimension(name: str, value: int) -> int:
    """`value` as a number of features d. A source stores a (d, d) covariance, which bounds d."""
    size = count(name, value, MOST)
    if size * size > _MOST_NUMBERS:
        raise ValueError(f"{name}: got {size}, wants at most {math.isqrt(_MOST_NUMBERS)}: its covariance is an array")
    return size


def check_number(name: str, value: float) -> float:
    """`value` as a finite float >= 0."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: got {value!r}, wants a finite number >= 0") from None
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name}: got {value!r}, wants a finite number >= 0")
    return number


def check_device(value: Any) -> torch.device:
    """`value` as a device on which torch can make a tensor."""
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:  # the last from a torch without CUDA
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device: got {str(value)!r}, wants one that torch can use here: {reason}") from None
    return device


def check_array(name: str, value: Any, shape: Sequence[int | str]) -> Tensor:
    """`value` as a finite float64 CPU tensor, a copy, of this shape; a string in `shape` stands for any size >= 1."""
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
    """`value` as float64 covariances (..., d, d), or an error that names the first matrix that is not one and why."""
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


def described(value: Any) -> Any:
    """A value as JSON has it; a large array by its digest."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() <= _LARGEST_WRITTEN:
        return value.tolist()
    return {"shape": list(value.shape), "sha256": hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()}
