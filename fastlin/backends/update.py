"""What a compiled optimiser update needs: the optimiser's rule, and the tensors that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
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


class Schedule:
    """What changes from step to step, in the memory of a device, where kernels read it and go on to the next row.

    A row has the step, the factor of the learning rates, the weight of the new values in the averages, and the factors
    of the losses of terms. csrc/cuda/update.h has the layout.

    Parameters
    ----------
    rows, factors : int
        Most steps of an upload, and factors of terms in a row.
    device : torch.device

    Attributes
    ----------
    step : Tensor (1,), int64
        Of the row that is due.
    factors : Tensor (factors,), float64
        Of the same.
    """

    def __init__(self, rows: int, factors: int, device: torch.device) -> None:
        self.rows, self.width = rows, 3 + factors
        self.words = torch.zeros(1 + (1 + rows) * self.width, dtype=torch.float64, device=device)
        self.step = self.words[1:2].view(torch.int64)
        self.factors = self.words[4 : 1 + self.width]

    def upload(self, steps: Sequence[tuple[int, float, float, list[float]]]) -> None:
        """Write the rows of the next steps (step, factor, weight, factors of terms), in one copy from the host."""
        words = torch.zeros(self.words.shape, dtype=torch.float64)
        for i, (step, *numbers, factors) in enumerate([steps[0], *steps]):
            row = words[1 + i * self.width :]
            row[:1].view(torch.int64)[0] = step
            row[1 : 3 + len(factors)] = torch.tensor([*numbers, *factors], dtype=torch.float64)
        self.words.copy_(words)


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
    schedule: Schedule | None = None  # has a factor of `rates`, in backends with `schedules`


class PreparedUpdate(Protocol):
    """One update of all parameters of all trials."""

    def __call__(self, loss: Tensor, gradients: list[Tensor], average_weight: float | None) -> None:
        """Update, given the losses (R,), the gradient of each parameter with its copies, and the averages' new weight.

        With a schedule, None takes the weight from it, and ends the step: the next row is due.
        """
