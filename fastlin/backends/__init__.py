"""Which backends there are, and which one serves a call."""

from __future__ import annotations

import functools
import importlib
import warnings

import torch

from fastlin.backends import eager
from fastlin.backends.base import Backend, BackendError

__all__ = ["ORDER", "Backend", "BackendError", "draws", "load", "names", "resolve", "sampler_on", "why_not"]

ORDER: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}
"""Backends that "auto" tries for a device type before eager, best first."""

_warned: set[tuple[str, str, str]] = set()


def names() -> tuple[str, ...]:
    """Names of all backends but "reference"."""
    return (*dict.fromkeys(name for order in ORDER.values() for name in order), "eager")


def why_not(name: str, op: str, device: torch.device, dtype: torch.dtype, m: int) -> str | None:
    """Why a backend cannot serve a call, or None."""
    return load(name).supports(op, device, dtype, m)


def load(name: str) -> Backend:
    """A backend by name; its module is imported on first use."""
    if name == "eager":  # torch.compile traces this, and cannot trace an import
        return eager.backend
    backend: Backend = importlib.import_module(f"fastlin.backends.{name}").backend
    return backend


@functools.cache
def draws(name: str) -> bool:
    return load(name).draws


def sampler_on(device: torch.device, dtype: torch.dtype, m: int) -> Backend | None:
    """The backend whose kernels draw for a device: on it, else on the CPU; None without any."""
    # Inside torch.func and under a dispatch mode what torch allocates may be without memory; the CPU's kernels draw
    # into memory of numpy's.
    is_plain = not torch._C._are_functorch_transforms_active() and torch._C._len_torch_dispatch_stack() == 0
    for name in ORDER.get(device.type, ()) if is_plain else ():
        backend = load(name)
        if backend.draws and backend.supports("sample", device, dtype, m) is None:
            return backend
    cpu = load("cpu")
    return cpu if cpu.supports("sample", torch.device("cpu"), dtype, m) is None else None


@functools.lru_cache(256)
def resolve(name: str, op: str, device: torch.device, dtype: torch.dtype, m: int) -> str:
    """Name of the backend that serves a call of a public op: the one named, or with "auto" the first that can.

    Raises a BackendError when the named backend cannot serve; only "auto" tries others.
    """
    if name != "auto":
        reason = why_not(name, op, device, dtype, m)
        if reason is not None:
            raise BackendError(f"{op}: backend {name!r} cannot serve this call: {reason}")
        return name
    order = (*ORDER.get(device.type, ()), "eager")
    for i, candidate in enumerate(order):
        reason = why_not(candidate, op, device, dtype, m)
        if reason is None:
            return candidate
        if (candidate, op, reason) not in _warned:
            _warned.add((candidate, op, reason))
            message = f"{op}: backend {candidate!r} does not serve this call ({reason}); {order[i + 1]} serves it"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    raise AssertionError("eager serves every call")
