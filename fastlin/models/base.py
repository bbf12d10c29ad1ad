"""The base class of all models: R trials with their own initialisations, prompts and heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from fastlin._tables import html, wrapped
from fastlin.data import random
from fastlin.models.units import UNITS, Units
from fastlin.ops.sampled import GradientsOfStep, Sequences, TaskSource, sampled_gradients

Forms = dict[str, Tensor | None]
_UNIT_OF = {"p": "prompt", "W": "attention", "A": "attention", "C": "values", "v": "head", "h": "head"}
"""The units of the op's parameters."""
OPTIONS = ("see_query", "shot_scale", "residual", "trainable_entry", "fixed_head")
"""Options of a model, which its file and `RunConfig` have under the same names."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    Attributes
    ----------
    trials, tasks, width : int
        R, K, m.
    features : int
        d: the coordinates before the label, without the constant one.
    layers, attention_heads, tokens : int
        L, H, and t prompt tokens per task.
    task_heads, task_prompts : bool
        Whether each task has its own head, and its own prompt, or all tasks share one.

    Examples
    --------
    >>> fl.models.Shape(trials=4, tasks=2, width=3, features=2, attention_heads=2).lead
    (4, 2)
    """

    trials: int
    tasks: int
    width: int
    features: int
    layers: int = 1
    attention_heads: int = 1
    tokens: int = 1
    task_heads: bool = False
    task_prompts: bool = True

    @property
    def lead(self) -> tuple[int, ...]:
        """(R,), or (R, H) with several attention heads: the leading dimensions of attention."""
        return (self.trials,) if self.attention_heads == 1 else (self.trials, self.attention_heads)


class Scaled(NamedTuple):
    """A raw parameter that is, times its unit, the op's parameter of the same name.

    Attributes
    ----------
    name : str
    view : Tensor (R, ...)
        The raw parameter, expanded where tasks share it.
    unit : Tensor
    """

    name: str
    view: Tensor
    unit: Tensor


@dataclass(frozen=True)
class Start:
    """Initialisation of the raw parameters: a distribution of mean zero, plus a readout of the labels.

    Attributes
    ----------
    distribution, prompt_distribution : str
        "normal" or "uniform"; the second is that of p.
    attention, values, heads, prompts : float
        Standard deviations or bounds of W, Wq, Wk or A; of Wv or C; of v or h; of p.
    readout : float
        Added to the label coordinate of the heads and to the diagonal of the value matrices: with 1, a model starts by
        reading labels.

    Examples
    --------
    >>> fl.models.Start(attention=0.02).distribution
    'normal'
    """

    distribution: str = "normal"
    prompt_distribution: str = "normal"
    attention: float = 0.1
    values: float = 0.1
    heads: float = 0.1
    prompts: float = 0.1
    readout: float = 0.0


class Model(nn.Module, ABC):
    """R trials of a model.

    Parameters
    ----------
    shape : Shape
    units : Units
        Factors from the raw parameters to those of the ops.
    see_query, shot_scale, residual, trainable_entry, fixed_head
        As in `fastlin.training.config.RunConfig`.
    dtype, device
        Of the raw parameters.

    Examples
    --------
    >>> shape = fl.models.Shape(trials=4, tasks=2, width=3, features=2)
    >>> model = fl.models.Full(shape, fl.models.literal(3))
    >>> isinstance(model, fl.models.Model), sorted(name for name, _ in model.named_parameters())
    (True, ['W', 'p', 'v'])
    """

    name: ClassVar[str]
    groups: ClassVar[dict[str, tuple[str, ...]]]
    """Names of the raw parameters in each group that a regime can train."""
    parts: ClassVar[dict[str, tuple[str, ...]]]
    """The same for queries, keys and values: q, k, v. Merged queries and keys are one matrix, in both q and k."""
    value_matrices: ClassVar[tuple[str, ...]] = ()
    scales: ClassVar[tuple[str, ...]] = ("p",)
    """The raw parameters that are `scaled`."""
    letters: ClassVar[tuple[str, ...]]
    """The parameters of the op besides p."""
    made_from: ClassVar[dict[str, tuple[str, ...]]]
    """The raw parameters that each parameter of the op is made from, by its letter in the order of `LETTERS`."""
    op: ClassVar[Callable[..., tuple[Tensor, Tensor]]]
    linear: ClassVar[bool] = True
    """Whether attention is linear: closed forms, sampled Gram matrices and compiled backends apply."""

    p: Tensor
    prompt_unit: Tensor
    attention_unit: Tensor
    values_unit: Tensor
    head_unit: Tensor

    def __init__(
        self,
        shape: Shape,
        units: Units,
        *,
        see_query: bool = False,
        shot_scale: bool = False,
        residual: float = 1.0,
        trainable_entry: bool = True,
        fixed_head: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.shape = shape
        self.options = {
            "see_query": see_query,
            "shot_scale": shot_scale,
            "residual": residual,
            "trainable_entry": trainable_entry,
            "fixed_head": fixed_head and not shape.task_heads and bool(self.value_matrices),
        }
        self.loss_unit = units.loss
        for name in UNITS:
            self.register_buffer(f"{name}_unit", getattr(units, name).to(dtype=dtype, device=device))
        for name, size in self._sizes().items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size, dtype=dtype, device=device)))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={value}" for name, value in self._sizes_shown().items())
        return wrapped(f"{type(self).__name__}({sizes}): {self._size_and_place()}", 80, "  ")

    def _repr_html_(self) -> str:
        return html(type(self).__name__, {**self._sizes_shown(), "values": self._size_and_place()})

    def _sizes_shown(self) -> dict[str, object]:
        known = {name: (getattr(self.shape, name), field.default) for name, field in Shape.__dataclass_fields__.items()}
        return {name: value for name, (value, default) in known.items() if value != default}

    def _size_and_place(self) -> str:
        count = sum(raw.numel() for raw in self.parameters())
        return f"{count} parameters, {str(self.p.dtype).removeprefix('torch.')} on {self.p.device}"

    def forms(self, prompts: bool = True) -> Forms:
        """The parameters of the op, with every factor folded in; p is None without prompts."""
        scaled = {name: view * unit for name, view, unit in self.scaled() if prompts or name != "p"}
        made = scaled | self.mixed(prompts)
        return {letter: made.get(letter) for letter in ("p", *self.letters)}

    def scaled(self) -> list[Scaled]:
        """The raw parameters that need no other arithmetic than a unit; optimiser updates apply it to gradients."""
        return [Scaled(name, self._spread(name), getattr(self, f"{_UNIT_OF[name]}_unit")) for name in self.scales]

    def mixed(self, prompts: bool = True) -> dict[str, Tensor]:
        """The parameters of the op that are not `scaled`."""
        return {}

    def pull(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of the raw parameters from gradients of the op's: the reverse mode of `forms`, without autograd.

        Those of `scaled` ones are as they are: shaped as the op's parameters, without the unit.

        Parameters
        ----------
        grads : mapping
            Gradients by letter, shaped as in `forms`; a raw parameter of none of these letters is left out.

        Returns
        -------
        dict
            By name.
        """
        return {name: grads[name] for name in self.scales if name in grads} | self._pull(grads)

    def assign(self, **forms: Tensor | None) -> None:
        """Set the parameters from those of the op, of all trials or of one for all: the inverse of `forms`."""
        present = {letter: form for letter, form in forms.items() if form is not None}
        if set(present) - {"p"} != set(self.letters):
            wants = ", ".join(self.letters)
            raise TypeError(f"{self.name}: got {', '.join(present)}; wants {wants} and, with prompts, p")
        with torch.no_grad():
            wanted = {letter: form.shape for letter, form in self.forms().items() if form is not None}
        for letter, form in present.items():
            allowed = [tuple(wanted[letter]), tuple(wanted[letter][1:])]
            if letter in ("v", "h") and not self.shape.task_heads:
                allowed.append(allowed[1][:-2] + allowed[1][-1:])
            if letter == "p" and not self.shape.task_prompts:
                allowed += [(*size[:-3], 1, *size[-2:]) for size in allowed]
            if tuple(form.shape) not in allowed:
                wants = " or ".join(map(str, dict.fromkeys(allowed)))
                raise ValueError(f"{letter}: got shape {tuple(form.shape)}, wants {wants}")
        raw = self._raw(present)
        if "p" in present:
            raw["p"] = self._raw_prompts(present["p"])
        with torch.no_grad():
            for name, values in raw.items():
                getattr(self, name).copy_(values)

    def loss(
        self,
        source: TaskSource,
        n: int,
        batch: int,
        *,
        prompts: bool = True,
        weight: Tensor | None = None,
        backend: str = "auto",
        rows: Tensor | None = None,
        **place: Unpack[Sequences],
    ) -> tuple[Tensor, Tensor]:
        """Loss (R,) and per-task losses (R, K) on sequences of the source; `rows` selects trials."""
        forms = self.forms(prompts)
        if rows is not None:
            forms = {name: None if form is None else form[rows] for name, form in forms.items()}
        return self.op(source, n, batch, **forms, **place, weight=weight, backend=backend, **self.op_options(n))

    def gradients(
        self,
        source: TaskSource,
        n: int,
        batch: int,
        forms: Forms,
        wants: str,
        *,
        weight: Tensor | None = None,
        backend: str = "auto",
        **place: Any,
    ) -> GradientsOfStep:
        """As `sampled_gradients`: a function of the step, with gradients of the `wants` letters of `forms`."""
        options = {"backend": backend, **self.op_options(n)}
        return sampled_gradients(self.op.__name__, source, n, batch, forms, wants, weight, options, **place)

    @abstractmethod
    def _sizes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the raw parameters, in the order of initialisation."""

    def _pull(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`pull` through `mixed`."""
        return {}

    @abstractmethod
    def _raw(self, forms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `forms` but for p."""

    def _spread(self, name: str) -> Tensor:
        """A raw parameter, expanded over the tasks that share it."""
        raw: Tensor = getattr(self, name)
        if name == "p":
            return self._over_tasks(raw)
        if name not in self.groups["heads"] or self.shape.task_heads:
            return raw
        return raw.unsqueeze(-2).expand(*raw.shape[:-1], self.shape.tasks, -1)

    def _over_tasks(self, tokens: Tensor) -> Tensor:
        """Prompts (R, K, t, m), expanded where tasks share one."""
        return tokens if self.shape.task_prompts else tokens.expand(-1, self.shape.tasks, -1, -1)

    def _raw_prompts(self, p: Tensor) -> Tensor:
        raw = self._raw_tokens(p)
        if self.shape.task_prompts:
            return raw
        one = raw[..., :1, :, :]
        if not torch.equal(raw, one.expand_as(raw)):
            raise ValueError("p: got prompts that differ between tasks, wants one for all: task_prompts is False")
        return one

    def _raw_tokens(self, p: Tensor) -> Tensor:
        return p / self.prompt_unit.to(p)

    def op_options(self, n: int) -> dict[str, Any]:
        """Options of the op at n shots, besides `forms`."""
        scale = {"scale": 1.0 / (n + 1)} if self.options["shot_scale"] else {}
        return {"see_query": self.options["see_query"], **scale}

    def group(self, name: str) -> list[nn.Parameter]:
        """The raw parameters of a group, without those that the model keeps fixed."""
        fixed = self.groups["heads"] if self.options["fixed_head"] else ()
        members = {**self.groups, **self.parts}[name]
        return [getattr(self, member) for member in members if member in self._sizes() and member not in fixed]

    def trained_names(self, groups: Iterable[str]) -> list[str]:
        """Names of the raw parameters of some groups, in the order of `named_parameters`."""
        members = {id(raw) for group in groups for raw in self.group(group)}
        return [name for name, raw in self.named_parameters() if id(raw) in members]

    @torch.no_grad()
    def start(self, start: Start, *, seed: int, stream: int, alike: int = 1) -> None:
        """Initialise: trial r depends on the seed and r alone; every `alike` consecutive trials are equal."""
        sizes = {member: getattr(start, name) for name, members in self.groups.items() for member in members}
        sizes |= dict.fromkeys(self.value_matrices, start.values)
        for step, (name, raw) in enumerate(self.named_parameters()):
            draw: dict[str, Any] = {"seed": seed, "step": step, "stream": stream, "dtype": torch.float64}
            rows, columns = len(raw) // alike, raw[0].numel()
            kind = start.prompt_distribution if name in self.groups["prompts"] else start.distribution
            if kind == "normal":
                draws = random.normal(rows, columns, **draw)
            else:
                draws = 2.0 * random.uniform(rows, columns, **draw) - 1.0
            if alike > 1:
                draws = draws.repeat_interleave(alike, 0)
            readout = start.readout
            if name in self.groups["heads"] and self.options["fixed_head"]:
                sizes[name], readout = 0.0, 1.0
            raw.copy_(sizes[name] * draws.view(raw.shape) + readout * self._readout(name))

    def _readout(self, name: str) -> Tensor | float:
        """The unit of the readout: e_m for heads, I for value matrices, 0 for others."""
        if name in self.value_matrices:
            return torch.eye(self.shape.width, dtype=torch.float64)
        if name not in self.groups["heads"]:
            return 0.0
        label = torch.zeros(self.shape.width, dtype=torch.float64)
        label[-1] = 1.0
        return label

    def describe(self) -> dict[str, Any]:
        """The description that `storage.load` needs besides the tensors."""
        dtype = str(self.attention_unit.dtype).removeprefix("torch.")
        return {"model": self.name, "shape": asdict(self.shape), **self.options, "unit": self.loss_unit, "dtype": dtype}

    def _raw_heads(self, letter: str, heads: Tensor) -> Tensor:
        raw = heads / self.head_unit.to(heads)
        if self.shape.task_heads:
            return raw
        if raw.ndim > 1 and raw.shape[-2] == self.shape.tasks:
            if not torch.equal(raw, raw[..., :1, :].expand_as(raw)):
                raise ValueError(
                    f"{letter}: got heads that differ between tasks, wants one for all: task_heads is False"
                )
            return raw[..., 0, :]
        return raw

    def _head_size(self) -> tuple[int, ...]:
        return (self.shape.tasks, self.shape.width) if self.shape.task_heads else (self.shape.width,)

    def _prompt_size(self) -> tuple[int, ...]:
        tasks = self.shape.tasks if self.shape.task_prompts else 1
        return (self.shape.trials, tasks, self.shape.tokens, self.shape.width)
