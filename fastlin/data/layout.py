"""Layout of the draws of a sequence.

Each kind of draw has a section of 2^21 Philox blocks, so its numbers do not depend on how many draws another needs:

    section   draws
    TASK      word 0 of the first block
    BETA      d normals
    QUERY     d normals for the query's features, then one for the noise of its label
    FEATURES  n d normals for the context's features, token by token; or n + 1 words that pick points, the query last
    NOISE     normals for the label noise: n for tokens, or one for each row of the Gram matrix's factor
    FACTOR    normals for the Gram matrix's factor: row 0 of the constant coordinate, then the entries right of the
              diagonal, row by row
    CHI       chi variates for the factor's diagonal, slot by slot, then one for the remainder of the labels (`chi`)

`DRAWS` is the version of all this. It changes when a number changes on any backend, even in its last digit.

    1   fastlin 0.1
    2   chi variates of float32 kernels are computed in float32 where `chi` allows it; one layer with few trials uses
        the rows of the factor in place of the Gram matrix
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastlin._checks import integer
from fastlin.data import chi, philox, random
from fastlin.data.philox import Coordinates

# Limit of batch, n and d: it keeps products of batch, n and m below 2^63.
MOST = 1 << 40
BLOCKS_PER_SECTION = 1 << 21
DRAWS = 2
"""Version of the draws; a run keeps it, and only the same version resumes the run."""
TASK, BETA, QUERY, FEATURES, NOISE, FACTOR, CHI = range(7)


class BatchDraws(NamedTuple):
    """Position of a batch in the generator: sequences `offset` to `offset + batch` of (seed, step, stream)."""

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
        block = section * BLOCKS_PER_SECTION
        return Coordinates(seed=self.seed, step=self.step, stream=self.stream, offset=self.offset, block=block)


def check_draws(
    batch: int, n: int, seed: int = 0, step: int = 0, stream: int = 0, offset: int = 0
) -> tuple[BatchDraws, int]:
    """The arguments that all samplers share, as Python integers: the draws of the batch, and n."""
    limits = (
        ("n", n, MOST),
        ("batch", batch, MOST),
        ("seed", seed, 1 << 64),
        ("step", step, philox.MAX_STEPS),
        ("stream", stream, philox.MAX_STREAMS),
        ("offset", offset, 1 << 64),
    )
    # Plain integers in range, as nearly all are, take no call.
    n, batch, seed, step, stream, offset = [
        value if type(value) is int and 0 <= value < limit else integer(name, value, limit)
        for name, value, limit in limits
    ]
    return BatchDraws(batch, seed, step, stream, offset), n


def check_room(draws: int, draws_per_block: int) -> None:
    """Raise ValueError when a section cannot hold so many draws."""
    room = draws_per_block * BLOCKS_PER_SECTION
    if draws > room:
        raise ValueError(f"n: needs {draws} draws of one kind for a sequence, wants at most {room}")


FEATURES_WITH_ROOM = 4000
"""Sections hold the draws of every Gram matrix of at most so many features: n may be anything."""


def check_gram_room(n: int, d: int) -> None:
    """Raise ValueError when the sections cannot hold the draws of a Gram matrix of n tokens with d features."""
    rank = min(n, d)
    check_room((d + 1) * chi.BLOCKS_PER_SLOT, 1)
    check_room(d + rank * d - rank * (rank + 1) // 2, 4)
