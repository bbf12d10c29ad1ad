"""`fastlin.train`: a task source, a regime and a context length, trained and set beside the theory."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlin import models, theory
from fastlin._tensors import FileError
from fastlin.experiments.opening import opened
from fastlin.experiments.plan import REPORT, SELECT, Plan
from fastlin.models import Model
from fastlin.ops.sampled import Source
from fastlin.training.loop import Loop
from fastlin.training.record import MODEL, Folder, ended
from fastlin.training.regimes import Regime, choice
from fastlin.training.signals import interruptible

# Of the largest of 64 or more batches in their sum: 0.016 or less of light tails.
LARGEST_SHARE = 0.1


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
        the reduced model. A full model with means that are not zero can go below it, but for joint+heads.
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
    theory: theory.Optimum | theory.Bound | theory.forgetting.FamilyOptimum | None
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
    memory: int | str | None = None,
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
    memory : int or str, optional
        Bytes that a step of a process may take, or a text such as "500M" or "4G"; 2 GiB by default. Trials are taken in
        chunks that fit; one that does not fit is refused.
    **values
        Any field of `fastlin.training.protocol.Protocol` in place of the preset's: optimiser, schedule, clip, ...

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
    plan = Plan.of(
        mix,
        regime,
        n,
        target=target,
        model=model,
        layers=layers,
        attention_heads=attention_heads,
        prompt_tokens=prompt_tokens,
        trials=trials,
        seed=seed,
        records=records,
        preset=preset,
        values={"steps": steps, "batch": batch, "lr": lr, **values},
        dtype=dtype,
        device=device,
        backend=backend,
        shards=shards,
        distributed=distributed,
        memory=memory,
    )
    if isinstance(checkpoint_seconds, bool) or not isinstance(checkpoint_seconds, (int, float)):
        raise TypeError(f"checkpoint_seconds: got {checkpoint_seconds!r}, wants a number >= 0")
    if not checkpoint_seconds >= 0:
        raise ValueError(f"checkpoint_seconds: got {checkpoint_seconds!r}, wants a number >= 0")
    if out is not None and not isinstance(out, (str, Path)):
        raise TypeError(f"out: got {out!r}, wants the path of a folder, or None")
    if out is None and resume:
        raise ValueError("resume: got True without out, wants the folder of the run to go on with")
    with opened(plan, None if out is None else Path(out), resume) as (folder, state, tensors):
        return _run(plan, folder, state, tensors, progress if plan.team.first else False, checkpoint_seconds, after)


def _run(
    plan: Plan,
    folder: Folder | None,
    state: dict[str, Any],
    tensors: dict[str, Tensor],
    progress: bool | None,
    checkpoint_seconds: float,
    after: Run | str | Path | None,
) -> Run:
    """Train from a state that was on disk: a result, a checkpoint, or nothing."""
    if "result" in state:
        model = plan.model() if folder is None else models.load(folder.path / MODEL)
        if folder is None:
            model.load_state_dict(tensors)
        return _finished(plan, folder, model, state["records"], state["result"])
    job = plan.job(folder, checkpoint_seconds, progress)
    loop = Loop(job)
    if "tree" in state:
        try:
            loop.restore(state["tree"], tensors, state["records"])
        except (KeyError, TypeError, ValueError, RuntimeError, StopIteration) as error:
            # Its checksum is right: it was made so, by another version or by hand.
            where = "" if folder is None else f"{folder.path}: "
            raise FileError(f"{where}its checkpoint is not of a run like this one: {error!r}") from None
    elif after is not None:
        loop.begin_after(*_earlier(plan, after))
    together = plan.team.size > 1
    # Between the last step and the result there is no checkpoint: a signal waits until the result is there.
    with interruptible(folder is not None or together, together) as loop.signal:
        loop.run()
        result = _result(plan, job.model, loop)
        if folder is not None:
            models.save(job.model, folder.path / MODEL)
            folder.finish(result)
    loop.signal.raise_at_the_end()
    return _finished(plan, folder, job.model, loop.records, result)


def _earlier(plan: Plan, after: Run | str | Path) -> tuple[Model, int, dict[int, int]]:
    """Model, steps and diverged trials of a run that did the first phases of a plan."""
    if isinstance(after, Run):
        config, model, diverged = json.loads(json.dumps(after.config)), after.model, after.diverged
    elif isinstance(after, (str, Path)):
        config, result = ended(Path(after))
        model, diverged = models.load(Path(after) / MODEL), {trial: step for trial, step in result["diverged"]}
    else:
        raise TypeError(f"after: got a {type(after).__name__}, wants a Run, or the path of its folder")
    wanted = json.loads(json.dumps(plan.config))
    done, phases = config["regime"]["phases"], wanted["regime"]["phases"]
    if done != phases[: len(done)] or len(done) == len(phases):
        raise ValueError(f"after: got a run of regime {config['regime']['name']!r}, wants the first phases of this one")
    steps = plan.protocol.steps * len(done) // len(phases)
    if config["steps"] != steps:
        raise ValueError(
            f"after: got a run of {config['steps']} steps, wants {steps}: the share of its phases in steps"
        )
    if "variants" in config["regime"] and config["regime"]["variants"] and wanted["regime"]["variants"]:
        raise ValueError("after: got a run of several regimes, wants one of a single regime")
    config["sources"] = {**wanted["sources"], "mix": config["sources"]["mix"]}
    for name, value in {"shards": None, **wanted}.items():
        # Points are of the target, which the earlier phases do not meet.
        if name not in ("regime", "steps", "records", "points") and config.get(name) != value:
            raise ValueError(f"after: got a run with {name} = {config.get(name)!r}, wants {value!r}, as in this one")
    return model, steps, diverged


@torch.no_grad()
def _result(plan: Plan, model: Model, loop: Loop) -> dict[str, Any]:
    """What result.json says; the rows of trials that diverged become NaN."""
    last, _ = plan.risk(model, plan.regime.prompts)
    for trial in (~torch.isfinite(last)).nonzero()[:, 0].tolist():
        # What went wrong in the last step has had no loss to show it.
        loop.diverged.setdefault(trial, loop.step)
    for raw in model.parameters():
        raw[list(loop.diverged)] = torch.nan
    selected = plan.evaluate(model, plan.regime.prompts, SELECT)
    # Of two trials of the same mean, the one whose mean is sure; one that rests on a single batch if there is no other.
    choice = torch.where(torch.isfinite(selected.risk), selected.risk + 2.0 * selected.error, torch.inf)
    light = torch.where(selected.tail <= LARGEST_SHARE, choice, torch.inf)
    found = plan.evaluate(model, plan.regime.prompts, REPORT)
    optimum = plan.optimum
    _warn_of_tails(found.tail)
    return {
        "risk": _numbers(found.risk),
        "risk_error": _numbers(found.error),
        "tail": _numbers(found.tail),
        "typical": _numbers(found.typical),
        "best": int((light if bool(torch.isfinite(light).any()) else choice).argmin()),
        "theory": None if optimum is None else float(optimum),
        "diverged": [[trial, step] for trial, step in loop.diverged.items()],
        "seconds": loop.seconds,
    }


def _warn_of_tails(share: Tensor) -> None:
    """Say when a sampled risk rests on one batch of many."""
    heavy = (share > LARGEST_SHARE).nonzero()[:, 0].tolist()
    if heavy:
        message = (
            f"train: the sampled risk of trials {heavy} has heavy tails: one batch in 64 is up to "
            f"{100 * float(share.max()):.0f} % of the sum, and the standard error is not to be trusted"
        )
        warnings.warn(message, stacklevel=2)


def _finished(
    plan: Plan, folder: Folder | None, model: Model, records: list[dict[str, Any]], result: dict[str, Any]
) -> Run:
    with torch.no_grad():
        forms = model.forms(plan.regime.prompts)
    risk = _row(result["risk"], torch.inf)
    return Run(
        risk=risk,
        risk_error=_row(result["risk_error"], torch.nan),
        tail=_row(result["tail"], torch.nan),
        typical=_row(result["typical"], torch.inf),
        params={name: None if form is None else form.contiguous() for name, form in forms.items()},
        best=result["best"],
        history=_history(records, len(risk)),
        theory=plan.optimum,
        folder=None if folder is None else folder.path,
        model=model,
        diverged={trial: step for trial, step in result["diverged"]},
        config=plan.config,
        seconds=result["seconds"],
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
