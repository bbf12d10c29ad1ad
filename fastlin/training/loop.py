"""The training loop, for any model, regime and number of trials.

A step takes the loss of the model on fresh sequences, which depend on the seed and the step alone, and one update of
the optimiser. Trials do not interact: the loss is their sum, so each trial has its own gradient. A checkpoint holds the
whole state at a step, and a loop that restores it continues with the same bits.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlin.models import Model
from fastlin.training import checkpoint
from fastlin.training.config import RunConfig
from fastlin.training.judge import Judge
from fastlin.training.objective import Objective
from fastlin.training.optimiser import make_optimiser, multiplier
from fastlin.training.progress import Progress
from fastlin.training.record import Folder
from fastlin.training.signals import Signal
from fastlin.training.start import initial_model, training_sources
from fastlin.training.team import ALONE, Team


class Loop:
    """The state of a run between two steps.

    Attributes
    ----------
    folder : Folder or None
        For records and checkpoints, in the process that writes them.
    step : int
        Steps done.
    diverged : dict of int to int
        Trial to the step at which its loss was not finite.
    signal : Signal
        The caller sets it. `run` does not raise a signal that arrives in the last step or later: the caller does, once
        the result is on disk.
    """

    def __init__(
        self,
        config: RunConfig,
        team: Team = ALONE,
        folder: Folder | None = None,
        checkpoint_seconds: float = 10.0,
        progress: bool | None = None,
    ) -> None:
        self.config, self.team, self.folder = config, team, folder
        self.model, self.judge = initial_model(config), Judge(config, team)
        self._checkpoint_seconds, self._progress = checkpoint_seconds, progress
        self._sources = training_sources(config)
        self._record_every = max(config.steps // config.records, 1)
        self.step = 0
        self.signal = Signal()
        self.seconds = 0.0
        self.diverged: dict[int, int] = {}
        self.records: list[dict[str, Any]] = []
        self.optimiser: torch.optim.Optimizer | None = None
        self._average: list[Tensor] = []
        self._averaged = 0
        trials = config.shape.trials
        self._loss = self._total = torch.zeros(trials, dtype=torch.float64, device=config.device)
        self._summed = 0
        self._diverged_mask: Tensor | None = None
        self._frozen: list[tuple[Tensor, Tensor, Tensor]] = []
        phases = len(config.regime.phases)
        self._ends = [config.steps * (i + 1) // phases for i in range(phases)]

    def run(self) -> None:
        """Train from `step` to the end."""
        config = self.config
        started, before = time.monotonic(), self.seconds
        saved = started
        optimum = None if self.judge.optimum is None else float(self.judge.optimum)
        with Progress(self._progress, f"{config.regime.name} n={config.n}", self.step, config.steps) as progress:
            for index, objective, first, end in self._phases():
                while self.step < end:
                    now = time.monotonic()
                    self.seconds = before + now - started
                    due = self.signal.stop is not None or now - saved >= self._checkpoint_seconds
                    if self.folder is not None and due:
                        self._save(self.folder)
                        saved = now
                    self.signal.raise_if_caught()
                    share = (self.step - first) / (end - first)
                    self._one_step(objective, share)
                    self.step += 1
                    self._add_to_average(first, end)
                    if self.step == end:
                        self._take_average()
                    if self.step % self._record_every == 0 or self.step == end:
                        self._record(index)
                    progress.show(self.step, objective.sequences, self.records, optimum)
                self.optimiser = None
        self.seconds = before + time.monotonic() - started

    def _phases(self) -> Iterator[tuple[int, Objective, int, int]]:
        """Index, objective, first step and end of each remaining phase, with its optimiser made."""
        firsts = [0, *self._ends[:-1]]
        for index, (first, end) in enumerate(zip(firsts, self._ends, strict=True)):
            if self.step >= end:
                continue
            if self.optimiser is None:
                self._begin(index)
            yield index, Objective(self.config, self.model, self._sources, self.team, index), first, end

    def _begin(self, index: int) -> None:
        self.model.requires_grad_(False)
        groups = self.config.regime.phases[index].trains
        trained = list(dict.fromkeys(raw for group in groups for raw in self.model.group(group)))
        for raw in trained:
            raw.requires_grad_(True)
        self._frozen = self._frozen_rows(index)
        self.optimiser = make_optimiser(self.config, trained)
        self._largest = [group["lr"] for group in self.optimiser.param_groups]
        self._average, self._averaged = [], 0

    def _frozen_rows(self, index: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Parameters that some variants do not train, with the mask (R,) of these trials and their values."""
        frozen: list[tuple[Tensor, Tensor, Tensor]] = []
        for raw in self.model.parameters():
            idle = [
                all(raw is not other for group in row.phases[index].trains for other in self.model.group(group))
                for row in self.config.regime.variants
            ]
            if raw.requires_grad and any(idle):
                rows = torch.tensor(idle * (len(raw) // len(idle)), device=raw.device)
                frozen.append((raw, rows, raw.detach()[rows].clone()))
        return frozen

    def _one_step(self, objective: Objective, share: float) -> None:
        optimiser = self.optimiser
        assert optimiser is not None
        factor = multiplier(self.config, share)
        for group, largest in zip(optimiser.param_groups, self._largest, strict=True):
            group["lr"] = largest * factor

        def closure(turn: int) -> float:
            optimiser.zero_grad()
            self._loss = objective.backward(self.step, share, turn, self._trained(), self.signal.caught)
            self.signal.heard = objective.heard
            value = (self._loss.sum() / self.model.loss_unit).item()
            if not math.isfinite(value):
                self._drop_diverged(~torch.isfinite(self._loss).cpu())
            for raw, rows, _ in self._frozen:
                assert raw.grad is not None
                raw.grad[rows] = 0.0
            if self._diverged_mask is not None:
                for raw in self._trained():
                    assert raw.grad is not None
                    raw.grad[self._diverged_mask] = 0.0
            if self.config.clip is not None:
                _clip(self._trained(), self.config.clip)
            return value

        for turn in range(objective.turns):
            optimiser.step(partial(closure, turn))
            with torch.no_grad():
                for raw, rows, values in self._frozen:
                    raw[rows] = values
            self._total = self._total + self._loss
            self._summed += 1

    def _trained(self) -> list[Tensor]:
        assert self.optimiser is not None
        return [raw for group in self.optimiser.param_groups for raw in group["params"]]

    @torch.no_grad()
    def _drop_diverged(self, bad: Tensor) -> None:
        """Zero the rows of diverged trials in parameters, averages and optimiser state, from this step on."""
        trials = len(bad)
        for trial in bad.nonzero()[:, 0].tolist():
            if trial not in self.diverged:
                self.diverged[trial] = self.step
                self._add({"step": self.step, "diverged": trial})
        assert self.optimiser is not None
        states = [
            value for state in self.optimiser.state.values() for value in state.values() if isinstance(value, Tensor)
        ]
        self._mask_diverged()
        for raw in (*self.model.parameters(), *self._average, *states):
            if raw.ndim and len(raw) == trials:
                raw[self._diverged_mask] = 0.0

    def _mask_diverged(self) -> None:
        self._diverged_mask = torch.zeros(self.model.shape.trials, dtype=torch.bool)
        self._diverged_mask[list(self.diverged)] = True

    @torch.no_grad()
    def _add_to_average(self, first: int, end: int) -> None:
        if self.step <= end - round(self.config.average * (end - first)):
            return
        trained = [raw.detach() for raw in self._trained()]
        if not self._average:
            self._average = [torch.zeros_like(raw) for raw in trained]
        self._averaged += 1
        torch._foreach_lerp_(self._average, trained, 1.0 / self._averaged)

    @torch.no_grad()
    def _take_average(self) -> None:
        for raw, average in zip(self._trained(), self._average, strict=False):
            raw.copy_(average)
        self._average, self._averaged = [], 0

    def _record(self, index: int) -> None:
        """Record the mean losses since the last record, and the current risk."""
        self._compare_parameters()
        with torch.no_grad():
            risk, error = self.judge.current(self.model, self.config.regime.phases[index].prompts)
        record: dict[str, Any] = {
            "step": self.step,
            "phase": index,
            "lr": self.optimiser.param_groups[0]["lr"] if self.optimiser is not None else None,
            "loss": self._numbers(self._total / self._summed),
            "risk": self._numbers(risk),
        }
        if bool(error.any()):
            record["risk_error"] = self._numbers(error)
        self._add(record)
        self._total = torch.zeros_like(self._total)
        self._summed = 0

    def _compare_parameters(self) -> None:
        """Raise when processes that train together hold different bits: machines may round differently."""
        team = self.team
        if team.size == 1:
            return
        parameters = [raw.detach().cpu().contiguous().numpy().tobytes() for raw in self.model.parameters()]
        own = hashlib.sha256(b"".join(parameters)).hexdigest()
        if team.broadcast(lambda: own) != own:
            raise RuntimeError(
                f"train: process {team.rank} of {team.size} holds other parameters than process 0 at step {self.step}; "
                "wants machines that compute alike: the same versions and instruction set (fastlin info)"
            )

    def _numbers(self, values: Tensor) -> list[float | None]:
        """One number per trial; None for trials that have diverged or have no finite value."""
        return [
            None if trial in self.diverged or not math.isfinite(value) else value
            for trial, value in enumerate(values.tolist())
        ]

    def _add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if self.folder is not None:
            self.folder.append(record)

    def begin_after(self, model: Model, step: int, diverged: dict[int, int]) -> None:
        """Continue from a run that did the phases up to a step; its diverged trials stay diverged.

        Where only this regime has variants, all variants of a seed continue from the same trial.
        """
        repeat = self.model.shape.trials // model.shape.trials
        self.step = step
        self.diverged = {trial * repeat + i: at for trial, at in diverged.items() for i in range(repeat)}
        with torch.no_grad():
            for raw, earlier in zip(self.model.parameters(), model.parameters(), strict=True):
                raw.copy_(earlier.repeat_interleave(repeat, 0))
                raw[list(self.diverged)] = 0.0
        if self.diverged:
            self._mask_diverged()

    def _save(self, folder: Folder) -> None:
        tensors: dict[str, Tensor] = {}
        state = {
            "model": dict(self.model.named_parameters()),
            "optimiser": None if self.optimiser is None else self.optimiser.state_dict(),
            "largest": self._largest,
            "average": self._average,
            "averaged": self._averaged,
            "total": self._total,
            "summed": self._summed,
            "step": self.step,
            "seconds": self.seconds,
            "diverged": self.diverged,
        }
        folder.save(checkpoint.flatten(state, "state", tensors), tensors)

    def restore(self, tree: dict[str, Any], tensors: dict[str, Tensor], records: list[dict[str, Any]]) -> None:
        """Restore the state of a checkpoint, and the records up to it."""
        state = checkpoint.restore(tree, tensors)
        self.step, self.seconds, self.records = state["step"], state["seconds"], records
        with torch.no_grad():
            for name, raw in self.model.named_parameters():
                raw.copy_(state["model"][name])
        self._begin(next(index for index, end in enumerate(self._ends) if self.step < end))
        assert self.optimiser is not None
        _load(self.optimiser, state["optimiser"])
        self._largest, self._average, self._averaged = state["largest"], state["average"], state["averaged"]
        self._total = state["total"].to(self._total.device)
        self._summed, self.diverged = state["summed"], state["diverged"]
        if self.diverged:
            self._drop_diverged(torch.zeros(self.model.shape.trials, dtype=torch.bool))


def _load(optimiser: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load an optimiser's state without torch's cast to the dtypes of the parameters."""
    optimiser.load_state_dict(saved)
    raws = [raw for group in optimiser.param_groups for raw in group["params"]]
    for index, state in saved["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                loaded = optimiser.state[raws[index]]
                loaded[name] = value.to(loaded[name].device)


@torch.no_grad()
def _clip(trained: list[Tensor], largest: float) -> None:
    """Scale the gradient of each trial to a norm of at most `largest`."""
    gradients = [raw.grad for raw in trained if raw.grad is not None]
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    if bool((norms > largest).any()):
        factors = (largest / norms).clamp(max=1.0)
        for gradient in gradients:
            gradient *= factors.view(-1, *[1] * (gradient.ndim - 1))
