"""`fastlin::gram`: the Gram matrices of prompted sequences, as torch sees them.

G = sum_t p_k p_k' + sum_i z_i z_i' (+ q q')       with S = dG + dG':   dz_i = S z_i   dp_k = sum_b S p_k   dq = S q
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlin import backends, validation
from fastlin.ops._transforms import Path, differentiated, each, path

_TENSORS = ("z", "p", "task", "q")


def gram(
    z: Tensor,
    p: Tensor | None,
    task: Tensor | None,
    q: Tensor | None,
    tasks: int,
    check_finite: bool,
    backend: str,
) -> Tensor:
    """Gram matrices (B, m, m) or (R, B, m, m) of validated arguments, by the path that fits the moment."""
    flat = (z, p, task, q, tasks, check_finite, backend)
    way = path(z, bool(differentiated("zpq", (z, p, q))), backend, check_finite)
    if way is Path.REGISTERED:
        result: Tensor = _gram_op(*flat)
        return result
    if way is Path.TRANSFORMED or way is Path.FUNCTION:
        return _apply(*flat)
    if way is Path.TRACED_TORCH:
        if task is not None and tasks >= 0:
            validation.assert_task_indices("gram", tasks, task)
        return _compute("eager", z, p, task, q)
    return _impl(*flat[:-1], backend if way is Path.DIRECT else "eager")


def _resolved(flat: Sequence[Any]) -> str:
    """Check the numbers; name of the backend that serves."""
    *tensors, tasks, check_finite, backend = flat
    validation.values("gram", tasks, check_finite, dict(zip(_TENSORS, tensors, strict=True)))
    z = tensors[0]
    dtype = torch.float32 if z.dtype in validation.HALF else z.dtype
    return backends.resolve(backend, "gram", z.device, dtype, z.shape[-1])


def _impl(*flat: Any) -> Tensor:
    return _compute(_resolved(flat), *flat[:4])


def _compute(backend: str, z: Tensor, p: Tensor | None, task: Tensor | None, q: Tensor | None) -> Tensor:
    if torch.is_autocast_enabled(z.device.type):
        with torch.autocast(z.device.type, enabled=False):
            return _compute(backend, z, p, task, q)
    serving = backends.load(backend)
    if z.dtype in validation.HALF and not getattr(serving, "reads_half", False):
        z = z.float()
    G = serving.gram(z)
    if q is not None:
        G = G + q[:, :, None] * q[:, None]
    if p is not None:
        of_tasks = serving.gram(p)
        G = G + (of_tasks if task is None else of_tasks.index_select(-3, task))
    return G


_gram_op: Any = torch.library.custom_op(
    "fastlin::gram",
    _impl,
    mutates_args=(),
    schema="(Tensor z, Tensor? p, Tensor? task, Tensor? q, SymInt tasks, bool check_finite, str backend) -> Tensor",
)


def _fake(z: Tensor, p: Tensor | None, *_: Any) -> Tensor:
    B, _n, m = z.shape
    dtype = torch.float32 if z.dtype in validation.HALF else z.dtype
    return z.new_empty((B, m, m) if p is None or p.ndim == 3 else (p.shape[0], B, m, m), dtype=dtype)


def _setup(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])


def _backward(ctx: Any, dG: Tensor) -> tuple[Tensor | None, ...]:
    z, p, task, q = ctx.saved_tensors
    needs_z, needs_p, _, needs_q = ctx.needs_input_grad[:4]
    S = dG + dG.mT
    total = S.sum(0) if S.ndim == 4 else S
    dp = None
    if needs_p:
        if task is None:
            of_tasks = S.sum(-3, keepdim=True)
        else:
            shape = (*S.shape[:-3], p.shape[-3], *S.shape[-2:])
            of_tasks = S.new_zeros(shape).index_add(S.ndim - 3, task, S)
        dp = p @ of_tasks
    dz = (z.to(total.dtype) @ total).to(z.dtype) if needs_z else None
    dq = (total @ q[..., None])[..., 0] if needs_q else None
    return dz, dp, None, dq, None, None, None


def _vmap(info: Any, in_dims: Sequence[int | None], *flat: Any, may_nest: bool = False) -> tuple[Tensor, int]:
    moved = [arg if dim is None else arg.movedim(dim, 0) for arg, dim in zip(flat, in_dims, strict=True)]
    backend = _resolved(moved)

    def call(*args: Any) -> list[Tensor]:
        return [_apply(*args) if may_nest else _gram_op(*args)]

    def compute(*args: Any) -> list[Tensor]:
        return [_compute(backend, *args[:4])]

    return each(
        call, compute if may_nest else None, backend, info.batch_size, [dim is not None for dim in in_dims], moved
    )[0], 0


class _Gram(torch.autograd.Function):
    forward = staticmethod(_impl)
    setup_context = staticmethod(_setup)
    backward = staticmethod(_backward)
    vmap = staticmethod(partial(_vmap, may_nest=True))


_apply: Callable[..., Tensor] = _Gram.apply
_gram_op.register_fake(_fake)
_gram_op.register_autograd(_backward, setup_context=_setup)
_gram_op.register_vmap(_vmap)
