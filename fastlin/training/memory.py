"""How many trials a step takes at once, so that a process stays within a budget of memory.

A step holds, in numbers of the parameters' type unless said otherwise,

    of every trial      parameters, gradients, two moments, an average, what the op gets, and sums in float64
    of the batch        its Gram matrices or tokens, where no kernel draws them: these in float64 on their way
    of trials at once   what grows with both: eager keeps some vectors of each sequence, and matrices of a stack;
                        kernels keep partial sums of 8 blocks or more, 24 MB of which they take anyway

The factors are upper bounds of what was measured on torch 2.13, and tests hold them to that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fastlin.models import Shape

DEFAULT = 2 << 30
"""Bytes that a step may take beside what the process has before it."""
LANES = 16
"""Kernels put so many trials side by side: chunks of a multiple have the bits of all trials at once."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_KERNELS = 24 << 20
_BLOCKS = 8


def size_in_bytes(value: Any) -> int:
    """A number of bytes from an integer, or a text such as "500M" or "4G"; None is the default."""
    if value is None:
        return DEFAULT
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)i?B?", str(value).strip(), re.IGNORECASE)
    if isinstance(value, bool) or not isinstance(value, (int, str)) or found is None:
        raise ValueError(f"memory: got {value!r}, wants bytes, or a text such as '500M' or '4G'")
    return int(float(found[1]) * _UNITS[found[2].upper()])


@dataclass(frozen=True)
class Step:
    """What decides the memory of a step.

    Attributes
    ----------
    shape : Shape
    parameters : int
        Numbers of one trial.
    backend : str
        That serves the model.
    linear : bool
        Softmax attention takes a batch in pieces of its own.
    drawn : bool
        Whether kernels draw the sequences.
    batch, n : int
        Sequences that are taken in one go, and their context length.
    itemsize : int
        Bytes of a parameter.
    """

    shape: Shape
    parameters: int
    backend: str
    linear: bool
    drawn: bool
    batch: int
    n: int
    itemsize: int

    @property
    def of_all_trials(self) -> int:
        """Bytes that all trials hold throughout."""
        return self.shape.trials * self.parameters * (8 * self.itemsize + 16)

    @property
    def of_the_batch(self) -> int:
        """Bytes that do not depend on the trials."""
        m = self.shape.width
        if not self.linear:
            return 5 << 26
        if self.drawn:
            return _KERNELS
        context = m * (m if self.backend == "eager" else max(self.n, m))
        return self.batch * (context + 2 * m) * (16 + 2 * self.itemsize)

    @property
    def of_a_trial(self) -> int:
        """Bytes of each trial that is taken at once."""
        shape = self.shape
        m, H, L, t = shape.width, shape.attention_heads, shape.layers, shape.tokens
        if not self.linear:
            return 4 * self.batch * self.itemsize
        if self.backend == "eager":
            stack = m * m * (14 + 4 * L + 2 * H) if L > 1 else 0
            return self.batch * (16 * H * m + 6 * t * m + 8 + stack) * self.itemsize
        if self.backend == "reference":
            tokens = self.n + t + 1
            return self.batch * L * H * (6 * tokens**2 + 10 * tokens * m) * self.itemsize
        sums = H * m * m * (2 * L - 1) + 2 * shape.tasks * ((2 * H + t) * m + 4)
        return 8 * _BLOCKS * sums

    def at_once(self, memory: int, together: int = 1) -> int:
        """How many groups of trials fit; all of them, or a number whose chunks have the same bits if it can be.

        Parameters
        ----------
        memory : int
            Bytes.
        together : int
            Trials of a group.

        Raises
        ------
        ValueError
            When not even one fits.
        """
        groups, group = self.shape.trials // together, self.of_a_trial * together
        left = memory - self.of_all_trials - self.of_the_batch
        most = left // group
        if most < 1:
            raise ValueError(
                f"memory: got {memory} bytes, wants {memory - left + group} or more for {self.shape.trials} trials, "
                f"{together} at once on {self.batch} sequences; shards=S takes these in pieces"
            )
        if most >= groups:
            return groups
        # The last chunk may have up to LANES - 1 more (`chunks`).
        return most // LANES * LANES - LANES if most >= 2 * LANES else min(most, LANES - 1)


def chunks(count: int, size: int | None) -> list[range]:
    """`count` trials in chunks of a size, the last with what is left over where that is less than `LANES`."""
    size = size or count
    firsts = list(range(0, count, size))
    if len(firsts) > 1 and count - firsts[-1] < LANES <= size:
        firsts.pop()
    return [range(first, last) for first, last in zip(firsts, [*firsts[1:], count], strict=True)]
