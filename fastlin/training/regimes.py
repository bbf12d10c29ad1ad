"""Regimes: what trains in each phase, and on which objective.

`REGIMES` is the table; docs/regimes.md shows it in words. Fine-tuning without forgetting has the regimes

    zs:X          pretrain; then X alone on the target at zero shots
    zs+fs:X       the same, and at n shots with a weight that falls from 1 to 0

where X is all, q, k or v: everything, or the parameters of queries, keys or values. Merged queries and keys are one
matrix, which both q and k train. `fastlin.train` takes a `Regime` of the user in place of a name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self

import msgspec

from fastlin import theory
from fastlin._checks import choice
from fastlin.data.sources import TaskMixture

PALETTE = {
    **{"blue": "#0072b2", "orange": "#e69f00", "vermilion": "#d55e00", "green": "#009e73"},
    **{"purple": "#cc79a7", "sky": "#56b4e9", "black": "#000000", "grey": "#555555"},
}
"""Colours of pictures: those of Okabe and Ito without yellow, and grey; to the colour-blind no two look alike."""


class ClosedForm(NamedTuple):
    """A closed form of `fastlin.theory`, and how tables and pictures show it.

    The label is the name of the regime, where the closed form is the optimum of one.
    """

    optimum: Callable[[TaskMixture, int], theory.Optimum | theory.Bound]
    label: str
    colour: str
    marker: str
    meaning: str  # what is optimised, for the legend of a table
    dashes: tuple[float, ...] | None = None  # lengths of dashes and gaps in line widths; None draws a solid line

    @property
    def name(self) -> str:
        """Key in `CLOSED_FORMS` and in records: the name of the function."""
        return self.optimum.__name__


@dataclass(frozen=True)
class Term:
    """One part of an objective: weight times the loss at a number of shots on a task source.

    Attributes
    ----------
    shots : int or None
        Context length; None is the run's n.
    weight : tuple of two float
        At the first step and at the end of the phase; linear between them.
    source : str
        "mix" or "target", the argument of `fastlin.train`.

    Examples
    --------
    >>> fl.training.regimes.Term(shots=0, weight=(1.0, 0.0), source="target").weight_at(0.25)
    0.75
    """

    shots: int | None = None
    weight: tuple[float, float] = (1.0, 1.0)
    source: str = "mix"

    def weight_at(self, progress: float) -> float:
        """The weight at `progress` in [0, 1] within the phase."""
        first, last = self.weight
        return first + (last - first) * progress


@dataclass(frozen=True)
class Phase:
    """A part of training with its own optimiser and schedule.

    Attributes
    ----------
    trains : tuple of str
        Among "attention", "heads", "prompts", and "q", "k", "v" for the parameters of queries, keys and values. All
        other parameters are frozen.
    prompts : bool
        Whether prompts are prepended.
    objective : tuple of Term

    Examples
    --------
    >>> fl.training.regimes.Phase(("prompts",), prompts=True).trains
    ('prompts',)
    """

    trains: tuple[str, ...]
    prompts: bool
    objective: tuple[Term, ...] = (Term(),)


@dataclass(frozen=True)
class Regime:
    """A way to train: a row of `REGIMES`, or one of the user.

    Attributes
    ----------
    name : str
    phases : tuple of Phase
        They share the steps of a run equally.
    task_heads, task_prompts : bool
        Whether each task has its own head, and its own prompt; one prompt for all hides the task from the model.
    judged : Term
        Shots and source of the risk; by default the run's n on its task source.
    study : str
        Which presets apply: "prompts", or "forgetting", where the query is in the sum, scores are divided by the number
        of columns and attention heads are averaged.
    variants : tuple of Regime
        The rows that `together` combined.
    closed_form : ClosedForm or None
        The optimum of a row of `REGIMES`. It decides no numbers: saved configs and comparisons leave it out.

    Examples
    --------
    >>> from fastlin.training.regimes import Phase, Regime
    >>> phases = Phase(("prompts",), True), Phase(("attention", "heads"), True)
    >>> mine = Regime("prompts first", phases)
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
    >>> fl.train(mix, mine, 5, steps=10, batch=64, progress=False).risk.shape
    torch.Size([1])
    """

    name: str
    phases: tuple[Phase, ...]
    task_heads: bool = False
    task_prompts: bool = True
    judged: Term = Term()
    study: str = "prompts"
    variants: tuple[Regime, ...] = ()
    closed_form: ClosedForm | None = field(default=None, compare=False, repr=False)

    @property
    def prompts(self) -> bool:
        """Whether the trained model has prompts."""
        return self.phases[-1].prompts

    def describe(self) -> dict[str, Any]:
        """The row in values that JSON has."""
        described = {name: value for name, value in asdict(self).items() if name != "closed_form"}
        return {**described, "variants": tuple(row.describe() for row in self.variants)}

    @classmethod
    def restore(cls, described: Mapping[str, Any]) -> Self:
        """The inverse of `describe`, also after a round trip through JSON."""
        variants = tuple(cls.restore(row) for row in described["variants"])
        phases = msgspec.convert(described["phases"], tuple[Phase, ...])
        judged = msgspec.convert(described["judged"], Term)
        return cls(**{**described, "phases": phases, "judged": judged, "variants": variants})


_PLAIN = Phase(("attention", "heads"), prompts=False)
_PROMPTS = Phase(("prompts",), prompts=True)
_ALL = Phase(("attention", "heads", "prompts"), prompts=True)

_PLAIN_FORM = ClosedForm(theory.plain, "plain", PALETTE["blue"], "o", "W, without prompts")
_FINE_TUNED = ClosedForm(
    theory.fine_tuned, "fine-tune", PALETTE["orange"], "s", "a prompt for each task, with the W of plain", (5, 1.5)
)
_ONE_PROMPT = ClosedForm(
    theory.one_prompt, "one-prompt", PALETTE["purple"], "<", "W and one prompt for all tasks", (8, 1.5, 2, 1.5)
)
_JOINT = ClosedForm(theory.joint, "joint", PALETTE["vermilion"], "^", "W and a prompt for each task", (4, 1.2, 1, 1.2))
_DECOUPLED = ClosedForm(
    theory.decoupled, "joint+heads", PALETTE["green"], "D", "W, a prompt and a head for each task", (2.2, 1)
)
_SHIFT = ClosedForm(
    theory.shared_shift, "shared shift", PALETTE["sky"], "v", "joint, with the head [-m; 1] for all tasks", (1, 1)
)
_SCALED = ClosedForm(
    *(theory.scaled_heads, "scaled heads", PALETTE["black"], "P", "joint+heads, and a scale of each head"),
    (6, 1, 1, 1, 1, 1),
)
_BOUND = ClosedForm(
    theory.heads_lower_bound, "lower bound", PALETTE["grey"], "X", "no prompts and heads can go below it", (1, 2)
)

STUDIES = ("prompts", "forgetting")
_ZERO_SHOT, _FEW_SHOT = Term(0, source="target"), Term(None, (1.0, 0.0), "target")
_OBJECTIVES = {"zs": (_ZERO_SHOT,), "zs+fs": (_ZERO_SHOT, _FEW_SHOT)}
_TUNED = {"all": ("attention", "heads"), "q": ("q",), "k": ("k",), "v": ("v",)}

REGIMES = {
    row.name: row
    for row in (
        Regime("plain", (_PLAIN,), closed_form=_PLAIN_FORM),
        Regime("fine-tune", (_PLAIN, _PROMPTS), closed_form=_FINE_TUNED),
        Regime("one-prompt", (_ALL,), task_prompts=False, closed_form=_ONE_PROMPT),
        Regime("joint", (_ALL,), closed_form=_JOINT),
        Regime("joint+heads", (_ALL,), task_heads=True, closed_form=_DECOUPLED),
        Regime("heads", (_PLAIN,), task_heads=True),
        Regime("pretrain", (_PLAIN,), study="forgetting"),
        *(
            Regime(
                f"{name}:{part}",
                (_PLAIN, Phase(trains, prompts=False, objective=objective)),
                judged=_ZERO_SHOT,
                study="forgetting",
            )
            for name, objective in _OBJECTIVES.items()
            for part, trains in _TUNED.items()
        ),
    )
}

# The closed forms of the regimes, and further ones that no regime trains to.
CLOSED_FORMS = {
    form.name: form
    for form in (
        *(row.closed_form for row in REGIMES.values() if row.closed_form is not None),
        *(_SHIFT, _SCALED, _BOUND),
    )
}


def together(rows: Sequence[Regime]) -> Regime:
    """Combine regimes that train side by side: trial r is seed r // V in variant r % V; variants share a seed's data.

    A phase trains what any variant trains, on the terms of all variants. The loop freezes the parameters that a variant
    does not train, and weights each term as the variant does.

    Parameters
    ----------
    rows : sequence of Regime
        V regimes that differ only in what they train and on which terms.

    Returns
    -------
    Regime

    Examples
    --------
    >>> from fastlin.training.regimes import REGIMES, together
    >>> together([REGIMES["zs:all"], REGIMES["zs:v"]]).name
    'zs:all,zs:v'
    """
    first = rows[0]
    for row in rows:
        for name in ("task_heads", "task_prompts", "judged", "study"):
            if getattr(row, name) != getattr(first, name):
                wants = f"wants {getattr(first, name)!r} as in {first.name!r}"
                raise ValueError(f"regime: {row.name!r} has {name} = {getattr(row, name)!r} beside others, {wants}")
        if [phase.prompts for phase in row.phases] != [phase.prompts for phase in first.phases]:
            raise ValueError(
                f"regime: {row.name!r} has other phases than {first.name!r}, wants phases with the same prompts"
            )
        if row.variants:
            raise ValueError(f"regime: {row.name!r} combines several regimes, wants single ones")
    if len({row.name for row in rows}) < len(rows):
        raise ValueError(f"regime: got {', '.join(row.name for row in rows)}, wants different ones")
    phases = []
    for same in zip(*(row.phases for row in rows), strict=True):
        trains = tuple(dict.fromkeys(name for phase in same for name in phase.trains))
        terms = {key: term for phase in reversed(same) for key, term in keyed(phase.objective).items()}
        longest = max((phase.objective for phase in same), key=len)
        order = dict.fromkeys([*keyed(longest), *terms])
        phases.append(Phase(trains, same[0].prompts, tuple(terms[key] for key in order)))
    name = ",".join(row.name for row in rows)
    return replace(first, name=name, phases=tuple(phases), variants=tuple(rows), closed_form=None)


def keyed(objective: Sequence[Term]) -> dict[tuple[int | None, str, int], Term]:
    """Terms by shots, source, and the number of earlier terms with the same two."""
    terms: dict[tuple[int | None, str, int], Term] = {}
    for term in objective:
        count = sum(key[:2] == (term.shots, term.source) for key in terms)
        terms[term.shots, term.source, count] = term
    return terms


def named(regime: str | Regime | Sequence[str | Regime]) -> Regime:
    """The row of a name, a row of the caller after a check, or several rows combined by `together`.

    Parameters
    ----------
    regime : str, Regime or sequence of these

    Returns
    -------
    Regime

    Examples
    --------
    >>> [phase.trains for phase in fl.training.regimes.named("fine-tune").phases]
    [('attention', 'heads'), ('prompts',)]
    """
    if isinstance(regime, (list, tuple)) and regime:
        rows = [named(one) for one in regime]
        return rows[0] if len(rows) == 1 else together(rows)
    if isinstance(regime, str):
        return REGIMES[choice("regime", regime, REGIMES)]
    if not isinstance(regime, Regime):
        raise TypeError(f"regime: got {regime!r}, wants one of {', '.join(REGIMES)} or a Regime")
    if not regime.phases:
        raise ValueError("regime: has no phases, wants at least one")
    for i, phase in enumerate(regime.phases):
        _check_phase(f"regime.phases[{i}]", phase)
    _check_term("regime.judged", regime.judged)
    choice("regime.study", regime.study, STUDIES)
    return regime


def _check_phase(where: str, phase: Any) -> None:
    if not isinstance(phase, Phase):
        raise TypeError(f"{where}: got a {type(phase).__name__}, wants a Phase")
    for name in phase.trains:
        choice(f"{where}.trains", name, ("attention", "heads", "prompts", "q", "k", "v"))
    if not phase.trains or len(set(phase.trains)) < len(phase.trains):
        raise ValueError(f"{where}.trains: got {phase.trains!r}, wants one or more different names")
    if not phase.objective:
        raise ValueError(f"{where}.objective: has no terms, wants one or more")
    if "prompts" in phase.trains and not phase.prompts:
        raise ValueError(f"{where}: trains prompts that it does not prepend, wants prompts=True")
    for i, term in enumerate(phase.objective):
        _check_term(f"{where}.objective[{i}]", term)


def _check_term(where: str, term: Any) -> None:
    if not isinstance(term, Term):
        raise TypeError(f"{where}: got a {type(term).__name__}, wants a Term")
    choice(f"{where}.source", term.source, ("mix", "target"))
    shots = term.shots
    if shots is not None and (isinstance(shots, bool) or not isinstance(shots, int) or shots < 0):
        raise ValueError(f"{where}.shots: got {shots!r}, wants an integer >= 0, or None for the run's n")
    weight: Any = term.weight
    two = isinstance(weight, (tuple, list)) and len(weight) == 2
    if not two or not all(isinstance(w, (int, float)) and math.isfinite(w) for w in weight):
        raise ValueError(f"{where}.weight: got {weight!r}, wants two finite numbers, at the first step and at the end")
