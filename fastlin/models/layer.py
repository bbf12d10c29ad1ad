"""One layer of attention: the reduced, the full and the separate model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fastlin.models.base import Model
from fastlin.ops.sampled import sampled_loss


class _Layer(Model):
    """Models with p, W, v in the ops."""

    groups: ClassVar = {"attention": ("W",), "heads": ("v",), "prompts": ("p",)}
    parts: ClassVar = {"q": ("W",), "k": ("W",), "v": ("v",)}
    letters = ("W", "v")
    made_from: ClassVar = {"p": ("p",), "W": ("W",), "v": ("v",)}
    op: ClassVar[Callable[..., tuple[Tensor, Tensor]]] = staticmethod(sampled_loss)
    W: Tensor
    v: Tensor


class Full(_Layer):
    """W (m, m) and v (m,) or (K, m), the merged Wq Wk' and Wv h.

    Examples
    --------
    >>> shape = fl.models.Shape(trials=4, tasks=2, width=3, features=2)
    >>> model = fl.models.Full(shape, fl.models.literal(3))
    >>> model.start(fl.models.Start(), seed=0, stream=0)
    >>> {name: tuple(form.shape) for name, form in model.forms().items()}
    {'p': (4, 2, 1, 3), 'W': (4, 3, 3), 'v': (4, 2, 3)}
    """

    name = "full"
    scales = ("p", "W", "v")

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        lead, m = self.shape.lead, self.shape.width
        return {"W": (*lead, m, m), "v": (*lead, *self._head_size()), "p": self._prompt_size()}

    def _raw(self, forms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        W, v = forms["W"], forms["v"]
        return {"W": W / self.attention_unit.to(W), "v": self._raw_heads("v", v)}


class Separate(_Layer):
    """W = Wq Wk' and v_k = Wv h_k, formed in torch; one head h for all attention heads.

    Examples
    --------
    >>> shape = fl.models.Shape(trials=4, tasks=2, width=3, features=2)
    >>> model = fl.models.Separate(shape, fl.models.literal(3))
    >>> model.Wq.shape, model.h.shape, model.forms()["W"].shape
    (torch.Size([4, 3, 3]), torch.Size([4, 3]), torch.Size([4, 3, 3]))
    """

    name = "separate"
    value_matrices = ("Wv",)
    groups: ClassVar = {"attention": ("Wq", "Wk", "Wv"), "heads": ("h",), "prompts": ("p",)}
    parts: ClassVar = {"q": ("Wq",), "k": ("Wk",), "v": ("Wv", "h")}
    made_from: ClassVar = {"p": ("p",), "W": ("Wq", "Wk"), "v": ("Wv", "h")}
    Wq: Tensor
    Wk: Tensor
    Wv: Tensor
    h: Tensor

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        lead, m = self.shape.lead, self.shape.width
        square = (*lead, m, m)
        heads = (self.shape.trials, *self._head_size())
        return {"Wq": square, "Wk": square, "Wv": square, "h": heads, "p": self._prompt_size()}

    def _rows_of_h(self) -> Tensor:
        """H as (R, K or 1, m), with several attention heads (R, 1, K or 1, m)."""
        h = self.h if self.shape.task_heads else self.h.unsqueeze(-2)
        return h.unsqueeze(1) if self.shape.attention_heads > 1 else h

    def _pull(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        pulled: dict[str, Tensor] = {}
        if "W" in grads:
            product = grads["W"] * self.attention_unit
            pulled |= {"Wq": product @ self.Wk, "Wk": product.mT @ self.Wq}
        if "v" in grads:
            dv = grads["v"] if self.shape.task_heads else grads["v"].sum(-2, keepdim=True)
            dv = dv * self.head_unit
            dh = dv @ self.Wv
            if self.shape.attention_heads > 1:
                dh = dh.sum(1)
            pulled |= {"Wv": dv.mT @ self._rows_of_h(), "h": dh.view(self.h.shape)}
        return pulled

    def mixed(self, prompts: bool = True) -> dict[str, Tensor]:
        """The parameters of the op that are not `scaled`."""
        v = (self._rows_of_h() @ self.Wv.mT) * self.head_unit
        v = v.expand(*v.shape[:-2], self.shape.tasks, self.shape.width)
        return {"W": (self.Wq @ self.Wk.mT) * self.attention_unit, "v": v}

    def _raw(self, forms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        W, v = forms["W"], forms["v"]
        if self.shape.attention_heads > 1:
            raise ValueError("attention_heads: v of several heads does not determine h and Wv; wants one head")
        eye = torch.eye(self.shape.width, dtype=W.dtype, device=W.device)
        return {"Wq": W / self.attention_unit.to(W), "Wk": eye, "Wv": eye, "h": self._raw_heads("v", v)}


class Reduced(_Layer):
    """The paper's eq. 7: W = [[W, 0], [0, 0]], head e_m, prompt token [p_k; 1]. With task heads, v_k and p_k are free.

    Optimal prompts are of order n, but their last entry is fixed to one. With `trainable_entry` p_k is the product of a
    vector and a number, which an optimiser grows together; the predictor is the same.

    Examples
    --------
    >>> shape = fl.models.Shape(trials=4, tasks=2, width=3, features=2)
    >>> model = fl.models.Reduced(shape, fl.models.literal(3))
    >>> model.W.shape, model.forms()["W"].shape
    (torch.Size([4, 2, 2]), torch.Size([4, 3, 3]))
    """

    name = "reduced"

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        shape = self.shape
        heads = {"v": (*shape.lead, *self._head_size())} if shape.task_heads else {}
        *lead, m = self._prompt_size()
        whole = shape.task_heads or self.options["trainable_entry"]
        W = (*shape.lead, shape.features, shape.features)
        return {"W": W, **heads, "p": (*lead, m if whole else m - 1)}

    @property
    def scales(self) -> tuple[str, ...]:  # type: ignore[override]
        """The raw parameters that are `scaled`."""
        return ("p", "v") if self.shape.task_heads else ()

    def mixed(self, prompts: bool = True) -> dict[str, Tensor]:
        """The parameters of the op that are not `scaled`."""
        constant = self.shape.width - 1 - self.shape.features
        W = torch.nn.functional.pad(self.W, (constant, 1, constant, 1)) * self.attention_unit
        if self.shape.task_heads:
            return {"W": W}
        made = {"W": W, "v": self._fixed_heads()}
        return {**made, "p": self._over_tasks(self._tokens())} if prompts else made

    @property
    def _inside(self) -> slice:
        """The coordinates of the features."""
        return slice(self.shape.width - 1 - self.shape.features, -1)

    def _pull(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        pulled, inside = {}, self._inside
        if "W" in grads:
            pulled["W"] = grads["W"][..., inside, inside] * self.attention_unit[inside, inside]
        if "p" in grads and not self.shape.task_heads:
            dp = grads["p"] if self.shape.task_prompts else grads["p"].sum(1, keepdim=True)
            pulled["p"] = self._pull_tokens(dp)
        return pulled

    def _fixed_heads(self) -> Tensor:
        v = self.W.new_zeros(*self.shape.lead, self.shape.tasks, self.shape.width)
        v[..., -1].fill_(1.0)  # without a number from the host, which an assignment would copy
        return v

    def _tokens(self) -> Tensor:
        """Prompt tokens from raw ones without task heads, (R, K or 1, t, m)."""
        unit = self.prompt_unit
        if self.options["trainable_entry"]:
            vector = self.p[..., :-1] * self.p[..., -1:] * (unit[:-1] * unit[-1])
        else:
            vector = self.p * (unit[:-1] * unit[-1])
        return torch.nn.functional.pad(vector, (0, 1), value=1.0)

    def _pull_tokens(self, dp: Tensor) -> Tensor:
        unit = self.prompt_unit
        vector = dp[..., :-1] * (unit[:-1] * unit[-1])
        if not self.options["trainable_entry"]:
            return vector
        entry = (vector * self.p[..., :-1]).sum(-1, keepdim=True)
        return torch.cat([vector * self.p[..., -1:], entry], -1)

    def _raw(self, forms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        W, v = forms["W"], forms["v"]
        inside = self._inside
        block = W[..., inside, inside]
        if int(W.count_nonzero()) != int(block.count_nonzero()):
            raise ValueError("W: got entries outside the block of the features, wants [[W, 0], [0, 0]]")
        raw = {"W": block / self.attention_unit[inside, inside].to(W)}
        if self.shape.task_heads:
            return {**raw, "v": self._raw_heads("v", v)}
        if not torch.equal(v, self._fixed_heads()[0, ..., :1, :].to(v).expand_as(v)):
            raise ValueError(
                "v: got other heads than e_m, wants e_m: the reduced model without task heads has no other"
            )
        return raw

    def _raw_tokens(self, p: Tensor) -> Tensor:
        unit = self.prompt_unit.to(p)
        if self.shape.task_heads:
            return p / unit
        vector = p[..., :-1] * p[..., -1:]
        if not self.options["trainable_entry"]:
            return vector / (unit[:-1] * unit[-1])
        # The number in the product is one.
        return torch.nn.functional.pad(vector / (unit[:-1] * unit[-1]), (0, 1), value=1.0)
