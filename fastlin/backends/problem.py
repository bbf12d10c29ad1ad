"""The problem that a backend computes: one form for every op, every model and any number of trials.

A sequence has tokens or a Gram matrix G, a query q and a task k. G and q pass through L - 1 matrix layers. The last
layer needs only vectors:

    G    = sum_t p p' + sum_i z_i z_i'  (+ q q' when see_query)
    T    = rho I + scale sum_h A_h G C_h         G <- T' G T         q <- T' q          each matrix layer
    yhat = scale sum_h (W_h' q) . (G v_hk)  (+ rho q . h_k)                             the last layer

The one-layer ops are L = 1 without skip. A stack has W = A_L and v_hk = C_Lh h_k (`split_last_layer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

Gradients = dict[str, Tensor]
"""Gradients by letter: x for the tokens or Gram matrices, else the parameter's own name."""

LETTERS = ("x", "q", "task", "p", "A", "C", "W", "v", "h")
"""The tensors that every op takes, in order. x is z or G; a layer lacks A, C, h, and a stack lacks W, v."""
PLAIN_TYPES = frozenset({Tensor, Parameter})
"""Types of tensors that own memory. A tensor of a subclass may only wrap others."""

_FULL_FORM = {
    "p": ("R", "K", "t", "m"),
    "W": ("R", "H", "m", "m"),
    "v": ("R", "H", "K", "m"),
    "A": ("R", "L", "H", "m", "m"),
    "C": ("R", "L", "H", "m", "m"),
    "h": ("R", "K", "m"),
}


class Options(NamedTuple):
    """The arguments of an op that are not tensors, in the order of the registered schema."""

    op: str  # public name of the op that was called
    tasks: int  # K, or -1 where it is the largest task index plus one
    scale: float  # factor of the attention
    first_skip: float  # factor of I in the first layer, 0 without skip
    skip: float  # factor of I in the other layers
    see_query: bool
    check_finite: bool
    backend: str  # as the caller named it


class Problem(NamedTuple):
    """Tensors in their full form, named as in the formulas above.

    A backend with `any_form` gets p, W, v of a layer in the caller's form: R and H may be missing. With `shares_heads`,
    v may be one head (m,) for all tasks.
    """

    x: Tensor | None  # tokens (B, n, m), or Gram matrices (B, m, m); None when the backend draws the sequences
    is_gram: bool
    q: Tensor | None  # (B, m); None when x is
    task: Tensor | None  # (B,) int64; None when there is one task
    p: Tensor | None  # prompts (R, K, t, m)
    A: Tensor | None  # matrix layers (R, L - 1, H, m, m); None when L = 1
    C: Tensor | None
    W: Tensor  # (R, H, m, m)
    v: Tensor  # (R, H, K, m)
    h: Tensor | None  # heads (R, K, m) that the skip of the last layer reads; None when it has none
    scale: float
    skips: tuple[float, ...]  # factor rho of I in each of the L layers
    see_query: bool
    tasks: int  # K

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        assert self.x is not None
        assert self.q is not None
        return self.x, self.q

    @property
    def trials(self) -> int:
        """R, or 1 when W has none."""
        return self.W.shape[0] if self.W.ndim > 2 else 1

    @property
    def heads(self) -> int:
        return self.W.shape[1] if self.W.ndim > 3 else 1

    @property
    def front(self) -> tuple[int, ...]:
        """Leading sizes of the results: (R,), or () when W has no R."""
        return self.W.shape[:1] if self.W.ndim > 2 else ()


def lift(name: str, tensor: Tensor, tasks: int, *, copies: bool = False) -> Tensor:
    """Give a parameter, by its letter, the full form of `_FULL_FORM`; it has any of the forms of the public ops.

    A head without task dimension is expanded over K = `tasks`. With `copies` a dimension of independent copies leads,
    and is merged into R. The result is a view unless that cannot be done in place.
    """
    shape = list(tensor.shape)
    front = [shape.pop(0)] if copies else []
    symbols = _FULL_FORM[name]
    if not front and len(shape) == len(symbols):
        return tensor
    if name in "vh" and len(shape) == 1:
        tensor = tensor.unsqueeze(-2).expand(*front, tasks, *shape)
        shape.insert(0, tasks)
    if len(shape) < len(symbols) - ("H" in symbols):
        shape.insert(0, 1)
    if len(shape) < len(symbols):
        shape.insert(symbols.index("H"), 1)
    if front:
        shape[0] *= front[0]
    return tensor.reshape(*shape)


def drop(name: str, gradient: Tensor, shape: Sequence[int], *, copies: int | None = None) -> Tensor:
    """Bring the gradient of a full form back to the shape of what was lifted: the transpose of `lift`.

    With `copies`, that many independent copies were merged into R and lead again.
    """
    if name in "vh" and len(shape) == 1:
        gradient = gradient.sum(-2)
    if copies is not None:
        return gradient.reshape(copies, *shape)
    return gradient if gradient.shape == shape else gradient.reshape(*shape)


def split_last_layer(A: Tensor, C: Tensor, h: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Matrix layers A, C (R, L - 1, H, m, m), or None when L = 1, and W, v of the last layer.

    Parameters are in full form: A, C (R, L, H, m, m), h (R, K, m).
    """
    last = A.shape[1] - 1
    v = h[:, None] @ C[:, last].mT
    return (A[:, :last] if last else None), (C[:, :last] if last else None), A[:, last], v


def join_last_layer(grads: Gradients, C: Tensor, h: Tensor, wants: str) -> Gradients:
    """Gradients of A, C (R, L, H, m, m) and h (R, K, m) from those of `split_last_layer`'s results."""
    joined = {letter: grad for letter, grad in grads.items() if letter in "xqp"}
    if "A" in wants:
        dW = grads["W"][:, None]
        joined["A"] = torch.cat([grads["A"], dW], 1) if "A" in grads else dW
    if "C" in wants:
        dC = (grads["v"].mT @ h[:, None])[:, None]
        joined["C"] = torch.cat([grads["C"], dC], 1) if "C" in grads else dC
    if "h" in wants:
        dh = (grads["v"] @ C[:, -1]).sum(1)
        joined["h"] = grads["h"] + dh if "h" in grads else dh
    return joined
