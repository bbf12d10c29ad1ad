"""Launches of the calls of one layer with given data, for `dev.paper`: form.cu, tokens.cu, count.cu and finish.cu.

Sizes are those that csrc/cuda computes: `chunk` is chunk_of of family.h, `numbers` the class there.
"""

from __future__ import annotations

from collections.abc import Callable

from dev.paper import Launch, Part
from fastlin.bench.cases import CaseShape, bytes_moved

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
    """Rounds of eight rows of W behind the first that the prompt's part takes, of one layer."""
    return _of_tasks(s) * (up(s.m, 8) - 1) if s.layers == 1 else 0


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
        # The compiler's line of this loop is that of its pragma. count_of has 16 loads of its 19.
        Part("cuda/finish.cu", "const double count = count_of(work, k);", _of_tasks, ("global", 19)),
        # 512 rows are one round of 16 loads for each lane.
        # 512 rows are one round of 16 loads for each lane.
        # What is inlined there counts once, whether the call needs it or not; but W' sum r q takes eight rows a round.
        Part("cuda/finish.cu", "finish_trial(work.P, work.out, work.at,", _of_tasks, whole=True),
        Part("core/records.h", "for (std::int64_t h = 0; h < H; ++h)", _of_tasks),
        Part("core/records.h", "has_prompt && !sums_a && i < m; i += kRows)", _rows_more),
        Part("core/records.h", "for (std::int64_t j = team.first; j < m; j += team.step) {", _rows_more),
        Part("cuda/finish.cu", "work.out.loss[r] = weighted_loss(work.P,", trials, whole=True),
    ),
    lambda s: 16 * trials(s) * s.K * (1 + 2 * s.m),
)


def finish_launches() -> tuple[Launch, ...]:
    """The end of every call: the sums of all chunks, and the results of each task."""
    return (REDUCE, FINISH)


# The coefficient of each task, at the start of a block, where tasks have no weights: counts are not needed.
COEFFICIENTS = (Part("cuda/device.cuh", "for (int k = warp; k < work.P.K; k += warps) {", lambda s: s.K * chunks(s)),)


# count.cu: given tasks.

_SHARE = 128 * COUNT_ROWS


def _count_rounds(s: CaseShape) -> float:
    return 4 * COUNT_ROWS * up(up(s.B, _SHARE), 4)


COUNT = Launch(
    "12count_kernelILb0E",
    lambda s: COUNT_ROWS,
    128,
    lambda s: 128,
    (
        Part("cuda/count.cu", "first - lane < end; first += kAtOnce * kThreads", _count_rounds),
        Part("cuda/count.cu", "add_counts(tasks, task[u], count);", lambda s: s.K * _count_rounds(s), whole=True),
    ),
    lambda s: 8 * s.B,
)


def record_floats(m: int) -> int:
    """Floats of a record."""
    return ((up(m * (m + 1) // 2, 4) * 4 + m + 5) // 4 | 1) * 4


def record_bytes(s: CaseShape) -> float:
    """Bytes of the records of a batch."""
    return 4 * record_floats(s.m) * s.B


# form.cu and tokens.cu: tokens in pieces, of tiles of 32 sequences.

FORM, TOKENS, PIECES = "cuda/form.cu", "cuda/tokens.cu", "cuda/pieces.cuh"


def together(m: int) -> int:
    """Tokens that a warp takes at a time."""
    return 2 if m <= 12 else 1


def piece(m: int) -> int:
    """Tokens of a piece."""
    return 16 if m <= 7 else 8 if m <= 12 else 4


def pieces(s: CaseShape) -> int:
    """Pieces of a sequence."""
    return up(s.n, piece(s.m))


def stride(s: CaseShape) -> int:
    """Floats from sequence to sequence in a stage: stride_of in pieces.cuh."""
    floats, apart = piece(s.m) * s.m, s.n * s.m % 4
    rounded = up(floats, 4) * 4
    if apart == 0:
        return rounded if rounded % 8 == 4 else rounded + 4
    least = floats + 4 if apart == 1 else rounded + apart
    return least + (4 + apart - least % 4) % 4


def _head(s: CaseShape) -> int:
    """Floats of queries, targets and tasks: one place of a long context, three of a short one."""
    return (1 if pieces(s) >= 3 else 3) * 32 * ((s.m | 1) + 2)


def _ahead(s: CaseShape) -> float:
    """Two of three stages are on their way."""
    return 2 * 4 * 32 * piece(s.m) * s.m


def _blocks(s: CaseShape) -> float:
    """Those of form.cu, which write a row of counts each, and chunks at B = 2^20."""
    return COUNT_ROWS


def _of_tiles(count: Count) -> Count:
    """For each tile of 32 sequences."""
    return lambda s: s.B / 32 * count(s)


def _times(factor: float, count: Count) -> Count:
    return lambda s: factor * count(s)


def _first_tiles(s: CaseShape) -> float:
    """Tiles whose first piece is among the three that a block copies at its start."""
    return _blocks(s) * up(3, pieces(s))


def _first_parameters(s: CaseShape) -> float:
    """Warps that write v and P_k v, at the start of a block."""
    return _blocks(s) * up(s.K * s.m, 32)


def _copies(file: str, m: int) -> tuple[Part, ...]:
    """Copies of a piece: before the first tile, and in the loop over pieces."""
    parts: list[Part] = []
    # The first pieces of tiles bring queries: 16 teams take two sequences each.
    first = f"{file}: for (int stage = 0; stage < kStages; ++stage) copy(stage);"
    then = f"{file}:       copy(stage);"
    numbers_of_query = "for (int j = lane; j < m; j += kTeam) __pipeline_memcpy_async(head"
    for inside, tiles in ((first, _first_tiles), (then, lambda s: s.B / 32 - _first_tiles(s))):
        queries = _times(8, tiles)
        parts.append(Part(PIECES, "kTeams) {  // queries", queries, None, inside))
        parts.append(Part(PIECES, numbers_of_query, _times(up(m, 8), queries), None, inside))
        # Of tokens that are not at multiples of 16 bytes, rows apart, and what follows the last token.
        parts += [
            Part(PIECES, text, lambda s: 0, None, inside)
            for text in (
                "for (int s = thread / 32; s < sequences; s += kWarps) {",
                "kTeams) {  // rows apart",
                "t < tokens; i += kTeam) {",
                "for (j += kTeam; j >= width; j -= width) ++t;",
                "kTeams) {  // what follows",
                "j < m && P.see_query; j += kTeam",
                *(["j < zeros; j += kTeam"] if together(m) > 1 else []),
            )
        ]
    return (
        Part(PIECES, "i < quads; i += kThreads) store_quad", lambda s: _blocks(s) * up(_head(s), 128)),
        Part(file, "for (int stage = 0; stage < kStages; ++stage) copy(stage);", lambda s: 12 * _blocks(s)),
        *parts,
        Part(file, "piece < how.count; ++piece, left -= how.tokens", _of_tiles(lambda s: 4 * pieces(s))),
    )


def form_launch(m: int) -> Launch:
    """Records of tokens, and counts of tasks; m <= 12."""
    quads = record_floats(m) // 4
    return Launch(
        f"11form_kernelILi{m}E",
        *(_blocks, 128),
        lambda s: 4 * (96 * stride(s) + _head(s) + 32 * 4 * quads),
        (
            *_copies(FORM, m),
            Part(FORM, "tile < end; tile += kTile", _of_tiles(lambda s: 4)),
            Part("cuda/counts.cuh", "for (int k = 0; k < tasks; ++k) {", _of_tiles(lambda s: s.K)),
            # A loop of each warp.
            Part(FORM, "return add_piece<M, kPart, 2>(own", _of_tiles(lambda s: up(s.n, together(m))), whole=True),
            # By single floats, which loads most: where pairs cannot be read.
            *(
                Part(
                    FORM, "t < tokens; t += kTokens<M>", lambda s: 0, ("shared", 1), f"{FORM}: add_part<M, {warp}>(how"
                )
                for warp in range(4)
            ),
            Part(FORM, "first < sequences; first += F::together", _of_tiles(lambda s: 4)),
            Part(FORM, "i < stored * F::all; i += kThreads", _of_tiles(lambda s: quads)),
        ),
        lambda s: bytes_moved(s) + record_bytes(s),
        ahead=_ahead,
    )


def _tokens_shared(s: CaseShape) -> float:
    table = s.K * (s.m | 1)
    return 4 * (s.m * up(s.m, 4) * 4 + 4 * (2 * s.m + 1) * 36 + 96 * stride(s) + _head(s) + 2 * table + 8)


def tokens_launch(m: int) -> Launch:
    """One trial from tokens."""
    at_a_time = ("fma", together(m) * (4 * m + 3))
    pairs = "if (how.loads == 2) return add_groups<M, 2"
    singles = "  add_groups<M, 1, kGradients>(own"
    group, most_loads = "t < tokens; t += kWarps * kTokens<M>", ("shared", 1.0)
    without = f"{TOKENS}: add_piece<M, false>(how, own"
    added = _of_tiles(lambda s: up(s.n, together(m)))
    return Launch(
        f"13tokens_kernelILi{m}E",
        *(chunks, 128, _tokens_shared),
        (
            *_copies(TOKENS, m),
            *COEFFICIENTS,
            Part(TOKENS, "n < M * Shape<M>::w_row; n += kThreads", lambda s: _blocks(s) * s.m * up(s.m, 4) / 8),
            Part(TOKENS, "n < static_cast<int>(P.K) * M; n += kThreads", _first_parameters),
            Part(TOKENS, "for (int t = 0; j < m && t < P.t; ++t)", lambda s: _first_parameters(s) * s.t),
            Part(
                *(TOKENS, "for (int i = 0; i < m; ++i) with_v =", lambda s: _first_parameters(s) * s.t * s.m),
                marker=("fma", 1),
                whole=True,
            ),
            Part(TOKENS, "first < end; first += kTile", _of_tiles(lambda s: 4)),
            *([Part(TOKENS, "first < M; first += at_once", _of_tiles(lambda s: 4 * s.m / 3))] if m == 33 else []),
            Part(TOKENS, pairs if m <= 12 else singles, added, at_a_time),
            # Without gradients; and by single floats, which loads most, where pairs can be read.
            Part(TOKENS, group, lambda s: 0, most_loads, without),
            *(
                (
                    Part(TOKENS, pairs, lambda s: 0, most_loads, without),
                    Part(TOKENS, group, lambda s: 0, most_loads, f"{TOKENS}: add_piece<M, true>(how, own"),
                )
                if m <= 12
                else ()
            ),
            Part("cuda/tokens_sums.cuh", "for (int each = 0; each < tasks; ++each)", _of_tiles(lambda s: 4 * s.K)),
        ),
        lambda s: bytes_moved(s) + partial_bytes(s),
        ahead=_ahead,
    )
