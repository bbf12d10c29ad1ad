"""What a call should take on a GPU, on paper: from the machine code of all its kernels. Nothing here was measured.

A call is a list of launches. Of each, the model knows the machine code, and how often the body of every loop runs: the
`Part`s. From these it counts instructions by kind, and takes as the time of a launch the longest of

- each unit's time for all instructions that occupy it (`Gpu.rates`), the four schedulers' among them;
- the DRAM's time for all bytes that the launch reads and writes, and, where copies run ahead of the work, the time that
  these take when each block has `ahead` bytes under way, for `FLIGHT` each;
- the latency's time: what one warp takes alone (`sass.clocks`: stall counts and waits of the machine code), for all
  warps, shared out to as many as fit a multiprocessor by registers, threads and shared memory;

stretched where the last wave of blocks is not full. A launch costs `LAUNCH` on top, a launch that follows another one
`GAP`. Contention between kinds, bank conflicts, misses of the instruction cache and clocks below the highest are not
counted: a real GPU takes longer.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dev import sass
from fastlin.bench.cases import CaseShape

LAUNCH, GAP = 2.5e-6, 1e-6
"""Seconds from the launch of the first kernel to its work, and between dependent kernels of a stream."""
FLIGHT = 0.7e-6
"""Seconds that an asynchronous copy takes from DRAM under load."""


@dataclass(frozen=True)
class Gpu:
    """A GPU by its published peaks.

    `rates` are warp instructions that a multiprocessor takes in a clock, by unit: `fma` serves float32 and, at half of
    its lanes where it has 128, integer products; `shared` is the port of shared memory, in 128 bytes.
    """

    name: str
    architecture: str
    multiprocessors: int
    clock: float
    bandwidth: float
    shared_bytes: int
    rates: Mapping[str, float]

    def units(self, counts: Mapping[str, float], shared_clocks: float, bytes_: float) -> dict[str, float]:
        """Seconds of each unit."""
        second = self.multiprocessors * self.clock
        of_units = {
            "issue": sum(counts.values()) / 4,
            "FMA": (counts["fma"] + counts["imad"]) / self.rates["fma"],
            "integer products": counts["imad"] / self.rates["imad"],
            "integer": counts["alu"] / self.rates["alu"],
            "float64": counts["double"] / self.rates["double"],
            "special": counts["special"] / self.rates["special"],
            "shared memory": shared_clocks,
            "L1": counts["generic"] + counts["global"] + counts["local"],
        }
        return {**{unit: clocks / second for unit, clocks in of_units.items()}, "DRAM": bytes_ / self.bandwidth}

    def resident(self, threads: int, registers: int, shared: int) -> int:
        """Blocks that a multiprocessor holds at once."""
        warps = -(-threads // 32)
        of_registers = 65536 // (warps * 32 * (-(-registers // 8) * 8))
        of_shared = self.shared_bytes // (shared + 1024)
        return max(min(of_registers, of_shared, 64 // warps, 32), 1)


_A100 = {"fma": 2, "imad": 2, "alu": 2, "double": 1, "special": 0.5}
_H100 = {"fma": 4, "imad": 2, "alu": 2, "double": 2, "special": 0.5}
GPUS = (
    Gpu("A100 SXM 80GB", "sm_80", 108, 1.41e9, 2.04e12, 164 << 10, _A100),
    Gpu("H100 SXM", "sm_90", 132, 1.98e9, 3.35e12, 228 << 10, _H100),
)
"""19.5 and 66.9 TFLOP/s in float32, as published, which H100 reaches at its highest clock."""


@dataclass(frozen=True)
class Part:
    """A loop of a kernel: where it is in the source, and how often its body runs.

    Attributes
    ----------
    file, text : str
        A file below csrc, and what the line of its `for` has: in one line of the file alone.
    runs : callable
        Of a shape: runs of the body in the source, added over all warps of the launch.
    marker : (str, float) or None
        Where the compiler unrolls the loop: a kind of instruction, and how many of them one run of the body has. The
        loop of that line with most of them is the one that counts. None: it is not unrolled.
    inside : str
        File and part of a line that the loop is inlined at, where one line has become several loops.
    whole : bool
        All loops that come from the line count together, as one.
    """

    file: str
    text: str
    runs: Callable[[CaseShape], float]
    marker: tuple[str, float] | None = None
    inside: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Launch:
    """A kernel of a call.

    Attributes
    ----------
    kernel : str
        Pattern of its mangled name.
    blocks, threads, shared : callable, int, callable
        Of a shape: blocks; threads of each, and bytes of dynamic shared memory.
    parts : tuple of Part
    bytes_ : callable
        Of a shape: bytes that the launch reads from and writes to DRAM.
    calls : tuple
        Functions that the kernel calls: pattern of the name, and how many warps call each, of a shape.
    straight : float
        How many times the code outside of loops runs, for each warp.
    ahead : callable or None
        Of a shape: bytes of asynchronous copies that a block has under way.
    """

    kernel: str
    blocks: Callable[[CaseShape], float]
    threads: int
    shared: Callable[[CaseShape], float]
    parts: tuple[Part, ...]
    bytes_: Callable[[CaseShape], float]
    calls: tuple[tuple[str, Callable[[CaseShape], float]], ...] = ()
    straight: float = 1.0
    ahead: Callable[[CaseShape], float] | None = None


@dataclass
class Estimate:
    """What the model finds of a launch or, added up, of a call."""

    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)  # of warp instructions, by kind
    bytes_: float = 0.0
    launches: int = 0
    fma_seconds: float = 0.0  # what the FMAs alone take
    dram_seconds: float = 0.0
    bound: str = ""
    registers: int = 0
    shared: int = 0
    warps: int = 0
    uncounted: list[sass.Loop] = field(default_factory=list)


def line_of(file: str, text: str, sources: Path) -> int:
    """The line of a file that has a text.

    Raises
    ------
    LookupError
        When none has it, or two.
    """
    lines = (sources / file).read_text().splitlines()
    found = [number for number, line in enumerate(lines, 1) if text in line]
    if len(found) != 1:
        raise LookupError(f"{file} has {len(found)} lines with {text!r}; wants one")
    return found[0]


def loops_of(part: Part, loops: Sequence[sass.Loop], sources: Path) -> list[sass.Loop]:
    """The loop of a part, or all of them where it is whole.

    Raises
    ------
    LookupError
        When the machine code has none, or several where one is wanted.
    """
    place = (Path(part.file).name, line_of(part.file, part.text, sources))
    everywhere = [loop for outer in loops[1:] for loop in outer.walk() if loop.own]
    if part.inside:
        file, text = part.inside.split(": ", 1)
        around = (Path(file).name, line_of(file, text, sources))
        everywhere = [loop for loop in everywhere if loop.has(around)]
    found: list[sass.Loop]
    if part.whole:
        found = [x for x in everywhere if sum(place in own.places for own in x.own) > 0.9 * len(x.own)]
        if found:
            return found
    elif part.marker is None:
        found = [loop for loop in everywhere if loop.line == place]
        if len(found) == 1:
            return found
    else:
        kind = part.marker[0]
        found = [loop for loop in everywhere if loop.has(place) and loop.counts[kind]]
        if found:
            return [max(found, key=lambda loop: (not loop.inside, loop.counts[kind]))]
    raise LookupError(f"{len(found)} loops at {place[0]}:{place[1]}; wants one")


def kernel_of(pattern: str, kernels: Mapping[str, object]) -> str:
    """The name of the kernel, or function, that a pattern finds."""
    found = [name for name in kernels if re.search(pattern, name)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} kernels match {pattern!r}; wants one")
    return found[0]


def estimate(
    launch: Launch,
    shape: CaseShape,
    gpu: Gpu,
    kernels: Mapping[str, list[sass.Loop]],
    registers: Mapping[str, int],
    sources: Path,
) -> Estimate:
    """What a launch takes."""
    name = kernel_of(launch.kernel, registers)
    loops = kernels[name]
    blocks, shared = launch.blocks(shape), launch.shared(shape)
    warps = blocks * (launch.threads // 32)
    rounds: list[tuple[sass.Loop, float]] = [(loops[0], warps * launch.straight)]
    for part in launch.parts:
        of_part = loops_of(part, loops, sources)
        copies = 1.0
        if part.marker is not None:
            copies = sum(loop.counts[part.marker[0]] for loop in of_part) / part.marker[1]
        rounds += [(loop, part.runs(shape) / copies) for loop in of_part]
    for pattern, calls in launch.calls:
        function = kernels[kernel_of(pattern, {other: None for other in kernels if other.startswith(name)})]
        rounds += [(loop, calls(shape)) for outer in function for loop in outer.walk()]
    counted = {id(loop) for loop, _ in rounds}
    found = Estimate(launches=1, bytes_=launch.bytes_(shape), registers=registers[name], shared=int(shared))
    found.uncounted = [x for outer in loops[1:] for x in outer.walk() if x.own and id(x) not in counted]
    shared_clocks = serial = 0.0
    for loop, runs in rounds:
        for kind, number in loop.counts.items():
            found.counts[kind] += round(number * runs)
        shared_clocks += runs * sum(instruction.shared_clocks for instruction in loop.own)
        serial += runs * sass.clocks(loop.own)
    at_once = gpu.resident(launch.threads, found.registers, found.shared)
    found.warps = at_once * (launch.threads // 32)
    units = gpu.units(found.counts, shared_clocks, found.bytes_)
    units["latency"] = serial / (found.warps * gpu.multiprocessors * gpu.clock)
    if launch.ahead is not None:
        units["copies"] = found.bytes_ * FLIGHT / (launch.ahead(shape) * at_once * gpu.multiprocessors)
    found.bound = max(units, key=lambda unit: units[unit])
    places = gpu.multiprocessors * at_once
    waves = math.ceil(blocks / places) * places / blocks if blocks > places else 1.0
    # Fewer blocks than places: some multiprocessors have less to do, or nothing.
    share = 1.0 if blocks >= places else math.ceil(blocks / gpu.multiprocessors) * gpu.multiprocessors / blocks
    longest = max(seconds for unit, seconds in units.items() if unit != "DRAM")
    found.seconds = max(longest * max(waves, share), units["DRAM"])
    found.fma_seconds = found.counts["fma"] / (gpu.rates["fma"] * gpu.multiprocessors * gpu.clock)
    found.dram_seconds = units["DRAM"]
    return found


def total(found: Sequence[Estimate]) -> Estimate:
    """A call of several launches."""
    longest = max(found, key=lambda one: one.seconds)
    sum_ = Estimate(bound=longest.bound, registers=longest.registers, shared=longest.shared, warps=longest.warps)
    sum_.seconds = LAUNCH + GAP * (len(found) - 1)
    for one in found:
        sum_.seconds += one.seconds
        sum_.counts += one.counts
        sum_.bytes_ += one.bytes_
        sum_.launches += one.launches
        sum_.fma_seconds += one.fma_seconds
        sum_.dram_seconds += one.dram_seconds
    return sum_
