"""Units: the factors between the raw parameters, which the optimiser updates, and those of the ops.

In the units of the data, raw parameters are of order one for any n and any size of the labels. With
D = diag(1 / rms of each token coordinate), s the rms of the labels and c = n + m,

    p = c^1/2 D^-1 p^        W, A = D W^ D / c        C = D C^ D^-1        v, h = s D v^

which amounts to tokens D z, labels y / s and a Gram matrix over c. Softmax attention averages tokens instead of adding
them, and has c = 1. Literal units are D = I, s = 1, `scale` in place of 1 / c, and prompts without a factor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastlin.ops.sampled import TaskSource

# Two digits of a mean square, in a hundredth of a second.
_SAMPLE = 1 << 16


class Units(NamedTuple):
    """Factors of the raw parameters, float64.

    Attributes
    ----------
    prompt, head : Tensor (m,)
    attention, values : Tensor (m, m)
    loss : float
        Mean square of the labels: a loss over it is of order one.

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
"""The fields of `Units` that are factors of parameters."""


def literal(m: int, scale: float = 1.0) -> Units:
    """Units one, but for the factor `scale` of the attention scores.

    Parameters
    ----------
    m : int
        Token width.
    scale : float

    Returns
    -------
    Units

    Examples
    --------
    >>> float(fl.models.literal(3, scale=0.1).attention[0, 0])
    0.1
    """
    one, square = torch.ones(m, dtype=torch.float64), torch.ones(m, m, dtype=torch.float64)
    return Units(one, scale * square, square, one, 1.0)


def measured(
    source: TaskSource, n: int, *, seed: int, stream: int, linear: bool = True, shot_scale: bool = False
) -> Units:
    """The units of a task source at context length n, from a sample of its queries and labels.

    Parameters
    ----------
    source : task source
    n, seed, stream : int
        Context length; seed and stream of the sample.
    linear : bool
        Linear attention, or softmax attention.
    shot_scale : bool
        Whether the op divides by n + 1, so that the units do not.

    Returns
    -------
    Units

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
    """Root mean square of each column; 1 for a column of zeros."""
    # numpy's mean has the same bits for any number of threads; torch splits its mean among them.
    rms = torch.from_numpy(np.sqrt(np.square(x.numpy()).mean(0)))
    return torch.where(rms > 0, rms, 1.0)
