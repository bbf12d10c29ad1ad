"""What every backend is asked for, and what a backend may say it can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fastlin.backends.draw import Draw
from fastlin.backends.problem import Gradients, Problem
from fastlin.backends.update import PreparedUpdate, UpdateRule, UpdateState

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""Tokens (B, n, m) or Gram matrices (B, m, m), queries (B, m), targets (B,), tasks (B,)."""
LossAndGradients = tuple[Tensor, Tensor, list[Tensor]]
BoundLoss = Callable[[Draw | None], LossAndGradients | None]
"""draw -> results, for tensors that stay where they are; the results of every call are the same tensors."""


class PreparedLoss(Protocol):
    """`Backend.loss` or, with a draw, `Backend.sampled_loss`, for problems of known shapes.

    Gradients are in the order of `wants`. It returns None where the general way must serve: x or q not contiguous,
    tensors that torch negates when it reads, task indices out of range, a draw of other sizes or of more than a piece.
    """

    def bind(self, problem: Problem, y: Tensor | None, weight: Tensor | None) -> BoundLoss | None:
        """The loss of these tensors, once or many times; where they are contiguous, their numbers may change."""


class BackendError(RuntimeError):
    """A named backend cannot serve the call; the message says why.

    Examples
    --------
    >>> z, q, y, task = fl.SphereTasks(2).sample(batch=4, n=10)
    >>> try:
    ...     fl.prompt_loss(z, q, y, task, None, torch.eye(3), torch.ones(3), backend="cuda")
    ... except fl.BackendError as error:
    ...     print(str(error).split(":")[0])
    prompt_loss
    """


class Backend(ABC):
    """A way to compute the ops. `wants` names gradients by letter (`problem`)."""

    name: ClassVar[str]
    traceable: bool = False  # made of torch operations alone, which torch can batch and differentiate
    any_form: bool = False
    """Takes p, W, v of a layer in the caller's forms and returns gradients in the same forms. yhat, gy and the losses
    then have no R where the parameters have none. That saves a small call eight views, 20 us."""
    shares_heads: bool = False
    """With `any_form`: also takes one head v (m,) for all tasks. Others get it expanded to K."""
    checks_tasks: bool = False
    """Raises IndexError for a task index outside [0, K), so that no index is checked before the call."""
    reads_half: bool = False
    """Reads tokens in float16 or bfloat16, and computes in float32. Others get them in float32."""
    draws: bool = False  # has `sampled_loss` and `sample`: its kernels draw sequences
    updates: bool = False  # has `prepare_update`: optimiser updates of all trials in one call
    schedules: bool = False
    """Kernels read the step of a draw from device memory where `Draw.device_step` is given."""
    last_kernel: str | None = None  # kernel of the last call, for tests and for the curious: "avx2 float32 streamed"
    last_sampler: str | None = None  # kernel of the last `sample`

    @abstractmethod
    def supports(self, op: str, device: torch.device, dtype: torch.dtype, m: int) -> str | None:
        """Why it cannot serve a call, or None."""

    @abstractmethod
    def predict(self, problem: Problem) -> Tensor:
        """Predictions yhat (R, B)."""

    @abstractmethod
    def predict_bwd(self, problem: Problem, gy: Tensor, wants: str) -> Gradients:
        """Gradients of the wanted letters, given gy = dloss/dyhat (R, B)."""

    @abstractmethod
    def loss(self, problem: Problem, y: Tensor, weight: Tensor | None, wants: str) -> tuple[Tensor, Tensor, Gradients]:
        """Loss (R,), per-task losses (R, K), and the gradients of loss for the wanted letters.

        `weight` (K,) weighs the tasks' means; None is the mean over the batch.
        """

    @abstractmethod
    def gram(self, z: Tensor) -> Tensor:
        """Gram matrices sum_i z_i z_i' (..., m, m) of tokens z (..., n, m)."""

    def prepare(self, problem: Problem, wants: str, draws: bool) -> PreparedLoss | None:
        """A loss for problems that differ from this one only in their numbers; None where nothing can be prepared."""
        return None

    def sampled_loss(
        self, problem: Problem, draw: Draw, weight: Tensor | None, wants: str
    ) -> tuple[Tensor, Tensor, Gradients]:
        """`loss` of sequences that the kernel draws and forgets; the problem has neither x nor q."""
        raise BackendError(f"backend {self.name!r} does not draw sequences; wants one with `draws`")

    def sample(self, draw: Draw, is_gram: bool, dtype: torch.dtype, device: torch.device) -> Batch:
        """Drawn sequences, with their Gram matrices or their tokens."""
        raise BackendError(f"backend {self.name!r} does not draw sequences; wants one with `draws`")

    def prepare_update(self, rule: UpdateRule, state: UpdateState) -> PreparedUpdate:
        """A function that updates all parameters of all trials in place.

        A trial whose loss is not finite is marked in `diverged`, and left as it is from then on.
        """
        raise BackendError(f"backend {self.name!r} has no optimiser update; wants one with `updates`")


def check_sizes(draw: Draw, problem: Problem) -> None:
    """Raise where a source has changed its sizes since the parameters were checked against it."""
    if (draw.m, draw.recipe.K) != (problem.W.shape[-1], problem.tasks):
        sizes = f"m = {draw.m}, K = {draw.recipe.K}"
        raise ValueError(f"mix: draws {sizes}; wants the sizes that it had when it was made")
