"""The launch of trials.cu, for `dev.paper`: one layer and many trials, from records or from stored Gram matrices.

For width 11, trials that fit one block, and sequences that the tasks share alike.
"""

from __future__ import annotations

from collections.abc import Callable

from dev.one_layer import COEFFICIENTS, Count, chunk, chunks, partial_bytes, record_bytes, record_floats, trials, up
from dev.paper import Launch, Part
from fastlin.bench.cases import CaseShape, bytes_moved

TRIALS, LANES, STAGE = "cuda/trials.cu", "cuda/trials_lane.cuh", "cuda/trials_stage.cuh"
CONTROL = 4504
"""Bytes of `Control`."""


def stored_floats(m: int) -> int:
    """Floats of a stored matrix as it is copied, with its query and target."""
    return (up(m * m, 4) * 4 + m + 4) // 4 * 4


def _is_stored(s: CaseShape) -> bool:
    return s.op == "gram_loss"


def _parameters(s: CaseShape) -> int:
    return trials(s) * (up(s.m * s.m, 4) | 1) * 4


def _of_sequence(s: CaseShape) -> int:
    """Floats of shared memory for a sequence of a tile: its record and its copy, or two records."""
    return record_floats(s.m) + (stored_floats(s.m) if _is_stored(s) else record_floats(s.m))


def sets(s: CaseShape) -> int:
    """Sets of lanes that share the sequences of a tile, two at a time."""
    return 256 // trials(s)


def tile(s: CaseShape) -> int:
    """Sequences of a tile."""
    left = ((99 << 10) - CONTROL) // 4 - _parameters(s)
    room = left // _of_sequence(s) - 1
    if _is_stored(s):
        room = min(room, (left - 4096) // stored_floats(s.m) - 1)
    return room // (2 * sets(s)) * 2 * sets(s)


def _trials_shared(s: CaseShape) -> float:
    return CONTROL + 4 * (_parameters(s) + (tile(s) + 1) * _of_sequence(s))


def _over_tiles(s: CaseShape, of_tile: Callable[[int], float]) -> float:
    """Added over the tiles of a chunk: whole ones, and the last of each task."""
    whole, rest = divmod(chunk(s) // s.K, tile(s))
    return s.K * (whole * of_tile(tile(s)) + (of_tile(rest) if rest else 0))


def _warps(count: Count) -> Count:
    """For each of the 8 warps of a chunk's block."""
    return lambda s: 8 * chunks(s) * count(s)


def _tiles(s: CaseShape) -> float:
    return _over_tiles(s, lambda size: 1)


def _pieces_of_sort(s: CaseShape) -> float:
    """Rounds of 32 sequences, of a warp."""
    return up(chunk(s), 256)


def _passes(numbers: int) -> list[int]:
    """Numbers of a lane that are added over sets at a time: 16 at most."""
    return [min(16, numbers - first) for first in range(0, numbers, 16)]


def _of_warps(s: CaseShape, runs: Callable[[int], float]) -> float:
    """Added over the 8 warps: each runs a loop as often as the first set that it has lanes of."""
    return sum(runs(32 * warp // trials(s)) for warp in range(8))


def _summed(s: CaseShape, numbers: int) -> float:
    """Of these 8 warps add so many, in all passes."""
    return sum(_of_warps(s, lambda first: up(count - first, sets(s))) for count in _passes(numbers))  # noqa: B023


def _of_run(s: CaseShape) -> float:
    return s.K * _summed(s, 1 + 2 * s.m)


def _of_part(s: CaseShape) -> float:
    return _summed(s, s.m * s.m)


def _fold(s: CaseShape) -> float:
    """Rounds of a thread that folds: 256 threads take 256 // record_floats sequences, four at a time."""
    if not _is_stored(s):
        return 0
    return _over_tiles(s, lambda size: up(size, 4 * (256 // record_floats(s.m))))


def _tile_parts() -> list[Part]:
    """What follows a tile, its copy and its fold. The round that copies the first tile adds nothing."""

    def records(s: CaseShape) -> float:
        return 0 if _is_stored(s) else chunks(s) * _over_tiles(s, lambda size: up(size * record_floats(s.m), 128))

    def matrices(s: CaseShape) -> float:
        return chunks(s) * _over_tiles(s, lambda size: size) if _is_stored(s) else 0

    def none(s: CaseShape) -> float:
        return 0

    parts = [
        Part(STAGE, "i < tile.count * quads; i += kThreads", records),
        # Width 11 is odd: matrices are copied by 4 bytes, 4 + 1 numbers of a lane.
        Part(STAGE, "for (int s = warp; s < tile.count; s += kWarps)", matrices),
        Part(STAGE, "row < m; ++row, G += P.x_row", none),
    ]
    task = "while (control->start[task + 1] <= first) ++task;"
    calls = ("const Tile next = stage.tile_after", "const Tile then = stage.tile_after")
    parts += [Part(STAGE, task, _warps(lambda s: s.K - 1), None, f"{TRIALS}: {call}") for call in calls]
    for sees, loops in (("false", _fold), ("true", none)):
        inside = f"{STAGE}: fold_from<S::stored_floats, {sees}>"
        parts.append(Part(STAGE, "left_over > 0; left_over -= kOnce * kSequences", _warps(loops), None, inside))
    return parts


PARTS = (
    Part(TRIALS, "i < rows * square; i += kThreads", lambda s: chunks(s) * up(trials(s) * s.m * s.m, 32)),
    Part(TRIALS, "for (int k = 0; k < work.P.K; ++k) {", _warps(lambda s: s.K)),
    Part(TRIALS, "i < rows * width; i += kThreads", lambda s: chunks(s) * s.K * up(trials(s) * (1 + 2 * s.m), 32)),
    *COEFFICIENTS,
    Part(LANES, "x < plan.slab * S::W; x += kThreads", lambda s: chunks(s) * up(_parameters(s), 32)),
    # A chunk is one part: 2048 sequences at most.
    Part(TRIALS, "first < control->chunk_size; first = control->next", _warps(lambda s: 1)),
    Part(STAGE, "i < size; i += kThreads) control->order[i]", lambda s: 0),  # of one task
    Part(STAGE, "i += 32) {  // to count them", _warps(_pieces_of_sort)),
    Part(STAGE, "++k) {  // count", _warps(lambda s: s.K * _pieces_of_sort(s))),
    Part(STAGE, "++k) {  // before them", _warps(lambda s: s.K)),
    Part(STAGE, "i += 32) {  // to place them", _warps(_pieces_of_sort)),
    Part(STAGE, "++k) {  // place", _warps(lambda s: s.K * _pieces_of_sort(s))),
    Part(TRIALS, "for (int buffer = 0; goes_on; buffer ^= 1) {", _warps(lambda s: _tiles(s) + 1)),
    *_tile_parts(),
    Part(
        *(LANES, "group < end; group += plan.step"),
        lambda s: chunks(s) * _over_tiles(s, lambda size: _of_warps(s, lambda set_: up(size - 2 * set_, 2 * sets(s)))),
    ),
    Part(LANES, "token[j] = j < m ? prompt[j] : 0, with_v = std::fma", _warps(lambda s: s.K * s.t), ("fma", 22)),
    # Sums over sets: each pass is a loop over numbers, and one over sets inside it.
    Part(
        *(LANES, "add_sets(sums, wanted, lane, plan,", lambda s: chunks(s) * _of_run(s) / len(_passes(1 + 2 * s.m))),
        whole=True,
    ),
    Part(
        *(LANES, "add_sets(dW, kOwn + kShared, lane,", lambda s: chunks(s) * _of_part(s) / len(_passes(s.m * s.m))),
        whole=True,
    ),
    # Eleven copies of one loop, of which one stands for all.
    Part(
        *(LANES, "s < sets; s += 4", lambda s: chunks(s) * (_of_run(s) + _of_part(s)) * up(sets(s), 4)),
        marker=("shared", 4),
    ),
)


def _trials_bytes(s: CaseShape) -> float:
    return (bytes_moved(s) if _is_stored(s) else record_bytes(s)) + partial_bytes(s)


MANY_TRIALS = Launch(
    "13trials_kernelILi11ELNS1_3ForE1E",
    *(chunks, 256, _trials_shared, PARTS, _trials_bytes),
    ahead=lambda s: 4 * tile(s) * (s.m * s.m + s.m + 1 if _is_stored(s) else record_floats(s.m)),
)
