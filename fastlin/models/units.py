"""Units: the factors between the parameters that an optimiser sees and those that the ops take.

A model that learns in the units of its data has parameters of order one whatever n and the size of the labels are. With
D = diag(1 / rms of each token coordinate), s the rms of the labels and c = n + m,

    p = c^1/2 D^-1 p^        W, A = D W^ D / c        C = D C^ D^-1        v, h = s D v^

so that every sequence looks as if its tokens were D z, its labels y / s, and its Gram matrix over c. Softmax attention
averages tokens instead of adding them, and has c = 1. Literal units are D = I, s = 1 and a factor `scale` in the place
of 1 / c, with prompts as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastlin.ops.sampled import Source

# Enough for two digits of a mean square, and a hundredth of a second.
_SAMPLE = 1 << 16


class Units(NamedTuple):
    """Factors of the raw parameters, float64.

    Attributes
    ----------
    prompt, head : Tensor (m,)
    attention, values : Tensor (m, m)
    loss : float
        The mean square of the labels: losses over it are of order one.

    Examples
    --------
    >>> units = fl.models.literal(3, scale=0.1)
    >>> units.prompt.shape, units.attention.shape, units.loss
    (torch.Size([3]), torch.Size([3, 3]), 1.0)
    """

    prompt: Tensor
    attention: Tensor
    values: Tensor
    head: Tensor
    loss: float


UNITS = ("prompt", "attention", "values", "head")
"""Those of `Units` that are factors of parameters."""


def literal(m: int, scale: float = 1.0) -> Units:
    """Parameters as the ops take them, but for the factor `scale` of the attention scores.

    Parameters
    ----------
    m : int
        Token width.
    scale : float

    Returns
    -------
    Units
        prompt, head (m,); attention, values (m, m).

    Examples
    --------
    >>> float(fl.models.literal(3, scale=0.1).attention[0, 0])
    0.1
    """
    one, square = torch.ones(m, dtype=torch.float64), torch.ones(m, m, dtype=torch.float64)
    return Units(one, scale * square, square, one, 1.0)


def measured(source: Source, n: int, *, seed: int, stream: int, linear: bool = True, shot_scale: bool = False) -> Units:
    """The units of a task source at context length n, from a sample of its queries and labels.

    With `linear` they are those of linear attention, else of softmax attention. With `shot_scale` the op divides by
    n + 1, and the units do not.

    Parameters
    ----------
    source : task source
    n : int
        Context length.
    seed, stream : int
        Of the sample.
    linear, shot_scale : bool
        See above.

    Returns
    -------
    Units
        prompt, head (m,); attention, values (m, m).

    Examples
    --------
    >>> units = fl.models.measured(fl.SphereTasks(2), 20, seed=0, stream=0)
    >>> units.attention.shape, 0.9 < units.loss < 1.1  # E[y^2] = 1
    (torch.Size([3, 3]), True)
    """
    _, q, y, _ = source.sample(_SAMPLE, 0, seed=seed, stream=stream, dtype=torch.float64, device="cpu")
    label = float(_rms(y[:, None])[0])
    size = torch.cat([_rms(q[:, :-1]), torch.tensor([label], dtype=torch.float64)])
    c = n + source.m if linear else 1
    return Units(
        prompt=c**0.5 * size,
        attention=(n + 1 if shot_scale else 1.0) / (c * size[:, None] * size),
        values=size / size[:, None],
        head=label / size,
        loss=label**2,
    )


def _rms(x: Tensor) -> Tensor:
    """Root mean square of each column; 1 for a column of zeros, which has no unit."""
    rms = x.square().mean(0).sqrt()
    return torch.where(rms > 0, rms, 1.0)
