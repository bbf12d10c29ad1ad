"""Checks of the arguments of task sources, and their description."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastlin._checks import count
from fastlin.data.layout import MOST

# Limit of one array: 2 GiB in float64, the covariances of a million tasks in 16 dimensions. A larger size is a typo.
_MOST_NUMBERS = 1 << 28
# A description writes out arrays of up to this many numbers: the covariances of 32 tasks with 20 features.
_LARGEST_WRITTEN = 12_800
# What torch raises for values that are not an array of numbers.
_UNREADABLE = (TypeError, ValueError, RuntimeError, OverflowError)


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
        number = None
    # float reads texts and truth values too.
    if number is None or isinstance(value, (str, bytes, bool)):
        raise TypeError(f"{name}: got {value!r}, wants a finite number >= 0")
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
    tensor = _numbers(name, value)
    fits = tensor.ndim == len(shape) and all(
        size >= 1 if isinstance(wanted, str) else size == wanted
        for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        raise _misshapen(name, tensor, shape)
    return tensor


def check_means(name: str, value: Any, d: int | None = None) -> Tensor:
    """`value` as means (K, d); an entry that is a number is that multiple of the all-ones vector.

    Without `d`, an entry that is a vector tells it.
    """
    entries = _entries(value)
    if entries is None:
        tensor = _numbers(name, value)
        return check_array(name, tensor if d is None or tensor.ndim != 1 else tensor[:, None].expand(-1, d), ("K", "d"))
    vectors = [_numbers(f"{name}[{k}]", entry) for k, entry in enumerate(entries)]
    d = d or max((vector.shape[-1] for vector in vectors if vector.ndim), default=0)
    if d == 0:
        raise ValueError(f"{name}: got {len(vectors)} entries without a vector, wants (K, d)")
    spread = [vector if vector.ndim else vector.expand(d) for vector in vectors]
    return torch.stack([check_array(f"{name}[{k}]", vector, (d,)) for k, vector in enumerate(spread)])


def check_covariances(name: str, value: Any, shape: Sequence[int]) -> Tensor:
    """`value` as float64 covariances of `shape` (..., d, d), or an error that names the first that is not one and why.

    A number is that multiple of I, d numbers are a diagonal: any beginning of `shape` fits. In a list each task's
    covariance may have its own form.
    """
    entries = _entries(value)
    if entries is not None and len(shape) > 2:
        if len(entries) != shape[0]:
            raise ValueError(f"{name}: got {len(entries)} entries, wants {shape[0]}, one for each task")
        return torch.stack([check_covariances(f"{name}[{k}]", entry, shape[1:]) for k, entry in enumerate(entries)])
    tensor = _numbers(name, value)
    if tensor.shape != tuple(shape[: tensor.ndim]):
        raise _misshapen(name, tensor, shape)
    if tensor.ndim == 2 and len(shape) > 2 and shape[0] == shape[1] and not isinstance(value, (list, tuple)):
        raise ValueError(
            f"{name}: got shape {tuple(tensor.shape)}, one matrix or the diagonals of {shape[0]} tasks; "
            f"wants {tuple(shape)}, or a list with an entry for each task"
        )
    is_diagonal = tensor.ndim < len(shape)
    if is_diagonal:
        if math.prod(shape) > _MOST_NUMBERS:
            raise ValueError(f"{name}: got {math.prod(shape)} numbers as matrices, wants at most {_MOST_NUMBERS}")
        tensor = tensor.reshape(*tensor.shape, *[1] * (len(shape) - 1 - tensor.ndim)).expand(*shape[:-1])
        tensor = torch.diag_embed(tensor)
    for i, matrix in enumerate(tensor.reshape(-1, *tensor.shape[-2:])):
        which = f"{name}[{i}]" if tensor.ndim > 2 else name
        size = float(matrix.abs().max())
        skew = float((matrix - matrix.T).abs().max())
        if skew > 1e-9 * size:
            raise ValueError(f"{which}: differs from its transpose by {skew:.3g}, wants a symmetric matrix")
        lowest = float(matrix.diagonal().min() if is_diagonal else torch.linalg.eigvalsh(matrix)[0])
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


def _numbers(name: str, value: Any) -> Tensor:
    """`value` as a finite float64 CPU tensor, a copy."""
    numbers = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 0)
    if isinstance(numbers, int) and numbers > _MOST_NUMBERS:
        raise ValueError(f"{name}: got {numbers} numbers, wants at most {_MOST_NUMBERS}")
    if str(getattr(value, "dtype", "")).removeprefix("torch.").startswith("complex"):
        raise TypeError(f"{name}: got {value.dtype}, wants real numbers")  # torch would drop the imaginary parts
    if isinstance(value, Tensor) and value.layout != torch.strided:
        raise TypeError(f"{name}: got layout {value.layout}, wants torch.strided, as to_dense() has")
    try:
        tensor = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach().clone()
    except _UNREADABLE:
        raise TypeError(f"{name}: got {value!r}, wants an array of numbers") from None
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name}: got values that are not finite, wants finite numbers")
    return tensor


def _entries(value: Any) -> list[Any] | None:
    """Entries of a list that is not one array: they are arrays, or have different forms. None for all else."""
    if not isinstance(value, (list, tuple)):
        return None
    if any(isinstance(entry, (Tensor, np.ndarray)) for entry in value):
        return list(value)
    try:
        torch.as_tensor(value, device="cpu")
    except _UNREADABLE:
        return list(value)
    return None


def _misshapen(name: str, tensor: Tensor, shape: Sequence[int | str]) -> ValueError:
    wants = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    return ValueError(f"{name}: got shape {tuple(tensor.shape)}, wants ({wants})")
