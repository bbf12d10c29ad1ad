"""What a call of `fastlin.train` asks for: checked, resolved, and turned into a model, its risk and its optimum."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastlin import backends, models, theory
from fastlin._info import info
from fastlin._threads import one_thread
from fastlin.data.philox import integer
from fastlin.data.sources import FixedTask, PointSet, SphereTasks, TaskMixture
from fastlin.experiments.evaluate import Predictor, covers, exact_error
from fastlin.models import Model, Shape, Start
from fastlin.ops.sampled import Source
from fastlin.theory import forgetting
from fastlin.theory.forgetting import FamilyOptimum
from fastlin.training import streams
from fastlin.training.job import Job
from fastlin.training.memory import DEFAULT, Step, size_in_bytes
from fastlin.training.presets import resolve
from fastlin.training.protocol import COUPLED, Protocol
from fastlin.training.record import Folder
from fastlin.training.regimes import REGIMES, Regime, choice, named
from fastlin.training.risk import Estimate, sampled_risk
from fastlin.training.team import ALONE, Team, team_of

_OPTIMA = {
    "plain": theory.plain,
    "fine-tune": theory.fine_tuned,
    "one-prompt": theory.one_prompt,
    "joint": theory.joint,
    "joint+heads": theory.decoupled,
}
_MAX_STEPS = 1 << 24
_MAX_SHOTS = 1 << 40
_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Sample:
    """A sample that risk is taken on: a stream, how many batches, and which part of a batch each is."""

    stream: int
    batches: int
    part: int = 1


_EVALUATION_BATCH = 8192
# The first is looked at on the way, and decides nothing.
ON_THE_WAY = Sample(streams.SELECT, 4, part=4)
# The choice of a trial sees more than the report: a tail that one batch in a hundred shows must not be chosen.
SELECT, REPORT = Sample(streams.SELECT, 128), Sample(streams.REPORT, 64)
# Numbers that a batch of tokens may have, where these are drawn.
_TOKENS = 1 << 23


@dataclass(frozen=True, eq=False)
class Plan:
    """A run, before it starts.

    Attributes
    ----------
    regime, protocol
    sources : dict
        "mix", and "target" where the regime wants it.
    n, seed, records : int
    kind : str
        Name of the model.
    shape : Shape
    dtype, device, backend
    config : dict
        Everything that decides the numbers, in values that JSON has.
    shards : int or None
        Pieces of each batch whose sums are added in order; None is one for each process.
    team : Team
        The processes that train together.
    memory : int
        Bytes that a step may take.
    """

    regime: Regime
    protocol: Protocol
    sources: dict[str, Source]
    n: int
    seed: int
    records: int
    kind: str
    shape: Shape
    dtype: torch.dtype
    device: torch.device
    backend: str
    config: dict[str, Any]
    shards: int | None = None
    team: Team = ALONE
    memory: int = DEFAULT

    @classmethod
    def of(
        cls,
        mix: Source,
        regime: str | Regime | Sequence[str | Regime],
        n: int,
        *,
        target: Source | None,
        model: str,
        layers: int,
        attention_heads: int,
        prompt_tokens: int,
        trials: int,
        seed: int,
        records: int,
        preset: str,
        values: Mapping[str, Any],
        dtype: torch.dtype | str,
        device: torch.device | str,
        backend: str,
        shards: int | None = None,
        distributed: bool | None = False,
        memory: int | str | None = None,
    ) -> Plan:
        """Check the arguments of `train` and resolve them, before any work."""
        row = named(regime)
        kind = choice("model", model, models.KINDS)
        protocol = resolve(preset, kind, values, row)
        sources = _sources(row, mix, target)
        n, seed = integer("n", n, _MAX_SHOTS), integer("seed", seed, 1 << 64)
        sizes = {"layers": layers, "attention_heads": attention_heads, "prompt_tokens": prompt_tokens}
        sizes = {name: _count(name, size) for name, size in {**sizes, "trials": trials, "records": records}.items()}
        if sizes["layers"] > 1 and kind != "stack":
            raise ValueError(f"layers: got {layers} for model {kind!r}, wants 1, or model='stack'")
        _check_steps(row, protocol, sizes["trials"])
        _check_turns(row, protocol, mix.K)
        if protocol.shot_scale and not models.KINDS[kind].linear:
            raise ValueError(f"shot_scale: got True for model {kind!r}, which averages tokens anyway; wants False")
        if kind == "reduced" and not row.task_heads:
            for i, phase in enumerate(row.phases):
                if phase.trains == ("heads",):
                    raise ValueError(f"regime.phases[{i}]: trains heads, which the reduced model has fixed; wants more")
        shape = Shape(
            trials=sizes["trials"] * max(len(row.variants), 1),
            tasks=mix.K,
            width=mix.m,
            features=mix.m - 1 - int(getattr(mix, "bias", False)),
            layers=sizes["layers"],
            attention_heads=sizes["attention_heads"],
            tokens=sizes["prompt_tokens"],
            task_heads=row.task_heads,
            task_prompts=row.task_prompts,
        )
        number = _DTYPES.get(str(dtype).removeprefix("torch."))
        if number is None:
            raise ValueError(f"dtype: got {dtype}, wants torch.float32 or torch.float64")
        try:
            device = torch.device(device)
            torch.empty(0, device=device)
        except (RuntimeError, TypeError, AssertionError) as error:  # the last from a torch without CUDA
            reason = str(error).partition("\n")[0]
            raise ValueError(f"device: got {str(device)!r}, wants one that torch can use here: {reason}") from None
        choice("backend", backend, ("auto", "reference", *backends.names()))
        _serving(kind, backend, device, number, mix.m)
        config = {
            "regime": row.describe(),
            "n": n,
            "model": kind,
            **sizes,
            "preset": preset,
            **protocol.describe(),
            "seed": seed,
            "dtype": str(number).removeprefix("torch."),
            "sources": {name: _described(source) for name, source in sources.items()},
        }
        if shards is not None:
            shards = config["shards"] = _count("shards", shards)
        if protocol.optimiser_class in COUPLED and shape.trials > 1:
            kind_name = protocol.optimiser_class.__name__
            raise ValueError(
                f"optimiser: {kind_name} has one step for all parameters, so that trials meet; wants trials=1"
            )
        if protocol.optimiser_class is not None:
            protocol.make_optimiser([torch.nn.Parameter(torch.zeros(1, 1))])
        return cls(
            row,
            protocol,
            sources,
            n,
            seed,
            sizes["records"],
            kind,
            shape,
            number,
            device,
            backend,
            config,
            shards=shards,
            team=team_of(device, distributed),
            memory=size_in_bytes(memory),
        )

    def model(self) -> Model:
        """The model at its start."""
        protocol, d = self.protocol, self.shape.features
        if protocol.units == "data":
            units = models.measured(
                self.sources["mix"],
                self.n,
                seed=self.seed,
                stream=streams.UNITS,
                linear=models.KINDS[self.kind].linear,
                shot_scale=protocol.shot_scale,
            )
        else:
            units = models.literal(self.shape.width, protocol.number("scale", d))
        if protocol.heads_averaged:
            units = units._replace(attention=units.attention / self.shape.attention_heads)
        try:
            model = models.KINDS[self.kind](
                self.shape,
                units,
                see_query=protocol.see_query,
                shot_scale=protocol.shot_scale,
                residual=protocol.residual,
                trainable_entry=protocol.trainable_entry,
                fixed_head=protocol.fixed_head,
                dtype=self.dtype,
                device=self.device,
            )
        except RuntimeError as error:
            if "allocate" not in str(error):
                raise
            sizes = f"trials {self.shape.trials}, layers {self.shape.layers}"
            sizes += f", attention_heads {self.shape.attention_heads}, prompt_tokens {self.shape.tokens}"
            raise ValueError(f"{sizes}: the model does not fit in memory, wants fewer of them") from None
        starts = {name: protocol.number(f"start_{name}", d) for name in ("attention", "values", "heads", "prompts")}
        start = Start(protocol.start, protocol.start_prompts_as, readout=protocol.start_readout, **starts)
        model.start(start, seed=self.seed, stream=streams.START, alike=max(len(self.regime.variants), 1))
        return model

    @cached_property
    def _gaussian(self) -> TaskMixture | None:
        """The task source as the closed forms take it; None where none covers the source and the model."""
        mix: Any = self._judged[0]
        if type(mix) is FixedTask:
            zero = torch.zeros(1, mix.d, mix.d, dtype=torch.float64)
            mix = TaskMixture(mix.theta[None], zero, [1.0], mix.noise_std, mix.feature_cov, bias=mix.bias)
        seen = self.protocol.see_query or self.protocol.shot_scale
        covered = models.KINDS[self.kind].linear and self.shape.layers == 1 and not seen
        return mix if covered and type(mix) is TaskMixture and not mix.bias else None

    @property
    def _judged(self) -> tuple[Source, int]:
        """The task source and the shots that the risk is taken on."""
        term = self.regime.judged
        return self.sources[term.source], self.n if term.shots is None else term.shots

    def risk(self, model: Model, prompts: bool) -> tuple[Tensor, Tensor]:
        """Population risk (R,) and its standard error, on the way."""
        found = self.evaluate(model, prompts, ON_THE_WAY)
        return found.risk, found.error

    def evaluate(self, model: Model, prompts: bool, sample: Sample) -> Estimate:
        """Population risk; error and tail are zero where a closed form covers the model and the risk is exact."""
        source, n = self._judged
        exact = self._exact(model, prompts)
        if exact is not None:
            return Estimate(exact, torch.zeros_like(exact), torch.zeros_like(exact), exact)
        batch = _EVALUATION_BATCH // sample.part
        if not (model.linear and hasattr(source, "sample_gram")):
            batch = max(min(batch, _TOKENS // max(n * source.m, 1)), 16)
        return sampled_risk(
            model,
            source,
            n,
            seed=self.seed,
            stream=sample.stream,
            batches=sample.batches,
            batch=batch,
            prompts=prompts,
            backend=self.backend,
            team=self.team,
            trials_at_once=self._at_once(model, source, batch, n),
        )

    def _at_once(self, model: Model, source: Source, batch: int, n: int, together: int = 1) -> int:
        """Trials that are taken in one go on so many sequences, in groups that stay together."""
        step = Step(
            shape=self.shape,
            parameters=sum(raw.numel() for raw in model.parameters()) // self.shape.trials,
            backend=_serving(self.kind, self.backend, self.device, self.dtype, self.shape.width),
            linear=model.linear,
            drawn=hasattr(source, "draw") and self.backend not in ("eager", "reference"),
            batch=batch,
            n=n,
            itemsize=self.dtype.itemsize,
        )
        return step.at_once(self.memory, together)

    def _exact(self, model: Model, prompts: bool) -> Tensor | None:
        """Population risk (R,) by a closed form; None where none covers the model on its source."""
        source, n = self._judged
        if self._gaussian is not None:
            with one_thread():
                return theory.full_population_loss(self._gaussian, n, **_as_layer(model, prompts))
        predictor = Predictor(model.op, model.forms(prompts), model.op_options)
        return exact_error(predictor, source, n) if self.protocol.shot_scale and covers(predictor, source) else None

    @cached_property
    def optimum(self) -> theory.Optimum | theory.Bound | FamilyOptimum | None:
        """The paper's closed form of the regime, where it has one for this source and a single layer."""
        if self.regime.study == "forgetting":
            return self._family_optimum()
        find = _OPTIMA.get(self.regime.name) if isinstance(self.sources["mix"], TaskMixture) else None
        if find is None or self._gaussian is None or self.config["regime"] != named(self.regime.name).describe():
            return None
        try:
            with one_thread():
                return find(self._gaussian, self.n)
        except theory.NotAttained as error:
            return theory.Bound(error.infimum)

    def _family_optimum(self) -> FamilyOptimum | None:
        """The optimum of pretraining, of full and of value-only fine-tuning; None where theory has none.

        The few-shot loss of zs+fs has no weight in the end: its optimum is that of zs. Several attention heads are
        another model, whose optimum is known for full fine-tuning only: it is the noise.
        """
        mix, protocol = self.sources["mix"], self.protocol
        T = _task_moment(mix)
        name, _, part = self.regime.name.partition(":")
        table = REGIMES.get(self.regime.name)
        standard = table is not None and self.config["regime"] == table.describe()
        one_layer = models.KINDS[self.kind].linear and self.shape.layers == 1 and self.kind != "reduced"
        if T is None or not (standard and one_layer and protocol.see_query and protocol.shot_scale):
            return None
        assert isinstance(mix, (SphereTasks, TaskMixture))
        one_head = self.shape.attention_heads == 1
        of_mix: dict[str, Any] = {"cov": mix.feature_cov, "noise_var": mix.noise_std**2, "task_cov": T}
        if name == "pretrain":
            loss = float(forgetting.pretraining_loss(mix.d, self.n, **of_mix))
            return FamilyOptimum(forgetting.pretrained(mix.d, self.n, **of_mix), loss) if one_head else None
        target = self.sources["target"]
        if type(target) is not FixedTask or not torch.equal(target.feature_cov, mix.feature_cov):
            return None
        noise = target.noise_std**2
        if part == "all":
            return FamilyOptimum(forgetting.fully_tuned(target.theta), noise)
        if part != "v" or not one_head:
            return None
        family = forgetting.value_tuned(target.theta, shots=self.n, **of_mix)
        return FamilyOptimum(family, float(forgetting.error(family, target.theta, 0, mix.feature_cov, noise)))

    def job(self, folder: Folder | None = None, checkpoint_seconds: float = 60.0, progress: bool | None = None) -> Job:
        """What the loop is to do, with the model at its start."""
        model, protocol = self.model(), self.protocol
        largest = protocol.batch * (self.shape.tasks if protocol.batch_per_task else 1)
        piece = -(-largest // (self.shards or self.team.size))
        shots = max(
            self.n if term.shots is None else term.shots for phase in self.regime.phases for term in phase.objective
        )
        sources = self._training_sources()
        variants = max(len(self.regime.variants), 1)
        seeds = min(self._at_once(model, source, piece, shots, variants) for source in sources.values())
        return Job(
            model=model,
            regime=self.regime,
            protocol=self.protocol,
            sources=sources,
            n=self.n,
            seed=self.seed,
            risk=self.risk,
            optimum=None if self.optimum is None else float(self.optimum),
            backend=self.backend,
            record_every=max(self.protocol.steps // self.records, 1),
            folder=folder,
            checkpoint_seconds=checkpoint_seconds,
            progress=progress,
            team=self.team,
            shards=self.shards,
            seeds_at_once=seeds,
        )

    def _training_sources(self) -> dict[str, Source]:
        """What the loop draws from: in place of the target, a finite set of its points where the protocol says so."""
        points, target = self.protocol.points, self.sources.get("target")
        if points is None or target is None or isinstance(target, PointSet):
            return self.sources
        drawn: Any = PointSet.drawn(target, points, seed=self.seed, stream=streams.POINTS)  # type: ignore[arg-type]
        return {**self.sources, "target": drawn}

    def about(self) -> dict[str, Any]:
        """Versions, backend and machine."""
        serves = _serving(self.kind, self.backend, self.device, self.dtype, self.shape.width)
        machine = {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()}
        where = {"device": str(self.device), "machine": machine, "processes": self.team.size}
        return {"backend": serves, **where, "info": info()}


def _serving(kind: str, backend: str, device: torch.device, dtype: torch.dtype, m: int) -> str:
    """Name of the backend that serves a model."""
    if models.KINDS[kind].linear:
        return backend if backend == "reference" else backends.resolve(backend, "sampled_loss", device, dtype, m)
    if backend not in ("auto", "eager"):
        raise backends.BackendError(f"backend: got {backend!r}, which does not have {kind}; wants 'auto' or 'eager'")
    return "eager"


def _task_moment(mix: Any) -> Tensor | None:
    """E[theta theta'] of a source with a constant coordinate whose tasks have mean zero; None of others."""
    if type(mix) is SphereTasks and mix.bias:
        return torch.eye(mix.d, dtype=torch.float64) * (mix.radius**2 / mix.d)
    centred = type(mix) is TaskMixture and mix.bias and mix.K == 1 and not bool(mix.means.any())
    return mix.covariances[0] if centred else None


def _as_layer(model: Model, prompts: bool) -> dict[str, Any]:
    """p, W, v of a model that is one layer; v = C h of a stack."""
    forms = {name: None if form is None else form.cpu() for name, form in model.forms(prompts).items()}
    if "A" not in forms:
        return forms
    A, C, h = forms["A"], forms["C"], forms["h"]
    assert A is not None
    assert C is not None
    assert h is not None
    if model.shape.attention_heads > 1:
        h = h.unsqueeze(1)
    return {"p": forms["p"], "W": A[:, 0], "v": h @ C[:, 0].mT}


def _sources(row: Regime, mix: Source, target: Source | None) -> dict[str, Source]:
    """The task sources that the regime's terms name."""
    for name, source in (("mix", mix), ("target", target)):
        if source is not None and (isinstance(source, type) or not hasattr(source, "sample")):
            raise TypeError(f"{name}: got a {type(source).__name__}, wants a task source such as fastlin.TaskMixture")
    if mix is None:
        raise TypeError("mix: got None, wants a task source such as fastlin.TaskMixture")
    wanted = "target" in {row.judged.source, *(term.source for phase in row.phases for term in phase.objective)}
    if target is None:
        if wanted:
            raise ValueError(f"target: got None, wants a task source: regime {row.name!r} trains on it")
        return {"mix": mix}
    if not wanted:
        raise ValueError(f"target: got a {type(target).__name__}, wants None: regime {row.name!r} does not train on it")
    if (target.m, target.K) != (mix.m, mix.K):
        raise ValueError(
            f"target: has token width {target.m} and {target.K} tasks, wants {mix.m} and {mix.K}, those of mix"
        )
    return {"mix": mix, "target": target}


def _check_steps(row: Regime, protocol: Protocol, trials: int) -> None:
    """Steps, and the streams of the generator that the run needs."""
    if not len(row.phases) <= protocol.steps < _MAX_STEPS:
        raise ValueError(
            f"steps: got {protocol.steps}, wants {len(row.phases)} to {_MAX_STEPS - 1}: one or more for each phase"
        )
    terms = max(len(phase.objective) for phase in row.phases)
    if terms * (trials if protocol.own_data else 1) > streams.FIRST_RESERVED:
        raise ValueError(
            f"trials: got {trials} with their own data in {terms} terms, wants at most {streams.FIRST_RESERVED} streams"
        )


def _check_turns(row: Regime, protocol: Protocol, tasks: int) -> None:
    """Steps for one task after the other leave out the weights of the tasks, which decide the best prompt of all."""
    alone = any(phase.trains == ("prompts",) for phase in row.phases)
    if protocol.prompts_in_turn and alone and not row.task_prompts and tasks > 1:
        raise ValueError(
            f"prompts_in_turn: got True for regime {row.name!r}, whose {tasks} tasks share one prompt; wants False, or "
            "task_prompts=True"
        )


def _count(name: str, value: Any) -> int:
    size = integer(name, value, 1 << 31)
    if size == 0:
        raise ValueError(f"{name}: got 0, wants an integer >= 1")
    return size


def _described(source: Any) -> Any:
    """A source in values that JSON has; one of the user's own by its class."""
    return source.describe() if hasattr(source, "describe") else {"source": type(source).__qualname__}
