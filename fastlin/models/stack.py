"""L layers of attention with residuals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastlin.models.base import Model
from fastlin.ops.sampled import sampled_stack_loss


class Stack(Model):
    """A_l = Wq Wk' and C_l = Wv of each layer, and heads h that read the query after the last layer.

    One layer has no residual; `assign` then also takes W, v, as A, h with C = I.

    Examples
    --------
    >>> shape = fl.models.Shape(trials=4, tasks=1, width=3, features=2, layers=2)
    >>> model = fl.models.Stack(shape, fl.models.literal(3))
    >>> loss, per_task = model.loss(fl.SphereTasks(2), 10, 64, seed=0, step=0)
    >>> model.A.shape, loss.shape, per_task.shape
    (torch.Size([4, 2, 3, 3]), torch.Size([4]), torch.Size([4, 1]))
    """

    name = "stack"
    value_matrices = ("C",)
    groups: ClassVar = {"attention": ("A", "C"), "heads": ("h",), "prompts": ("p",)}
    parts: ClassVar = {"q": ("A",), "k": ("A",), "v": ("C", "h")}
    letters = ("A", "C", "h")
    scales = ("p", "A", "C", "h")
    made_from: ClassVar = {"p": ("p",), "A": ("A",), "C": ("C",), "h": ("h",)}
    op = staticmethod(sampled_stack_loss)
    A: Tensor
    C: Tensor
    h: Tensor

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        shape, m = self.shape, self.shape.width
        square = (shape.trials, shape.layers, *shape.lead[1:], m, m)
        return {"A": square, "C": square, "h": (shape.trials, *self._head_size()), "p": self._prompt_size()}

    def op_options(self, n: int) -> dict[str, Any]:
        """Options of the op at n shots, besides `forms`."""
        return {**super().op_options(n), "residual": self.options["residual"]}

    def assign(self, **forms: Tensor | None) -> None:
        """Set p, A, C, h, or p, W, v of one layer."""
        W = forms.get("W")
        if W is not None and self.shape.layers == self.shape.attention_heads == 1:
            eye = torch.eye(self.shape.width, dtype=W.dtype, device=W.device)
            forms = {"p": forms.get("p"), "A": W.unsqueeze(-3), "C": eye[None], "h": forms.get("v")}
        super().assign(**forms)

    def _raw(self, forms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        A, C, h = (forms[letter] for letter in self.letters)
        return {"A": A / self.attention_unit.to(A), "C": C / self.values_unit.to(C), "h": self._raw_heads("h", h)}
