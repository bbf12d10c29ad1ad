"""Checks of the arguments of closed forms. Errors name the argument, what it wants and what it got."""

import operator
from typing import Any

import torch
from torch import Tensor


def check_shots(n: Any, name: str = "n") -> int:
    """`n` as a non-negative Python integer."""
    try:
        shots = -1 if isinstance(n, bool) else operator.index(n)
    except (TypeError, ValueError):
        shots = -1
    if shots < 0:
        raise ValueError(f"{name}: wants a non-negative integer, got {n!r}")
    return shots


def check_shot_counts(n: Any) -> Tensor:
    """`n`, one shot count or an array of them, as a float64 tensor of the same shape."""
    try:
        counts = torch.as_tensor(n, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"n: wants non-negative integers, got {n!r}") from None
    if counts.dtype == torch.bool or counts.is_floating_point() or counts.is_complex():
        raise ValueError(f"n: wants non-negative integers, got {n!r}")
    if counts.numel() and int(counts.min()) < 0:
        raise ValueError(f"n: wants non-negative integers, got {int(counts.min())}")
    return counts.to(torch.float64)


def check_variance(value: float, name: str = "noise_var") -> float:
    """`value` as a finite non-negative float."""
    try:
        variance = float(value)
    except (TypeError, ValueError):
        variance = -1.0
    if not 0.0 <= variance < float("inf"):
        raise ValueError(f"{name}: wants a finite non-negative number, got {value!r}")
    return variance


def identity(d: int) -> Tensor:
    """Identity (d, d), float64 on the CPU."""
    return torch.eye(d, dtype=torch.float64, device="cpu")


def array(name: str, value: Any, *shapes: tuple[int | str, ...]) -> Tensor:
    """`value` as a real float64 tensor on the CPU, of one of `shapes`; a tensor keeps its autograd graph.

    A string in a shape stands for any size, a leading "..." for any number of dimensions. No shapes: any shape.
    """
    try:
        tensor = torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: wants an array of numbers, got {value!r}") from None
    if tensor.is_complex():
        raise ValueError(f"{name}: wants real numbers, got {tensor.dtype}")
    # Convert Python numbers directly to float64: the tensor above has rounded them to the default dtype.
    tensor = torch.as_tensor(tensor if isinstance(value, Tensor) else value, dtype=torch.float64, device="cpu")
    if shapes and not any(_fits(tuple(tensor.shape), shape) for shape in shapes):
        forms = " or ".join("(" + ", ".join(map(str, s)) + ("," if len(s) == 1 else "") + ")" for s in shapes)
        raise ValueError(f"{name}: wants shape {forms}, got {tuple(tensor.shape)}")
    return tensor


def _fits(sizes: tuple[int, ...], shape: tuple[int | str, ...]) -> bool:
    if shape[:1] == ("...",):
        shape = shape[1:]
        sizes = sizes[-len(shape) :]
    return len(sizes) == len(shape) and all(isinstance(w, str) or w == s for w, s in zip(shape, sizes, strict=True))
