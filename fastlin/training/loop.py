"""The training loop, for any model, regime and number of trials.

A step takes the loss of the model on fresh sequences, which depend on the seed and the step alone, and one update of
the optimiser. Trials do not interact: the loss is their sum, so each trial has its own gradient. A checkpoint holds the
whole state at a step, and a loop that restores it continues with the same bits.
"""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastlin.models import Model
from fastlin.training import checkpoint
from fastlin.training.callbacks import Callback
from fastlin.training.config import RunConfig
from fastlin.training.graph import make_update
from fastlin.training.judge import Judge
from fastlin.training.objective import Objective
from fastlin.training.progress import Progress
from fastlin.training.record import Folder
from fastlin.training.signals import Signal
from fastlin.training.start import initial_model, training_sources
from fastlin.training.team import ALONE, Team
from fastlin.training.update import Update, moment_at


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
        the result is on disk. The same holds for `failure`.
    failure : BaseException or None
        What the callback raised.
    """

    def __init__(
        self,
        config: RunConfig,
        team: Team = ALONE,
        folder: Folder | None = None,
        checkpoint_seconds: float = 10.0,
        progress: bool | None = None,
        callback: Callback | None = None,
    ) -> None:
        self.config, self.team, self.folder = config, team, folder
        self.model, self.judge = initial_model(config), Judge(config, team)
        self._checkpoint_seconds, self._progress, self._callback = checkpoint_seconds, progress, callback
        self._sources = training_sources(config)
        self._record_every = config.record_every
        self.step = 0
        self.signal = Signal()
        self.failure: BaseException | None = None
        self.seconds = 0.0
        self.diverged: dict[int, int] = {}
        self.records: list[dict[str, Any]] = []
        self._update: Update | None = None
        self._averaged = 0
        self._summed = 0
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
                    stop = self.signal.stop is not None or self.failure is not None
                    due = stop or now - saved >= self._checkpoint_seconds
                    if self.folder is not None and due:
                        self._save(self.folder)
                        saved = now
                    self.signal.raise_if_caught()
                    self.raise_failure()
                    self._one_step(objective, first, end)
                    if self.step == end:
                        self._take_averages()
                    if self.step % self._record_every == 0 or self.step == end:
                        self._record(index)
                    progress.show(self.step, objective.sequences, self.records, optimum)
                self._update = None
        self.seconds = before + time.monotonic() - started

    def _phases(self) -> Iterator[tuple[int, Objective, int, int]]:
        """Index, objective, first step and end of each remaining phase, with its update made."""
        firsts = [0, *self._ends[:-1]]
        for index, (first, end) in enumerate(zip(firsts, self._ends, strict=True)):
            if self.step >= end:
                continue
            if self._update is None:
                self._begin(index)
            objective = Objective(self.config, self.model, self._sources, self.team, index)
            self._first, self._turns = first, objective.turns
            yield index, objective, first, end

    def _begin(self, index: int) -> None:
        config, model = self.config, self.model
        model.requires_grad_(False)
        names = model.trained_names(config.regime.phases[index].trains)
        diverged = torch.zeros(model.shape.trials, dtype=torch.int64, device=config.device)
        diverged[list(self.diverged)] = 1
        self._update = make_update(config, model, names, self._idle(index, names), diverged, index, self.team.size)
        self._averaged = self._summed = 0

    def _idle(self, index: int, names: list[str]) -> dict[str, Tensor]:
        """Of parameters that some variants do not train, the mask (R,) of their trials."""
        trained = [self.model.trained_names(row.phases[index].trains) for row in self.config.regime.variants]
        masks = {}
        for name in names:
            idle = [name not in of_variant for of_variant in trained]
            if any(idle):
                masks[name] = torch.tensor(idle * self.config.trials, device=self.config.device)
        return masks

    def _one_step(self, objective: Objective, first: int, end: int) -> None:
        assert self._update is not None
        moment = moment_at(self.config, self.step, first, end)
        self._averaged += int(moment.average_weight > 0.0)
        self._update.take(objective, moment, self.signal.caught)
        self.signal.heard = objective.heard
        self._summed += objective.turns
        self.step += 1

    def _take_averages(self) -> None:
        assert self._update is not None
        if self._averaged:
            self._update.take_averages()
        self._averaged = 0

    def _note_diverged(self) -> None:
        """Record the trials that have diverged since the last call, and zero their parameters."""
        assert self._update is not None
        new = {
            trial: self._first + (update - 1) // self._turns
            for trial, update in enumerate(self._update.diverged.tolist())
            if update and trial not in self.diverged
        }
        for trial, step in sorted(new.items(), key=lambda item: (item[1], item[0])):
            self.diverged[trial] = step
            self._add({"step": step, "diverged": trial})
        if new:
            self._update.clear_diverged()

    def _record(self, index: int) -> None:
        """Record the mean losses since the last record, and the current risk."""
        assert self._update is not None
        self._note_diverged()
        self._compare_parameters()
        with torch.no_grad():
            risk, error = self.judge.current(self.model, self.config.regime.phases[index].prompts)
        record: dict[str, Any] = {
            "step": self.step,
            "phase": index,
            "lr": self._update.lr,
            "loss": self._numbers(self._update.total / self._summed),
            "risk": self._numbers(risk),
        }
        if bool(error.any()):
            record["risk_error"] = self._numbers(error)
        self._add(record)
        self._call_back(record)
        self._update.total.zero_()
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

    def _call_back(self, record: dict[str, Any]) -> None:
        """Call the callback in the first process; what it raises ends all of them before the next step."""

        def call() -> None:
            if self._callback is not None:
                optimum = None if self.judge.optimum is None else float(self.judge.optimum)
                folder = None if self.folder is None else self.folder.path
                self._callback({**copy.deepcopy(record), "theory": optimum, "folder": folder})

        try:
            self.team.broadcast(call)
        except BaseException as error:
            self.failure = error

    def raise_failure(self) -> None:
        """Raise what the callback raised."""
        if self.failure is not None:
            raise self.failure

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

    def _save(self, folder: Folder) -> None:
        assert self._update is not None
        self._note_diverged()
        tensors: dict[str, Tensor] = {}
        state = {
            "model": dict(self.model.named_parameters()),
            "update": self._update.state(),
            "averages": self._update.averages,
            "averaged": self._averaged,
            "total": self._update.total,
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
        self.diverged = state["diverged"]
        with torch.no_grad():
            for name, raw in self.model.named_parameters():
                raw.copy_(state["model"][name])
        self._begin(next(index for index, end in enumerate(self._ends) if self.step < end))
        assert self._update is not None
        self._update.restore(state["update"])
        for average, saved in zip(self._update.averages, state["averages"], strict=True):
            average.copy_(saved)
        self._update.total.copy_(state["total"])
        self._averaged, self._summed = state["averaged"], state["summed"]
