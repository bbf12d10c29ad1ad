"""The backends: what they share, which there are, and which one serves a call."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from typing import Protocol, cast

import torch
from torch import Tensor

from fastlin.backends import eager
from fastlin.backends.draw import Draw
from fastlin.backends.problem import Gradients, Problem

ORDER: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}
"""Backends that "auto" tries for a device type before eager, best first."""


class BackendError(RuntimeError):
    """A backend that was named cannot serve the call; the message says why.

    Examples
    --------
    >>> z, q, y, task = fl.SphereTasks(2).sample(batch=4, n=10)
    >>> try:
    ...     fl.prompt_loss(z, q, y, task, None, torch.eye(3), torch.ones(3), backend="cuda")
    ... except fl.BackendError as error:
    ...     print(str(error).split(":")[0])
    prompt_loss
    """


class Backend(Protocol):
    """What a backend module provides. Gradients are asked for by letter; see `problem`.

    A module may set `any_form = True`. It then gets p, W, v of a layer as the caller gave them, and gives gradients in
    the same forms; yhat, gy and the losses have no R where these have none. That saves a small call eight views, 20 us.
    A head (m,) that the tasks share is given so with `shares_heads = True`, else expanded. With `checks_tasks = True`
    it raises IndexError for a task index outside [0, K), and no index is looked at before the call. With
    `prepare(problem, y, weight, wants)`, beside both, it makes a `Prepared` loss for calls whose tensors have the
    shapes, dtypes and device of these. With `reads_half = True` tokens x come to it in float16 or bfloat16 where the
    caller has them so, to be multiplied and added in float32; others get them in float32.
    """

    @property
    def traceable(self) -> bool:
        """Whether it is made of torch operations alone, which torch can batch and differentiate."""

    def supports(self, op: str, device: torch.device, dtype: torch.dtype, m: int) -> str | None:
        """Why it cannot serve a call, or None."""

    def predict(self, problem: Problem) -> Tensor:
        """Predictions yhat (R, B)."""

    def predict_bwd(self, problem: Problem, gy: Tensor, wants: str) -> Gradients:
        """Gradients of the wanted letters, given gy = dloss/dyhat (R, B)."""

    def loss(self, problem: Problem, y: Tensor, weight: Tensor | None, wants: str) -> tuple[Tensor, Tensor, Gradients]:
        """Loss (R,), per-task losses (R, K), and the gradients of loss for the wanted letters."""

    def gram(self, z: Tensor) -> Tensor:
        """Gram matrices (..., m, m) of tokens (..., n, m)."""


class Sampler(Protocol):
    """What a backend module provides besides when it draws sequences itself; see `draw`."""

    def sampled_loss(
        self, problem: Problem, draw: Draw, weight: Tensor | None, wants: str
    ) -> tuple[Tensor, Tensor, Gradients]:
        """`Backend.loss` of sequences that are drawn; the problem has neither x nor q."""

    def sample(
        self, draw: Draw, is_gram: bool, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gram matrices (B, m, m) or tokens (B, n, m), queries (B, m), targets (B,), tasks (B,)."""


_warned: set[tuple[str, str, str]] = set()


def names() -> tuple[str, ...]:
    """Names of the backends there are, "reference" apart."""
    return (*dict.fromkeys(name for order in ORDER.values() for name in order), "eager")


def why_not(name: str, op: str, device: torch.device, dtype: torch.dtype, m: int) -> str | None:
    """Why a backend cannot serve a call, or None."""
    return load(name).supports(op, device, dtype, m)


def load(name: str) -> Backend:
    """The module of a backend, imported when it is first needed."""
    if name == "eager":
        return eager
    path = f"fastlin.backends.{name}"
    module = sys.modules.get(path)
    # What import_module asks as well, in a third of its time; another thread may be importing.
    if module is None or getattr(module.__spec__, "_initializing", False):
        module = importlib.import_module(path)
    return cast(Backend, module)


def sampler(name: str) -> Sampler | None:
    """A backend that draws sequences itself, or None when it does not."""
    module = load(name)
    return cast(Sampler, module) if hasattr(module, "sampled_loss") else None


def sampler_on(device: torch.device, dtype: torch.dtype, m: int) -> Sampler | None:
    """The backend whose kernels draw for a device: on it, or on the CPU where it has none; None without any."""
    # Inside torch.func and under a dispatch mode what torch allocates may be without memory; the CPU's kernels draw
    # into memory of numpy's.
    is_plain = not torch._C._are_functorch_transforms_active() and torch._C._len_torch_dispatch_stack() == 0
    for name in ORDER.get(device.type, ()) if is_plain else ():
        serving = sampler(name)
        if serving is not None and load(name).supports("sample", device, dtype, m) is None:
            return serving
    return None if load("cpu").supports("sample", torch.device("cpu"), dtype, m) is not None else sampler("cpu")


@functools.lru_cache(256)
def resolve(name: str, op: str, device: torch.device, dtype: torch.dtype, m: int) -> str:
    """Name of the backend that serves a call.

    Parameters
    ----------
    name : str
        "auto" or a backend's name.
    op : str
        Public name of the op.
    device, dtype, m
        Of the call's data.

    Raises
    ------
    BackendError
        When a backend that was named cannot serve; only "auto" looks further.

    Notes
    -----
    An answer is kept: to look it up takes 0.4 us, to ask the backends 2.
    """
    if name != "auto":
        reason = why_not(name, op, device, dtype, m)
        if reason is not None:
            raise BackendError(f"{op}: backend {name!r} cannot serve this call: {reason}")
        return name
    order = (*ORDER.get(device.type, ()), "eager")
    for i, candidate in enumerate(order):
        reason = load(candidate).supports(op, device, dtype, m)
        if reason is None:
            return candidate
        if (candidate, op, reason) not in _warned:
            _warned.add((candidate, op, reason))
            message = f"{op}: backend {candidate!r} does not serve this call ({reason}); {order[i + 1]} serves it"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    raise AssertionError("eager serves every call")
