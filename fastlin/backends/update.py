"""What a compiled optimiser update needs: the optimiser's rule, and the tensors that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class UpdateRule(NamedTuple):
    """Adam, or SGD with the momentum beta1, as torch.optim defines them."""

    is_adam: bool
    gradient_scale: float  # factor of all gradients
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float  # largest norm of each trial's gradient; negative: none


class UpdateState(NamedTuple):
    """The tensors that an update reads and writes in place; of each parameter (R, ...) where they are lists."""

    values: list[Tensor]
    first: list[Tensor]  # mean of the gradients, or the momentum
    second: list[Tensor]  # mean of their squares; empty for SGD
    averages: list[Tensor]  # running averages; empty: none
    idle: list[Tensor | None]  # (R,) uint8: trials that do not train the parameter
    units: list[Tensor | None]  # factor of each parameter's gradient, of as many numbers as a trial's values
    copies: list[tuple[int, int]]  # (c, k): the gradient has c copies of each run of k values, which are added
    total: Tensor  # (R,) float64, sums of the losses
    rates: Tensor  # (R,) float64, learning rates
    updates: Tensor  # (1,) int64, updates done
    diverged: Tensor  # (R,) int64, the update, from 1 on, at which the loss was not finite; 0: none so far


PreparedUpdate = Callable[[Tensor, list[Tensor], float], None]
"""(loss (R,), gradient of each parameter with its copies, weight of the new values in the averages): one update."""
