"""`fastlin.train` and `fastlin.load`, which return a `Run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlin import models
from fastlin._checks import choice, real
from fastlin._files import FileError
from fastlin._tables import html, wrapped
from fastlin.models import Model
from fastlin.ops.sampled import TaskSource
from fastlin.training import outcome, record
from fastlin.training.callbacks import Callback
from fastlin.training.config import RunConfig
from fastlin.training.judge import Judge, Theory, below_theory, excess, excess_percent
from fastlin.training.loop import Loop
from fastlin.training.opening import State, opened
from fastlin.training.record import MODEL, Folder, Position, Result
from fastlin.training.regimes import Regime
from fastlin.training.signals import interruptible
from fastlin.training.start import initial_model, steps_before
from fastlin.training.team import team_of


@dataclass(frozen=True, eq=False)
class Run:
    """R trained trials, their risk and the optimum beside it.

    Attributes
    ----------
    risk : Tensor (trials,), float64
        Population risk of the final parameters: exact where a closed form covers the model, else on a sample that
        neither training nor selection used. Infinite for trials that diverged.
    risk_error : Tensor (trials,)
        Standard error of the risk; zero where the risk is exact.
    tail : Tensor (trials,)
        Share of the largest of 64 batches in the sampled risk: 0.016 for light tails. Above 0.1 few sequences dominate
        the risk, and its standard error is unreliable. Zero where the risk is exact.
    typical : Tensor (trials,)
        Median risk over these batches of 8192 sequences; the risk itself where it is exact.
    params : dict
        p (or None), W, v of a layer, or p, A, C, h of a stack, with leading R and every factor folded in: arguments of
        the ops, or of `fastlin.ops.softmax.softmax_loss`, together with `options`. NaN for trials that diverged.
    best : int
        The trial with the lowest risk plus two standard errors, chosen on data that `risk` does not use.
    history : dict
        step (N,), phase (N,), lr (N,), loss (N, trials): mean batch loss since the previous record,
        risk (N, trials), risk_error (N, trials).
    theory : Optimum, Bound, FamilyOptimum or None
        The closed form of the regime for one layer; a Bound where the optimum is not attained. It is the optimum of
        the reduced model: a full model can go below it where task means are not zero, except in joint+heads. None in a
        run loaded from a folder that does not store its task source: a class of the user, or a large source.
    folder : Path or None
    model : Model
    diverged : dict of int to int
        Trial to the step at which its loss was not finite.
    config : dict
        Everything that decides the numbers.
    seconds : float
        Wall time of training, summed over interrupted parts.

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
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
        """Keyword arguments of the ops besides `params`, at the run's n."""
        return self.options_at(self.config["n"])

    def options_at(self, n: int) -> dict[str, Any]:
        """The same at n shots: a scale of 1/(n+1) is not folded into `params`, which serve every n."""
        return self.model.op_options(n)

    def trials_of(self, regime: str) -> slice:
        """Trials of one of the regimes that were trained side by side, in the order of their seeds."""
        names = [row["name"] for row in self.config["regime"]["variants"]] or [self.config["regime"]["name"]]
        return slice(names.index(choice("regime", regime, names)), None, len(names))

    def __repr__(self) -> str:
        facts = self._facts()
        sizes = f"Run: {facts['regime']}, {facts['model']}, n = {facts['n']}, {facts['training']}"
        figures = [f"{name} {facts[name]}" for name in list(facts)[4:]]
        return "\n".join(wrapped(line, 80, "  ") for line in [sizes, "  " + ", ".join(figures), *self._notes()])

    def _repr_html_(self) -> str:
        return html("Run", self._facts()) + "".join(f"<p>{note}</p>" for note in self._notes())

    def _facts(self) -> dict[str, str]:
        """What was trained, and the figures of the best trial."""
        config, trials, best = self.config, len(self.risk), self.best
        several = [
            f"{config[name]} {name.replace('_', ' ')}" for name in ("layers", "attention_heads") if config[name] > 1
        ]
        facts = {
            "regime": config["regime"]["name"],
            "model": ", ".join([f"{config['model']} model", *several]),
            "n": str(config["n"]),
            "training": f"{trials} trial{'s' * (trials > 1)} × {config['steps']} steps × batch {config['batch']}",
        }
        if len(self.diverged) == trials:
            facts["risk"] = "none, every trial diverged"
        else:
            error = f" ± {float(self.risk_error[best]):.2g}" if self.risk_error[best] > 0 else ""
            facts["best risk"] = f"{float(self.risk[best]):.6g}{error} of trial {best}"
        if self.theory is not None:
            facts["optimum"] = f"{float(self.theory):.6g}"
        if self._percent is not None:
            facts["excess"] = f"{self._percent:+.3f} %"
        if self.diverged and "best risk" in facts:
            facts["diverged"] = str(len(self.diverged))
        return facts | ({} if self.folder is None else {"folder": str(self.folder)})

    @property
    def _percent(self) -> float | None:
        return excess_percent(float(self.risk[self.best]), None if self.theory is None else float(self.theory))

    def _notes(self) -> list[str]:
        return below_theory([self._percent])

    @property
    def excess(self) -> Tensor | None:
        """Risk over the optimum, minus one: (trials,); None without an optimum."""
        return None if self.theory is None else excess(self.risk, float(self.theory))


def train(
    mix: TaskSource,
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
    target: TaskSource | None = None,
    after: Run | str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
    checkpoint_seconds: float = 10.0,
    callback: Callback | None = None,
    **fields: Any,
) -> Run:
    """Train R trials of a model on fresh sequences of a task source.

    Parameters
    ----------
    mix : TaskMixture, SphereTasks, FixedTask or PointSet
    regime : str, Regime or a sequence of these
        "plain", "fine-tune", "one-prompt", "joint", "joint+heads", "heads"; on sources with a constant coordinate
        "pretrain", "zs:all", "zs:q", "zs:k", "zs:v", and the same with "zs+fs"; or a `Regime`. Several regimes train
        side by side on the same data: `Run.trials_of` selects the trials of one.
    n : int
        Context length.
    model, layers, attention_heads, preset, steps, batch, trials, lr, seed, target
        As in `fastlin.training.config.RunConfig`; None takes the preset's value.
    after : Run or path of its folder, optional
        A run of the first phases of this one, such as "pretrain". Training continues from it, to the same bits as if
        this run had done these phases. All other fields must be equal, and its steps those of these phases.
    out : path, optional
        Folder of the run: description, records, checkpoints, result. New or empty, or with `resume` that of the same
        run. A run that has ended is read from it.
    resume : bool
        Resume from the folder's checkpoint, to the same bits as an uninterrupted run.
    progress : bool, optional
        Show a live line; None shows it when standard error is a terminal.
    checkpoint_seconds : float
        Time between checkpoints.
    callback : callable, optional
        Called as `callback(record)` with a dict about every `steps / records` steps, in the first process only. Its
        entries are those of records.jsonl

        - step, phase, lr: steps done, index of the phase, learning rate
        - loss: list of `trials` numbers, mean batch losses since the previous record; None for a trial that diverged
        - risk: the same, current population risk; risk_error, its standard error, where it is sampled

        and theory, the optimum or None, and folder, the path of the run or None. A run that resumes calls it with new
        records only; after a crash these repeat the steps since the last checkpoint. An exception in it ends the run
        in all processes, after a checkpoint, or after the result if it was the last record: `resume` goes on with the
        next step. `fastlin.training.callbacks` has ready ones for TensorBoard and Weights & Biases.
    **fields
        Any other field of `RunConfig`: dtype, device, backend, optimiser, schedule, clip, ...

    Returns
    -------
    Run
        The trained trials, their risk, and the optimum of the regime where one is known.

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
    >>> run = fl.train(mix, "joint", 10, trials=3, steps=200, batch=1024, progress=False)
    >>> run.risk.shape, bool((run.excess < 0.5).all())
    (torch.Size([3]), True)
    """
    fields |= {"model": model, "layers": layers, "attention_heads": attention_heads, "preset": preset, "steps": steps}
    fields |= {"batch": batch, "trials": trials, "lr": lr, "seed": seed, "target": target}
    config = RunConfig.resolve(mix, regime, n, **fields)
    real("checkpoint_seconds", checkpoint_seconds, 0.0)
    for name, flag in (("resume", resume), ("progress", progress)):
        if not isinstance(flag, bool) and (flag is not None or name == "resume"):
            raise TypeError(f"{name}: got {flag!r}, wants True or False")
    if out is not None and not isinstance(out, (str, Path)):
        raise TypeError(f"out: got {out!r}, wants the path of a folder, or None")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback: got {callback!r}, wants a function of a record, or None")
    if out is None and resume:
        raise ValueError("resume: got True without out, wants the folder of the run to resume")
    team = team_of(config.device, config.distributed)
    with opened(config, team, None if out is None else Path(out), resume) as (folder, state):
        if state.result is not None:
            return _read(config, state, folder)
        loop = Loop(config, team, folder, checkpoint_seconds, progress if team.first else False, callback)
        return _trained(loop, state, after)


def _read(config: RunConfig, state: State, folder: Folder | None) -> Run:
    """A run that has ended, from its folder; in processes other than the first, from the broadcast state."""
    assert state.result is not None
    path = None if folder is None else folder.path
    if path is not None:
        model = models.load(path / MODEL)
    else:
        model = initial_model(config)
        model.load_state_dict(state.tensors)
    return _finished(state.config, Judge(config), model, state.records, state.result, path)


def load(folder: str | Path) -> Run:
    """Load a run that has ended.

    Parameters
    ----------
    folder : str or Path
        `out` of `train`, or the folder of a cell that the command line trained.

    Returns
    -------
    Run
        As `train` returned it.

    Raises
    ------
    FileError
        A ValueError that names the file and its fault, or says that the run has not ended.

    Examples
    --------
    >>> import tempfile
    >>> few = {"steps": 5, "batch": 64, "progress": False}
    >>> with tempfile.TemporaryDirectory() as out:
    ...     run = fl.train(fl.SphereTasks(2), "plain", 5, out=out, **few)
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
    """Train from a checkpoint, from the end of another run, or from the initialisation."""
    config, team, folder = loop.config, loop.team, loop.folder
    if state.tree is not None:
        try:
            loop.restore(state.tree, state.tensors, state.records)
        except (KeyError, TypeError, ValueError, RuntimeError, StopIteration) as error:
            # The checksum is right: another version or another program wrote this checkpoint.
            where = "" if folder is None else f"{folder.path}: "
            raise FileError(f"{where}its checkpoint is not of a run like this one: {error!r}") from None
    elif after is not None:
        if not isinstance(after, (Run, str, Path)):
            raise TypeError(f"after: got a {type(after).__name__}, wants a Run, or the path of its folder")
        earlier = after if isinstance(after, Run) else load(after)
        loop.begin_after(earlier.model, steps_before(config, earlier.config), earlier.diverged)
    together = team.size > 1
    path = None if folder is None else folder.path
    # There is no checkpoint between the last step and the result: a signal waits until the result is written.
    with interruptible(folder is not None or together, together, path) as loop.signal:
        loop.run()
        measured = outcome.measure(loop)
        if folder is None:
            result = Result(**measured, records=Position(0, ""))
        else:
            models.save(loop.model, folder.path / MODEL)
            result = folder.finish(measured)
    loop.signal.raise_at_the_end()
    loop.raise_failure()
    return _finished(state.config, loop.judge, loop.model, loop.records, result, path)


def _finished(
    config: dict[str, Any],
    judge: Judge | None,
    model: Model,
    records: list[dict[str, Any]],
    result: Result,
    folder: Path | None,
) -> Run:
    trials = model.shape.trials
    if len(result.risk) != trials:
        raise FileError(f"{folder}: its result is of {len(result.risk)} trials, its model of {trials}")
    with torch.no_grad():
        forms = model.forms(config["regime"]["phases"][-1]["prompts"])
    return Run(
        **outcome.estimates(result),
        params={name: None if form is None else form.contiguous() for name, form in forms.items()},
        best=result.best,
        history=outcome.history(records, trials),
        theory=None if judge is None else judge.optimum,
        folder=folder,
        model=model,
        diverged=dict(result.diverged),
        config=config,
        seconds=result.seconds,
    )
