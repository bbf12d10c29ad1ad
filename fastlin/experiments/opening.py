"""What a folder holds of a run when it is opened: a result, a checkpoint or nothing; told to all who train together."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fastlin import models
from fastlin.experiments.plan import Plan
from fastlin.training.record import MODEL, Folder, first_difference


@contextmanager
def opened(plan: Plan, path: Path | None, resume: bool) -> Iterator[tuple[Folder | None, Any, dict[str, Tensor]]]:
    """Open the folder of a run in the first process, and tell all what is in it.

    Yields
    ------
    folder : Folder or None
        Locked; None without a path, and in all processes but the first.
    state : dict
        "result" of a run that has ended, or "tree" of a checkpoint, and "records"; neither for a new run.
    tensors : dict
        The checkpoint's; of a run that has ended the model's, where several processes want them.
    """
    held: list[Folder] = []

    def read() -> tuple[dict[str, Any], dict[str, Tensor]]:
        state: dict[str, Any] = {"config": plan.config}
        if path is None:
            return state, {}
        about = plan.about()
        held.append(Folder(path, plan.config, about, resume))
        folder = held[0]
        _warn_of_changes(folder.about(), about, plan)
        result = folder.result(lambda found: _what_is_wrong(found, plan.shape.trials))
        if result is not None:
            tensors = models.load(folder.path / MODEL).state_dict() if plan.team.size > 1 else {}
            return {**state, "result": result, "records": folder.records()}, tensors
        checkpoint = folder.restore()
        if checkpoint is None:
            return state, {}
        return {**state, "tree": checkpoint[0], "records": folder.records()}, checkpoint[1]

    try:
        state, tensors = plan.team.told(read)
        if not plan.team.first:
            _compare(state["config"], json.loads(json.dumps(plan.config)), plan.team.rank)
        yield (held[0] if held else None), state, tensors
    finally:
        for folder in held:
            folder.close()


def _compare(first: dict[str, Any], own: dict[str, Any], rank: int) -> None:
    """Raise when this process was asked for another run than the first."""
    difference = first_difference(first, own)
    if difference is not None:
        name, theirs, ours = difference
        raise ValueError(f"{name}: process {rank} got {ours!r}, process 0 got {theirs!r}; wants the same in all")


def _warn_of_changes(before: dict[str, Any], now: dict[str, Any], plan: Plan) -> None:
    """Say what may keep a resumed run from having the same bits."""
    then, today = (_installation(run, plan.shards is None) for run in (before, now))
    changed = [f"{name} {then.get(name)} is now {what}" for name, what in today.items() if then.get(name) != what]
    if changed:
        message = f"train: resumed on another installation ({'; '.join(changed)}): the last digits may differ"
        warnings.warn(message, stacklevel=6)


def _installation(run: dict[str, Any], by_process: bool) -> dict[str, Any]:
    """What decides the last digits; the number of processes too, where each has one piece of a batch."""
    found = run["info"]
    processes = {"processes": run.get("processes", 1)} if by_process else {}
    return {"backend": run["backend"], "instruction set": found["instruction_set"], **processes, **found["versions"]}


def _what_is_wrong(result: dict[str, Any], trials: int) -> str | None:
    """Of a result that was read from a file."""
    for name in ("risk", "risk_error", "tail", "typical"):
        values = result.get(name)
        if not isinstance(values, list) or [value for value in values if not isinstance(value, float | None)]:
            return f"{name} is not a list of numbers"
        if len(values) != trials:
            return f"{name} is not a list of {trials} numbers"
    if result.get("best") not in range(trials):
        return f"best is not one of {trials} trials"
    if not isinstance(result.get("seconds"), float):
        return "seconds is not a number"
    pairs = result.get("diverged")
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return "diverged is not a list of trials and steps"
    return None
