"""The lean step in a CUDA graph: captured once in a phase, and replayed in each of its steps.

Whatever changes from step to step lies in the memory of the device: step, learning rate, weight of the averages,
factors of terms. They are uploaded up to the next record at once, and the update's kernel goes on to the next step.
Between two records the host launches graphs; it reads nothing, copies nothing and waits for nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlin import backends
from fastlin.backends.update import Schedule
from fastlin.models import Model
from fastlin.training.config import RunConfig
from fastlin.training.objective import Objective
from fastlin.training.start import training_sources
from fastlin.training.update import LeanUpdate, Moment, TorchUpdate, Update, moment_at, why_not_lean

_MOST_ROWS = 4096
"""Steps of an upload: 130 KB with one term."""


def why_not_captured(config: RunConfig, index: int, processes: int) -> str | None:
    """Why the lean steps of a phase, by its index, are not captured in a CUDA graph; None where they are."""
    if not _has_graphs(config.device):
        return f"device {config.device}"
    if not backends.load(config.serving_backend).schedules:
        return f"backend {config.serving_backend}"
    if processes > 1:
        return f"{processes} processes"
    if config.shards is not None:
        return "shards"
    if config.own_data:
        return "own_data"
    sources = training_sources(config)
    for name in dict.fromkeys(term.source for term in config.regime.phases[index].objective):
        draw: Callable[..., Any] = getattr(sources[name], "draw", lambda *_: None)
        if draw(1, 0) is None:
            return f"{name} is a {type(sources[name]).__name__}, whose sequences no kernel draws"
    return None


def way_of_steps(config: RunConfig, processes: int) -> str:
    """How the steps of a run are taken, and why not in a faster way, for its file."""
    reason = why_not_lean(config)
    if reason is not None:
        return f"autograd: {reason}"
    if not _has_graphs(config.device):
        return "lean"
    reasons = [why_not_captured(config, index, processes) for index in range(len(config.regime.phases))]
    found = [f"phase {index}: {why}" for index, why in enumerate(reasons) if why is not None]
    return "lean, in a CUDA graph" + (f", but not {'; '.join(found)}" if found else "")


def make_update(
    config: RunConfig,
    model: Model,
    names: list[str],
    idle: Mapping[str, Tensor],
    diverged: Tensor,
    index: int,
    processes: int,
) -> Update:
    """The update of a phase, by its index: lean where it can be, and in a CUDA graph where that can be."""
    kind: type[Update] = TorchUpdate
    if why_not_lean(config) is None:
        kind = LeanUpdate if why_not_captured(config, index, processes) else CapturedUpdate
    return kind(config, model, names, idle, diverged)


class CapturedUpdate(LeanUpdate):
    """The lean step, captured and replayed."""

    def __init__(
        self, config: RunConfig, model: Model, names: list[str], idle: Mapping[str, Tensor], diverged: Tensor
    ) -> None:
        terms = max(len(phase.objective) for phase in config.regime.phases)
        self._schedule = Schedule(min(config.record_every, _MOST_ROWS), terms * config.variants, diverged.device)
        super().__init__(config, model, names, idle, diverged, self._schedule)
        self._state.rates.fill_(config.lr)
        self._uploaded: dict[int, float] = {}
        self._replay: Callable[[], object] | None = None
        self._objective: Objective | None = None  # whose tensors the graph reads and writes

    def take(self, objective: Objective, moment: Moment, caught: int | None) -> None:
        """Take the updates of a step, and add their losses (R,) to `total`; `caught` is not read."""
        if moment.step not in self._uploaded:
            self._upload(objective, moment)
        self.lr = self.config.lr * self._uploaded.pop(moment.step)
        if self._replay is None:
            self._objective = objective
            self._replay = captured(partial(self._step, objective), self.diverged.device)
        else:
            self._replay()

    def _upload(self, objective: Objective, moment: Moment) -> None:
        """Put this step and those up to the next record on the device."""
        step, every = moment.step, self.config.record_every
        end = min((step // every + 1) * every, step + self._schedule.rows, moment.end)
        moments = [moment_at(self.config, each, moment.first, moment.end) for each in range(step, end)]
        self._schedule.upload([(m.step, m.factor, m.average_weight, objective.factors(m.progress)) for m in moments])
        self._uploaded = {m.step: m.factor for m in moments}

    def _step(self, objective: Objective) -> None:
        schedule = self._schedule
        for turn in range(objective.turns):
            loss, grads = objective.by_hand(schedule.step, schedule.factors, turn, None)
            self._apply(loss, grads, None if turn == objective.turns - 1 else 0.0)


def _has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def captured(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Take a step, capture it in a CUDA graph, and return what takes it again, as long as its tensors live.

    The first step runs as it is: it allocates and compiles what is made once. The graph's own stream is then warm too.
    Where the capture fails, a warning says why, and `step` is what is returned.
    """
    current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        step()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # torch leaves its stream the current one where a capture fails; the outer context puts that right.
        with torch.cuda.stream(current), torch.cuda.graph(graph, stream=side):
            step()
    except RuntimeError as error:
        warnings.warn(f"train: a step is launched kernel by kernel: its capture fails: {error}", stacklevel=2)
        return step
    replay: Callable[[], object] = graph.replay
    return replay
