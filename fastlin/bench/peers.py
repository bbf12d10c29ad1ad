"""The op under test, and the losses that a user would write instead of it, in torch and numpy."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastlin import reference
from fastlin.bench import forms
from fastlin.bench.cases import ARGUMENTS, SAMPLED, Case, Loss
from fastlin.ops import api, sampled

Array = npt.NDArray[Any]

NUMPY = ("prompt_loss", "predict", "gram")
"""Ops that are natural in numpy: one layer, one trial."""


def public(name: str) -> Any:
    return getattr(sampled if name in SAMPLED else api, name)


def op(name: str, backend: str) -> Loss:
    """The loss of the public op, served by the named backend; of an op without loss, its result."""
    return _value(functools.partial(public(name), backend=backend))


def literal(name: str) -> Loss:
    """The loss of `fastlin.reference`: full attention over the concatenated sequence; or its result."""
    return _value(getattr(reference, name))


def _value(call: Callable[..., Any]) -> Loss:
    def loss(*arguments: Tensor) -> Tensor:
        value: Tensor | tuple[Tensor, Tensor] = call(*arguments)
        return value[0] if isinstance(value, tuple) else value

    return loss


@functools.cache
def of_form(name: str, form: str, trials: bool) -> Loss:
    """A form of an op, as a loss where the op has one; with trials, torch.func.vmap over those of the parameters."""
    call = forms.FORMS[name][form]
    given = ARGUMENTS[SAMPLED.get(name, name)]
    if "y" in given:
        call = forms.squared(call)
    if not trials:
        return call
    mapped: Loss = torch.func.vmap(call, in_dims=tuple(0 if name in "pWvACh" else None for name in given))
    return mapped


@functools.cache
def compiled(loss: Loss, mode: str | None) -> Loss:
    """A loss under torch.compile; its backward pass is compiled with it, when it is first called.

    The mode "reduce-overhead" puts both into CUDA graphs, whose results the next call overwrites.
    """
    run: Loss = torch.compile(loss, dynamic=False, mode=mode)
    if mode is None:
        return run

    def call(*arguments: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return run(*arguments)

    return call


def captured(step: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    """A step, forward and backward, as one CUDA graph; the results of a replay are overwritten by the next."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is made once must be there before the capture
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return results

    return replay


def by_numpy(case: Case) -> Callable[[], tuple[Array, ...]]:
    """The same work in numpy, whose products are those of BLAS."""
    op = case.shape.op
    values = [x.detach().numpy() for x in case.arguments]
    if op == "prompt_loss":
        return functools.partial(_layer_by_hand, *values)
    form = next(iter(forms.SHARED[op].values()))
    return lambda: (form(*values),)


def _layer_by_hand(z: Array, q: Array, y: Array, task: Array, p: Array, W: Array, v: Array) -> tuple[Array, ...]:
    """Loss () and gradients: dp = r [(p.v) a + (p.a) v], dW = r q c', dv_k = r e, added over the sequences of k."""
    Z = np.concatenate([p[task], z], 1)
    prompts, a, head = p.shape[1], q @ W, v[task]
    scores, values = (Z @ vector[..., None] for vector in (a, head))
    residual = (scores * values).sum((1, 2)) - y
    r = 2 * residual / len(y)
    c, e = ((Z.swapaxes(1, 2) @ weights)[..., 0] for weights in (values, scores))
    dW = q.T @ (r[:, None] * c)
    dp = values[:, :prompts] * a[:, None] + scores[:, :prompts] * head[:, None]
    of_task = np.equal.outer(np.arange(len(v)), task).astype(z.dtype) * r  # (K, B)
    return np.mean(residual * residual), np.tensordot(of_task, dp, 1), dW, of_task @ e
