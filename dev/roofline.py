"""What the CUDA kernels should take on a GPU, on paper. `python -m dev.roofline`, where nvcc and nvdisasm are.

Instructions are those of the machine code, float32: for each place in the source where a sequence's work is done, the
loop that it became, and how often a sequence goes through it. Loops alone are counted. A GPU's time is that of the unit
that has most to do, all others hidden behind it: what no kernel beats, and a good one comes near to. Nothing here was
measured on a GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from csrc.cuda import nvcc
from dev import sass
from fastlin._tables import markdown
from fastlin.bench.cases import CaseShape, bytes_moved
from fastlin.bench.timing import in_units

SOURCES = Path(nvcc.__file__).parents[1]


@dataclass(frozen=True)
class Gpu:
    """A GPU by its published peaks; instructions of float32, float64, integers of a clock and multiprocessor."""

    name: str
    architecture: str
    multiprocessors: int
    clock: float
    bandwidth: float
    fma: int
    double: int
    integer: int = 64
    memory: int = 32  # 4-byte accesses to shared memory or L1: 128 bytes a clock
    issue: int = 128  # four warps

    def seconds(self, counts: Mapping[str, float], bytes_: float) -> dict[str, float]:
        """Time of one sequence on each unit."""
        rate = self.multiprocessors * self.clock
        units = {"fma": self.fma, "double": self.double, "integer": self.integer, "memory": self.memory}
        found = {name: counts.get(name, 0.0) / (rate * units[name]) for name in units}
        return {**found, "issue": sum(counts.values()) / (rate * self.issue), "DRAM": bytes_ / self.bandwidth}


GPUS = (
    Gpu("A100 SXM 80GB", "sm_80", 108, 1.41e9, 2.04e12, 64, 32),
    Gpu("H100 SXM", "sm_90", 132, 1.98e9, 3.35e12, 128, 64),
)
"""19.5 and 66.9 TFLOP/s in float32, as published, which H100 reaches at its highest clock."""


@dataclass(frozen=True)
class Site:
    """A place in the source, and how many units of work a sequence has there.

    Attributes
    ----------
    work : str
    file, text : str
        A file below csrc and what its line has, which is looked up.
    unit : str
        Kind of instruction that the units are counted in: multiply-adds that are done, those beyond an edge included,
        or accesses to memory. The loop of the site that has most of them is the unrolled one, and stands for the site.
    units : callable
        Of a shape.
    parts : callable or None
        How often a sequence goes through the loop around that one, of a shape: the parts of a product.
    whole : bool
        Whether a unit goes through all loops inside the outermost one.
    """

    work: str
    file: str
    text: str
    unit: str
    units: Callable[[CaseShape], float]
    parts: Callable[[CaseShape], float] | None = None
    whole: bool = False


def up(a: int, b: int) -> int:
    """Parts of size b that cover a."""
    return -(-a // b)


def _gram_parts(m: int) -> int:
    """Register tiles of 4 x 4 on and below the diagonal."""
    return up(m, 4) * (up(m, 4) + 1) // 2


def _normals(shape: CaseShape) -> int:
    d = shape.m - 1
    rank = min(shape.n, d)
    return d + d + rank * d - rank * (rank + 1) // 2


def _trials(units: Callable[[CaseShape], float]) -> Callable[[CaseShape], float]:
    return lambda shape: (shape.R or 1) * units(shape)


def _per_layer(units: Callable[[CaseShape], float]) -> Callable[[CaseShape], float]:
    return lambda shape: (shape.R or 1) * (shape.L - 1) * units(shape)


TOKENS = (
    Site(
        *(
            "tokens from memory to the tile",
            "cuda/tile_warp.h",
            "staging[lane() * kStagingStride + l] = there ?",
            "memory",
        ),
        lambda s: 3 * up(s.n, 8) * up(8 * s.m, 32),
    ),
    Site(
        *("tokens from rows to lanes", "cuda/tile_warp.h", "tile[(j + i) * N + lane()] = staging[i *", "memory"),
        lambda s: 2 * s.n * s.m,
    ),
    Site(
        *("G = sum z z'", "cuda/worker.h", "product_parts<kRows, 4>(rows, i + rows, count", "fma"),
        lambda s: 16 * s.n * _gram_parts(s.m),
        lambda s: up(s.n, 8) * _gram_parts(s.m),
    ),
)
DRAWS = (
    Site("normals", "core/sampler-inl.h", "lanes.normals(block(kFactor)", "memory", _normals, whole=True),
    Site(
        "chi variates", "core/sampler-inl.h", "lanes.chi(block(kChi)", "memory", lambda s: min(s.n, s.m - 1), whole=True
    ),
    Site(
        *("G = R'R", "core/sampler-inl.h", "symmetric_product(m, count, Across<T>{rows, m}", "fma"),
        lambda s: 16 * min(s.n, s.m - 1) * _gram_parts(s.m),
        lambda s: _gram_parts(s.m),
    ),
)
TRIAL = (
    Site(
        "a = W'q",
        "cuda/trial.h",
        "product_column(m, m, NumbersAcross<T>{W_of",
        "fma",
        _trials(lambda s: 8 * up(s.m, 8) * s.m),
        _trials(lambda s: up(s.m, 8)),
    ),
    Site(
        "c = G v, e = G a",
        "cuda/trial.h",
        "product_parts<6, 2>(m, 2, m, Across<T>{G",
        "fma",
        _trials(lambda s: 12 * up(s.m, 6) * s.m),
        _trials(lambda s: up(s.m, 6)),
    ),
    Site("a.c", "cuda/trial.h", "L::dot(a_of(head), c, m)", "fma", _trials(lambda s: s.m)),
    Site("g c", "cuda/trial.h", "L::put(c, i, g * L::at(c, i))", "fma", _trials(lambda s: s.m)),
    Site(
        *("dW", "cuda/trial.h", "L::add_outer(q, c, m, dW_of", "fma"),
        _trials(lambda s: 6 * up(up(s.m, 3) * up(s.m, 2), 32)),
    ),
    Site(
        *("sums of the record", "cuda/trial.h", "static_cast<double>(L::sum(sums + i * N, from, to))", "memory"),
        _trials(lambda s: up(2 * s.m + 1, 32)),
    ),
)
LAYERS = (
    Site(
        *("products of a stack", "core/stack-inl.h", "product(m, m, m, Across<T>{Gl, m}, Across<T>{Tl, m}", "fma"),
        _per_layer(lambda s: 10 * 16 * up(s.m, 4) ** 2 * s.m),
        _per_layer(lambda s: 10 * up(s.m, 4) ** 2),
    ),
)


@dataclass(frozen=True)
class Case:
    """A call: its shape, the instance of attention_kernel that serves it, and where it works."""

    shape: CaseShape
    instance: str
    sites: tuple[Site, ...]

    @property
    def name(self) -> str:
        """The op and its sizes."""
        s = self.shape
        sizes = [
            f"m = {s.m}",
            f"n = {s.n}",
            *([f"R = {s.R}"] if s.R else []),
            *([f"L = {s.L}"] if "stack" in s.op else []),
        ]
        return f"`{s.op}`, {', '.join(sizes)}"


GIVEN, DRAWN, STACKED, STACKED_DRAWN = "Lb0ELb0E", "Lb0ELb1E", "Lb1ELb0E", "Lb1ELb1E"
CASES = (
    *(Case(CaseShape(n=n), GIVEN, TOKENS + TRIAL) for n in (10, 50, 200)),
    Case(CaseShape(n=50, m=33), GIVEN, TOKENS + TRIAL),
    Case(CaseShape(n=50, R=50), GIVEN, TOKENS + TRIAL),
    Case(CaseShape("sampled_loss", n=50), DRAWN, DRAWS + TRIAL),
    Case(CaseShape("sampled_loss", n=50, R=50), DRAWN, DRAWS + TRIAL),
    Case(CaseShape("stack_loss", n=50, L=3), STACKED, TOKENS + LAYERS + TRIAL),
    Case(CaseShape("sampled_stack_loss", n=50, L=3), STACKED_DRAWN, DRAWS + LAYERS + TRIAL),
)


def place_of(site: Site, sources: Path = SOURCES) -> sass.Place:
    """The line of a site.

    Raises
    ------
    LookupError
        When the source has none, or two.
    """
    lines = (sources / site.file).read_text().splitlines()
    found = [number for number, line in enumerate(lines, 1) if site.text in line]
    if len(found) != 1:
        raise LookupError(f"{site.file} has {len(found)} lines with {site.text!r}; wants one")
    return Path(site.file).name, found[0]


def at_site(site: Site, shape: CaseShape, loops: Sequence[sass.Loop], place: sass.Place) -> dict[str, float]:
    """Instructions of one sequence by kind, at a site that is at a place."""
    around = {id(inner): loop for outer in loops for loop in outer.walk() for inner in loop.inside}
    everywhere = [loop for outer in loops[1:] for loop in outer.walk()]
    if site.whole:
        found = [(loop, sum((x.counts for x in loop.walk()), Counter())) for loop in everywhere if _is_at(loop, place)]
    else:
        # A loop of few steps may have become part of the one around it: innermost ones first.
        found = [(loop, loop.counts_at(place)) for loop in sorted(everywhere, key=lambda loop: bool(loop.inside))]
        of_innermost = [(loop, counts) for loop, counts in found if counts[site.unit] and not loop.inside]
        found = of_innermost or found
    loop, most = max(found, key=lambda item: item[1][site.unit], default=(None, Counter()))
    if loop is None or not most[site.unit]:
        raise LookupError(f"no loop of {site.work!r} at {place[0]}:{place[1]}")
    units = site.units(shape) / most[site.unit]
    parts = 0.0 if site.parts is None else site.parts(shape)
    each = Counter() if site.parts is None else around[id(loop)].counts_at(place)
    return {kind: units * most[kind] + parts * each[kind] for kind in (*most, *each)}


def _is_at(loop: sass.Loop, place: sass.Place) -> bool:
    """Whether nearly all that is in a loop comes from a line."""
    own = [instruction for instruction in loop.own if instruction.places]
    return sum(place in instruction.places for instruction in own) > 0.9 * len(own)


def count(case: Case, loops: Sequence[sass.Loop]) -> dict[str, dict[str, float]]:
    """Instructions of one sequence by site and kind."""
    return {site.work: at_site(site, case.shape, loops, place_of(site)) for site in case.sites}


def compile_all(architectures: Sequence[str], folder: Path) -> dict[str, dict[str, list[sass.Loop]]]:
    """Loops of the kernels for each architecture."""
    toolkit = nvcc.find()
    if toolkit is None:
        raise FileNotFoundError("no nvcc, neither in CUDA_HOME nor on the PATH")
    found: dict[str, dict[str, list[sass.Loop]]] = {name: {} for name in architectures}
    for source in sorted((SOURCES / "cuda").glob("*.cu")):
        ptx = folder / f"{source.stem}.ptx"
        subprocess.run(nvcc.ptx_command(toolkit, source, ptx, architectures), check=True)
        for name in architectures:
            cubin = folder / f"{source.stem}-{name}.cubin"
            subprocess.run(nvcc.cubin_command(toolkit, ptx, cubin, name), check=True, capture_output=True)
            found[name] |= sass.kernels(cubin)
    return found


def kernel_of(case: Case, kernels: Mapping[str, list[sass.Loop]]) -> list[sass.Loop]:
    """Loops of the instance that serves a case."""
    (name,) = (name for name in kernels if re.search(rf"attention_kernelIf{case.instance}", name))
    return kernels[name]


def tables(kernels: Mapping[str, Mapping[str, list[sass.Loop]]], gpus: Sequence[Gpu] = GPUS) -> str:
    """Both tables: instructions of a sequence, and the time of 2^20 of them on each GPU."""
    counted: list[list[str]] = []
    timed: list[list[str]] = []
    batch = 1 << 20
    for case in CASES:
        cells = [case.name]
        for gpu in gpus:
            by_site = count(case, kernel_of(case, kernels[gpu.architecture]))
            total = {kind: sum(found.get(kind, 0.0) for found in by_site.values()) for kind in sass.KINDS}
            if gpu is gpus[0]:
                largest = max(by_site, key=lambda work: sum(by_site[work].values()))
                share = sum(by_site[largest].values()) / sum(total.values())
                kinds = [f"{total[kind]:,.0f}" for kind in sass.KINDS]
                read = bytes_moved(case.shape) // case.shape.B
                counted.append([case.name, f"{read:,}", *kinds, f"{largest} ({share:.0%})"])
            seconds = gpu.seconds(total, bytes_moved(case.shape) / case.shape.B)
            worst = max(seconds, key=lambda unit: seconds[unit])
            cells += [in_units(batch * seconds[worst]), worst, f"{seconds['DRAM'] / seconds[worst]:.0%}"]
        timed.append(cells)
    header = ["call", "bytes", "float32", "float64", "accesses", "integer", "other", "most of it"]
    times = ["call", *(name for gpu in gpus for name in (gpu.name, "bound by", "of bandwidth"))]
    return f"{markdown(header, counted)}\n{markdown(times, timed)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, count, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m dev.roofline", description="Expected times, on paper.")
    parser.parse_args(arguments)
    try:
        sass.disassembler()
        with tempfile.TemporaryDirectory() as folder:
            kernels = compile_all([gpu.architecture for gpu in GPUS], Path(folder))
    except FileNotFoundError as error:
        sys.stderr.write(f"dev.roofline: {error}\n")
        return 2
    sys.stdout.write(tables(kernels))
    return 0


if __name__ == "__main__":
    sys.exit(main())
