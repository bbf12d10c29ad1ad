"""What a user would write instead of the ops: predictions of a batch (B,).

Those of SHARED have operators and methods alone that torch, numpy and JAX have, and run in each of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Form = Callable[..., Any]
"""Predictions (B,) of z or G, q, task and the parameters; of "gram", the matrices (B, m, m)."""


def query_row(z: Tensor, q: Tensor, task: Tensor, p: Tensor, W: Tensor, v: Tensor) -> Tensor:
    """One layer as a researcher writes it who has seen that only the query's row of the attention is read."""
    Z = torch.cat([p[task], z], 1)
    scores = Z @ (q @ W).unsqueeze(-1)
    values = Z @ v[task].unsqueeze(-1)
    return (scores * values).sum((1, 2))


def query_row_one_product(z: Tensor, q: Tensor, task: Tensor, p: Tensor, W: Tensor, v: Tensor) -> Tensor:
    """`query_row` with both vectors in one matrix product: the fastest eager form that was found."""
    Z = torch.cat([p[task], z], 1)
    scores, values = (Z @ torch.stack([q @ W, v[task]], -1)).unbind(-1)
    return (scores * values).sum(1)


def attention_stack(z: Tensor, q: Tensor, task: Tensor, p: Tensor, A: Tensor, C: Tensor, h: Tensor) -> Tensor:
    """A stack as a researcher writes it: full masked attention over the concatenated tokens, layer by layer."""
    Z = torch.cat([p[task], z, q[:, None]], 1)
    seen = Z.new_ones(Z.shape[1])
    seen[-1] = 0.0
    for A_l, C_l in zip(A, C, strict=True):
        Z = Z + (Z @ A_l @ Z.mT * seen) @ (Z @ C_l)
    return (Z[:, -1] * h[task]).sum(-1)


def linear_stack(z: Tensor, q: Tensor, task: Tensor, p: Tensor, A: Tensor, C: Tensor, h: Tensor) -> Tensor:
    """The same with keys and values multiplied first, which makes the attention linear in n."""
    Z = torch.cat([p[task], z], 1)
    x = q[:, None]
    for A_l, C_l in zip(A, C, strict=True):
        T = A_l @ (Z.mT @ Z) @ C_l
        Z, x = Z + Z @ T, x + x @ T
    return (x[:, 0] * h[task]).sum(-1)


def query_row_in_parts(z: Any, q: Any, task: Any, p: Any, W: Any, v: Any) -> Any:
    """`query_row` without the concatenation, in operators that torch, numpy and JAX share."""
    prompt, a, head = p[task], (q @ W)[..., None], v[task][..., None]
    return ((z @ a) * (z @ head)).sum((1, 2)) + ((prompt @ a) * (prompt @ head)).sum((1, 2))


def gram(z: Any, p: Any, task: Any) -> Any:
    prompt = p[task]
    return z.swapaxes(1, 2) @ z + prompt.swapaxes(1, 2) @ prompt


def of_gram(G: Any, q: Any, task: Any, p: Any, W: Any, v: Any) -> Any:
    """One layer on Gram matrices without prompt: (W'q) . (G v)."""
    prompt, head = p[task], v[task][..., None]
    values = G @ head + prompt.swapaxes(1, 2) @ (prompt @ head)
    return ((q @ W) * values[..., 0]).sum(-1)


def gram_layer(z: Any, q: Any, task: Any, p: Any, W: Any, v: Any) -> Any:
    return of_gram(z.swapaxes(1, 2) @ z, q, task, p, W, v)


def stack_of_gram(G: Any, q: Any, task: Any, p: Any, A: Any, C: Any, h: Any) -> Any:
    """A stack on Gram matrices without prompt: G <- T'GT and q <- T'q with T = I + A G C."""
    prompt = p[task]
    G = G + prompt.swapaxes(1, 2) @ prompt
    x = q[:, None]
    for layer in range(A.shape[0]):
        change = A[layer] @ G @ C[layer]
        x = x + x @ change
        G = G + G @ change
        G = G + change.swapaxes(1, 2) @ G
    return (x[:, 0] * h[task]).sum(-1)


def gram_stack(z: Any, q: Any, task: Any, p: Any, A: Any, C: Any, h: Any) -> Any:
    return stack_of_gram(z.swapaxes(1, 2) @ z, q, task, p, A, C, h)


def squared(form: Form) -> Form:
    """The loss () of a form, with y after q."""

    def loss(data: Any, q: Any, y: Any, task: Any, *parameters: Any) -> Any:
        residual = form(data, q, task, *parameters) - y
        return (residual * residual).mean()

    loss.__name__ = form.__name__
    return loss


_LAYERS, _STACKS = ("prompt_loss", "predict", "sampled_loss"), ("stack_loss", "stack_predict", "sampled_stack_loss")

FORMS: dict[str, dict[str, Form]] = {
    **{op: {"": query_row, "gram": gram_layer, "product": query_row_one_product} for op in _LAYERS},
    **{op: {"": attention_stack, "gram": gram_stack, "linear": linear_stack} for op in _STACKS},
    "gram_loss": {"gram": of_gram},
    "gram_stack_loss": {"gram": stack_of_gram},
    "gram": {"gram": gram},
}
"""Forms in torch by op: "" as one writes it first, "gram" by the identity that fastlin uses, and the fastest others."""

SHARED: dict[str, dict[str, Form]] = {
    op: {**({"": query_row_in_parts} if op in ("prompt_loss", "predict") else {}), "gram": forms["gram"]}
    for op, forms in FORMS.items()
}
"""Forms in operators that JAX and numpy have too."""
