"""The objective of a phase: the loss of every trial on the sequences of a step, and its gradients.

A batch may be cut into pieces, by the index of the sequences. The loss of a piece is weighted by its share of the
batch's sequences or, where tasks have weights, of each task's sequences. The sums over pieces are then the losses and
gradients of the batch, to rounding. They are added in float64, in one buffer, which the processes that share the pieces
reduce in one call:

    [ losses (R,), gradients (P,) ]  a row for each piece, or one for all          signals (2,)

With a row for each piece the rows are added in order afterwards: the bits do not depend on the number of processes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlin.data.sources import TaskMixture
from fastlin.models import Model
from fastlin.models.base import Forms
from fastlin.ops.sampled import GradientsOfStep, Step, Stream, TaskSource
from fastlin.training.config import RunConfig
from fastlin.training.regimes import Term, keyed
from fastlin.training.team import Team

_SIGNALS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)


class TermDraw(NamedTuple):
    """A term of an objective on a piece of a batch."""

    term: Term
    shots: int
    sources: list[TaskSource]  # one, or one per task
    stream: Stream
    offset: int
    batch: int
    share: float  # weight of the piece's mean in that of the batch; 1 where `weight` is given
    weight: Tensor | None  # (K,)
    rows: Tensor | None  # trials that have the term; None: all
    variants: list[Term]  # the term in each variant that has it; empty without variants
    calls: dict[int, GradientsOfStep]  # of its sources, by index, once they are prepared
    column: int  # of its first factor among `Objective.factors`

    @property
    def weighted(self) -> list[Term]:
        """The terms whose weights are its factors, one for each variant that has it."""
        return self.variants or [self.term]


class Objective:
    """The objective of a phase, by its index in the regime.

    Attributes
    ----------
    turns : int
        Optimiser updates in a step: one, or one per task.
    sequences : int
        Sequences of a step, in all processes.
    heard : int or None
        A signal that one of several processes caught by the last step.
    """

    def __init__(self, config: RunConfig, model: Model, sources: dict[str, TaskSource], team: Team, index: int) -> None:
        self.config, self.model, self.sources, self.team, self.index = config, model, sources, team, index
        self.phase = phase = config.regime.phases[index]
        self.heard: int | None = None
        self._forms: Forms = {}
        self._scaled: list[tuple[Tensor, Tensor, Tensor]] = []
        self._names = names = model.trained_names(phase.trains)
        scaled = {name: view.shape for name, view, _ in model.scaled()}
        self._shapes = [scaled.get(name, getattr(model, name).shape) for name in names]
        self._wants = "".join(a for a, raws in model.made_from.items() if not set(raws).isdisjoint(names))
        self._in_pieces = team.size > 1 or config.shards is not None
        pieces = config.shards or team.size
        self._rows = config.shards or 1
        terms = range(len(phase.objective))
        # The terms of each piece of this process, by row of the buffer.
        self._units = {
            piece if config.shards else 0: [self._draw(i, piece, pieces) for i in terms] for piece in team.share(pieces)
        }
        whole = [self._draw(i, 0, 1) for i in terms]
        self.turns = max(len(draw.sources) for draw in whole)
        self.sequences = self.turns * sum(draw.batch for draw in whole)

    def _draw(self, i_term: int, piece: int, pieces: int) -> TermDraw:
        config, phase, term = self.config, self.phase, self.phase.objective[i_term]
        source, key = self.sources[term.source], list(keyed(phase.objective))[i_term]
        terms = [keyed(row.phases[self.index].objective).get(key) for row in config.regime.variants]
        has = [i for i in range(config.variants) if not terms or terms[i] is not None]
        rows = None
        if len(has) < config.variants:
            trials = [seed * config.variants + i for seed in range(config.trials) for i in has]
            rows = torch.tensor(trials, device=self.model.attention_unit.device)
        own = [i_term * config.trials + seed for seed in range(config.trials) for _ in has]
        stream: Stream = own if config.own_data else i_term
        shots = config.n if term.shots is None else term.shots
        mixed = isinstance(source, TaskMixture) and source.K > 1
        batch, weight, sources = config.batch, None, [source]
        if mixed and config.prompts_in_turn and phase.trains == ("prompts",):
            assert isinstance(source, TaskMixture)
            sources = [source.reweighted(row) for row in torch.eye(source.K, dtype=torch.float64)]
        elif mixed and config.batch_per_task:
            assert isinstance(source, TaskMixture)
            equal = torch.full((source.K,), 1.0 / source.K, dtype=torch.float64)
            balanced = source.reweighted(equal, stratify=True)
            sources, batch, weight = [balanced], batch * source.K, source.weights
        first, last = batch * piece // pieces, batch * (piece + 1) // pieces
        share = (last - first) / batch
        if weight is not None:
            share = 1.0
            if pieces > 1:
                weight = weight * balanced.task_counts(first, last - first) / balanced.task_counts(0, batch)
            weight = weight.to(self.model.attention_unit)
        own_terms = [t for t in terms if t is not None]
        column = i_term * config.variants
        return TermDraw(term, shots, sources, stream, first, last - first, share, weight, rows, own_terms, {}, column)

    def factors(self, progress: float) -> list[float]:
        """Factors of the losses of all terms at `progress`, as `by_hand` takes them: `variants` columns for each."""
        found = [1.0] * (len(self.phase.objective) * self.config.variants)
        for draw in self._units[0]:
            for i, term in enumerate(draw.weighted):
                found[draw.column + i] = draw.share * term.weight_at(progress)
        return found

    def backward(self, step: int, progress: float, turn: int, trained: list[Tensor], caught: int | None) -> Tensor:
        """Compute the losses (R,) of the batch, and set the gradients of the trained parameters, by autograd.

        The gradients are those of the losses over the model's `loss_unit`. `progress` in [0, 1] is the part of the
        phase that is done, `caught` a signal that this process caught.
        """

        def of_draws(draws: list[TermDraw]) -> tuple[Tensor, list[Tensor]]:
            loss = self.loss(draws, step, progress, turn)
            torch.autograd.backward(loss.sum() / self.model.loss_unit)
            grads = [torch.zeros_like(raw) if raw.grad is None else raw.grad for raw in trained]
            for raw in trained:
                raw.grad = None
            return loss.detach(), grads

        loss, grads = self._summed(of_draws, [raw.shape for raw in trained], caught)
        for raw, grad in zip(trained, grads, strict=True):
            raw.grad = grad
        return loss

    @torch.no_grad()
    def by_hand(
        self, step: Step, progress: float | Tensor, turn: int, caught: int | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Losses (R,) of the batch and their gradients of the trained raw parameters, without autograd.

        Arguments as in `backward`; of a step in device memory, `progress` is a tensor of its `factors`. The gradients
        are those of the losses, without the factor 1 / `loss_unit`, in the forms of `Model.pull`.
        """

        def of_draws(draws: list[TermDraw]) -> tuple[Tensor, list[Tensor]]:
            loss, grads = self._gradients(draws, step, progress, turn)
            pulled = self.model.pull(grads)
            return loss, [pulled[name] for name in self._names]

        return self._summed(of_draws, self._shapes, caught)

    def _summed(
        self,
        of_draws: Callable[[list[TermDraw]], tuple[Tensor, list[Tensor]]],
        shapes: list[torch.Size],
        caught: int | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Losses and gradients of the batch, summed over its pieces and over processes."""
        if not self._in_pieces:
            return of_draws(self._units[0])
        R, unit = self.model.shape.trials, self.model.attention_unit
        sizes = [R, *(shape.numel() for shape in shapes)]
        width = sum(sizes)
        flat = torch.zeros(self._rows * width + len(_SIGNALS), dtype=torch.float64, device=unit.device)
        rows = flat[: -len(_SIGNALS)].view(self._rows, width).unbind()
        for row, draws in self._units.items():
            if any(draw.batch for draw in draws):
                loss, grads = of_draws(draws)
                torch.cat([loss, *(grad.reshape(-1) for grad in grads)], out=rows[row])
        if caught is not None:
            flat[_SIGNALS.index(caught) - len(_SIGNALS)] = 1.0
        self.team.add(flat)
        had = flat[-len(_SIGNALS) :].tolist()
        self.heard = next((number for number, count in zip(_SIGNALS, had, strict=True) if count), None)
        total = rows[0]
        for other in rows[1:]:
            total = total + other
        loss, *sums = total.to(unit.dtype).split_with_sizes(sizes)
        return loss, [grad.view(shape) for grad, shape in zip(sums, shapes, strict=True)]

    def loss(self, draws: list[TermDraw], step: int, progress: float, turn: int) -> Tensor:
        """Loss (R,) on terms of the objective; zero for trials that do not have them."""
        losses = []
        for draw in draws:
            if draw.batch == 0:
                continue
            loss, _ = self.model.loss(
                *self._data(draw, turn),
                **self._place(draw),
                step=step,
                prompts=self.phase.prompts,
                rows=draw.rows,
            )
            factor = _factor(draw, progress, loss)
            losses.append(self._of_all_trials(loss if factor is None else factor * loss, draw.rows))
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)

    def _gradients(
        self, draws: list[TermDraw], step: Step, progress: float | Tensor, turn: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`loss`, and its gradients by letter of the op's parameters."""
        forms = self._kept_forms()
        total, sums = None, dict[str, Tensor]()
        for draw in draws:
            if draw.batch == 0:
                continue
            loss, grads = self._of_term(draw, forms, turn)(step)
            factor = _factor(draw, progress, loss)
            if factor is not None:
                loss = factor * loss
                grads = {letter: factor.view(-1, *[1] * (grad.ndim - 1)) * grad for letter, grad in grads.items()}
            if draw.rows is not None:
                loss = self._of_all_trials(loss, draw.rows)
                grads = {letter: self._of_all_trials(grad, draw.rows) for letter, grad in grads.items()}
            total = loss if total is None else total + loss
            sums = {letter: sums[letter] + grad for letter, grad in grads.items()} if sums else grads
        assert total is not None
        return total, sums

    def _kept_forms(self) -> Forms:
        """The parameters of the op, in tensors that stay where they are."""
        model, prompts, forms = self.model, self.phase.prompts, self._forms
        if not forms:
            made = model.forms(prompts)
            forms |= {letter: None if form is None else form.contiguous() for letter, form in made.items()}
            scaled = ((view, unit, forms[name]) for name, view, unit in model.scaled())
            self._scaled = [(view, unit, form) for view, unit, form in scaled if form is not None]
            return forms
        for view, unit, form in self._scaled:
            torch.mul(view, unit, out=form)
        for letter, mixed in model.mixed(prompts).items():
            kept = forms[letter]
            assert kept is not None
            kept.copy_(mixed)
        return forms

    def _of_term(self, draw: TermDraw, forms: Forms, turn: int) -> GradientsOfStep:
        """Loss and gradients of a term, prepared in the first step."""
        source, rows = turn % len(draw.sources), draw.rows
        if source not in draw.calls:
            own = {letter: form if form is None or rows is None else form[rows] for letter, form in forms.items()}
            call = self.model.gradients(*self._data(draw, turn), own, self._wants, **self._place(draw))
            draw.calls[source] = call if rows is None else partial(_of_rows, call, forms, own, rows)
        return draw.calls[source]

    def _data(self, draw: TermDraw, turn: int) -> tuple[TaskSource, int, int]:
        return draw.sources[turn % len(draw.sources)], draw.shots, draw.batch

    def _place(self, draw: TermDraw) -> dict[str, Any]:
        return {
            "seed": self.config.seed,
            "stream": draw.stream,
            "offset": draw.offset,
            "weight": draw.weight,
            "backend": self.config.backend,
        }

    def _of_all_trials(self, tensor: Tensor, rows: Tensor | None) -> Tensor:
        """A tensor of some trials as one of all, zero for the others."""
        if rows is None:
            return tensor
        return tensor.new_zeros(self.model.shape.trials, *tensor.shape[1:]).index_copy(0, rows, tensor)


def _of_rows(
    call: GradientsOfStep, forms: Forms, own: Forms, rows: Tensor, step: Step
) -> tuple[Tensor, dict[str, Tensor]]:
    for letter, form in forms.items():
        if form is not None:
            torch.index_select(form, 0, rows, out=own[letter])
    return call(step)


def _factor(draw: TermDraw, progress: float | Tensor, like: Tensor) -> Tensor | None:
    """Factor of a term's loss, one for each of its trials; None for one."""
    terms = draw.weighted
    if isinstance(progress, Tensor):
        if draw.share == 1.0 and all(tuple(term.weight) == (1.0, 1.0) for term in terms):
            return None
        factors = progress[draw.column : draw.column + len(terms)].to(like.dtype)
    else:
        weights = [term.weight_at(progress) for term in terms]
        if draw.share == 1.0 and weights.count(1.0) == len(weights):
            return None
        factors = draw.share * like.new_tensor(weights)
    return factors.repeat(len(like) // len(terms))
