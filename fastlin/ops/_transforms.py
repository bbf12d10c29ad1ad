"""Which way a call takes through torch, and how the ops behave under torch.vmap.

A batch of parameters is a batch of trials, which every backend serves in one call. Any other batch is served by
vmapping the torch operations of a traceable backend, and by one call for each entry where the backend is compiled or
where torch cannot vmap again: inside the vmap rule of a registered op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from fastlin import backends
from fastlin.backends.problem import LETTERS, drop, lift
from fastlin.ops import _call
from fastlin.ops._call import PARAMETERS, Arguments


class Path(Enum):
    """The way of a call: what torch is doing at the moment decides."""

    REGISTERED = "the registered op: compilers, fake tensors and the meta device have no numbers, tracers want an op"
    TRACED_TORCH = "eager's torch operations, compiled: torch.func inside torch.compile cannot see through the op"
    TORCH = "eager's torch operations: forward mode differentiates them any number of times"
    TRANSFORMED = "the autograd.Function that torch.func can differentiate and vmap"
    FUNCTION = "the autograd.Function of plain autograd"
    DIRECT = "the backend itself"


def differentiated(letters: Sequence[str], tensors: Sequence[Tensor | None]) -> str:
    """Letters of the tensors that autograd will differentiate in."""
    if not torch.is_grad_enabled():
        return ""
    return "".join([a for a, t in zip(letters, tensors, strict=True) if t is not None and t.requires_grad])


def path(first: Tensor, is_differentiated: bool, backend: str, has_checks: bool) -> Path:
    """The way of a call.

    Parameters
    ----------
    first : Tensor
        The first of its tensors, which tells whether there are numbers.
    is_differentiated : bool
        Whether autograd will differentiate it.
    backend : str
        As the caller named it.
    has_checks : bool
        Whether numbers must be looked at beyond the task indices.
    """
    functorch = torch._C._are_functorch_transforms_active()
    if torch.compiler.is_compiling() or isinstance(first, FakeTensor) or first.is_meta or _is_recorded():
        in_torch = functorch and backend in ("auto", "eager") and not has_checks
        return Path.TRACED_TORCH if in_torch else Path.REGISTERED
    if forward_ad._current_level >= 0 or (functorch and _in_forward_mode()):
        return Path.TORCH
    if functorch:
        return Path.TRANSFORMED
    return Path.FUNCTION if is_differentiated else Path.DIRECT


def _is_recorded() -> bool:
    """Whether torch.jit.trace, make_fx or another dispatch mode watches the operations."""
    return torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0


def _in_forward_mode() -> bool:
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)


def batched(
    call: Callable[..., list[Tensor]],
    name: str,
    copies: int,
    in_dims: Sequence[int | None],
    args: Sequence[Any],
    *,
    may_nest: bool,
) -> list[Tensor]:
    """Results of an op for each entry of the vmapped dimension, which leads in all of them.

    Parameters
    ----------
    call : callable
        The op on flat arguments, differentiable, with its results in one list.
    name : str
        Which op it is.
    copies : int
        Size of the vmapped dimension.
    in_dims : sequence of int or None
        Where the vmapped dimension is in each argument.
    args : sequence
        The op's flat arguments.
    may_nest : bool
        Whether torch.vmap may be called here.
    """
    moved = [arg if dim is None else arg.movedim(dim, 0) for arg, dim in zip(args, in_dims, strict=True)]
    is_batched = [dim is not None for dim in in_dims]
    given = _call.parse(name, moved)
    wants = given.wants
    of_trials = [i for i, letter in enumerate(LETTERS) if letter in PARAMETERS]
    if name == "predict_bwd":
        of_trials.append(len(LETTERS))
    if sum(is_batched) == sum(is_batched[i] for i in of_trials) and not set("xq") & set(wants):
        return _as_trials(call, name, copies, is_batched, given)
    options = _call.checked(given).options

    def compute(*flat: Any) -> list[Tensor]:
        return _call.compute(name, _call.parse(name, flat)._replace(options=options))

    return each(call, compute if may_nest else None, options.backend, copies, is_batched, moved)


def each(
    call: Callable[..., list[Tensor]],
    compute: Callable[..., list[Tensor]] | None,
    backend: str,
    copies: int,
    is_batched: Sequence[bool],
    moved: Sequence[Any],
) -> list[Tensor]:
    """Results for each entry of the leading dimension of the arguments that are batched.

    `compute` is the op without checks, which torch can vmap when the backend is traceable; None where it cannot.
    """
    if compute is not None and backends.load(backend).traceable:
        return list(torch.vmap(compute, tuple(0 if b else None for b in is_batched))(*moved))
    rows = [call(*(arg[i] if b else arg for arg, b in zip(moved, is_batched, strict=True))) for i in range(copies)]
    return [torch.stack(results) for results in zip(*rows, strict=True)]


def _as_trials(
    call: Callable[..., list[Tensor]], name: str, copies: int, is_batched: Sequence[bool], given: Arguments
) -> list[Tensor]:
    options = given.options if given.options.tasks >= 0 else _call.checked(given).options
    tensors = list(given.tensors)
    shapes: dict[str, Sequence[int]] = {}
    R = None
    for i, (letter, tensor) in enumerate(zip(LETTERS, given.tensors, strict=True)):
        if letter not in PARAMETERS or tensor is None:
            continue
        if not is_batched[i]:
            tensor = tensor.expand(copies, *tensor.shape)
        shapes[letter] = tensor.shape[1:]
        if letter in "WA" and tensor.ndim - 1 > (2 if letter == "W" else 3):
            R = tensor.shape[1]
        tensors[i] = lift(letter, tensor, options.tasks, copies=True)
    extra = list(given.extra)
    if name == "predict_bwd":
        gy = extra[0] if is_batched[len(LETTERS)] else extra[0].expand(copies, *extra[0].shape)
        extra[0] = gy.reshape(-1, gy.shape[-1])
    results = call(*tensors, *extra, *options)
    front = (copies,) if R is None else (copies, R)
    values = len(results) - len(given.wants)
    unfolded = [value.reshape(*front, *value.shape[1:]) for value in results[:values]]
    for letter, grad in zip(given.wants, results[values:], strict=True):
        unfolded.append(drop(letter, grad, shapes[letter], copies=copies))
    return unfolded
