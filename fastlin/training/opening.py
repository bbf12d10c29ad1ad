"""Open the folder of a run: read its result, its checkpoint or nothing, and broadcast it to all processes."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fastlin import models
from fastlin._info import info
from fastlin.training.config import RunConfig
from fastlin.training.graph import way_of_steps
from fastlin.training.record import MODEL, Folder, Result, RunFile, first_difference
from fastlin.training.team import Team


@dataclass
class State:
    """The contents of a run's folder."""

    config: dict[str, Any]  # of the first process
    result: Result | None = None  # of a run that has ended
    tree: dict[str, Any] | None = None  # of a checkpoint
    tensors: dict[str, Tensor] = field(default_factory=dict)  # of the checkpoint, or of the model of an ended run
    records: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def opened(config: RunConfig, team: Team, path: Path | None, resume: bool) -> Iterator[tuple[Folder | None, State]]:
    """Open and lock the folder of a run in the first process, and broadcast its state.

    The folder is None without a path, and in all processes but the first.
    """
    folders: list[Folder] = []
    described = config.describe()

    def read() -> State:
        state = State(described)
        if path is None:
            return state
        about = _about(config, team)
        folder = Folder(path, described, about, resume)
        folders.append(folder)
        _warn_of_changes(folder.run_file(), about, config)
        ended = folder.result()
        if ended is not None:
            state.result, state.records = ended
            state.tensors = models.load(folder.path / MODEL).state_dict() if team.size > 1 else {}
            return state
        checkpoint = folder.restore()
        if checkpoint is not None:
            state.tree, state.tensors, state.records = checkpoint
        return state

    try:
        state = team.broadcast(read)
        if not team.first:
            _compare(state.config, described, team.rank)
        yield (folders[0] if folders else None), state
    finally:
        for folder in folders:
            folder.close()


def _compare(first: dict[str, Any], own: dict[str, Any], rank: int) -> None:
    difference = first_difference(first, own)
    if difference is not None:
        name, theirs, ours = difference
        raise ValueError(f"{name}: process {rank} got {ours!r}, process 0 got {theirs!r}; wants the same in all")


def _about(config: RunConfig, team: Team) -> dict[str, Any]:
    machine = {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()}
    where = {"device": str(config.device), "machine": machine, "processes": team.size}
    step = way_of_steps(config, team.size)
    return {"backend": config.serving_backend, "step": step, **where, "info": info()}


def _warn_of_changes(before: RunFile, now: dict[str, Any], config: RunConfig) -> None:
    """Warn of changes that may keep a resumed run from having the same bits."""
    then = _installation(before.backend, before.processes, before.info, config)
    today = _installation(now["backend"], now["processes"], now["info"], config)
    changed = [f"{name} {then.get(name)} is now {what}" for name, what in today.items() if then.get(name) != what]
    if changed:
        message = f"train: resumed on another installation ({'; '.join(changed)}): the last digits may differ"
        warnings.warn(message, stacklevel=6)


def _installation(backend: str, processes: int, info: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """What decides the last digits; without shards also the number of processes, which cut the batch."""
    by_process = {"processes": processes} if config.shards is None else {}
    return {"backend": backend, "instruction set": info["instruction_set"], **by_process, **info["versions"]}
