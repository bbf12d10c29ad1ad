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
from typing import NamedTuple

import torch
from torch import Tensor

from fastlin.data.sources import TaskMixture
from fastlin.models import Model
from fastlin.ops.sampled import Stream, TaskSource
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
        return TermDraw(term, shots, sources, stream, first, last - first, share, weight, rows, own_terms)

    def backward(self, step: int, progress: float, turn: int, trained: list[Tensor], caught: int | None) -> Tensor:
        """Compute the losses (R,) of the batch, and set the gradients of the trained parameters.

        `progress` in [0, 1] is the part of the phase that is done, `caught` a signal that this process caught.
        """
        if not self._in_pieces:
            return self._backward(self._units[0], step, progress, turn)
        R, device = self.model.shape.trials, self.model.attention_unit.device
        sizes = [R, *(raw.numel() for raw in trained)]
        width = sum(sizes)
        flat = torch.zeros(self._rows * width + len(_SIGNALS), dtype=torch.float64, device=device)
        rows = flat[: -len(_SIGNALS)].view(self._rows, width).unbind()
        for row, draws in self._units.items():
            loss = self._backward(draws, step, progress, turn)
            grads = [raw.new_zeros(raw.numel()) if raw.grad is None else raw.grad.view(-1) for raw in trained]
            torch.cat([loss, *grads], out=rows[row])
            for raw in trained:
                raw.grad = None
        if caught is not None:
            flat[_SIGNALS.index(caught) - len(_SIGNALS)] = 1.0
        self.team.add(flat)
        had = flat[-len(_SIGNALS) :].tolist()
        self.heard = next((number for number, count in zip(_SIGNALS, had, strict=True) if count), None)
        total = rows[0]
        for other in rows[1:]:
            total = total + other
        loss, *sums = total.to(trained[0].dtype).split_with_sizes(sizes)
        for raw, gradient in zip(trained, sums, strict=True):
            raw.grad = gradient.view(raw.shape)
        return loss

    def _backward(self, draws: list[TermDraw], step: int, progress: float, turn: int) -> Tensor:
        """Losses (R,) of some terms, zero where they have no sequences; their gradients are added to the parameters."""
        if not any(draw.batch for draw in draws):
            return self.model.attention_unit.new_zeros(self.model.shape.trials)
        loss = self.loss(draws, step, progress, turn)
        torch.autograd.backward(loss.sum() / self.model.loss_unit)
        return loss.detach()

    def loss(self, draws: list[TermDraw], step: int, progress: float, turn: int) -> Tensor:
        """Loss (R,) on terms of the objective; zero for trials that do not have them."""
        losses = []
        for draw in draws:
            if draw.batch == 0:
                continue
            loss, _ = self.model.loss(
                draw.sources[turn % len(draw.sources)],
                draw.shots,
                draw.batch,
                seed=self.config.seed,
                step=step,
                stream=draw.stream,
                offset=draw.offset,
                prompts=self.phase.prompts,
                weight=draw.weight,
                backend=self.config.backend,
                rows=draw.rows,
            )
            if draw.share != 1.0:
                loss = draw.share * loss
            weights = [term.weight_at(progress) for term in draw.variants]
            if weights:
                loss = loss * loss.new_tensor(weights).repeat(len(loss) // len(weights))
            elif draw.term.weight_at(progress) != 1.0:
                loss = draw.term.weight_at(progress) * loss
            if draw.rows is not None:
                loss = loss.new_zeros(self.model.shape.trials).index_copy(0, draw.rows, loss)
            losses.append(loss)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)
