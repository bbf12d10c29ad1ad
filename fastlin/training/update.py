"""One optimiser update of all trials, in two ways.

`LeanUpdate` has no autograd: the kernel makes the gradients of the op's parameters, the model pulls them back to its
own, and one compiled call updates all trials. It serves Adam and SGD with momentum, on backends with `updates`, for
models of linear attention. `TorchUpdate` takes any optimiser of torch.optim and any model, through autograd.
`why_not_lean` decides; `fastlin.training.graph` has the lean step in a CUDA graph.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlin import backends, models
from fastlin.backends.update import Schedule, UpdateState
from fastlin.models import Model
from fastlin.models.base import Scaled
from fastlin.training.config import RunConfig
from fastlin.training.objective import Objective
from fastlin.training.optimiser import compiled_rule, make_optimiser, multiplier


class Moment(NamedTuple):
    """A step of a phase."""

    step: int
    progress: float  # in [0, 1] within the phase
    factor: float  # multiplier of the learning rate
    average_weight: float  # of the new values in the running average; 0: not averaged
    first: int  # step of the phase
    end: int


def moment_at(config: RunConfig, step: int, first: int, end: int) -> Moment:
    """A step of the phase that has the steps first, ..., end - 1."""
    progress = (step - first) / (end - first)
    averaged = step - (end - round(config.average * (end - first)))  # steps of the average that are done
    weight = 0.0 if averaged < 0 else 1.0 / (averaged + 1)
    return Moment(step, progress, multiplier(config, progress), weight, first, end)


class Update(ABC):
    """The optimiser of a phase.

    Parameters
    ----------
    config : RunConfig
    model : Model
    names : list of str
        The raw parameters that train.
    idle : mapping
        Of some of them, the mask (R,) of the trials that do not train them.
    diverged : Tensor (R,), int64
        The update of this phase, from 1 on, at which the trial's loss was not finite; 0: none so far. Updates write it.
    """

    def __init__(
        self, config: RunConfig, model: Model, names: list[str], idle: Mapping[str, Tensor], diverged: Tensor
    ) -> None:
        self.config, self.model, self.names, self.idle, self.diverged = config, model, names, idle, diverged
        self.trained = [getattr(model, name) for name in names]
        self.averages = [torch.zeros_like(raw) for raw in self.trained] if config.average else []
        self.total = torch.zeros(model.shape.trials, dtype=torch.float64, device=diverged.device)
        self.lr = 0.0

    @abstractmethod
    def take(self, objective: Objective, moment: Moment, caught: int | None) -> None:
        """Take the updates of a step, and add their losses (R,) to `total`; `caught` is a signal of this process."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint needs, besides averages and total."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""

    @abstractmethod
    def rows_of_state(self) -> list[Tensor]:
        """The tensors of the optimiser's state."""

    @torch.no_grad()
    def take_averages(self) -> None:
        """Set the parameters to their running averages, if there are any."""
        for raw, average in zip(self.trained, self.averages, strict=False):
            raw.copy_(average)

    @torch.no_grad()
    def clear_diverged(self) -> None:
        """Zero the rows of diverged trials in parameters, averages and optimiser state."""
        dead = self.diverged > 0
        for raw in (*self.model.parameters(), *self.averages, *self.rows_of_state()):
            if raw.ndim and len(raw) == len(dead):
                raw[dead] = 0.0


def why_not_lean(config: RunConfig) -> str | None:
    """Why a run trains through autograd; None for the lean step."""
    if not models.KINDS[config.model].linear:
        return f"model {config.model}"
    backend = config.serving_backend
    if backend == "reference" or not backends.load(backend).updates:
        return f"backend {backend}"
    if compiled_rule(config) is None:
        options = ", ".join(config.optimiser_options)
        return f"optimiser {config.optimiser}" + (f" with {options}" if options else "")
    return None


class LeanUpdate(Update):
    """Kernel, pull-back, compiled update."""

    def __init__(
        self,
        config: RunConfig,
        model: Model,
        names: list[str],
        idle: Mapping[str, Tensor],
        diverged: Tensor,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(config, model, names, idle, diverged)
        rule = compiled_rule(config, 1.0 / model.loss_unit)
        assert rule is not None
        scaled = {one.name: one for one in model.scaled()}
        self._state = UpdateState(
            values=[raw.detach() for raw in self.trained],
            first=[torch.zeros_like(raw) for raw in self.trained],
            second=[torch.zeros_like(raw) for raw in self.trained] if rule.is_adam else [],
            averages=self.averages,
            idle=[idle[name].to(torch.uint8) if name in idle else None for name in names],
            units=[_unit(raw, scaled.get(name)) for name, raw in zip(names, self.trained, strict=True)],
            copies=[_copies(raw, scaled.get(name)) for name, raw in zip(names, self.trained, strict=True)],
            total=self.total,
            # Data, not arguments: a device can keep them.
            rates=torch.zeros_like(self.total),
            updates=torch.zeros_like(diverged[:1]),
            diverged=diverged,
            schedule=schedule,
        )
        self._apply = backends.load(config.serving_backend).prepare_update(rule, self._state)

    def take(self, objective: Objective, moment: Moment, caught: int | None) -> None:
        """Take the updates of a step, and add their losses (R,) to `total`; `caught` is a signal of this process."""
        lr = self.config.lr * moment.factor
        if lr != self.lr:
            self.lr = lr
            self._state.rates.fill_(lr)
        for turn in range(objective.turns):
            loss, grads = objective.by_hand(moment.step, moment.progress, turn, caught)
            is_last = turn == objective.turns - 1
            self._apply(loss, grads, moment.average_weight if is_last else 0.0)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs, besides averages and total."""
        state = self._state
        return {"updates": int(state.updates), "first": state.first, "second": state.second}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self._state.updates.fill_(state["updates"])
        for own, saved in zip(self.rows_of_state(), [*state["first"], *state["second"]], strict=True):
            own.copy_(saved)

    def rows_of_state(self) -> list[Tensor]:
        """The tensors of the optimiser's state."""
        return [*self._state.first, *self._state.second]


def _unit(raw: Tensor, scaled: Scaled | None) -> Tensor | None:
    """The factor of a parameter's gradient, of the size of a trial's values."""
    return None if scaled is None else scaled.unit.expand(raw.shape[1:]).contiguous()


def _copies(raw: Tensor, scaled: Scaled | None) -> tuple[int, int]:
    """How often the gradient has each run of a trial's values, and how long a run is."""
    if scaled is None or scaled.view.numel() == raw.numel():
        return 1, max(raw[0].numel(), 1)
    at = scaled.view.stride().index(0)  # the expanded dimension
    return scaled.view.shape[at], scaled.view.shape[at + 1 :].numel()


class TorchUpdate(Update):
    """Autograd, and an optimiser of torch.optim."""

    def __init__(
        self, config: RunConfig, model: Model, names: list[str], idle: Mapping[str, Tensor], diverged: Tensor
    ) -> None:
        super().__init__(config, model, names, idle, diverged)
        for raw in self.trained:
            raw.requires_grad_(True)
        rows = [(getattr(model, name), mask) for name, mask in idle.items()]
        self._frozen = [(raw, mask, raw.detach()[mask].clone()) for raw, mask in rows]
        self.optimiser = make_optimiser(config, self.trained)
        self._largest = [group["lr"] for group in self.optimiser.param_groups]
        self._updates = 0
        self._any_diverged = bool((diverged > 0).any())

    def take(self, objective: Objective, moment: Moment, caught: int | None) -> None:
        """Take the updates of a step, and add their losses (R,) to `total`; `caught` is a signal of this process."""
        for group, largest in zip(self.optimiser.param_groups, self._largest, strict=True):
            group["lr"] = largest * moment.factor
        self.lr = self.optimiser.param_groups[0]["lr"]
        for turn in range(objective.turns):
            self._updates += 1
            self.optimiser.step(partial(self._closure, objective, moment, turn, caught))
            with torch.no_grad():
                for raw, rows, values in self._frozen:
                    raw[rows] = values
            self.total += self._loss
        if moment.average_weight:
            with torch.no_grad():
                torch._foreach_lerp_(self.averages, [raw.detach() for raw in self.trained], moment.average_weight)

    def _closure(self, objective: Objective, moment: Moment, turn: int, caught: int | None) -> float:
        self.optimiser.zero_grad()
        self._loss = objective.backward(moment.step, moment.progress, turn, self.trained, caught)
        value = (self._loss.sum() / self.model.loss_unit).item()
        if not math.isfinite(value):
            self.diverged[~torch.isfinite(self._loss) & (self.diverged == 0)] = self._updates
            self._any_diverged = bool((self.diverged > 0).any())
            self.clear_diverged()
        still = [(raw, rows) for raw, rows, _ in self._frozen]
        if self._any_diverged:
            still += [(raw, self.diverged > 0) for raw in self.trained]
        for raw, rows in still:
            assert raw.grad is not None
            raw.grad[rows] = 0.0
        if self.config.clip is not None:
            _clip(self.trained, self.config.clip)
        return value

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs, besides averages and total."""
        return {"updates": self._updates, "optimiser": self.optimiser.state_dict(), "largest": self._largest}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`, without torch's cast of the state to the dtypes of the parameters."""
        saved = state["optimiser"]
        self._updates, self._largest = state["updates"], state["largest"]
        self.optimiser.load_state_dict(saved)
        raws = [raw for group in self.optimiser.param_groups for raw in group["params"]]
        for index, values in saved["state"].items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    loaded = self.optimiser.state[raws[index]]
                    loaded[name] = value.to(loaded[name].device)

    def rows_of_state(self) -> list[Tensor]:
        """The tensors of the optimiser's state."""
        states = self.optimiser.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]


@torch.no_grad()
def _clip(trained: list[Tensor], largest: float) -> None:
    """Scale the gradient of each trial to a norm of at most `largest`."""
    gradients = [raw.grad for raw in trained if raw.grad is not None]
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    if bool((norms > largest).any()):
        factors = (largest / norms).clamp(max=1.0)
        for gradient in gradients:
            gradient *= factors.view(-1, *[1] * (gradient.ndim - 1))
