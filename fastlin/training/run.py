"""`fastlin.train` and `fastlin.load`: a trained run, and what is known of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlin import models
from fastlin._files import FileError
from fastlin.models import Model
from fastlin.ops.sampled import Source
from fastlin.training import record
from fastlin.training.checks import choice, real
from fastlin.training.config import RunConfig
from fastlin.training.judge import Judge, Theory
from fastlin.training.loop import Loop
from fastlin.training.opening import State, opened
from fastlin.training.record import MODEL, Folder, Position, Result
from fastlin.training.regimes import Regime
from fastlin.training.signals import interruptible
from fastlin.training.start import initial_model
from fastlin.training.team import team_of


@dataclass(frozen=True, eq=False)
class Run:
    """A trained model and what is known of it.

    Attributes
    ----------
    risk : Tensor (trials,), float64
        Population risk of the final parameters: exact where a closed form covers the model, else on a sample that
        training and selection did not see. Infinite for trials that diverged.
    risk_error : Tensor (trials,)
        Its standard error; zero where it is exact.
    tail : Tensor (trials,)
        Share of the largest of 64 batches in the sampled risk: 0.016 of light tails, above 0.1 the risk rests on few
        sequences and its standard error means little. Zero where the risk is exact.
    typical : Tensor (trials,)
        Median over these batches of 8192 sequences: what is met most of the time. The risk where that is exact.
    params : dict
        p (or None), W, v of a layer, or p, A, C, h of a stack, with leading R and every factor folded in: arguments of
        the ops, or of `fastlin.ops.softmax.softmax_loss`, together with `options`. Rows of trials that diverged are
        NaN.
    best : int
        The trial with the lowest risk, and twice its standard error, on data that `risk` does not report.
    history : dict
        step (N,), phase (N,), lr (N,), loss (N, trials): means of the batch losses since the record before,
        risk (N, trials), risk_error (N, trials).
    theory : Optimum, Bound, FamilyOptimum or None
        The paper's closed form of the regime for a single layer; a Bound where it is not attained. It is the optimum of
        the reduced model. A full model with means that are not zero can go below it, but for joint+heads. None of a
        run from a folder whose task source is not written out there: a class of the user's, or a large one.
    folder : Path or None
    model : Model
    diverged : dict of int to int
        Trial to the step at which its loss was not finite.
    config : dict
        Everything that decides the numbers.
    seconds : float
        Wall time of training, over all its pieces.

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]], torch.eye(2).expand(2, 2, 2), [0.5, 0.5])
    >>> run = fl.train(mix, "joint", 10, trials=3, steps=20, batch=256, progress=False)
    >>> run.risk.shape, run.params["W"].shape, run.params["p"].shape
    (torch.Size([3]), torch.Size([3, 3, 3]), torch.Size([3, 2, 1, 3]))
    >>> loss, _ = fl.sampled_loss(mix, 10, 256, **run.params, **run.options, seed=1, step=0)
    >>> loss.shape
    torch.Size([3])
    """

    risk: Tensor
    risk_error: Tensor
    tail: Tensor
    typical: Tensor
    params: dict[str, Tensor | None]
    best: int
    history: dict[str, Tensor]
    theory: Theory | None
    folder: Path | None
    model: Model
    diverged: dict[int, int]
    config: dict[str, Any]
    seconds: float

    @property
    def options(self) -> dict[str, Any]:
        """What the ops take besides `params` at the run's n: see_query, residual for a stack, scale if n decides it."""
        return self.options_at(self.config["n"])

    def options_at(self, n: int) -> dict[str, Any]:
        """The same at n shots: a scale of 1/(n+1) is not folded into `params`, which serve every n.

        Parameters
        ----------
        n : int
            Context length.

        Returns
        -------
        dict
            Keyword arguments of the ops.
        """
        return self.model.op_options(n)

    def of(self, regime: str) -> slice:
        """The trials of one of several regimes, in the order of their seeds.

        Parameters
        ----------
        regime : str
            One of those that the run was given.

        Returns
        -------
        slice
            Of the dimension (trials,).
        """
        names = [row["name"] for row in self.config["regime"]["variants"]] or [self.config["regime"]["name"]]
        return slice(names.index(choice("regime", regime, names)), None, len(names))

    @property
    def excess(self) -> Tensor | None:
        """Risk over the optimum, minus one: (trials,); None where there is no optimum to compare with."""
        return None if self.theory is None else self.risk / float(self.theory) - 1.0


def train(
    mix: Source,
    regime: str | Regime | Sequence[str | Regime],
    n: int,
    *,
    model: str = "full",
    layers: int = 1,
    attention_heads: int = 1,
    preset: str = "tuned",
    steps: int | None = None,
    batch: int | None = None,
    trials: int = 1,
    lr: float | None = None,
    seed: int = 0,
    target: Source | None = None,
    after: Run | str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    prompt_tokens: int = 1,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    backend: str = "auto",
    progress: bool | None = None,
    records: int = 100,
    checkpoint_seconds: float = 10.0,
    shards: int | None = None,
    distributed: bool | None = None,
    **values: Any,
) -> Run:
    """Train R trials of a model on fresh sequences of a task source.

    Parameters
    ----------
    mix : TaskMixture, SphereTasks, FixedTask or PointSet
    regime : str or Regime
        "plain", "fine-tune", "one-prompt", "joint", "joint+heads", "heads"; on sources with a constant coordinate
        "pretrain", "zs:all", "zs:q", "zs:k", "zs:v", and the same with "zs+fs"; or a row of one's own. Several are
        trained side by side on the same data: `Run.of` says which trials are whose.
    n : int
        Context length.
    model : str
        "reduced", "full", "separate" (Wq, Wk, Wv and a head), "stack", "softmax" (`full` with softmax attention, for
        comparison: torch operations, without closed forms).
    layers, attention_heads, prompt_tokens : int
        L (of a stack), H, and prompt tokens a task.
    preset : str
        "paper", "authors" or "tuned"; `fastlin.training.presets` has their values.
    steps, batch, lr
        In place of the preset's. `steps` are shared equally among the phases of a regime.
    trials : int
        R, each from its own initialisation; trial r starts the same whatever R is. Of each regime, where they are
        several.
    seed : int
    target : task source, optional
        Of the terms of a regime that ask for it: the task that is fine-tuned on.
    after : Run or path of its folder, optional
        A run of the first phases of this one, such as "pretrain": training goes on from it, to the same bits as if this
        run had done them itself. Everything else must be the same, and its steps those of these phases.
    out : path, optional
        Folder of the run: description, records, checkpoints, result. New or empty, or with `resume` that of the same
        run; a run that had ended is read from it.
    resume : bool
        Go on from the folder's checkpoint, with the same bits as a run that was not stopped.
    dtype, device, backend
        Of the parameters and the kernels.
    progress : bool, optional
        Show a live line; by default when standard error is a terminal.
    records : int
        About how many times the risk is looked at on the way.
    checkpoint_seconds : float
        Between checkpoints.
    shards : int, optional
        Take each batch in this many pieces, whose losses and gradients are added in order: the bits are then the same
        for any number of processes. By default each process has one piece.
    distributed : bool, optional
        Whether the processes of torch.distributed's process group share each batch, all having called this with the
        same arguments; by default when there is such a group. The first process alone reads and writes `out`.
    **values
        Any other field of `fastlin.training.config.RunConfig`: optimiser, schedule, clip, ...

    Returns
    -------
    Run

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]], torch.eye(2).expand(2, 2, 2), [0.5, 0.5])
    >>> run = fl.train(mix, "joint", 10, trials=3, steps=200, batch=1024, progress=False)
    >>> run.risk.shape, bool((run.excess < 0.5).all())
    (torch.Size([3]), True)
    """
    config = RunConfig.resolve(
        mix,
        regime,
        n,
        model=model,
        layers=layers,
        attention_heads=attention_heads,
        prompt_tokens=prompt_tokens,
        preset=preset,
        steps=steps,
        batch=batch,
        trials=trials,
        lr=lr,
        seed=seed,
        target=target,
        dtype=dtype,
        device=device,
        backend=backend,
        records=records,
        shards=shards,
        distributed=distributed,
        **values,
    )
    real("checkpoint_seconds", checkpoint_seconds, 0.0)
    if out is not None and not isinstance(out, (str, Path)):
        raise TypeError(f"out: got {out!r}, wants the path of a folder, or None")
    if out is None and resume:
        raise ValueError("resume: got True without out, wants the folder of the run to resume")
    team = team_of(config.device, config.distributed)
    with opened(config, team, None if out is None else Path(out), resume) as (folder, state):
        if state.result is not None:
            return _read(config, state, folder)
        loop = Loop(config, team, folder, checkpoint_seconds, progress if team.first else False)
        return _trained(loop, state, after)


def _read(config: RunConfig, state: State, folder: Folder | None) -> Run:
    """A run that had ended, from its folder or, in other processes than the first, from what that has broadcast."""
    assert state.result is not None
    path = None if folder is None else folder.path
    if path is not None:
        model = models.load(path / MODEL)
    else:
        model = initial_model(config)
        model.load_state_dict(state.tensors)
    return _finished(state.config, Judge(config), model, state.records, state.result, path)


def load(folder: str | Path) -> Run:
    """The run of a folder, when it has ended.

    Parameters
    ----------
    folder : str or Path
        What `train` was given as `out`, or the folder of a cell that the command line has trained.

    Returns
    -------
    Run
        As `train` returned it.

    Raises
    ------
    FileError
        A ValueError that names the file and says what is wrong with it, or that the run has not ended.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as out:
    ...     run = fl.train(fl.SphereTasks(2), "plain", 5, steps=5, batch=64, out=out, progress=False)
    ...     again = fl.load(out)
    >>> torch.equal(run.risk, again.risk), again.config == run.config
    (True, True)
    """
    if not isinstance(folder, (str, Path)):
        raise TypeError(f"folder: got a {type(folder).__name__}, wants the path of a run's folder")
    path = Path(folder)
    run, result, records = record.ended(path)
    try:
        config = RunConfig.restore(run.config)
        judge = None if config is None else Judge(config)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{path / record.RUN}: its config is not that of a run: {error!r}") from None
    return _finished(run.config, judge, models.load(path / MODEL), records, result, path)


def _trained(loop: Loop, state: State, after: Run | str | Path | None) -> Run:
    """Train from a checkpoint, from another run's end, or from the initialisation."""
    config, team, folder = loop.config, loop.team, loop.folder
    if state.tree is not None:
        try:
            loop.restore(state.tree, state.tensors, state.records)
        except (KeyError, TypeError, ValueError, RuntimeError, StopIteration) as error:
            # Its checksum is right: it was made so, by another version or by hand.
            where = "" if folder is None else f"{folder.path}: "
            raise FileError(f"{where}its checkpoint is not of a run like this one: {error!r}") from None
    elif after is not None:
        loop.begin_after(*_earlier(config, after))
    together = team.size > 1
    path = None if folder is None else folder.path
    # Between the last step and the result there is no checkpoint: a signal waits until the result is there.
    with interruptible(folder is not None or together, together, path) as loop.signal:
        loop.run()
        found = _result(loop)
        if folder is None:
            result = Result(**found, records=Position(0, ""))
        else:
            models.save(loop.model, folder.path / MODEL)
            result = folder.finish(found)
    loop.signal.raise_at_the_end()
    return _finished(state.config, loop.judge, loop.model, loop.records, result, path)


def _earlier(config: RunConfig, after: Run | str | Path) -> tuple[Model, int, dict[int, int]]:
    """Model, steps and diverged trials of a run that did the first phases of another."""
    if not isinstance(after, (Run, str, Path)):
        raise TypeError(f"after: got a {type(after).__name__}, wants a Run, or the path of its folder")
    run = after if isinstance(after, Run) else load(after)
    held, wanted = dict(run.config), config.describe()
    done, phases = held["regime"]["phases"], wanted["regime"]["phases"]
    if done != phases[: len(done)] or len(done) == len(phases):
        raise ValueError(f"after: got a run of regime {held['regime']['name']!r}, wants the first phases of this one")
    steps = config.steps * len(done) // len(phases)
    if held["steps"] != steps:
        raise ValueError(f"after: got a run of {held['steps']} steps, wants {steps}: the share of its phases in steps")
    if held["regime"].get("variants") and wanted["regime"]["variants"]:
        raise ValueError("after: got a run of several regimes, wants one of a single regime")
    held["sources"] = {**wanted["sources"], "mix": held["sources"]["mix"]}
    for name, value in {"shards": None, **wanted}.items():
        # Points are of the target, which the earlier phases do not meet.
        if name not in ("regime", "steps", "records", "points") and held.get(name) != value:
            raise ValueError(f"after: got a run with {name} = {held.get(name)!r}, wants {value!r}, as in this one")
    return run.model, steps, run.diverged


@torch.no_grad()
def _result(loop: Loop) -> dict[str, Any]:
    """What result.json says; the rows of trials that diverged become NaN."""
    model, judge, prompts = loop.model, loop.judge, loop.config.regime.prompts
    last, _ = judge.on_the_way(model, prompts)
    for trial in (~torch.isfinite(last)).nonzero()[:, 0].tolist():
        # What went wrong in the last step has had no loss to show it.
        loop.diverged.setdefault(trial, loop.step)
    for raw in model.parameters():
        raw[list(loop.diverged)] = torch.nan
    found, best = judge.final(model, prompts)
    return {
        "risk": _numbers(found.risk),
        "risk_error": _numbers(found.error),
        "tail": _numbers(found.tail),
        "typical": _numbers(found.typical),
        "best": best,
        "theory": None if judge.optimum is None else float(judge.optimum),
        "diverged": list(loop.diverged.items()),
        "seconds": loop.seconds,
    }


def _finished(
    config: dict[str, Any],
    judge: Judge | None,
    model: Model,
    records: list[dict[str, Any]],
    result: Result,
    folder: Path | None,
) -> Run:
    if len(result.risk) != model.shape.trials:
        raise FileError(f"{folder}: its result is of {len(result.risk)} trials, its model of {model.shape.trials}")
    with torch.no_grad():
        forms = model.forms(config["regime"]["phases"][-1]["prompts"])
    risk = _row(result.risk, torch.inf)
    return Run(
        risk=risk,
        risk_error=_row(result.risk_error, torch.nan),
        tail=_row(result.tail, torch.nan),
        typical=_row(result.typical, torch.inf),
        params={name: None if form is None else form.contiguous() for name, form in forms.items()},
        best=result.best,
        history=_history(records, len(risk)),
        theory=None if judge is None else judge.optimum,
        folder=folder,
        model=model,
        diverged=dict(result.diverged),
        config=config,
        seconds=result.seconds,
    )


def _numbers(values: Tensor) -> list[float | None]:
    """Numbers that JSON has; None for those that are not finite."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _row(values: list[float | None], missing: float) -> Tensor:
    return torch.tensor([missing if value is None else value for value in values], dtype=torch.float64)


def _history(records: list[dict[str, Any]], trials: int) -> dict[str, Tensor]:
    rows = [record for record in records if "loss" in record]
    exact = [0.0] * trials
    history: dict[str, Tensor] = {name: torch.tensor([row[name] for row in rows]) for name in ("step", "phase")}
    history["lr"] = torch.tensor([row["lr"] for row in rows], dtype=torch.float64)
    for name in ("loss", "risk", "risk_error"):
        missing = torch.nan if name == "risk_error" else torch.inf
        lines = [_row(row.get(name, exact), missing) for row in rows]
        history[name] = torch.stack(lines) if lines else torch.empty(0, trials, dtype=torch.float64)
    return history
