"""The op under test, and what a user would write instead of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fastlin as fl
from benchmarks.cases import Loss


def op(name: str, backend: str) -> Loss:
    """The loss of the public op, served by the named backend."""
    public: Any = getattr(fl, name)

    def loss(*arguments: Tensor) -> Tensor:
        value: Tensor = public(*arguments, backend=backend)[0]
        return value

    return loss


def literal(name: str) -> Loss:
    """The loss of `fastlin.reference`: full attention over the concatenated sequence."""
    oracle: Any = getattr(fl.reference, name)

    def loss(*arguments: Tensor) -> Tensor:
        value: Tensor = oracle(*arguments)[0]
        return value

    return loss


def query_row(z: Tensor, q: Tensor, y: Tensor, task: Tensor, p: Tensor, W: Tensor, v: Tensor) -> Tensor:
    """`prompt_loss` as a researcher writes it who has seen that only the query's row of the attention is read."""
    Z = torch.cat([p[task], z], 1)
    scores = Z @ (q @ W).unsqueeze(-1)
    values = Z @ v[task].unsqueeze(-1)
    yhat = (scores * values).sum((1, 2))
    return (yhat - y).square().mean()


def query_row_one_product(z: Tensor, q: Tensor, y: Tensor, task: Tensor, p: Tensor, W: Tensor, v: Tensor) -> Tensor:
    """`query_row` with both vectors in one matrix product: the fastest eager form that was found."""
    Z = torch.cat([p[task], z], 1)
    scores, values = (Z @ torch.stack([q @ W, v[task]], -1)).unbind(-1)
    yhat = (scores * values).sum(1)
    return (yhat - y).square().mean()


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


def compiled_query_row() -> Loss:
    """`query_row` under torch.compile."""
    return compiled(query_row, None)


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
