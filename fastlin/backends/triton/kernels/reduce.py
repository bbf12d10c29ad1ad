"""The second stage of every sum: partial results, one for each tile, added in the order of the tiles.

Which tile a sequence is in depends on the batch alone, tl.sum adds along a fixed tree and the loop goes up: the same
bits on every run, whatever the machine schedules. No kernel here has an atomic.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["width"])
def sum_runs_kernel(PART, RUN, runs, width, OUT, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """OUT (runs, width): sums of runs of the rows of PART (rows, width).

    RUN (2, runs) has the first row of each run and the number of its rows. A program adds COLUMNS columns of one run,
    ROWS rows at a time; column blocks vary fastest.
    """
    blocks = tl.cdiv(width, COLUMNS)
    run = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    first = tl.load(RUN + run).to(tl.int64)
    count = tl.load(RUN + runs + run)
    total = tl.zeros((COLUMNS,), PART.dtype.element_ty)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        there = (row < count) & (column < width)
        total += tl.sum(tl.load(PART + (first + row) * width + column, mask=there, other=0.0), 0)
    column = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(OUT + run * width + column, total, mask=column < width)
