"""A task source as the kernels take it: arrays on their device, and a place in words of 32 bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fastlin.backends.draw import Draw

_copies: Any = WeakIdKeyDictionary()
"""Copies of a source's arrays by device, each with the version it is of: they do not change from step to step."""


class DeviceSource(NamedTuple):
    """Sequences to draw.

    Attributes
    ----------
    draw : Draw
    arrays : dict
        NUMBERS, MEANS, FACTORS, FEATURE of the kernels.
    place : dict
        Words of seed, stream and step, offset.
    task : Tensor or None
        (B,) tasks; None for one.
    """

    draw: Draw
    arrays: dict[str, Tensor | None]
    place: dict[str, int]
    task: Tensor | None

    @property
    def flags(self) -> dict[str, bool | int]:
        """NOISY and BIAS."""
        return {"NOISY": self.draw.recipe.noise_std != 0, "BIAS": int(self.draw.recipe.bias)}


def arrays(draw: Draw, device: torch.device) -> dict[str, Tensor | None]:
    """The recipe's numbers on a device."""
    recipe = draw.recipe
    numbers = torch.full((2,), recipe.noise_std, dtype=torch.float64, device=device)
    numbers[1:] = recipe.radius
    named = {"MEANS": recipe.means, "FACTORS": recipe.factors, "FEATURE": recipe.feature_factor}
    return {"NUMBERS": numbers, **{name: copied(array, device) for name, array in named.items()}}


def copied(array: Tensor | None, device: torch.device) -> Tensor | None:
    """An array on a device; the copy is kept while the array lives and is not changed."""
    if array is None or array.device == device:
        return array
    kept = _copies.setdefault(array, {})
    version, copy = kept.get(device, (None, None))
    if version != array._version:
        version, copy = kept[device] = array._version, array.to(device)
    assert copy is None or isinstance(copy, Tensor)
    return copy


def place(draw: Draw) -> dict[str, int]:
    """Seed, stream and step, offset as signed words, in the counter's layout."""
    words = {
        "seed_low": draw.seed,
        "seed_high": draw.seed >> 32,
        "stream": (draw.stream & 0xFF) << 24,
        "step": draw.step | (draw.stream >> 8) << 24,
        "offset_low": draw.offset,
        "offset_high": draw.offset >> 32,
    }
    return {name: ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000 for name, word in words.items()}
