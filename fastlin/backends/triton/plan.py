"""How a batch is cut into tiles, and the sizes that the kernels are compiled for: few, and none depends on B or n."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WIDEST = 64
"""Largest m. Of M = 128 the streaming kernel's W and dW, tiles in registers, would not fit there."""
PROGRAMS = 2048
"""Programs of a launch that needs room for each, at M = 16: enough for 132 multiprocessors at any occupancy. Wider ones
are as many times fewer: one program of 255 registers fills a multiprocessor, and the caches are to hold their room."""
PARTIAL_BYTES = 1 << 28
"""Memory for partial sums; a batch that needs more is taken in pieces."""
DRAWN_BYTES = 1 << 28
"""Memory for Gram matrices that one kernel draws and the next reads."""
ROWS = 256
"""Partial sums that a program of the second stage adds."""


class TileConfig(NamedTuple):
    """Compile-time sizes of a kernel.

    Attributes
    ----------
    M : int
        m padded to a power of two, at least 16.
    BB : int
        Sequences of a tile.
    BN : int
        Tokens that are read at a time.
    warps : int
        Of 32 threads, or of 64 on AMD.
    """

    M: int
    BB: int
    BN: int
    warps: int


def padded(m: int) -> int:
    """M."""
    return max(16, 1 << (m - 1).bit_length())


def config(m: int, dtype: torch.dtype, *, streams: bool = False, draws: bool = False) -> TileConfig:
    """The one configuration of a kernel for a width and a dtype: nothing is tuned at run time.

    A tile of matrices has 1024 entries, or 512 in float64, which is 4 registers of each of 256 threads; but a dot
    keeps rows and columns of its factors there as well, 96 numbers, and the reverse of a layer has five such tiles
    alive. At 2048 entries it spills 104 bytes on sm_80; so it does 40 at 1024 where it draws, which has half of it.
    Beyond M = 16 a tile is one sequence, whose matrices are in memory.

    Parameters
    ----------
    m, dtype
        Of the problem.
    streams : bool
        Whether a tile is BB x BN tokens, not BB matrices.
    draws : bool
        Whether the sequences are drawn.
    """
    M = padded(m)
    entries = 1024 // (1 + (dtype is torch.float64)) // (1 + draws)
    return TileConfig(M, max(entries // (16 * M if streams else M * M), 1), 16, 8)


def draws_apart(m: int, dtype: torch.dtype) -> bool:
    """Whether a separate kernel draws the Gram matrices of a sampled loss, in float64 and beyond M = 16.

    There the two would not fit into one's registers: it spills 56 bytes on sm_80 at M = 16, and 160 on sm_100 at
    M = 64. Writing and reading m^2 numbers is little beside a stack's products, 4 m^3 multiply-adds for each layer.
    """
    return dtype is torch.float64 or padded(m) > 16


def slots(M: int, BB: int) -> int:
    """Matrices that a program has in memory while it works on a tile, besides those of the layers: see `attention`."""
    return 6 if M > 16 else 2 * BB


class Tiles(NamedTuple):
    """Sequences in tiles of one task each.

    Attributes
    ----------
    order : Tensor or None
        (B,) sequences by task; None when they are in order.
    table : Tensor (3, tiles) int64
        Task, first place in `order`, number of sequences; the last tiles may have none.
    runs : Tensor (2, K) int64
        First tile and number of tiles of each task.
    counts : Tensor (K,) int64
        Sequences of each task.
    """

    order: Tensor | None
    table: Tensor
    runs: Tensor
    counts: Tensor

    @property
    def number(self) -> int:
        """Number of tiles, with the empty ones: it follows from B and K, and nobody waits for the device."""
        return self.table.shape[1]


def cut_batch(task: Tensor | None, B: int, K: int, BB: int, device: torch.device) -> Tiles:
    """Cut a batch into tiles of at most BB sequences of one task, in the order of the tasks and of the batch."""
    if task is None or K == 1:
        counts = torch.full((1,), B, dtype=torch.int64, device=device)
        order = None
        bounds = torch.stack([counts * 0, counts])
    else:
        ranked, order = task.sort(stable=True)
        edges = torch.searchsorted(ranked, torch.arange(K + 1, device=device))
        counts = edges.diff()
        bounds = torch.stack([edges[:-1], counts])
    most = B // BB + min(K, B)
    table, runs = cut(bounds, BB, most)
    return Tiles(order, table, runs, counts)


def cut(runs: Tensor, size: int, most: int) -> tuple[Tensor, Tensor]:
    """Cut runs (2, S) of first and count into pieces of at most `size`.

    Returns
    -------
    table : Tensor (3, most)
        Run, first and count of each piece; those beyond the last are empty.
    pieces : Tensor (2, S)
        First piece and number of pieces of each run.
    """
    first, count = runs
    pieces = (count + size - 1) // size
    ends = pieces.cumsum(0)
    index = torch.arange(most, device=runs.device)
    run = torch.searchsorted(ends, index, right=True).clamp(max=len(count) - 1)
    within = (index - (ends - pieces)[run]) * size
    table = torch.stack([run, first[run] + within, (count[run] - within).clamp(0, size)])
    return table, torch.stack([ends - pieces, pieces])
