"""How the ops behave under torch.vmap.

A batch of parameters is a batch of trials, which every backend serves in one call. Any other batch is served by
vmapping the torch operations of a traceable backend. Where the backend is compiled, and inside the vmap rule of a
registered op, where torch cannot vmap again, each entry is a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlin.backends.problem import LETTERS, drop, lift
from fastlin.ops import call as calls
from fastlin.ops.arguments import PARAMETERS, Arguments, flatten, parse


def batched(
    call: Callable[..., list[Tensor]],
    name: str,
    copies: int,
    in_dims: Sequence[int | None],
    flat: Sequence[Any],
    *,
    may_nest: bool,
) -> list[Tensor]:
    """Results of an op for each entry of the vmapped dimension, of size `copies`, which leads in all of them.

    `call` is the op on its `flat` arguments, differentiable, with its results in one list. `in_dims` is where the
    vmapped dimension is in each argument. `may_nest` is whether torch.vmap may be called here.
    """
    moved = [arg if dim is None else arg.movedim(dim, 0) for arg, dim in zip(flat, in_dims, strict=True)]
    is_batched = [dim is not None for dim in in_dims]
    args = parse(name, moved)
    of_trials = [i for i, letter in enumerate(LETTERS) if letter in PARAMETERS]
    if name == "predict_bwd":
        of_trials.append(len(LETTERS))
    if sum(is_batched) == sum(is_batched[i] for i in of_trials) and not set("xq") & set(args.wants):
        return _as_trials(call, name, copies, is_batched, args)
    args, backend = calls.checked(args)
    if may_nest and backend.traceable:

        def compute(*entry: Any) -> list[Tensor]:
            return calls.compute(name, parse(name, entry)._replace(options=args.options), backend)

        return list(torch.vmap(compute, tuple(0 if b else None for b in is_batched))(*moved))
    rows = [call(*(arg[i] if b else arg for arg, b in zip(moved, is_batched, strict=True))) for i in range(copies)]
    return [torch.stack(results) for results in zip(*rows, strict=True)]


def _as_trials(
    call: Callable[..., list[Tensor]], name: str, copies: int, is_batched: Sequence[bool], args: Arguments
) -> list[Tensor]:
    options = args.options if args.options.tasks >= 0 else calls.checked(args)[0].options
    tensors = list(args.tensors)
    shapes: dict[str, Sequence[int]] = {}
    R = None
    for i, (letter, tensor) in enumerate(zip(LETTERS, args.tensors, strict=True)):
        if letter not in PARAMETERS or tensor is None:
            continue
        if not is_batched[i]:
            tensor = tensor.expand(copies, *tensor.shape)
        shapes[letter] = tensor.shape[1:]
        if letter in "WAp" and tensor.ndim - 1 > (2 if letter == "W" else 3):
            R = tensor.shape[1]
        tensors[i] = lift(letter, tensor, options.tasks, copies=True)
    gy = args.gy
    if gy is not None:
        gy = gy if is_batched[len(LETTERS)] else gy.expand(copies, *gy.shape)
        gy = gy.reshape(-1, gy.shape[-1])
    results = call(*flatten(name, args._replace(tensors=tensors, options=options, gy=gy)))
    front = (copies,) if R is None else (copies, R)
    values = len(results) - len(args.wants)
    unfolded = [value.reshape(*front, *value.shape[1:]) for value in results[:values]]
    for letter, grad in zip(args.wants, results[values:], strict=True):
        unfolded.append(drop(letter, grad, shapes[letter], copies=copies))
    return unfolded
