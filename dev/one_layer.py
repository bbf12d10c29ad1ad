"""Launches of the calls of one layer with given data, for `dev.paper`: trials.cu, form.cu, tokens.cu, count.cu, finish.cu.

Sizes are those that csrc/cuda computes: `chunk` is chunk_of of family.h, `numbers` the class there.
"""

from __future__ import annotations

from collections.abc import Callable

from dev.paper import Launch, Part
from fastlin.bench.cases import CaseShape

Count = Callable[[CaseShape], float]

COUNT_ROWS = 512
"""Blocks that count tasks: kCountRows."""


def up(a: float, b: float) -> int:
    """Parts of size b that cover a."""
    return int(-(-a // b))


def trials(s: CaseShape) -> int:
    """R of the kernels."""
    return s.R or 1


def chunk(s: CaseShape) -> int:
    """Sequences of a chunk."""
    numbers = trials(s) * (s.m * s.m * (2 * s.layers - 1) + s.K * (1 + (2 + s.t) * s.m))
    most = min(max((64 << 20) // (4 * numbers), 16), 512)
    return max(up(up(s.B, most), 64) * 64, 64)


def chunks(s: CaseShape) -> int:
    """Chunks of a batch."""
    return up(s.B, chunk(s))


def numbers(s: CaseShape) -> int:
    """Sums of a chunk, with all gradients: squares, e and q of each task, in a stack dp too; dW, and dA and dC."""
    width = 1 + 2 * s.m + (s.t * s.m if s.layers > 1 else 0)
    return trials(s) * (s.m * s.m * (2 * s.layers - 1) + s.K * width)


def partial_bytes(s: CaseShape) -> float:
    """Bytes of the sums of all chunks: written once, read once."""
    return 4 * chunks(s) * numbers(s)


def _of_tasks(s: CaseShape) -> float:
    """Warps that finish a task of a trial."""
    return s.K * trials(s)


def _rows_more(s: CaseShape) -> float:
    """Rows of W behind the first that the prompt's part takes, of one layer."""
    return _of_tasks(s) * (s.m - 1) if s.layers == 1 else 0


REDUCE = Launch(
    "13reduce_kernelE",
    lambda s: up(numbers(s), 32),
    256,
    lambda s: 2048,
    (
        Part(
            *("cuda/finish.cu", "chunk < work.chunks; chunk += 4 * kReduceWarps"),
            lambda s: 8 * up(numbers(s), 32) * up(chunks(s), 32),
        ),
    ),
    partial_bytes,
)
FINISH = Launch(
    "13finish_kernelE",
    trials,
    128,
    lambda s: 8 * (s.K + 4 * s.m),
    (
        Part("cuda/finish.cu", "for (int k = warp; k < work.P.K;", _of_tasks),
        # 512 rows are one round of 16 loads for each lane.
        # 512 rows are one round of 16 loads for each lane.
        Part("cuda/finish.cu", "const double count = count_of(work, k);", _of_tasks, whole=True),
        # What is inlined there counts once, whether the call needs it or not; but W' sum r q runs for each row.
        Part("cuda/finish.cu", "finish_trial(work.P, work.out, work.at,", _of_tasks, whole=True),
        Part("core/records.h", "for (std::int64_t h = 0; h < H; ++h)", _of_tasks),
        Part("core/records.h", "has_prompt && !sums_a && i < m; ++i)", _rows_more),
        Part("core/records.h", "j += team.step) s[j] += g * W[j];", _rows_more),
        Part("cuda/finish.cu", "work.out.loss[r] = weighted_loss(work.P,", trials, whole=True),
    ),
    lambda s: 16 * trials(s) * s.K * (1 + 2 * s.m),
)


def finish_launches() -> tuple[Launch, ...]:
    """The end of every call: the sums of all chunks, and the results of each task."""
    return (REDUCE, FINISH)
