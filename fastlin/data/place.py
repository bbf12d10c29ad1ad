"""Where the draws of a sequence are.

They lie in sections of 2^21 Philox blocks, so that no kind of draw depends on how many of another there are:

    section   draws
    TASK      word 0 of the first block
    BETA      d normals
    QUERY     d normals of the query's features, then one of its label's noise
    FEATURES  n d normals of the context's features, token by token; or n + 1 words that pick points, the query's last
    NOISE     normals of the labels' noise: n of the tokens, or one for each row of the Gram matrix's factor
    FACTOR    normals of the Gram matrix's factor: row 0 of the constant coordinate, then what is right of the
              diagonal, row by row
    CHI       chi variates of the factor's diagonal, slot by slot, then that of the labels' remainder (`chi`)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastlin.data import chi, random
from fastlin.data.philox import Coordinates

BLOCKS_PER_SECTION = 1 << 21
TASK, BETA, QUERY, FEATURES, NOISE, FACTOR, CHI = range(7)


class Place(NamedTuple):
    """Which sequences: `batch` of them from `offset` on, of one stream at one step of one seed."""

    batch: int
    seed: int
    step: int
    stream: int
    offset: int

    def uniform(self, section: int, columns: int) -> Tensor:
        """Uniforms (batch, columns) of a section, float64."""
        check_room(columns, 4)
        return random.uniform(self.batch, columns, **self._at(section), dtype=torch.float64)

    def normal(self, section: int, columns: int) -> Tensor:
        """Normals (batch, columns) of a section, float64."""
        check_room(columns, 4)
        return random.normal(self.batch, columns, **self._at(section), dtype=torch.float64)

    def chi(self, freedom: list[int]) -> Tensor:
        """Chi variates (batch, len(freedom)) with these degrees of freedom, float64."""
        check_room(len(freedom) * chi.BLOCKS_PER_SLOT, 1)
        return random.chi(self.batch, freedom, self._at(CHI))

    def _at(self, section: int) -> Coordinates:
        return {
            "seed": self.seed,
            "step": self.step,
            "stream": self.stream,
            "offset": self.offset,
            "block": section * BLOCKS_PER_SECTION,
        }


def check_room(draws: int, draws_per_block: int) -> None:
    """Raise ValueError when a section has no room for so many draws."""
    room = draws_per_block * BLOCKS_PER_SECTION
    if draws > room:
        raise ValueError(f"n: needs {draws} draws of one kind for a sequence, wants at most {room}")
