"""One layer of softmax attention, for comparison with linear attention."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlin.models.layer import Full
from fastlin.ops.softmax import softmax_loss


class Softmax(Full):
    """The parameters of `Full` in yhat = sum_i softmax_i(q' W z_i) (z_i . v_k); several attention heads add.

    Softmax attention averages tokens instead of adding them. Two heads with small W and -W and large v and -v amount to
    linear attention on tokens minus their mean.

    Examples
    --------
    >>> shape = fl.models.Shape(trials=4, tasks=1, width=3, features=2)
    >>> model = fl.models.Softmax(shape, fl.models.literal(3))
    >>> loss, per_task = model.loss(fl.SphereTasks(2), 10, 64, seed=0, step=0)
    >>> loss.shape, per_task.shape
    (torch.Size([4]), torch.Size([4, 1]))
    """

    name = "softmax"
    linear = False
    op = staticmethod(softmax_loss)

    def _readout(self, name: str) -> Tensor | float:
        """With a sign that alternates between attention heads.

        With equal signs the heads stay averages of labels: 2c at n = 10 ends at 14.6, with alternating signs at 10.8.
        """
        readout, heads = super()._readout(name), self.shape.attention_heads
        if name not in self.groups["heads"] or heads == 1:
            return readout
        signs = 1.0 - 2.0 * (torch.arange(heads, dtype=torch.float64) % 2)
        return readout * signs.view(heads, *[1] * len(self._head_size()))
