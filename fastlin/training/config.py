"""The description of a run: everything that decides its numbers, and where it is computed.

The fields are keywords of `fastlin.train`. On the command line those declared with `_flag` have a flag, the rest are
`--set NAME=VALUE`. A run's folder stores what `RunConfig.describe` returns. A new option is one more field.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Self

import torch

from fastlin import backends, models
from fastlin._checks import choice, count, integer
from fastlin.data.checks import check_device
from fastlin.data.layout import DRAWS
from fastlin.data.restore import restored
from fastlin.models import Shape
from fastlin.ops.sampled import TaskSource
from fastlin.training import checks, presets
from fastlin.training.optimiser import Lost, optimiser_class
from fastlin.training.regimes import Regime, named

Number = float | str
"""A number, or the name of one that depends on the number of features, such as "1/sqrt(d+1)"."""

_MAX_SHOTS = 1 << 40
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_COUNTS = ("layers", "attention_heads", "prompt_tokens", "trials", "records")


def _flag(default: Any, kind: type, help: str) -> Any:
    """A field with a flag on the command line."""
    return field(default=default, metadata={"flag": kind, "help": help})


@dataclass(frozen=True, eq=False)
class RunConfig:
    """A run. Every field but the first three is a keyword of `fastlin.train`.

    Attributes
    ----------
    mix : task source
    regime : Regime
    n : int
        Context length.
    target : task source or None
        The task to fine-tune on, for regimes with terms on a target.
    model : str
        "reduced", "full", "separate" (Wq, Wk, Wv and a head), "stack", or "softmax" (`full` with softmax attention, for
        comparison: torch operations, without closed forms).
    layers, attention_heads, prompt_tokens : int
        L of a stack, H, and prompt tokens of each task.
    trials : int
        R, independent initialisations of each regime. Trial r starts the same whatever R is.
    seed : int
    records : int
        Approximate number of times the risk is recorded during training.
    preset : str
        "paper", "authors" or "tuned" (`fastlin.training.presets`): decides the fields from `steps` to `start_readout`
        that are not given.
    steps : int
        Optimiser steps in all; the phases of a regime share them equally.
    batch : int
        Fresh sequences in each step; with `batch_per_task`, of each task.
    lr : float
        Largest learning rate.
    optimiser : str, class or function
        The name of a class of torch.optim in any case, a class, or a function from a list of parameters to an
        optimiser, whose learning rates are then the largest.
    optimiser_options : mapping
        Other arguments of the class, such as {"betas": (0.9, 0.99)}.
    weight_decay : float
        Argument of the class.
    schedule : str or callable
        "constant", "linear", "cosine", "one-cycle" (up over 30 % of a phase, then down), or a function of progress in
        [0, 1] within the phase that returns the learning-rate multiplier.
    clip : float or None
        Largest norm of each trial's gradient; None does not clip.
    average : float
        Parameters are averaged over this last fraction of each phase; 0 takes the last ones.
    batch_per_task : bool
        Whether each task has `batch` sequences and its loss the task's weight, or tasks are drawn by their weights.
    prompts_in_turn : bool
        Whether a phase that trains prompts alone takes one optimiser step per task, task after task.
    own_data : bool
        Whether each trial draws its own data, or all trials share them.
    units : str
        "data": parameters in the units of the data (`fastlin.models.units`); "literal": as they are, with `scale`.
    scale : Number
        Factor of the attention scores in literal units.
    see_query : bool
        Whether the query is among keys and values.
    shot_scale : bool
        Whether scores are divided by the number of columns n + 1, in each term of an objective by its own.
    heads_averaged : bool
        Whether attention heads are averaged, or added.
    points : int or None
        Train on this many points of the target, drawn with replacement; None draws fresh points.
    residual : float
        Factor of the identity in the layers of a stack.
    trainable_entry : bool
        Reduced model only: whether its prompt is the product of a vector and a trainable last entry.
    start, start_prompts_as : str
        Distribution of the initial parameters, "normal" or "uniform", and that of the prompts.
    fixed_head : bool
        Models with value matrices only: whether a head that tasks share is e_m, so that only value matrices train.
    start_attention, start_values, start_heads, start_prompts : Number
        Standard deviations or bounds of W, Wq, Wk or A; of Wv or C; of v or h; of p.
    start_readout : float
        Added to the label coordinate of the heads and to the diagonal of the value matrices.
    dtype : torch.dtype
        Of the parameters and the kernels.
    shards : int or None
        Cut each batch into this many pieces and add their losses and gradients in order: the same bits for any number
        of processes. None takes one piece per process.
    device : torch.device
    backend : str
    distributed : bool or None
        Whether the processes of torch.distributed's process group share each batch; None: when there is a group. All
        processes call `train` with the same arguments, and only the first reads and writes `out`.

    Examples
    --------
    >>> from fastlin.training.config import RunConfig
    >>> config = RunConfig.resolve(fl.SphereTasks(3), "plain", 10, preset="paper", steps=100)
    >>> config.lr, config.steps, config.shape.width
    (0.001, 100, 4)
    """

    mix: TaskSource
    regime: Regime
    n: int
    target: TaskSource | None = None
    model: str = _flag("full", str, "reduced, full, separate, stack or softmax")
    layers: int = _flag(1, int, "layers of a stack")
    attention_heads: int = _flag(1, int, "attention heads")
    prompt_tokens: int = _flag(1, int, "prompt tokens of each task")
    trials: int = _flag(1, int, "independent initialisations")
    seed: int = _flag(0, int, "seed of the data and the initialisations")
    records: int = 100
    preset: str = _flag("tuned", str, "paper, authors or tuned")
    steps: int = _flag(20_000, int, "optimiser steps, in place of the preset's")
    batch: int = _flag(8192, int, "sequences of a step, in place of the preset's")
    lr: float = _flag(1e-3, float, "largest learning rate, in place of the preset's")
    optimiser: str | Callable[..., torch.optim.Optimizer] = "Adam"
    optimiser_options: Mapping[str, Any] = field(default_factory=dict)
    weight_decay: float = 0.0
    schedule: str | Callable[[float], float] = "constant"
    clip: float | None = None
    average: float = 0.0
    batch_per_task: bool = False
    prompts_in_turn: bool = False
    own_data: bool = False
    units: str = "literal"
    scale: Number = 1.0
    see_query: bool = False
    shot_scale: bool = False
    heads_averaged: bool = False
    points: int | None = None
    residual: float = 1.0
    trainable_entry: bool = False
    start: str = "uniform"
    start_prompts_as: str = "normal"
    fixed_head: bool = False
    start_attention: Number = "1/sqrt(d+1)"
    start_values: Number = "1/sqrt(d+1)"
    start_heads: Number = "1/sqrt(d+1)"
    start_prompts: Number = 1.0
    start_readout: float = 0.0
    dtype: torch.dtype = _flag(torch.float32, str, "float32 or float64")  # noqa: RUF009
    shards: int | None = _flag(None, int, "pieces of a batch: the same bits for any number of processes")
    device: torch.device = _flag(  # noqa: RUF009
        torch.device("cpu"), str, "cpu, or cuda: under torchrun each process has its own GPU"
    )
    backend: str = _flag("auto", str, "auto, or the name of a backend")
    distributed: bool | None = None

    @classmethod
    def resolve(cls, mix: Any, regime: str | Regime | Sequence[str | Regime], n: int, **arguments: Any) -> Self:
        """The description of a run from the arguments of `fastlin.train`, checked before any work.

        None takes the preset's value where a preset decides, but in `clip` and `points`, which have None as a value.
        """
        names = [known.name for known in fields(cls)[3:]]
        for name in arguments:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f" (did you mean {close[0]}?)" if close else ""
                raise TypeError(f"train: got an unknown argument {name!r}{hint}, wants one of {', '.join(names)}")
        decided = set(names[names.index("steps") : names.index("dtype")]) - {"clip", "points"}
        given = {name: value for name, value in arguments.items() if value is not None or name not in decided}
        row = named(regime)
        model = choice("model", given.get("model", cls.model), models.KINDS)
        base = presets.values(given.get("preset", cls.preset), model, row)
        values = {**base, **given}
        if "optimiser_options" in values or "optimiser" in values:
            values["optimiser_options"] = _optimiser_options(base, given)
        values["dtype"] = _dtype(values.get("dtype", cls.dtype))
        values["device"] = check_device(values.get("device", cls.device))
        return cls(mix=mix, regime=row, n=n, **values)

    def __post_init__(self) -> None:
        checks.check_protocol(self)
        checks.check_sources(self)
        converted = {"n": integer("n", self.n, _MAX_SHOTS), "seed": integer("seed", self.seed, 1 << 64)}
        converted |= {name: count(name, getattr(self, name)) for name in _COUNTS}
        if self.shards is not None:
            converted["shards"] = count("shards", self.shards)
        for name, value in converted.items():
            object.__setattr__(self, name, value)
        checks.check_combinations(self)

    @cached_property
    def shape(self) -> Shape:
        """Sizes of the model, with the trials of all regimes that train side by side."""
        return Shape(
            trials=self.trials * self.variants,
            tasks=self.mix.K,
            width=self.mix.m,
            features=self.mix.m - 1 - int(getattr(self.mix, "bias", False)),
            layers=self.layers,
            attention_heads=self.attention_heads,
            tokens=self.prompt_tokens,
            task_heads=self.regime.task_heads,
            task_prompts=self.regime.task_prompts,
        )

    @property
    def variants(self) -> int:
        """Number of regimes that train side by side."""
        return max(len(self.regime.variants), 1)

    @property
    def record_every(self) -> int:
        """Steps between two records."""
        return max(self.steps // self.records, 1)

    @property
    def sources(self) -> dict[str, TaskSource]:
        """The task sources by the names in the terms of an objective."""
        return {"mix": self.mix} if self.target is None else {"mix": self.mix, "target": self.target}

    @property
    def judged(self) -> tuple[TaskSource, int]:
        """Task source and shots of the risk."""
        term = self.regime.judged
        return self.sources[term.source], self.n if term.shots is None else term.shots

    @property
    def serving_backend(self) -> str:
        """Name of the backend that serves the model."""
        if models.KINDS[self.model].linear:
            if self.backend == "reference":
                return self.backend
            return backends.resolve(self.backend, "sampled_loss", self.device, self.dtype, self.mix.m)
        if self.backend not in ("auto", "eager"):
            raise backends.BackendError(
                f"backend: got {self.backend!r}, which does not have {self.model}; wants 'auto' or 'eager'"
            )
        return "eager"

    def number(self, name: str) -> float:
        """The value of a field that may depend on the number of features."""
        value = getattr(self, name)
        return checks.OF_FEATURES[value](self.shape.features) if isinstance(value, str) else float(value)

    def describe(self) -> dict[str, Any]:
        """Everything that decides the numbers, in values that JSON has; functions by their names."""
        described: dict[str, Any] = {
            known.name: _described(getattr(self, known.name))
            for known in fields(self)
            if known.name not in ("mix", "target", "device", "backend", "distributed", "shards")
        }
        described["draws"] = DRAWS
        described["sources"] = {name: _described(source) for name, source in self.sources.items()}
        if self.shards is not None:
            described["shards"] = self.shards
        as_read: dict[str, Any] = json.loads(json.dumps(described))
        return as_read

    @classmethod
    def restore(cls, described: Mapping[str, Any]) -> Self | None:
        """The inverse of `describe`; None where a task source is not written out: a class of the user, or a large one.

        Raises KeyError, TypeError or ValueError where the description is not one of a run.
        """
        values = {name: value for name, value in described.items() if name not in ("sources", "regime", "draws")}
        regime = named(Regime.restore(described["regime"]))
        sources: dict[str, Any] = {name: restored(source) for name, source in described["sources"].items()}
        if None in sources.values():
            return None
        for name in ("optimiser", "schedule"):
            values[name] = Lost.unless_known(name, values[name])
        values["dtype"] = _dtype(values["dtype"])
        options = {name: tuple(v) if isinstance(v, list) else v for name, v in values["optimiser_options"].items()}
        return cls(regime=regime, **{**values, "optimiser_options": options}, **sources)


def _optimiser_options(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given options, over those of the preset where the optimiser is the preset's."""
    default = RunConfig.optimiser
    of_preset, kind = (optimiser_class(values.get("optimiser", default)) for values in (base, {**base, **given}))
    if kind is None:
        for name in ("lr", "weight_decay", "optimiser_options"):
            if name in given:
                raise ValueError(f"{name}: got {given[name]!r} beside a function that makes the optimiser, wants None")
    options = base.get("optimiser_options", {}) if kind is of_preset else {}
    more = given.get("optimiser_options", {})
    return {**options, **more} if isinstance(more, Mapping) else more


def _dtype(value: Any) -> torch.dtype:
    dtype = _DTYPES.get(str(value).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"dtype: got {value}, wants torch.float32 or torch.float64")
    return dtype


def _described(value: Any) -> Any:
    """A field in values that JSON has: dtypes and functions by their names."""
    if isinstance(value, Lost):
        return value.name
    if hasattr(value, "describe"):
        return value.describe()
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if hasattr(value, "sample"):  # a task source of the user, by its class
        return {"source": type(value).__qualname__}
    return _function_name(value) if callable(value) else value


def _function_name(function: Any) -> str:
    """The name of a function or class; with a digest of its code for lambdas and local functions, which share names."""
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    code = getattr(function, "__code__", None)
    if "<" not in name or code is None:
        return name
    what = repr((code.co_code, code.co_names, [c for c in code.co_consts if not hasattr(c, "co_code")]))
    return f"{name} {hashlib.sha256(what.encode()).hexdigest()[:16]}"
