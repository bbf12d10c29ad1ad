"""The ops that draw their own data from a task source.

A prediction depends on a sequence only through its Gram matrix and its query. A task source draws both without drawing
tokens, at a cost that does not depend on n (`fastlin.data.bartlett`). A backend with `draws` draws them in its kernel,
uses each for all trials and keeps none. Otherwise the source draws a batch: Gram matrices if it can, else tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol, Required, TypedDict

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from fastlin import validation
from fastlin._checks import kind
from fastlin.backends.draw import Draw
from fastlin.backends.problem import LETTERS
from fastlin.ops import call, registered
from fastlin.ops.api import Weight
from fastlin.ops.arguments import Arguments, Given, trials_of
from fastlin.validation import Settings

Stream = int | str | Sequence[int]
Batch = tuple[Tensor, Tensor, Tensor, Tensor]
Step = int | Tensor
"""A step, or (1,) int64 in the memory of a device, which kernels of a backend with `schedules` read when they run."""
GradientsOfStep = Callable[[Step], tuple[Tensor, dict[str, Tensor]]]


class Sequences(TypedDict, total=False):
    """Which sequences of a task source, as in `sampled_loss`."""

    seed: Required[int]
    step: Required[int]
    stream: Stream
    offset: int


class TaskSource(Protocol):
    """What the ops need of a task source.

    One that can has also `sample_gram`, with G in place of z, and `draw`, for kernels that draw.
    """

    @property
    def m(self) -> int: ...  # token width

    @property
    def K(self) -> int: ...  # number of tasks

    @property
    def sample(self) -> Callable[..., Batch]: ...  # z, q, y, task


def sampled_loss(
    mix: TaskSource,
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
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
    >>> sizes = (50, 2, 1, 3), (50, 3, 3), (50, 2, 3)  # 50 trials
    >>> p, W, v = (torch.randn(size, requires_grad=True) for size in sizes)
    >>> loss, per_task = fl.sampled_loss(mix, 20, 1024, p, W, v, seed=0, step=0, scale=1 / 20)
    >>> loss.sum().backward()
    >>> loss.shape, per_task.shape, W.grad.shape
    (torch.Size([50]), torch.Size([50, 2]), torch.Size([50, 3, 3]))
    """
    tensors = (None, None, None, p, None, None, W, v, None)
    settings = Settings(scale, see_query, backend=backend, check_finite=check_finite)
    place: Sequences = {"seed": seed, "step": step, "stream": stream, "offset": offset}
    loss, per_task = _loss("sampled_loss", mix, n, batch, tensors, weight, settings, place)
    return loss, per_task


def sampled_stack_loss(
    mix: TaskSource,
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
    >>> source, options = fl.SphereTasks(2), {"seed": 0, "step": 0, "scale": 1 / 20}
    >>> loss, _ = fl.sampled_stack_loss(source, 20, 1024, None, A, C, h, **options)
    >>> loss.shape
    torch.Size([])
    """
    tensors = (None, None, None, p, A, C, None, None, h)
    settings = Settings(scale, see_query, first_skip, residual, backend, check_finite)
    place: Sequences = {"seed": seed, "step": step, "stream": stream, "offset": offset}
    loss, per_task = _loss("sampled_stack_loss", mix, n, batch, tensors, weight, settings, place)
    return loss, per_task


def sampled_gradients(
    op: str,
    mix: TaskSource,
    n: int,
    batch: int,
    forms: Mapping[str, Tensor | None],
    wants: str,
    weight: Tensor | None,
    options: Mapping[str, Any],
    *,
    seed: int,
    stream: Stream = 0,
    offset: int = 0,
) -> GradientsOfStep:
    """A function of the step: loss (R,) of `sampled_loss` or `sampled_stack_loss`, and its gradients by letter.

    Arguments are checked here, once: a step costs its kernel and 15 us.

    Parameters
    ----------
    op : str
        "sampled_loss" or "sampled_stack_loss".
    mix, n, batch, weight
        As in `sampled_loss`.
    forms : mapping
        The op's parameters by letter, contiguous; none requires grad. The function reads the numbers that they have
        when it is called.
    wants : str
        Letters of the gradients, in the order of `LETTERS`.
    options : mapping
        Fields of `Settings`.
    seed, stream, offset
        As in `sampled_loss`.

    Returns
    -------
    function
        Results of later calls may overwrite those of earlier ones.

    Raises
    ------
    ValueError
        From the function: the step is in device memory, but no kernel draws that can read it there.
    """
    tensors, settings = tuple([forms.get(letter) for letter in LETTERS]), Settings(**options)
    place: Sequences = {"seed": seed, "step": 0, "stream": stream, "offset": offset}
    known = {"K": (mix.K, "mix"), "m": (mix.m, "mix")}
    (checked, _), weights = call.signature(op, tensors, None, weight, settings, known)
    draw: Callable[..., Draw | None] = getattr(mix, "draw", lambda *_, **__: None)
    args, backend = call.checked(Arguments(tensors, checked, weight=weights, wants=wants))
    is_drawn = backend.draws and type(stream) is int and draw(batch, n, **place) is not None
    bound = call.Plan("sampled", args, backend).bind(args) if is_drawn else None

    def of_step(step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        number = step if isinstance(step, int) else 0
        drawn = None if bound is None else draw(batch, n, seed=seed, step=number, stream=stream, offset=offset)
        if isinstance(step, Tensor):
            if bound is None or drawn is None or not backend.schedules:
                raise ValueError(f"{op}: step is a tensor, wants an integer where no CUDA kernel draws the sequences")
            loss, _, *grads = bound(drawn._replace(device_step=step))
        elif bound is None or drawn is None:
            loss, _, *grads = _loss(op, mix, n, batch, tensors, weight, settings, {**place, "step": step}, wants)
        else:
            loss, _, *grads = bound(drawn)
        return loss, dict(zip(wants, grads, strict=True))

    return of_step


def _loss(
    op: str,
    mix: TaskSource,
    n: int,
    batch: int,
    tensors: Given,
    weight: Weight,
    settings: Settings,
    place: Sequences,
    wants: str = "",
) -> tuple[Tensor, ...]:
    """Loss and per-task losses; outside of autograd, also the gradients of the `wants` letters."""
    if isinstance(mix, type) or not hasattr(mix, "sample"):
        raise not_a_source(op, mix)
    known = {"K": (mix.K, "mix"), "m": (mix.m, "mix")}
    (options, plans), weights = call.signature(op, tensors, None, weight, settings, known)
    if options.backend == "reference":
        drawn = {"mix": mix, "n": n, "batch": batch, **place}
        literal: tuple[Tensor, Tensor] = registered.literal(op, tensors, None, weights, settings, **drawn)
        return literal
    if type(place["stream"]) is not int:
        streams = validation.streams(op, place["stream"], trials_of(tensors))
        if streams is not None:

            def of_trials(own: Given, stream: int) -> tuple[Tensor, ...]:
                return _loss(op, mix, n, batch, own, weights, settings, {**place, "stream": stream}, wants)

            return for_each_trial(tensors, streams, of_trials)
    given = Arguments(tensors, options, weight=weights, wants=wants, plans=plans)
    if hasattr(mix, "draw"):
        losses = registered.sampled_loss(given, mix, n, batch, place)
        if losses is not None:
            return losses
    like, sample = call.anchor(tensors), getattr(mix, "sample_gram", mix.sample)
    x, q, y, task = untraced(sample, batch, n, **place, dtype=like.dtype, device=like.device)
    # A source may be the user's: what it draws is checked as the data of an op are.
    of_data, data = _OF_DATA[op][hasattr(mix, "sample_gram")], (x, q, task, *tensors[3:])
    try:
        if wants:
            return registered.loss_and_gradients(of_data, data, y, weights, settings, known, wants)
        return registered.loss(of_data, data, y, weights, settings, known)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{op}: the data that mix draws do not fit: {error}") from None


_OF_DATA = {"sampled_loss": ("prompt_loss", "gram_loss"), "sampled_stack_loss": ("stack_loss", "gram_stack_loss")}
"""The same losses of given tokens, and of given Gram matrices."""


def not_a_source(op: str, mix: Any) -> TypeError:
    """The error for a `mix` that cannot draw."""
    return TypeError(f"{op}: mix is {kind(mix)}; wants a task source such as fastlin.SphereTasks(10)")


def for_each_trial(
    tensors: Sequence[Tensor | None],
    streams: Sequence[int],
    loss: Callable[[Given, int], tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """Losses and other results (R, ...) of trials that each have a stream, by a loss of some trials' tensors."""
    # Neighbours of the same stream are one call: their data are drawn once.
    runs = [(stream, len(list(same))) for stream, same in groupby(streams)]
    sizes = [size for _, size in runs]
    split: list[Sequence[Any]] = [[None] * len(runs) if t is None else torch.split(t, sizes) for t in tensors]
    trials = [loss(tuple(parts[r] for parts in split), stream) for r, (stream, _) in enumerate(runs)]
    return tuple(torch.cat(parts) for parts in zip(*trials, strict=True))


@_disable_dynamo
def untraced(sample: Callable[..., Batch], batch: int, n: int, **place: Any) -> Batch:
    """The batch that a source draws. torch.compile does not trace sampling: it breaks the graph around it."""
    # This form of torch.compiler.disable does not import the compiler before the first call, which would double the
    # time of `import fastlin`.
    return sample(batch, n, **place)
