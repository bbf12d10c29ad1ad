"""Functions that `fastlin.train` calls with each record, and ready ones for TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from fastlin._checks import choice
from fastlin.training.judge import excess_percent

Record = dict[str, Any]
Callback = Callable[[Record], object]


def scalars(record: Record) -> dict[str, float]:
    """The numbers that the ready callbacks log: statistics over the trials that have not diverged.

    Parameters
    ----------
    record : dict
        As `fastlin.train` passes it to a callback.

    Returns
    -------
    dict
        lr; loss/min, loss/median, loss/max; the same of risk; excess_percent of the lowest risk, where there is an
        optimum. As in `fastlin.Run`, it can be below zero.

    Examples
    --------
    >>> risks = {"loss": [2.5, None, 2.0], "risk": [2.2, None, 1.8], "theory": 1.5}
    >>> record = {"lr": 0.01, **risks}
    >>> numbers = fl.training.callbacks.scalars(record)
    >>> numbers["loss/median"], numbers["risk/min"]
    (2.25, 1.8)
    """
    numbers = {"lr": record["lr"]}
    for name in ("loss", "risk"):
        values = [value for value in record[name] if value is not None]
        if values:
            found = {"min": min(values), "median": statistics.median(values), "max": max(values)}
            numbers |= {f"{name}/{what}": value for what, value in found.items()}
    excess = excess_percent(numbers.get("risk/min"), record["theory"])
    return numbers if excess is None else {**numbers, "excess_percent": excess}


class Watch(ABC):
    """A callback that logs `scalars` against the step; it opens its log at the first record.

    `close` ends the log, as does leaving a `with` block. One object watches one run.
    """

    extra: str
    """Name of the package, and of the extra that installs it."""

    def __init__(self) -> None:
        _check_installed(self.extra)
        self._log: Any = None

    def __call__(self, record: Record) -> None:
        """Log a record."""
        if self._log is None:
            self._log = self._open(record["step"])
        self._write(scalars(record), record["step"])

    @abstractmethod
    def _open(self, step: int) -> Any:
        """The log, from a step on."""

    @abstractmethod
    def _write(self, numbers: dict[str, float], step: int) -> None:
        """Log numbers at a step."""

    @abstractmethod
    def _end(self) -> None:
        """End the log."""

    def close(self) -> None:
        """End the log; a later record opens a new one."""
        if self._log is not None:
            self._end()
            self._log = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_installed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"{package}: not installed; pip install 'fastlin[{package}]' brings it", name=package)


def check_watch(package: str) -> None:
    """Raise unless `package` names a ready callback whose package is installed."""
    _check_installed(choice("watch", package, (TensorBoard.extra, WandB.extra)))


def watch_cell(package: str, out: Path, project: str, cell: str) -> Watch:
    """The callback of a cell of `fastlin train`, by the name of its package."""
    if package == TensorBoard.extra:
        return TensorBoard(out / package / cell)
    return WandB(project, name=cell, dir=out)


class TensorBoard(Watch):
    """Log a run for TensorBoard; needs the extra `tensorboard`.

    Parameters
    ----------
    folder : str or Path
        For the event files; `tensorboard --logdir` of a parent folder compares runs. A run that resumes into the folder
        hides the steps that it repeats.

    Examples
    --------
    >>> from fastlin.training.callbacks import TensorBoard
    >>> with TensorBoard("runs/tensorboard/joint") as watch:  # doctest: +SKIP
    ...     run = fl.train(mix, "joint", 10, callback=watch)
    """

    extra = "tensorboard"

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self._folder = Path(folder)

    def _open(self, step: int) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=step)

    def _write(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._log.add_scalar(name, value, step)
        # A killed process has its records on disk.
        self._log.flush()

    def _end(self) -> None:
        self._log.close()


class WandB(Watch):
    """Log a run to Weights & Biases; needs the extra `wandb`.

    Parameters
    ----------
    project : str
    **init
        Other arguments of `wandb.init`: name, config, mode="offline", id and resume for a run that resumes, ...

    Examples
    --------
    >>> from fastlin.training.callbacks import WandB
    >>> with WandB("prompts", name="joint", mode="offline") as watch:  # doctest: +SKIP
    ...     run = fl.train(mix, "joint", 10, callback=watch)
    """

    extra = "wandb"

    def __init__(self, project: str, **init: Any) -> None:
        super().__init__()
        self._init = {"project": project, **init}

    def _open(self, step: int) -> Any:
        import wandb

        return wandb.init(**self._init)

    def _write(self, numbers: dict[str, float], step: int) -> None:
        self._log.log(numbers, step=step)

    def _end(self) -> None:
        self._log.finish()
