"""What a compiled optimiser update needs: the optimiser's rule, and the tensors that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class UpdateRule(NamedTuple):
    """Adam, or SGD with the momentum beta1, as torch.optim defines them.

    Attributes
    ----------
    is_adam : bool
    gradient_scale : float
        Factor of all gradients.
    beta1, beta2, eps, weight_decay : float
    clip : float
        Largest norm of each trial's gradient; negative: none.
    """

    is_adam: bool
    gradient_scale: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float


class UpdateState(NamedTuple):
    """The tensors that an update reads and writes in place.

    Attributes
    ----------
    values, first, second, averages : list of Tensor (R, ...)
        Of each parameter: its values, the mean of its gradients or its momentum, the mean of their squares (empty for
        SGD), and its running average (empty: none).
    idle : list of Tensor (R,), uint8, or None
        Trials that do not train the parameter.
    units : list of Tensor, or None
        Factor of each parameter's gradient, of as many numbers as a trial's values.
    copies : list of (int, int)
        (c, k): the gradient has c copies of each run of k of a trial's values, and they are added.
    total, rates : Tensor (R,), float64
        Sums of the losses; learning rates.
    updates : Tensor (1,), int64
        Updates done.
    diverged : Tensor (R,), int64
        The update, from 1 on, at which the trial's loss was not finite; 0: none so far.
    """

    values: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    averages: list[Tensor]
    idle: list[Tensor | None]
    units: list[Tensor | None]
    copies: list[tuple[int, int]]
    total: Tensor
    rates: Tensor
    updates: Tensor
    diverged: Tensor


PreparedUpdate = Callable[[Tensor, list[Tensor], float], None]
"""(loss (R,), gradient of each parameter with its copies, weight of the new values in the averages): one update."""
