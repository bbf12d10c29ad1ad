"""What a phase descends: the loss of every trial on the sequences of a step, and its gradients.

A batch may be cut into pieces, by the index of the sequences, and the trials into chunks. A piece's losses are its
part of the whole batch's: its mean has the share of its sequences, and where tasks have weights, each task's mean has
the share of the task's sequences. So the sums over pieces are the losses and gradients of the batch, to rounding. They
are added in float64, in one buffer, which processes that share the pieces add up in one call:

    [ losses (R,), gradients (P,) ]  a row for each piece, or one for all          signals (2,)

With a row for each piece the rows are added in their order afterwards, and the bits do not depend on who had which.
"""

from __future__ import annotations

import signal
from typing import NamedTuple

import torch
from torch import Tensor

from fastlin.data.sources import TaskMixture
from fastlin.ops.sampled import Source, Stream
from fastlin.training.job import Job
from fastlin.training.memory import chunks
from fastlin.training.regimes import Phase, Regime, Term, keyed

_SIGNALS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)


class Draw(NamedTuple):
    """A term of an objective on a piece of a batch and a chunk of the trials, ready for the ops."""

    term: Term
    shots: int
    sources: list[Source]  # one, or one for each task in turn
    stream: Stream
    offset: int
    batch: int
    share: float  # of the piece's mean in that of the batch; 1 where there are weights
    weight: Tensor | None
    rows: Tensor | None  # trials that have the term; None is all
    variants: list[Term]  # the term in each variant of a regime that has it, where there are variants


def place_of(regime: Regime, phase: Phase) -> int:
    """Where in the regime a phase is; others may be equal to it."""
    return next(i for i, other in enumerate(regime.phases) if other is phase)


class Objective:
    """The objective of a phase.

    Attributes
    ----------
    turns : int
        Optimiser steps in a step: one, or one for each task.
    sequences : int
        That a step draws, in all processes.
    heard : int or None
        A signal that any of several processes has had in the last step.
    """

    def __init__(self, job: Job, phase: Phase) -> None:
        self.job, self.phase = job, phase
        self.heard: int | None = None
        self._in_pieces = job.team.size > 1 or job.shards is not None
        pieces = job.shards or job.team.size
        self._rows = job.shards or 1
        variants = max(len(job.regime.variants), 1)
        parts = chunks(job.model.shape.trials // variants, job.seeds_at_once)
        terms = range(len(phase.objective))
        # For each piece of this process, the terms of each chunk.
        self._units = {
            piece if job.shards else 0: [[self._draw(i, piece, pieces, seeds) for i in terms] for seeds in parts]
            for piece in job.team.share(pieces)
        }
        whole = [self._draw(i, 0, 1, parts[0]) for i in terms]
        self.turns = max(len(draw.sources) for draw in whole)
        self.sequences = self.turns * sum(draw.batch for draw in whole)

    def _draw(self, index: int, piece: int, pieces: int, seeds: range) -> Draw:
        job, phase, term = self.job, self.phase, self.phase.objective[index]
        protocol, source = job.protocol, job.sources[term.source]
        variants = max(len(job.regime.variants), 1)
        all_seeds = job.model.shape.trials // variants
        key, at = list(keyed(phase.objective))[index], place_of(job.regime, phase)
        terms = [keyed(row.phases[at].objective).get(key) for row in job.regime.variants]
        has = [i for i in range(variants) if not terms or terms[i] is not None]
        rows = None
        if len(has) < variants or len(seeds) < all_seeds:
            trials = [seed * variants + i for seed in seeds for i in has]
            rows = torch.tensor(trials, device=job.model.attention_unit.device)
        own = [index * all_seeds + seed for seed in seeds for _ in has]
        stream: Stream = own if protocol.own_data else index
        shots = job.n if term.shots is None else term.shots
        mixed = isinstance(source, TaskMixture) and source.K > 1
        batch, weight, sources = protocol.batch, None, [source]
        if mixed and protocol.prompts_in_turn and phase.trains == ("prompts",):
            assert isinstance(source, TaskMixture)
            sources = [source.reweighted(row) for row in torch.eye(source.K, dtype=torch.float64)]
        elif mixed and protocol.batch_per_task:
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
            weight = weight.to(job.model.attention_unit)
        own_terms = [t for t in terms if t is not None]
        return Draw(term, shots, sources, stream, first, last - first, share, weight, rows, own_terms)

    def backward(self, step: int, progress: float, turn: int, trained: list[Tensor], caught: int | None) -> Tensor:
        """Leave the gradients of the batch in the trained parameters.

        Parameters
        ----------
        step : int
        progress : float
            Share of the phase that is done.
        turn : int
        trained : list of Tensor
            Without gradients as yet.
        caught : int or None
            A signal that this process has had; `heard` is what any has had.

        Returns
        -------
        Tensor (R,)
            The loss of each trial.
        """
        if not self._in_pieces:
            return self._backward(self._units[0], step, progress, turn)
        R, device = self.job.model.shape.trials, self.job.model.attention_unit.device
        sizes = [R, *(raw.numel() for raw in trained)]
        width = sum(sizes)
        flat = torch.zeros(self._rows * width + len(_SIGNALS), dtype=torch.float64, device=device)
        rows = flat[: -len(_SIGNALS)].view(self._rows, width).unbind()
        for row, chunks_of_terms in self._units.items():
            loss = self._backward(chunks_of_terms, step, progress, turn)
            grads = [raw.new_zeros(raw.numel()) if raw.grad is None else raw.grad.view(-1) for raw in trained]
            torch.cat([loss, *grads], out=rows[row])
            for raw in trained:
                raw.grad = None
        if caught is not None:
            flat[_SIGNALS.index(caught) - len(_SIGNALS)] = 1.0
        self.job.team.add(flat)
        had = flat[-len(_SIGNALS) :].tolist()
        self.heard = next((number for number, count in zip(_SIGNALS, had, strict=True) if count), None)
        total = rows[0]
        for other in rows[1:]:
            total = total + other
        loss, *sums = total.to(trained[0].dtype).split_with_sizes(sizes)
        for raw, gradient in zip(trained, sums, strict=True):
            raw.grad = gradient.view(raw.shape)
        return loss

    def _backward(self, units: list[list[Draw]], step: int, progress: float, turn: int) -> Tensor:
        """Add the gradients of some terms to the parameters'; returns their losses (R,), 0 where there is nothing."""
        total = None
        for draws in units:
            if any(draw.batch for draw in draws):
                loss = self.loss(draws, step, progress, turn)
                torch.autograd.backward(loss.sum() / self.job.model.loss_unit)
                total = loss.detach() if total is None else total + loss.detach()
        return self.job.model.attention_unit.new_zeros(self.job.model.shape.trials) if total is None else total

    def loss(self, draws: list[Draw], step: int, progress: float, turn: int) -> Tensor:
        """The loss of each trial on terms of the objective, (R,); zero of trials that these do not have."""
        job, losses = self.job, []
        for draw in draws:
            if draw.batch == 0:
                continue
            loss, _ = job.model.loss(
                draw.sources[turn % len(draw.sources)],
                draw.shots,
                draw.batch,
                seed=job.seed,
                step=step,
                stream=draw.stream,
                offset=draw.offset,
                prompts=self.phase.prompts,
                weight=draw.weight,
                backend=job.backend,
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
                loss = loss.new_zeros(job.model.shape.trials).index_copy(0, draw.rows, loss)
            losses.append(loss)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)
