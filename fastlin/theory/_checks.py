"""Validation shared by the closed forms: every error names the argument, what it got and what it wants."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def check_shots(n: Any, name: str = "n") -> int:
    """`n` as a non-negative Python integer."""
    try:
        if isinstance(n, bool):
            raise TypeError
        shots = operator.index(n)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: wants a non-negative integer, got {n!r}") from None
    if shots < 0:
        raise ValueError(f"{name}: wants a non-negative integer, got {shots}")
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
    variance = float(value)
    if not 0.0 <= variance < float("inf"):
        raise ValueError(f"{name}: wants a finite non-negative number, got {value!r}")
    return variance


def as_float64(name: str, value: Any) -> Tensor:
    """`value` as a real float64 tensor on the CPU, the home of all theory; keeps the graph of a tensor."""
    tensor = torch.as_tensor(value, device="cpu")
    if tensor.is_complex():
        raise ValueError(f"{name}: wants real numbers, got {tensor.dtype}")
    # Python numbers go straight to float64: as_tensor alone would round them to the default dtype.
    source = tensor if isinstance(value, Tensor) else value
    return torch.as_tensor(source, dtype=torch.float64, device="cpu")


def identity(d: int) -> Tensor:
    """Identity (d, d), float64 on the CPU."""
    return torch.eye(d, dtype=torch.float64, device="cpu")


def check_shape(name: str, tensor: Tensor, *wanted: Sequence[int | str]) -> None:
    """Raise unless the shape fits one of `wanted`, whose entries are sizes or names of free sizes."""
    for shape in wanted:
        sizes = zip(shape, tensor.shape, strict=False)
        if len(shape) == tensor.ndim and all(isinstance(w, str) or w == s for w, s in sizes):
            return
    forms = " or ".join("(" + ", ".join(map(str, w)) + ("," if len(w) == 1 else "") + ")" for w in wanted)
    raise ValueError(f"{name}: wants shape {forms}, got {tuple(tensor.shape)}")
