"""Results of the closed forms, and their conversion to parameters of the attention ops."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastlin._tables import html


class Attention(NamedTuple):
    """Parameters of the one-layer ops, for scale 1.

    Attributes
    ----------
    p, W, v : Tensor (K, 1, m), (m, m), (K, m)
        Prompt tokens, query-key weight and heads.

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
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
        Of the population loss.
    reason, wants : str
        Why no parameters attain it, and a condition under which some do.

    Examples
    --------
    A mean along a direction in which no task varies:

    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]])
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
    """A bound on the loss, without parameters that attain it; `float(bound)` is its value.

    Attributes
    ----------
    loss : float

    Examples
    --------
    >>> float(fl.theory.Bound(loss=0.5))
    0.5
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
        Preconditioner: the reduced model predicts x' W (X'y + p_k).
    prompts : Tensor (K, d), or (K, d+1) with heads
        Reduced prompts p_k, or whole prompt tokens if there are task heads.
    heads : Tensor (K, d+1) or None
        Task heads; None is the fixed head e_m of the reduced model.
    loss : float
        Population loss, label noise included.

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
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

    def __repr__(self) -> str:
        return f"Optimum({', '.join(f'{name}={value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        return html("Optimum", self._facts())

    def _facts(self) -> dict[str, str]:
        """The loss, and shapes of the parameters."""
        forms = {"W": self.W, "prompts": self.prompts, "heads": self.heads}
        shapes = {name: "None" if form is None else str(tuple(form.shape)) for name, form in forms.items()}
        return {"loss": f"{self.loss:.6g}", **shapes}

    def attention(self) -> Attention:
        """The predictor as parameters of the ops: W becomes [[W, 0], [0, 0]], m = d + 1.

        Without heads v_k = e_m, and the prompt token is [p_k; 1].
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
