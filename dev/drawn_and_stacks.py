"""Launches of the calls that draw their sequences, of stacks, and of a training step's update, for `dev.paper`.

count.cu, drawn.cu, form_drawn.cu, stack.cu and update.cu. Tasks are Gaussian with full covariances, without noise,
feature covariance or constant coordinate, and equal in the loss; parameters have one prompt token. Kernels and their
shared memory are those of m = 11.
"""

from __future__ import annotations

from collections.abc import Callable

from dev.one_layer import COEFFICIENTS, COUNT_ROWS, Count, chunks, partial_bytes, record_floats, trials, up
from dev.paper import Launch, Part
from fastlin.bench.cases import CaseShape


def _record(s: CaseShape) -> int:
    """Bytes of a record."""
    return 4 * record_floats(s.m)


def _never(s: CaseShape) -> float:
    """Of a loop for what these calls do not have."""
    return 0


def _per_block(count: Count) -> Count:
    """For each chunk and trial, which is a block."""
    return lambda s: chunks(s) * trials(s) * count(s)


def _warps(s: CaseShape) -> float:
    """Of a block whose warps all do the same."""
    return 4


def _one(s: CaseShape) -> float:
    return 1


def _tasks(s: CaseShape) -> float:
    return s.K


def _features(s: CaseShape) -> float:
    return s.m - 1


# What all kernels do that draw. A tile is 32 sequences, one in each lane.


def _tiles(s: CaseShape) -> float:
    return s.B / 32


def _each(count: Count) -> Count:
    """For each tile."""
    return lambda s: _tiles(s) * count(s)


def _rank(s: CaseShape) -> int:
    return min(s.n, s.m - 1)


def _below(s: CaseShape) -> int:
    """Normals of the factor."""
    return _rank(s) * (s.m - 1) - _rank(s) * (_rank(s) + 1) // 2


def _normal_pairs(s: CaseShape) -> int:
    """Pairs of Philox blocks: those of the query, of beta and of the factor."""
    return up(2 * up(s.m - 1, 4) + up(_below(s), 4), 2)


def _open(s: CaseShape) -> list[float]:
    """How likely float leaves one of the chi variates of a pair open, in a lane of a warp.

    It does where u + b > 1 - 2^-15 (chi-inl.h), b = x^4 / (108 d) with a mean of 1 / (36 d): 1 in 860 at 50 degrees.
    """
    of_pairs = [(s.n - 2 * pair - 0.5) / 2 - 1 / 3 for pair in range(up(_rank(s), 2))]
    return [1 - (1 - 1 / (36 * d) - 2**-15) ** 64 for d in of_pairs]


def _search(s: CaseShape) -> float:
    """Steps of the search for a task."""
    return (s.K - 1).bit_length()


def _draws(kernel: str, task: str) -> tuple[Part, ...]:
    """The draws of a tile; `task` is the line that draws the task."""
    draw = "cuda/draw.cuh"
    return (
        Part(draw, "pair < end; pair += step) {", _each(_normal_pairs)),
        Part(draw, "pair < end; pair += step, bit += bit)", _each(lambda s: up(_rank(s), 2))),
        # Lanes go on together up to the last pair that is open in one: 1.1 rounds at n = 50, of 0.4 open pairs.
        Part(draw, "open_pairs != 0; index +=", _each(lambda s: 2.75 * sum(_open(s)))),
        Part(draw, "i < 2 * static_cast<int>(open_pairs & 1)", _each(lambda s: 2 * sum(_open(s)))),
        # Second attempts settle nine of ten at n = 50.
        Part(draw, "needs_block && j < kBlocksPerChi; ++j)", _each(lambda s: 0.1 * sum(_open(s)))),
        Part("core/sampler-inl.h", "while (first < last)", _each(_search), None, f"{kernel}: {task}"),
    )


def _tables(kernel: str, per_block: Callable[[Count], Count]) -> tuple[Part, ...]:
    """The loops that write the tables of a block: fewer than 32 rows for each section."""
    loop = "for (int i = thread_; i < count;"
    runs = {"kQuery": per_block(_one), "kBeta": per_block(_one), "kNoise": _never, "kFactor": per_block(_one)}
    return (
        *(
            Part("cuda/draw.cuh", loop, count, None, f"{kernel}: table.add(Sections::block(Sections::{section})")
            for section, count in runs.items()
        ),
        Part("cuda/draw.cuh", "i < round_up(shape.slots(), 2)", per_block(_one)),
    )


COUNT_DRAWN = Launch(
    "12count_kernelILb1E",
    lambda s: COUNT_ROWS,
    256,
    lambda s: 256,
    (
        # 128 sequences a round: code for each quarter of them is inlined.
        Part("cuda/count.cu", "first - lane < end; first +=", lambda s: s.B / 128),
        Part("cuda/draw.cuh", "Sections::task(source, i, word_of(", lambda s: s.B / 128 * _search(s), whole=True),
        Part("cuda/count.cu", "add_counts(tasks, task[u], count)", lambda s: s.B / 128 * s.K, whole=True),
    ),
    lambda s: 4 * COUNT_ROWS * s.K,
)
"""Counts of drawn tasks: for `sampled_loss` of one trial, where no records are made."""


# drawn.cu: a warp has 32 sequences at a time, a block a chunk and four warps.

_DRAWN, _SUMS, _MEMORY = "cuda/drawn.cu", "cuda/drawn_sums.cuh", "cuda/drawn_memory.cuh"
_GROUPS = "while (row < d && round_up(normals_before(row + 1), 8)"
_FACTOR = ("F, applied.u_v)", "F, applied.u_a)", "F, applied.c)", "F, applied.e)")


def _drawn_shared(s: CaseShape) -> float:
    """`drawn_memory`: numbers of tasks, W, coefficients, groups, tables; four warps' columns of 84 entries and sums."""
    of_task = 168 if s.K == 1 else up(164, 32) * 32 + 4
    block = s.K * of_task + 120 + up(s.K, 4) * 4 + 4 + 96 + 96
    return 4 * (block + 4 * up(32 * 84 + s.K * _width(s), 4) * 4)


def _width(s: CaseShape) -> int:
    """Sums of a task in one layer: squares, e, q."""
    return 1 + 2 * s.m


DRAWN = Launch(
    "12drawn_kernelILi11ELb0E",
    chunks,
    128,
    _drawn_shared,
    (
        Part(_DRAWN, "first < count; first += warps * kLanes", _tiles),
        *_draws(_DRAWN, "const int task = drawn_task(philox, sequence, source, i);"),
        Part(_DRAWN, "sums.write(applied, own, of_task", _each(_tasks), whole=True),  # masks of tasks
        Part(_SUMS, "sum = std::fma(row[i].x[x], column[j].x[x], sum)", _each(lambda s: 8), ("fma", 16)),
        Part(_SUMS, "column < width; column += kLanes", _each(lambda s: up(_width(s), 32))),
        Part(_SUMS, "      for (int k = 0; k < work.P.K; ++k) {", _each(lambda s: s.K * up(_width(s), 32))),
        # Before the first tile.
        *COEFFICIENTS,
        Part(_DRAWN, "i < K * at.task_stride; i += threads", _per_block(lambda s: up(196 * s.K, 32))),
        Part(_DRAWN, "t < P.t; ++t, p += M", _per_block(lambda s: s.K * s.t)),
        Part(_DRAWN, "l < M; ++l) product =", _per_block(lambda s: s.K * s.t * s.m)),
        Part(_DRAWN, "i < (M - 1) * E::quads; i += threads", _per_block(_warps)),
        *_tables(_DRAWN, _per_block),
        Part(_MEMORY, _GROUPS, _per_block(lambda s: 4 * (s.m - 1)), None, f"{_DRAWN}: const int end = std::min(wanted"),
        Part(_SUMS, "i < work.P.K * work.at.width; i += kLanes", _per_block(lambda s: 4 * up(s.K * _width(s), 32))),
        # After the last one: dW and the sums of tasks, 121 and 46 numbers of four warps.
        Part(_DRAWN, "finish_chunk<M>(work, at,", _per_block(lambda s: 6), whole=True),
        # A feature covariance, other tasks, heads of stacks, fewer tokens than features.
        Part(_DRAWN, "source.feature_factor != nullptr && i < d * E::d_quads", _never),
        *(Part(_DRAWN, text, _never, whole=True) for text in ("normals, nullptr, own + E::query", *_FACTOR)),
        Part(_DRAWN, "j < d; ++j) beta[j * kLanes] = mean[j]", _never),
        Part(_DRAWN, "j < d; ++j) beta[j * kLanes] *= stretch", _never),
        Part(_DRAWN, "sum = std::fma(own[(E::query + j) * kLanes], with", _never),
        Part(_DRAWN, "if (shape.rank < d) clear_after_rank", _never, whole=True),
    ),
    partial_bytes,
)
"""`sampled_loss` of one trial."""


# form_drawn.cu: a block has 32 sequences at a time, its four warps share out what is to be done with them.

_FORM = "cuda/form_drawn.cu"
_DOT = "for (; j + 2 <= d; j += 2) {"
_ENTRIES = 126
"""Of a sequence's column: FormShape::made."""


def _form_blocks(s: CaseShape) -> int:
    """Blocks that have a tile; with counts of tasks there are always COUNT_ROWS."""
    return min(up(s.B, 32), COUNT_ROWS)


def _form_shared(s: CaseShape) -> float:
    """`form_memory`: numbers of tasks, tables, tasks, counts, columns of 126 entries, records."""
    of_task = 132 if s.K == 1 else up(128, 32) * 32 + 4
    return 4 * (s.K * of_task + 104 + 96 + 32 + up(s.K, 4) * 4 + 32 * _ENTRIES + 32 * record_floats(s.m))


def _per_form(count: Count) -> Count:
    """For each block that forms records."""
    return lambda s: _form_blocks(s) * count(s)


def _bands(s: CaseShape) -> float:
    """Rounds of the loop over bands, and of the loop over full rows of each of the five bands, as if all had as many.

    A round over bands has the code of all, 195 multiply-adds, and takes one band's. Band b has 2 b full rows with 21 -
    4 b multiply-adds each: 180 in all, and 65 in one round of each loop. Instructions of other kinds are within 5 %.
    """
    return (195 + 180) / (195 + 65)


FORM_DRAWN = Launch(
    "17form_drawn_kernelILi11ELb0E",
    _form_blocks,
    128,
    _form_shared,
    (
        # What a warp does for itself is 270 of 670 instructions; labels, the task, the ends of records are one warp's.
        Part(_FORM, "i < end; i += static_cast<std::int64_t>(gridDim.x) * T", _each(lambda s: 4 * 0.4 + 0.6)),
        *_draws(_FORM, "const int task = drawn_task(philox, sequence, source, i);"),
        Part(_FORM, "i < d; i += E::workers) {", _each(_features)),
        Part(_FORM, "number == kBands ? (make_band<kBands>(record), true)", _each(_bands), whole=True),
        Part(_FORM, "row < shape.rows(); ++row", _each(_rank)),
        Part(_FORM, _DOT, _each(lambda s: s.m // 2), None, f"{_FORM}: float y = dot_columns(q, own"),
        Part(_FORM, "j = E::workers - 1 - worker; j < M; j += E::workers", _each(lambda s: s.m)),
        Part(_FORM, "q < count * (E::floats / 4); q += E::threads) to[q]", _each(lambda s: _record(s) / 16)),
        # Before the first tile.
        Part(_FORM, "i < source.K; i += E::threads) counts[i] = 0", _per_form(_one)),
        Part(_FORM, "i < K * at.task_stride; i += E::threads", _per_form(lambda s: up(132 * s.K, 32))),
        *_tables(_FORM, _per_form),
        # A feature covariance, other tasks.
        Part(_FORM, "source.feature_factor != nullptr && i < d * E::d_quads", _never),
        Part(_FORM, "if (source.feature_factor != nullptr) make_features();", _never, whole=True),
        Part(_FORM, "row < shape.rows(); row += E::workers) {", _never),
        Part(_FORM, _DOT, _never, None, f"{_FORM}: put_label(row, deviation, dot_columns"),
        Part(_FORM, _DOT, _never, None, f"{_FORM}: / std::sqrt(dot_columns(normals, normals))"),
        Part(_FORM, "beta[i * T] = stretch * normals[i * T];", _never),
        Part(_FORM, "beta[i * T] = of_task[i];", _never),
    ),
    lambda s: _record(s) * s.B,
)
"""Records for trials.cu and stack.cu, and counts of tasks."""


# stack.cu: a warp has eight sequences at a time, a block a chunk of a trial and four warps.

_STACK, _WARP, _REVERSE = "cuda/stack.cu", "cuda/stack_warp.cuh", "cuda/stack_reverse.cuh"


def _dense(s: CaseShape) -> int:
    """Matrix layers that are computed with matrices: neither the last one nor the head."""
    return s.L - 2


def _stack_shared(s: CaseShape) -> float:
    """`stack_layout` with all four warps, in columns of 12 and matrices of 144 floats."""
    block = (2 * _dense(s) + 6) * 144 + s.K * (3 + 2 * s.t) * 12 + 4
    sequence = (20 + s.t + s.L) * 12 + _dense(s) * 3 * 144 + (288 if _dense(s) > 1 else 0)
    quads = (2 + s.t) * 3
    warp = 8 + 8 * s.K + max(32 // quads, 1) * s.K * quads * 4 + 96 + 8 * (sequence // 4 | 1) * 4
    return 4 * (block + 4 * warp)


def _groups(count: Count) -> Count:
    """For each eight sequences and trial."""
    return lambda s: trials(s) * s.B / 8 * count(s)


def _reverse_products(s: CaseShape) -> float:
    """Rounds of the loop over a layer's six products in reverse: 1122 multiply-adds, as if all steps were in one.

    A product takes 363. The bottom layer has two of the steps, others all six; one step adds to dA, one to dC.
    """
    return (2 * 363 + 33 + 726 + (_dense(s) - 1) * (6 * 363 + 33 + 726)) / 1122


STACK = Launch(
    "12stack_kernelILi11E",
    lambda s: chunks(s) * trials(s),
    128,
    _stack_shared,
    (
        Part(_STACK, "first = warp * StackShape<M>::sequences; first < count;", _groups(_one)),
        Part(_WARP, "for (int t = 0; t < at.t; ++t) {", _groups(lambda s: s.t)),
        Part(_WARP, "l < at.dense; ++l) forward(l, G)", _groups(_dense)),
        Part(_WARP, "step < (S::parts == 1 ? 2 : 4); ++step", _groups(lambda s: 2 * _dense(s))),
        Part(_WARP, "for (int n = tokens; n >= 0; --n)", _groups(lambda s: _dense(s) + s.t)),
        # The bottom layer ends after 50 of 340 instructions.
        Part(_REVERSE, "l = at.dense - 1; l >= 0; --l) reverse(l)", _groups(lambda s: _dense(s) - 0.85)),
        Part(_REVERSE, "step < (l > 0 ? 6 : 5); ++step", _groups(_reverse_products)),
        Part(_REVERSE, "if (l == 0 && work.at.p >= 0) prompts_above(G);", _groups(lambda s: s.t), whole=True),
        Part(_REVERSE, "if (work.at.p >= 0) prompts_below(H);", _groups(lambda s: s.t), whole=True),
        # Three streams at one prompt token; a lane has a quad of a stream's sums.
        Part(_REVERSE, "s < S::sequences; s += at.streams) {", _groups(lambda s: 3)),
        Part(_REVERSE, "quad < quads; quad += 32) {", _groups(lambda s: 3)),
        # A stack of one matrix layer.
        Part(_REVERSE, "lane.apply(G, of_token(at.p, t), dp);", _never, ("fma", 33)),
        # Before the first sequence: parameters, zeros of the sums.
        *COEFFICIENTS,
        Part(_STACK, "for (int l = 0; l < at.dense; ++l) {", _per_block(lambda s: 4 * _dense(s))),
        Part(_STACK, "(StackShape<M>::has_both ? 6 : 3); ++i", _per_block(lambda s: 4 * 6)),
        Part(_STACK, "for (int k = 0; k < at.K; ++k) {", _per_block(lambda s: 4 * s.K)),
        *(
            Part(
                _STACK, "i < S::matrix; i += static_cast<int>(blockDim.x)", _per_block(count), None, f"{_STACK}: {line}"
            )
            for line, count in (
                ("memory + at.A + l * matrix);", lambda s: 5 * _dense(s)),
                ("memory + at.C + l * matrix);", lambda s: 5 * _dense(s)),
            )
        ),
        Part(_STACK, "load_matrix<M>(from, m, i < 3,", _per_block(lambda s: 5 * 3), whole=True),  # in two forms
        *(
            Part(_STACK, "i < count * column; i +=", _per_block(count), None, f"{_STACK}: {line}")
            for line, count in (
                ("load_vectors<M>(nullptr, false, 1.0f, P.v_of(r, k),", _tasks),
                ("load_vectors<M>(last_C,", _tasks),
                ("load_vectors<M>(nullptr, false, 1.0f, P.h", lambda s: up(12 * s.K, 32)),
                ("load_vectors<M>(nullptr, false, 1.0f, p,", lambda s: up(12 * s.K * s.t, 32)),
                ("load_vectors<M>(C, true,", lambda s: up(12 * s.K * s.t, 32)),
            )
        ),
        *(
            Part(_STACK, "matrix != nullptr && k < m; ++k", _per_block(count), None, f"{_STACK}: {line}")
            for line, count in (
                ("load_vectors<M>(last_C,", lambda s: s.K * s.m),
                ("load_vectors<M>(C, true,", lambda s: up(12 * s.K * s.t, 32) * s.m),
            )
        ),
        # A loop that is unrolled, and what it leaves.
        Part(_WARP, "i < at.parts; i += 32)", _per_block(lambda s: 4 * 8), ("shared", 1), whole=True),
        # After the last one: 6,300 and 1,000 instructions, as if all loops there had as many rounds.
        Part(_STACK, "write_sums<M>(work, at, memory, r, partial);", _per_block(lambda s: 22), whole=True),
        Part(_STACK, "  write_task_sums<M>(work, at, memory, r, partial);", _per_block(lambda s: 6), whole=True),
    ),
    lambda s: _record(s) * s.B * trials(s) + partial_bytes(s),
)
"""Stacks of three layers and more, from records."""


# update.cu: a block has a trial of up to 1024 numbers. Adam without clipping, a schedule on the device.

_UPDATE = "cuda/update.cu"


def _updated(s: CaseShape) -> int:
    """Numbers of a trial: W, v and p."""
    return s.m * s.m + s.K * s.m * (1 + s.t)


def _updates(s: CaseShape) -> float:
    """Warps that have a number to update."""
    return trials(s) * up(_updated(s), 32)


_NUMBERS = "at < end; at += kThreads) {"
_PARAMETERS = "i >= p->size; ++p) i -= p->size"
_COPIES = "copy < p.copies; ++copy)"

UPDATE = (
    Launch(
        "14prepare_kernelIfE",
        trials,
        256,
        lambda s: 2048,
        # Gradients are read here for clipping alone, and the powers of Adam's betas are one warp's.
        (Part(_UPDATE, _NUMBERS, _never), Part(_UPDATE, _PARAMETERS, _never), Part(_UPDATE, _COPIES, _never)),
        lambda s: 28 * trials(s),
        (("internal_accurate_pow", lambda s: 2),),
    ),
    Launch(
        "12apply_kernelIfE",
        trials,
        256,
        lambda s: 0,
        (
            Part(_UPDATE, _NUMBERS, _updates),
            Part(_UPDATE, _PARAMETERS, _updates),
            Part(_UPDATE, _COPIES, _never, whole=True),
            Part(_UPDATE, "update.rule.clip >= 0.0 && i < update.chunks", _never),
            # Four numbers of a row, by one warp; unrolled, and what that leaves.
            Part("cuda/update.h", "words[1 + i] = row[i]", lambda s: 4, ("global", 2), whole=True),
        ),
        lambda s: 28 * trials(s) * _updated(s),
    ),
)
"""The update of a training step, of all trials."""
