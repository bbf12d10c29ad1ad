"""What the closed forms return, and its translation into parameters of the attention ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Attention(NamedTuple):
    """Parameters of the one-layer ops: p (K, 1, m) prompt tokens, W (m, m), v (K, m) heads; scale 1.

    Attributes
    ----------
    p : Tensor (K, 1, m)
    W : Tensor (m, m)
    v : Tensor (K, m)

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]], torch.eye(2).expand(2, 2, 2), [0.5, 0.5])
    >>> attention = fl.theory.joint(mix, 10).attention()
    >>> attention.p.shape, attention.W.shape, attention.v.shape
    (torch.Size([2, 1, 3]), torch.Size([3, 3]), torch.Size([2, 3]))
    """

    p: Tensor
    W: Tensor
    v: Tensor


class NotAttained(ValueError):
    """No finite parameters reach the infimum of the loss.

    Attributes
    ----------
    infimum : float
        The infimum of the population loss.
    reason, wants : str
        Why it is not attained, and what it would take.

    Examples
    --------
    A task without spread, of a mean that is not zero:

    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, 0.0]], [[[0.0, 0.0], [0.0, 1.0]]] * 2, [0.5, 0.5])
    >>> try:
    ...     fl.theory.joint(mix, 10)
    ... except fl.theory.NotAttained as error:
    ...     print(round(error.infimum, 4))
    0.2
    """

    def __init__(self, infimum: float, reason: str, wants: str) -> None:
        super().__init__(infimum, reason, wants)
        self.infimum, self.reason, self.wants = infimum, reason, wants

    def __str__(self) -> str:
        return (
            f"mix: {self.reason}, so no finite prompts attain the infimum {self.infimum:.10g} of the loss; "
            f"wants {self.wants}"
        )


@dataclass(frozen=True)
class Bound:
    """A value of the loss that no parameters are claimed to attain; `float(bound)` is the value.

    Attributes
    ----------
    loss : float, a scalar of shape ()

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]], torch.eye(2).expand(2, 2, 2), [0.5, 0.5])
    >>> bound = fl.theory.heads_lower_bound(mix, 10)
    >>> float(bound) == bound.loss
    True
    """

    loss: float

    def __float__(self) -> float:
        return self.loss


@dataclass(frozen=True, eq=False)
class Optimum:
    """An optimum of the population loss; `float(optimum)` is its loss.

    Attributes
    ----------
    W : Tensor (d, d)
        Preconditioner: the prediction is x' W (X'y + p_k) in the reduced model.
    prompts : Tensor (K, d), or (K, d+1) with heads
        Reduced prompts p_k, or whole prompt tokens where task heads are in use.
    heads : Tensor (K, d+1) or None
        Task heads; None is the fixed head e_m of the reduced model.
    loss : float
        The population loss at the optimum, label noise included.

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]], torch.eye(2).expand(2, 2, 2), [0.5, 0.5])
    >>> optimum = fl.theory.joint(mix, 10)
    >>> round(optimum.loss, 4), optimum.W.shape, optimum.prompts.shape, optimum.heads
    (0.6207, torch.Size([2, 2]), torch.Size([2, 2]), None)
    """

    W: Tensor
    prompts: Tensor
    heads: Tensor | None
    loss: float

    def __float__(self) -> float:
        return self.loss

    def attention(self) -> Attention:
        """The same predictor as parameters p, W, v of the ops, m = d + 1, scale 1.

        W becomes [[W, 0], [0, 0]]. Without heads v_k = e_m and the prompt token is [p_k; 1].

        Returns
        -------
        Attention
            p (K, 1, m), W (m, m), v (K, m).
        """
        K, d = self.prompts.shape[0], self.W.shape[0]
        if self.heads is None:
            p = torch.cat([self.prompts, self.prompts.new_ones(K, 1)], dim=1)
            v = self.prompts.new_zeros(K, d + 1)
            v[:, d] = 1.0
        else:
            p, v = self.prompts, self.heads
        return Attention(p[:, None, :].clone(), embed(self.W), v.clone())


def embed(W: Tensor) -> Tensor:
    """[[W, 0], [0, 0]] (d+1, d+1) of W (d, d)."""
    return torch.nn.functional.pad(W, (0, 1, 0, 1))
