"""The description of a run: everything that decides its numbers, and where it is computed.

`fastlin.train` takes these fields as keywords, `fastlin train` has a flag for each that says so (the rest are
`--set NAME=VALUE`), and a run's folder keeps what `RunConfig.describe` returns. A new option is one more field.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Self

import torch

from fastlin import backends, models
from fastlin.data.philox import integer
from fastlin.data.restore import restored
from fastlin.models import Shape
from fastlin.ops.sampled import Source
from fastlin.training import checks, presets, streams
from fastlin.training.checks import choice
from fastlin.training.optimiser import COUPLED, Lost, make_optimiser, optimiser_class
from fastlin.training.regimes import Regime, named

Number = float | str
"""A number, or the name of one that depends on the number of features, such as "1/sqrt(d+1)"."""

_MAX_STEPS = 1 << 24
_MAX_SHOTS = 1 << 40
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_COUNTS = ("layers", "attention_heads", "prompt_tokens", "trials", "records")


def _flag(default: Any, kind: type, help: str) -> Any:
    """A field that the command line has a flag for."""
    return field(default=default, metadata={"flag": kind, "help": help})


@dataclass(frozen=True, eq=False)
class RunConfig:
    """What a run is. Every field but the first three is a keyword of `fastlin.train`.

    Attributes
    ----------
    mix : task source
    regime : Regime
    n : int
        Context length.
    target : task source or None
        The task that is fine-tuned on, where the regime has terms on it.
    model : str
        "reduced", "full", "separate", "stack" or "softmax".
    layers, attention_heads, prompt_tokens : int
        L of a stack, H, and prompt tokens of each task.
    trials : int
        Independent initialisations; of each regime, where several are trained side by side.
    seed : int
    records : int
        About how many times the risk is recorded on the way.
    preset : str
        Where the fields below come from when they are not given: "paper", "authors" or "tuned".
    steps : int
        Optimiser steps in all; the phases of a regime share them equally.
    batch : int
        Fresh sequences in each step; of each task with `batch_per_task`.
    lr : float
        Largest learning rate.
    optimiser : str, class or function
        The name of a class of torch.optim in any case, a class, or a function of a list of parameters that returns an
        optimiser, whose learning rates then are the largest.
    optimiser_options : mapping
        What else a class is called with, such as {"betas": (0.9, 0.99)}.
    weight_decay : float
        Of a class.
    schedule : str or callable
        "constant", "linear", "cosine", "one-cycle" (up over 30 % of a phase, then down), or a function of progress in
        [0, 1] within the phase that returns the learning-rate multiplier.
    clip : float or None
        Largest norm of each trial's gradient; None does not clip.
    average : float
        Fraction of each phase, at its end, over which parameters are averaged; 0 takes the last ones.
    batch_per_task : bool
        Whether each task has `batch` sequences and its loss the task's weight, or tasks are drawn by their weights.
    prompts_in_turn : bool
        Whether a phase that trains prompts alone takes one optimiser step per task, task after task.
    own_data : bool
        Whether each trial draws its own data, or all share them.
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
        Train on the target by drawing with replacement from this many points of it; None draws fresh ones.
    residual : float
        Factor of the identity in the layers of a stack.
    trainable_entry : bool
        Reduced model only: whether its prompt is a product of a vector and a trainable last entry.
    start, start_prompts_as : str
        Distribution of the initial parameters, "normal" or "uniform", and that of the prompts.
    fixed_head : bool
        Models with value matrices only: whether a head that tasks share is e_m, and the value matrices train alone.
    start_attention, start_values, start_heads, start_prompts : Number
        Their standard deviations, or bounds: of W, Wq, Wk or A; of Wv or C; of v or h; of p.
    start_readout : float
        What heads start with on the label's coordinate, and value matrices on their diagonal.
    dtype : torch.dtype
        Of the parameters and the kernels.
    shards : int or None
        Pieces of each batch, whose losses and gradients are added in order: the bits are then the same for any number
        of processes. None takes one piece per process.
    device : torch.device
    backend : str
    distributed : bool or None
        Whether the processes of torch.distributed's process group share each batch; None: when there is such a group.

    Examples
    --------
    >>> from fastlin.training.config import RunConfig
    >>> config = RunConfig.resolve(fl.SphereTasks(3), "plain", 10, preset="paper", steps=100)
    >>> config.lr, config.steps, config.shape.width
    (0.001, 100, 4)
    """

    mix: Source
    regime: Regime
    n: int
    target: Source | None = None
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
    def resolve(cls, mix: Any, regime: str | Regime | Sequence[str | Regime], n: int, **given: Any) -> Self:
        """The description of a run from the arguments of `fastlin.train`, all of it checked before any work.

        Parameters
        ----------
        mix, regime, n
            As in `fastlin.train`.
        **given
            Other fields by name. Where a preset decides, None takes its value; None is a value of clip and points.

        Raises
        ------
        ValueError, TypeError
            Naming the argument, what it got and what it wants.
        """
        names = [known.name for known in fields(cls)[3:]]
        for name in given:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f" (did you mean {close[0]}?)" if close else ""
                raise TypeError(f"train: got an unknown argument {name!r}{hint}, wants one of {', '.join(names)}")
        decided = set(names[names.index("steps") : names.index("dtype")]) - {"clip", "points"}
        given = {name: value for name, value in given.items() if value is not None or name not in decided}
        row = named(regime)
        model = choice("model", given.get("model", cls.model), models.KINDS)
        base = presets.values(given.get("preset", cls.preset), model, row)
        values = {**base, **given}
        if "optimiser_options" in values or "optimiser" in values:
            values["optimiser_options"] = _optimiser_options(base, given)
        values["dtype"] = _dtype(values.get("dtype", cls.dtype))
        values["device"] = _device(values.get("device", cls.device))
        return cls(mix=mix, regime=row, n=n, **values)

    def __post_init__(self) -> None:
        checks.protocol(self)
        _check_sources(self)
        converted = {"n": integer("n", self.n, _MAX_SHOTS), "seed": integer("seed", self.seed, 1 << 64)}
        converted |= {name: checks.count(name, getattr(self, name)) for name in _COUNTS}
        if self.shards is not None:
            converted["shards"] = checks.count("shards", self.shards)
        for name, value in converted.items():
            object.__setattr__(self, name, value)
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Raise where two fields do not go together."""
        row = self.regime
        if self.layers > 1 and self.model != "stack":
            raise ValueError(f"layers: got {self.layers} for model {self.model!r}, wants 1, or model='stack'")
        _check_steps(self)
        _check_turns(self)
        if self.shot_scale and not models.KINDS[self.model].linear:
            raise ValueError(
                f"shot_scale: got True for model {self.model!r}, which averages tokens anyway; wants False"
            )
        if self.model == "reduced" and not row.task_heads:
            for i, phase in enumerate(row.phases):
                if phase.trains == ("heads",):
                    raise ValueError(f"regime.phases[{i}]: trains heads, which the reduced model has fixed; wants more")
        choice("backend", self.backend, ("auto", "reference", *backends.names()))
        self.serving_backend  # noqa: B018  raises where no backend serves
        kind = optimiser_class(self.optimiser)
        if kind in COUPLED and self.shape.trials > 1:
            assert kind is not None
            raise ValueError(
                f"optimiser: {kind.__name__} couples all parameters, so trials would interact; wants trials=1"
            )
        if kind is not None:
            make_optimiser(self, [torch.nn.Parameter(torch.zeros(1, 1))])

    @cached_property
    def shape(self) -> Shape:
        """Sizes of the model; with several regimes side by side, its trials are those of all."""
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
        """Regimes that are trained side by side."""
        return max(len(self.regime.variants), 1)

    @property
    def sources(self) -> dict[str, Source]:
        """The task sources by the names that terms of an objective have for them."""
        return {"mix": self.mix} if self.target is None else {"mix": self.mix, "target": self.target}

    @property
    def judged(self) -> tuple[Source, int]:
        """The task source and the shots that the risk is taken on."""
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
            known.name: checks.described(getattr(self, known.name))
            for known in fields(self)
            if known.name not in ("mix", "target", "device", "backend", "distributed", "shards")
        }
        described["sources"] = {name: checks.described(source) for name, source in self.sources.items()}
        if self.shards is not None:
            described["shards"] = self.shards
        as_read: dict[str, Any] = json.loads(json.dumps(described))
        return as_read

    @classmethod
    def restore(cls, described: Mapping[str, Any]) -> Self | None:
        """The inverse of `describe`; None where a task source is not written out: one of the user's own, or large.

        Raises
        ------
        ValueError, TypeError
            Where the description is not one of a run.
        """
        values = {name: value for name, value in described.items() if name not in ("sources", "regime")}
        regime = named(Regime.restore(described["regime"]))
        found: dict[str, Any] = {name: restored(source) for name, source in described["sources"].items()}
        if None in found.values():
            return None
        for name in ("optimiser", "schedule"):
            values[name] = Lost.unless_known(name, values[name])
        values["dtype"] = _dtype(values["dtype"])
        options = {name: tuple(v) if isinstance(v, list) else v for name, v in values["optimiser_options"].items()}
        return cls(regime=regime, **{**values, "optimiser_options": options}, **found)


def _optimiser_options(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the preset, unless the optimiser is another one, and those that were given."""
    known = RunConfig.optimiser
    before, now = (optimiser_class(values.get("optimiser", known)) for values in (base, {**base, **given}))
    if now is None:
        for name in ("lr", "weight_decay", "optimiser_options"):
            if name in given:
                raise ValueError(f"{name}: got {given[name]!r} beside a function that makes the optimiser, wants None")
    kept = base.get("optimiser_options", {}) if now is before else {}
    more = given.get("optimiser_options", {})
    return {**kept, **more} if isinstance(more, Mapping) else more


def _dtype(value: Any) -> torch.dtype:
    found = _DTYPES.get(str(value).removeprefix("torch."))
    if found is None:
        raise ValueError(f"dtype: got {value}, wants torch.float32 or torch.float64")
    return found


def _device(value: Any) -> torch.device:
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:  # the last from a torch without CUDA
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device: got {str(value)!r}, wants one that torch can use here: {reason}") from None
    return device


def _check_sources(config: RunConfig) -> None:
    """The task sources are those that the regime's terms name."""
    row, mix, target = config.regime, config.mix, config.target
    for name, source in (("mix", mix), ("target", target)):
        if source is not None and (isinstance(source, type) or not hasattr(source, "sample")):
            raise TypeError(f"{name}: got a {type(source).__name__}, wants a task source such as fastlin.TaskMixture")
    if mix is None:
        raise TypeError("mix: got None, wants a task source such as fastlin.TaskMixture")
    wanted = "target" in {row.judged.source, *(term.source for phase in row.phases for term in phase.objective)}
    if target is None:
        if wanted:
            raise ValueError(f"target: got None, wants a task source: regime {row.name!r} trains on it")
        return
    if not wanted:
        raise ValueError(f"target: got a {type(target).__name__}, wants None: regime {row.name!r} does not train on it")
    if (target.m, target.K) != (mix.m, mix.K):
        raise ValueError(
            f"target: has token width {target.m} and {target.K} tasks, wants {mix.m} and {mix.K}, those of mix"
        )


def _check_steps(config: RunConfig) -> None:
    """Steps, and the streams of the generator that the run needs."""
    phases = config.regime.phases
    if not len(phases) <= config.steps < _MAX_STEPS:
        raise ValueError(
            f"steps: got {config.steps}, wants {len(phases)} to {_MAX_STEPS - 1}: one or more for each phase"
        )
    terms = max(len(phase.objective) for phase in phases)
    if terms * (config.trials if config.own_data else 1) > streams.FIRST_RESERVED:
        raise ValueError(
            f"trials: got {config.trials} with their own data in {terms} terms, "
            f"wants at most {streams.FIRST_RESERVED} streams"
        )


def _check_turns(config: RunConfig) -> None:
    """Steps for one task after the other leave out the weights of the tasks, which decide the best shared prompt."""
    row = config.regime
    alone = any(phase.trains == ("prompts",) for phase in row.phases)
    if config.prompts_in_turn and alone and not row.task_prompts and config.mix.K > 1:
        raise ValueError(
            f"prompts_in_turn: got True for regime {row.name!r}, whose {config.mix.K} tasks share one prompt; wants "
            "False, or task_prompts=True"
        )
