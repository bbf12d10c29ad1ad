"""Errors of a model at chosen shots on a chosen task source: exact where a closed form covers it, else sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlin import theory
from fastlin._checks import integer, kind
from fastlin._threads import one_thread
from fastlin.data.sources import FixedTask, SphereTasks, TaskMixture
from fastlin.models import Model
from fastlin.ops.sampled import TaskSource, sampled_loss
from fastlin.theory.forgetting import Family, attention_error, task_points
from fastlin.training import streams

_MAX_SHOTS = 1 << 40


class Errors(NamedTuple):
    """Population errors at shot counts.

    Attributes
    ----------
    shots : tuple of int
        S counts.
    error : Tensor (S, R), float64
    standard_error : Tensor (S, R)
        Zero where the error is exact.
    exact : bool

    Examples
    --------
    >>> family = fl.theory.forgetting.pretrained(3)
    >>> errors = fl.evaluate(family, fl.FixedTask([1.0, 0.0, 0.0], bias=True), shots=[0, 10])
    >>> errors.shots, errors.exact, errors.error.shape
    ((0, 10), True, torch.Size([2, 1]))
    """

    shots: tuple[int, ...]
    error: Tensor
    standard_error: Tensor
    exact: bool


class Predictor(NamedTuple):
    """A loss op, its parameters with leading R, and its options at n shots."""

    op: Callable[..., tuple[Tensor, Tensor]]
    params: Mapping[str, Tensor | None]
    options: Callable[[int], dict[str, Any]]


def evaluate(
    model: Any,
    source: TaskSource,
    shots: int | Sequence[int],
    *,
    exact: bool | None = None,
    prompts: bool = True,
    batch: int = 8192,
    batches: int = 64,
    seed: int = 0,
    backend: str = "auto",
) -> Errors:
    """Population errors at shot counts on a task source.

    Parameters
    ----------
    model : Run, Model or theory.forgetting.Family
        Trained trials, or a member of the theory's family, which counts as one trial.
    source : task source
        With the model's token width and, where the model has heads or prompts per task, its number of tasks.
    shots : int or sequence of int
    exact : bool, optional
        None takes the closed form where one covers the model on the source: one layer of linear attention, on tokens
        with a constant coordinate of a `FixedTask`, `SphereTasks` or `TaskMixture`. False samples; True raises where
        there is none.
    prompts : bool
        Whether to prepend the prompts of a Model; a Run decides this itself.
    batch, batches : int
        Sequences per batch, and number of batches, from which the standard error is computed. All trials and shot
        counts use the same.
    seed : int
    backend : str

    Returns
    -------
    Errors

    Examples
    --------
    >>> family = fl.theory.forgetting.pretrained(3)
    >>> task = fl.FixedTask([1.0, 0.0, 0.0], bias=True)
    >>> errors = fl.evaluate(family, task, shots=[0, 10, 100])
    >>> [round(error, 4) for error in errors.error[:, 0].tolist()]
    [1.0, 0.3388, 0.0393]
    >>> few = {"exact": False, "batch": 512, "batches": 8}
    >>> sampled = fl.evaluate(family, task.at_cosine(-1), shots=10, **few)
    >>> sampled.error.shape, sampled.exact
    (torch.Size([1, 1]), False)
    """
    if isinstance(source, type) or not hasattr(source, "sample"):
        raise TypeError(f"source: got {kind(source)}, wants a task source such as fastlin.SphereTasks(10)")
    several: Any = shots if isinstance(shots, Iterable) and getattr(shots, "ndim", 1) > 0 else [shots]
    counts = [integer("shots", n, _MAX_SHOTS) for n in several]
    if not counts:
        raise ValueError("shots: got none, wants at least one")
    for name, value in (("batch", batch), ("batches", batches)):
        if integer(name, value, 1 << 31) < (2 if name == "batches" else 1):
            raise ValueError(f"{name}: got {value}, wants {2 if name == 'batches' else 1} or more")
    predictor = _for_source(predictor_of(model, prompts), source)
    closed = covers(predictor, source)
    if exact and not closed:
        raise ValueError("exact: got True where no closed form covers the model on the source, wants None or False")
    with torch.no_grad():
        if closed if exact is None else exact:
            errors = torch.stack([exact_error(predictor, source, n) for n in counts])
            return Errors(tuple(counts), errors, torch.zeros_like(errors), True)
        rows = [_sampled(predictor, source, n, batch, batches, seed, backend) for n in counts]
    errors, standard_errors = (torch.stack(column) for column in zip(*rows, strict=True))
    return Errors(tuple(counts), errors, standard_errors, False)


def predictor_of(model: Any, prompts: bool = True) -> Predictor:
    """The predictor of a Run, Model or Family."""
    if isinstance(model, Family):
        W, v = model.attention()
        params: dict[str, Tensor | None] = {"p": None, "W": W[None], "v": v[None, None]}
        return Predictor(sampled_loss, params, lambda n: {"see_query": True, "scale": 1.0 / (n + 1)})
    if isinstance(model, Model):
        with torch.no_grad():
            return Predictor(model.op, model.forms(prompts), model.op_options)
    if isinstance(getattr(model, "model", None), Model):
        return Predictor(model.model.op, model.params, model.model.op_options)
    raise TypeError(f"model: got a {type(model).__name__}, wants a Run, a model of fastlin.models or a Family")


def _for_source(predictor: Predictor, source: TaskSource) -> Predictor:
    """The predictor with the source's number of tasks; raises where its tasks differ and their number does too."""
    params = dict(predictor.params)
    for name, dimension in (("p", 1), ("v", -2), ("h", -2)):
        value = params.get(name)
        if value is None:
            continue
        if value.shape[-1] != source.m:
            raise ValueError(f"source: has token width {source.m}, wants {value.shape[-1]}, that of the model")
        if value.shape[dimension] != source.K:
            first = value.narrow(dimension, 0, 1)
            if not torch.allclose(value, first.expand_as(value), rtol=0.0, atol=0.0, equal_nan=True):
                of_model = f"{value.shape[dimension]}, since the model has its own {name} for each"
                raise ValueError(f"source: has {source.K} tasks, wants {of_model}")
            shape = list(value.shape)
            shape[dimension] = source.K
            params[name] = first.expand(shape)
    return predictor._replace(params=params)


def covers(predictor: Predictor, source: Any) -> bool:
    """Whether `exact_error` applies: one layer on tokens [1; x; y] of a source with a known distribution."""
    known = type(source) in (FixedTask, SphereTasks, TaskMixture) and source.bias
    return known and predictor.op is sampled_loss


def exact_error(predictor: Predictor, source: Any, n: int) -> Tensor:
    """Population error (R,) of one layer, float64, where `covers` is true."""
    params: Any = predictor.params
    p, W, v = params["p"], params["W"], params["v"]
    options = {**predictor.options(n), "cov": source.feature_cov, "noise_var": source.noise_std**2}
    options.setdefault("scale", 1.0)
    total = torch.zeros(len(W), dtype=torch.float64)
    with one_thread():
        for k, (points, weight) in enumerate(_points(source)):
            own = None if p is None else p[:, k]
            total += weight * points.mean(attention_error(W, v[..., k, :], points.theta, n, p=own, **options))
    return total


def _points(source: Any) -> list[tuple[theory.forgetting.TaskPoints, float]]:
    """For each task of a source, points that average over its weight vectors, and its probability."""
    if type(source) is FixedTask:
        return [(theory.forgetting.TaskPoints(source.theta[None], torch.ones(1, dtype=torch.float64)), 1.0)]
    if type(source) is SphereTasks:
        return [(task_points(source.d, radius=source.radius), 1.0)]
    rows = zip(source.means, source.covariances, source.weights.tolist(), strict=True)
    return [(task_points(source.d, mean=mean, task_cov=cov), weight) for mean, cov, weight in rows]


def _sampled(
    predictor: Predictor, source: TaskSource, n: int, batch: int, batches: int, seed: int, backend: str
) -> tuple[Tensor, Tensor]:
    """Mean and standard error, both (R,)."""
    options = {"seed": seed, "stream": streams.EVALUATE, "backend": backend, **predictor.options(n)}
    op = partial(predictor.op, source, n, batch, **predictor.params, **options)
    losses = torch.stack([op(step=i)[0].double() for i in range(batches)])
    return losses.mean(0), losses.std(0) / batches**0.5
