"""The op under test, and what a user would write instead of it."""

from __future__ import annotations

import functools
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
def compiled_query_row() -> Loss:
    """`query_row` under torch.compile; its backward pass is compiled with it, when it is first called."""
    compiled: Loss = torch.compile(query_row, dynamic=False)
    return compiled
