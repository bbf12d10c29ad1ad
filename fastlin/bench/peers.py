"""The op under test, and the losses that a user would write instead of it, in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlin import reference
from fastlin.bench import forms
from fastlin.bench.cases import ARGUMENTS, SAMPLED, Loss
from fastlin.ops import api, sampled


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
