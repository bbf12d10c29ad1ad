"""The same work in numpy, whose products are those of BLAS, for the ops where that is natural: one layer, one trial."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fastlin.bench import forms
from fastlin.bench.cases import Case

Array = npt.NDArray[Any]

OPS = ("prompt_loss", "predict", "gram")


def given(case: Case) -> Callable[[], tuple[Array, ...]]:
    op = case.shape.op
    values = [x.detach().numpy() for x in case.arguments]
    if op == "prompt_loss":
        return partial(_layer_by_hand, *values)
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
