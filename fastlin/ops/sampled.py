"""The ops that draw their own data from a task source: nothing about a sequence is given, or kept.

A sequence enters a model through its Gram matrix and its query alone, and a task source draws both without drawing
tokens, at a cost that does not depend on n (`fastlin.data.bartlett`). A backend that can draws them in its kernel, uses
each for all trials and forgets it; otherwise the source draws a batch. A source that gives only tokens gives these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from fastlin import reference, validation
from fastlin.backends.problem import Options
from fastlin.ops import _register
from fastlin.ops._call import trials_of
from fastlin.ops.functional import Weight, in_order

Stream = int | str | Sequence[int]


class Source(Protocol):
    """What a task source tells of itself, and how it is asked."""

    @property
    def m(self) -> int:
        """Token width."""

    @property
    def K(self) -> int:
        """Number of tasks."""

    @property
    def sample(self) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
        """z, q, y, task. A source that can has `sample_gram` besides, with G in place of z, and `draw` for kernels."""


def sampled_loss(
    mix: Source,
    n: int,
    batch: int,
    p: Tensor | None,
    W: Tensor,
    v: Tensor,
    *,
    seed: int,
    step: int,
    stream: Stream = 0,
    offset: int = 0,
    weight: Weight = None,
    scale: float = 1.0,
    see_query: bool = False,
    backend: str = "auto",
    check_finite: bool = False,
) -> tuple[Tensor, Tensor]:
    """Squared error of one layer on sequences that a task source draws.

    Parameters
    ----------
    mix : TaskMixture, SphereTasks, FixedTask or PointSet
        Where the sequences come from; K and m are its.
    n, batch : int
        Context length and number of sequences.
    p, W, v : Tensor
        As in `prompt_loss`; the data have their dtype and device.
    seed, step, offset : int
        Which sequences: they depend on these and on nothing else, and a batch can be taken in pieces by `offset`.
    stream : int, "trial" or sequence of int
        An integer is the stream of all trials, which share their data. With "trial" trial r draws its own data from
        stream r; with R integers, from those.
    weight, scale, see_query, backend, check_finite
        As in `prompt_loss`.

    Returns
    -------
    loss : Tensor, shape () or (R,)
    per_task : Tensor, shape (K,) or (R, K)

    Notes
    -----
    Equal to `gram_loss` on `mix.sample_gram(batch, n, ...)`. Differentiable in p, W, v.

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]], torch.eye(2).expand(2, 2, 2), [0.5, 0.5])
    >>> p, W, v = (torch.randn(50, *size).requires_grad_() for size in ((2, 1, 3), (3, 3), (2, 3)))  # 50 trials
    >>> loss, per_task = fl.sampled_loss(mix, 20, 1024, p, W, v, seed=0, step=0, scale=1 / 20)
    >>> loss.sum().backward()
    >>> loss.shape, per_task.shape, W.grad.shape
    (torch.Size([50]), torch.Size([50, 2]), torch.Size([50, 3, 3]))
    """
    place = {"seed": seed, "step": step, "stream": stream, "offset": offset}
    model = {"scale": scale, "see_query": see_query}
    return _loss("sampled_loss", mix, n, batch, {"p": p, "W": W, "v": v}, place, weight, backend, check_finite, model)


def sampled_stack_loss(
    mix: Source,
    n: int,
    batch: int,
    p: Tensor | None,
    A: Tensor,
    C: Tensor,
    h: Tensor,
    *,
    seed: int,
    step: int,
    stream: Stream = 0,
    offset: int = 0,
    weight: Weight = None,
    scale: float = 1.0,
    see_query: bool = False,
    first_skip: bool | None = None,
    residual: float = 1.0,
    backend: str = "auto",
    check_finite: bool = False,
) -> tuple[Tensor, Tensor]:
    """Squared error of a stack of L layers on sequences that a task source draws.

    Parameters
    ----------
    mix, n, batch, seed, step, stream, offset
        As in `sampled_loss`.
    p, A, C, h, weight, scale, see_query, first_skip, residual, backend, check_finite
        As in `stack_loss`.

    Returns
    -------
    loss : Tensor, shape () or (R,)
    per_task : Tensor, shape (K,) or (R, K)

    Examples
    --------
    >>> A, C, h = torch.eye(3).repeat(2, 1, 1), torch.eye(3).repeat(2, 1, 1), torch.ones(3)
    >>> loss, _ = fl.sampled_stack_loss(fl.SphereTasks(2), 20, 1024, None, A, C, h, seed=0, step=0, scale=1 / 20)
    >>> loss.shape
    torch.Size([])
    """
    place = {"seed": seed, "step": step, "stream": stream, "offset": offset}
    model = {"scale": scale, "see_query": see_query, "first_skip": first_skip, "residual": residual}
    parameters = {"p": p, "A": A, "C": C, "h": h}
    return _loss("sampled_stack_loss", mix, n, batch, parameters, place, weight, backend, check_finite, model)


def _loss(
    op: str,
    mix: Source,
    n: int,
    batch: int,
    parameters: Mapping[str, Any],
    place: Mapping[str, Any],
    weight: Weight,
    backend: str,
    check_finite: bool,
    model: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    options, weight = examined(op, mix, parameters, weight, backend, check_finite, model)
    like = next(t for name, t in parameters.items() if name in "WA")
    if backend == "reference":
        literal: Callable[..., tuple[Tensor, Tensor]] = getattr(reference, op)
        return literal(mix, n, batch, *parameters.values(), **place, weight=weight, check_finite=check_finite, **model)
    tensors = in_order({"z": None, "q": None, "task": None}, parameters)
    streams = validation.streams(op, place["stream"], trials_of(tensors))
    if streams is not None:
        return of_each_trial(
            parameters,
            streams,
            lambda own, one: _loss(
                op, mix, n, batch, own, {**place, "stream": one}, weight, backend, check_finite, model
            ),
        )
    if hasattr(mix, "draw"):
        drawn = _register.sampled_loss(tensors, lambda: mix.draw(batch, n, **place), weight, options)
        if drawn is not None:
            return drawn
    x, q, y, task = _untraced_draw(mix, batch, n, **place, dtype=like.dtype, device=like.device)
    name = "G" if hasattr(mix, "sample_gram") else "z"
    if name == "z":
        options = options._replace(op="prompt_loss" if op == "sampled_loss" else "stack_loss")
    return _register.loss(in_order({name: x, "q": q, "task": task}, parameters), y, weight, options)


def examined(
    op: str,
    mix: Source,
    parameters: Mapping[str, Any],
    weight: Weight,
    backend: str,
    check_finite: bool,
    model: Mapping[str, Any],
) -> tuple[Options, Tensor | None]:
    """Check the arguments of an op that draws from a task source; returns its options, and the weight as a tensor."""
    if isinstance(mix, type) or not hasattr(mix, "sample"):
        raise TypeError(f"{op}: mix is a {type(mix).__name__}; wants a task source such as fastlin.TaskMixture")
    accepted, weight = validation.arguments(
        op,
        {},
        parameters,
        weight=weight,
        backend=backend,
        check_finite=check_finite,
        known={"K": (mix.K, "mix"), "m": (mix.m, "mix")},
        **model,
    )
    return accepted.options, weight


def of_each_trial(
    parameters: Mapping[str, Any],
    streams: Sequence[int],
    loss: Callable[[dict[str, Any], int], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Loss (R,) and per-task losses (R, K) of trials that each have a stream, by a loss of one's parameters.

    Neighbours of the same stream are one call: their data are drawn once.
    """
    runs = [(stream, len(list(same))) for stream, same in groupby(streams)]
    sizes = [size for _, size in runs]
    apart = {name: [None] * len(runs) if t is None else t.split(sizes) for name, t in parameters.items()}
    trials = [loss({name: parts[r] for name, parts in apart.items()}, stream) for r, (stream, _) in enumerate(runs)]
    losses, per_task = zip(*trials, strict=True)
    return torch.cat(losses), torch.cat(per_task)


def _draw(mix: Any, batch: int, n: int, **place: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = getattr(mix, "sample_gram", mix.sample)
    return draw(batch, n, **place)


# Sampling is not for tracing: torch.compile breaks the graph around it. This form of torch.compiler.disable does not
# import the compiler before the first call, which would double the time of `import fastlin`.
_untraced_draw: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = _disable_dynamo(_draw)
