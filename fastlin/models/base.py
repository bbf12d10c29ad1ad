"""What all models share: R trials with their own initialisations, prompts, heads, and a loss through the public ops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastlin.data import random
from fastlin.models.units import UNITS, Units
from fastlin.ops.sampled import Source, Stream

Forms = dict[str, Tensor | None]


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
        L, H, and t prompt tokens a task.
    task_heads, task_prompts : bool
        Whether each task has its own head, and its own prompt, or all share one.

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


@dataclass(frozen=True)
class Start:
    """Where raw parameters start: a distribution of mean zero, and what is added to it.

    Attributes
    ----------
    distribution, prompt_distribution : str
        "normal" with these standard deviations, or "uniform" between minus and plus these bounds; the second is of p.
    attention, values, heads, prompts : float
        Sizes of W, Wq, Wk or A; of Wv or C; of v or h; of p.
    readout : float
        What heads have more on the label's coordinate, and value matrices on their diagonal: with 1, a model starts by
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
        Between the raw parameters and those of the ops.
    see_query : bool
        Whether the query is among the keys and values.
    shot_scale : bool
        Whether scores are divided by the number of columns n + 1, whatever n a loss is taken at.
    residual : float
        Factor of the identity in the layers of a stack.
    trainable_entry : bool
        Of the reduced model: whether its prompt is a product of a vector and a trainable last entry.
    fixed_head : bool
        Of models that have value matrices: whether a head that tasks share is e_m, and these train alone.
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
    """What regimes train, by name, and the raw parameters that belong to it."""
    parts: ClassVar[dict[str, tuple[str, ...]]]
    """The same of queries, keys and values: q, k, v. Where queries and keys are merged both are the product."""
    value_matrices: ClassVar[tuple[str, ...]] = ()
    """The raw parameters that are value matrices."""
    letters: ClassVar[tuple[str, ...]]
    """The parameters of the op besides p."""
    op: ClassVar[Callable[..., tuple[Tensor, Tensor]]]
    linear: ClassVar[bool] = True
    """Whether it is linear attention, which has closed forms, Gram matrices that are drawn, and compiled backends."""

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

    def forms(self, prompts: bool = True) -> Forms:
        """The parameters of the op, with every factor folded in; p is None without prompts."""
        return {"p": self._prompts() if prompts else None, **self._forms()}

    def assign(self, **forms: Tensor | None) -> None:
        """Take parameters of the op, of all trials or of one that all get: the inverse of `forms`."""
        given = {letter: form for letter, form in forms.items() if form is not None}
        if set(given) - {"p"} != set(self.letters):
            wants = ", ".join(self.letters)
            raise TypeError(f"{self.name}: got {', '.join(given)}; wants {wants} and, with prompts, p")
        with torch.no_grad():
            wanted = {letter: form.shape for letter, form in self.forms().items() if form is not None}
        for letter, form in given.items():
            allowed = [tuple(wanted[letter]), tuple(wanted[letter][1:])]
            if letter in ("v", "h") and not self.shape.task_heads:
                allowed.append(allowed[1][:-2] + allowed[1][-1:])
            if letter == "p" and not self.shape.task_prompts:
                allowed += [(*size[:-3], 1, *size[-2:]) for size in allowed]
            if tuple(form.shape) not in allowed:
                wants = " or ".join(map(str, dict.fromkeys(allowed)))
                raise ValueError(f"{letter}: got shape {tuple(form.shape)}, wants {wants}")
        raw = self._raw(given)
        if "p" in given:
            raw["p"] = self._raw_prompts(given["p"])
        with torch.no_grad():
            for name, values in raw.items():
                getattr(self, name).copy_(values)

    def loss(
        self,
        source: Source,
        n: int,
        batch: int,
        *,
        seed: int,
        step: int,
        stream: Stream = 0,
        offset: int = 0,
        prompts: bool = True,
        weight: Tensor | None = None,
        backend: str = "auto",
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Loss (R,) and per-task losses (R, K) on sequences that the source draws; `rows` takes some trials."""
        place: dict[str, Any] = {"seed": seed, "step": step, "stream": stream, "offset": offset}
        forms = self.forms(prompts)
        if rows is not None:
            forms = {name: None if form is None else form[rows] for name, form in forms.items()}
        return self.op(source, n, batch, **forms, **place, weight=weight, backend=backend, **self.op_options(n))

    @abstractmethod
    def _sizes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the raw parameters, in the order of their initialisation."""

    @abstractmethod
    def _forms(self) -> dict[str, Tensor]:
        """The parameters of the op but p."""

    @abstractmethod
    def _raw(self, forms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `_forms`."""

    def _prompts(self) -> Tensor:
        """(R, K, t, m) from prompts (R, 1, t, m) that are shared or (R, K, t, m) that are not."""
        tokens = self._tokens()
        return tokens if self.shape.task_prompts else tokens.expand(-1, self.shape.tasks, -1, -1)

    def _raw_prompts(self, p: Tensor) -> Tensor:
        """The inverse of `_prompts`."""
        raw = self._raw_tokens(p)
        if self.shape.task_prompts:
            return raw
        one = raw[..., :1, :, :]
        if not torch.equal(raw, one.expand_as(raw)):
            raise ValueError("p: got prompts that differ between tasks, wants one for all: task_prompts is False")
        return one

    def _tokens(self) -> Tensor:
        """Prompt tokens of the op from raw ones, of as many tasks."""
        return self.p * self.prompt_unit

    def _raw_tokens(self, p: Tensor) -> Tensor:
        """The inverse of `_tokens`."""
        return p / self.prompt_unit.to(p)

    def op_options(self, n: int) -> dict[str, Any]:
        """Options that the op is called with beside `forms` at n shots."""
        scale = {"scale": 1.0 / (n + 1)} if self.options["shot_scale"] else {}
        return {"see_query": self.options["see_query"], **scale}

    def group(self, name: str) -> list[nn.Parameter]:
        """The raw parameters of a group; none where the model holds them fixed."""
        fixed = self.groups["heads"] if self.options["fixed_head"] else ()
        members = {**self.groups, **self.parts}[name]
        return [getattr(self, member) for member in members if member in self._sizes() and member not in fixed]

    @torch.no_grad()
    def start(self, start: Start, *, seed: int, stream: int, alike: int = 1) -> None:
        """Initialise; trial r depends on the seed and r alone, not on the number of trials.

        With `alike` that many trials in a row are one and the same.
        """
        sizes = {member: getattr(start, name) for name, members in self.groups.items() for member in members}
        sizes |= dict.fromkeys(self.value_matrices, start.values)
        for step, (name, raw) in enumerate(self.named_parameters()):
            place: dict[str, Any] = {"seed": seed, "step": step, "stream": stream, "dtype": torch.float64}
            columns = raw[0].numel()
            kind = start.prompt_distribution if name in self.groups["prompts"] else start.distribution
            if kind == "normal":
                draws = random.normal(len(raw) // alike, columns, **place)
            else:
                draws = 2.0 * random.uniform(len(raw) // alike, columns, **place) - 1.0
            if alike > 1:
                draws = draws.repeat_interleave(alike, 0)
            readout = start.readout
            if name in self.groups["heads"] and self.options["fixed_head"]:
                sizes[name], readout = 0.0, 1.0
            raw.copy_(sizes[name] * draws.view(raw.shape) + readout * self._readout(name))

    def _readout(self, name: str) -> Tensor | float:
        """What one readout adds to a raw parameter: e_m for heads, I for value matrices."""
        if name in self.value_matrices:
            return torch.eye(self.shape.width, dtype=torch.float64)
        if name not in self.groups["heads"]:
            return 0.0
        label = torch.zeros(self.shape.width, dtype=torch.float64)
        label[-1] = 1.0
        return label

    def describe(self) -> dict[str, Any]:
        """What `storage.load` needs besides the tensors."""
        dtype = str(self.attention_unit.dtype).removeprefix("torch.")
        return {"model": self.name, "shape": asdict(self.shape), **self.options, "unit": self.loss_unit, "dtype": dtype}

    def _heads(self, raw: Tensor) -> Tensor:
        """(..., K, m) from heads (..., m) that are shared or (..., K, m) that are not."""
        heads = raw * self.head_unit
        if self.shape.task_heads:
            return heads
        return heads.unsqueeze(-2).expand(*heads.shape[:-1], self.shape.tasks, self.shape.width)

    def _raw_heads(self, letter: str, heads: Tensor) -> Tensor:
        """The inverse of `_heads`."""
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
