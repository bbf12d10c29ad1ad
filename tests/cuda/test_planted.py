"""Faults that are planted in copies of the kernels' sources, each of which must be seen, and by what.

All of them are in one copy, and a variable of the environment chooses: so the kernels are compiled twice, not fifty
times. What is not found in the sources fails, as does a fault that nothing sees.
"""

import re

import pytest
from cpp import toolchain
from cuda import emulation

# Text of a source, and with which faults it becomes what.
EDITS = [
    # Bound checks.
    ("tile_warp.h", "const bool there = inside &&", "const bool there = (inside || fault(read past a row)) &&"),
    ("tile_warp.h", "if (j + lane() < count)\n", "if (fault(written past a row) || j + lane() < count)\n"),
    ("trial.h", "if (out.yhat != nullptr && real)", "if (out.yhat != nullptr && (real || fault(lanes to spare)))"),
    ("kernels.cuh", "first + (real ? lane()", "first + (real || fault(past the batch) ? lane()"),
    ("kernels.cuh", "if (i >= call.matrices)", "if (i >= call.matrices && !fault(past the matrices))"),
    ("kernels.cuh", "if (r >= P.R)", "if (r >= P.R && !fault(past the trials))"),
    # Lanes and what they exchange.
    ("kernels.cuh", "__ballot_sync(0xffffffffu,", "__ballot_sync(fault(lane without a vote) ? ~1u : ~0u,"),
    ("kernels.cuh", "call.task(position - 1) != k", "call.task(position - !fault(vote on itself)) != k"),
    (
        "tile_warp.h",
        "(s + lane()) & (N - 1);\n      const T value",
        "(s + lane()) & (N - 1 - fault(even lanes alone));\n      const T value",
    ),
    (
        "tile_warp.h",
        "= staging[i * kStagingStride + lane()];",
        "= staging[i * kStagingStride + (lane() ^ int(fault(neighbour's row)))];",
    ),
    # All blocks of threads add to the sums of one, in the order in which they come.
    (
        "trial.h",
        "call.partial + block * call.matrices + r",
        "call.partial + (fault(unordered sum) || fault(atomic sum) ? 0 : block) * call.matrices + r",
    ),
    (
        "trial.h",
        "if (out.dW != nullptr) zero(dW_of(block, r), square);",
        "if (out.dW != nullptr && (block == 0 || !(fault(unordered sum) || fault(atomic sum))))"
        " zero(dW_of(block, r), square);",
    ),
    (
        "tile_warp.h",
        "sums[(i0 + i) * m + j0 + j] += static_cast<double>(acc[i][j]);",
        "{ double* to = sums + (i0 + i) * m + j0 + j;"
        " if (fault(atomic sum)) atomicAdd(to, double(acc[i][j])); else *to += acc[i][j]; }",
    ),
    (
        "kernels.cuh",
        "for (std::int64_t block = 0; block < call.blocks; ++block) sum +=",
        "const bool one = i < of_W && call.blocks > 0 && (fault(unordered sum) || fault(atomic sum));"
        " for (std::int64_t block = 0; block < (one ? 1 : call.blocks); ++block) sum +=",
    ),
]

# What sees them: the build, the problems that it takes, and what is reported.
OVERRUN = ("addresses", r"AddressSanitizer: heap-buffer-overflow")
WRONG = ("addresses", r"\w+\[\d+\] is \S+ instead of \S+, tolerance")
RACE = ("races", r"ThreadSanitizer: data race")
SEEN = {
    "read past a row": OVERRUN,
    "written past a row": OVERRUN,
    "lanes to spare": WRONG,
    "past the batch": OVERRUN,
    "past the matrices": OVERRUN,
    "past the trials": OVERRUN,
    "lane without a vote": (
        "addresses",
        r"block \d+: a lane is not in the mask of its own collective: kernels.cuh:\d+",
    ),
    "vote on itself": WRONG,
    "even lanes alone": WRONG,
    "neighbour's row": WRONG,
    "unordered sum": RACE,
    "atomic sum": ("addresses", r"dW has other bits"),  # which no sanitizer has anything against
}
# Barriers are numbered within a file. Those that may go without a trace, and why:
SPARE = {
    "cuda/kernels.cuh no. 5": "`sum_tokens` waits before it reads what `take` has written",
    "cuda/kernels.cuh no. 7": "`store_rows` waits before it reads the sequences of other lanes",
    "cuda/trial.h no. 1": "`add_outer` and `add_sums` wait before they add to what was cleared",
}

BARRIER = re.compile(r"\b(?:sync_block|sync_lanes|team\.sync)\(\);")
FILES = ("cuda/kernels.cuh", "cuda/worker.h", "cuda/trial.h", "cuda/tile_warp.h", "core/records.h")
HEADER = """#pragma once
#include <cstdlib>
inline const int fastlin_planted = std::getenv("PLANTED") == nullptr ? -1 : std::atoi(std::getenv("PLANTED"));
"""
FAULT = re.compile(r"fault\(([^()]+)\)")


def barriers(name):
    return [f"{name} no. {i}" for i in range(1, len(BARRIER.findall((toolchain.SOURCES / name).read_text())) + 1)]


NAMES = [*SEEN, *(barrier for name in FILES for barrier in barriers(name))]


def planted(sources, name):
    """A source with all faults in it, which are none until one is chosen."""
    text = (sources / name).read_text()
    for where, old, new in EDITS:
        if name == f"cuda/{where}":
            assert text.count(old) == 1, f"{name} does not have once what a fault is planted in: {old}"
            text = text.replace(old, new)
    names = iter(barriers(name))
    text = BARRIER.sub(lambda found: f"if (!fault({next(names)})) {found[0]}", text)
    return FAULT.sub(lambda found: f"(fastlin_planted == {NAMES.index(found[1])})", text)


def plant(sources):
    for name in FILES:
        text = planted(sources, name)
        (sources / name).write_text(HEADER + text if name == FILES[0] else text)


def driver(build):
    flags = emulation.ADDRESSES if build == "addresses" else emulation.RACES
    return emulation.driver(f"planted-{build}", flags, plant, (EDITS, FILES, HEADER, NAMES))


def assert_seen(fault, build, report):
    """In the problems of the test that finds nothing without a fault."""
    for mode in (("edges", 60), ("drawn",)) if build == "addresses" else (("edges", 24), ("drawn",)):
        done = emulation.call(driver(build), *mode, PLANTED=str(NAMES.index(fault)))
        if done.returncode != 0:
            break
    assert re.search(report, done.stdout + done.stderr), f"not seen: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("build", ["addresses", "races"])
def test_nothing_without_a_fault(build):
    emulation.assert_ok(driver(build), "edges", 6)


def test_every_fault_is_planted():
    text = "".join(new for _, _, new in EDITS)
    assert set(FAULT.findall(text)) == set(SEEN)
    assert SPARE.keys() <= set(NAMES)


@pytest.mark.parametrize("fault", SEEN)
def test_fault_is_seen(fault):
    assert_seen(fault, *SEEN[fault])


@pytest.mark.parametrize("barrier", [name for name in NAMES if name not in SEEN and name not in SPARE])
def test_barrier_is_missed(barrier):
    assert_seen(barrier, *RACE)
