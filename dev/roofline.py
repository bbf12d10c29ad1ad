"""What the CUDA kernels should take on a GPU, on paper. `python -m dev.roofline`, where nvcc and nvdisasm are.

`dev.paper` is the model, `CASES` the calls that it is asked about: their launches, and how often each loop runs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from csrc.cuda import nvcc
from dev import paper, sass
from dev.paper import GPUS, Estimate, Launch, Part
from fastlin._tables import markdown
from fastlin.bench.cases import CaseShape, bytes_moved
from fastlin.bench.timing import in_units

SOURCES = Path(nvcc.__file__).parents[1]
BATCH = 1 << 20
K = 2
Count = Callable[[CaseShape], float]
Code = tuple[dict[str, list[sass.Loop]], dict[str, int]]
"""Loops, and registers, of the kernels of an architecture."""


def up(a: float, b: float) -> int:
    """Parts of size b that cover a."""
    return int(-(-a // b))


def _gram_parts(m: int) -> int:
    """Register tiles of 4 x 4 on and below the diagonal."""
    return up(m, 4) * (up(m, 4) + 1) // 2


def _tiles(shape: CaseShape) -> float:
    return shape.B / 32


def _each(count: Count) -> Count:
    """For each tile."""
    return lambda s: _tiles(s) * count(s)


def _trials(count: Count) -> Count:
    """For each tile and trial."""
    return lambda s: _tiles(s) * (s.R or 1) * count(s)


def _per_layer(count: Count) -> Count:
    return lambda s: _tiles(s) * (s.R or 1) * (s.L - 1) * count(s)


LOAD = "staging[lane() * kStagingStride + l] = there ?"
COLUMNS = "for (std::int64_t j = 0; j < end; j += J) product_part"
TOKENS = (
    Part("cuda/tile_warp.h", LOAD, _each(lambda s: 32 * up(s.n, 8) * up(8 * s.m, 32)), ("generic", 3)),
    Part("cuda/tile_warp.h", "tile[(j + i) * N + lane()] = staging[i *", _each(lambda s: s.n * s.m), ("generic", 2)),
    Part(
        *("cuda/worker.h", "product_parts<kRows, 4>(rows, i + rows, count"),
        *(_each(lambda s: s.n * _gram_parts(s.m)), ("fma", 16)),
    ),
    Part(
        *("cuda/tile_warp.h", COLUMNS, _each(lambda s: up(s.n, 8) * _gram_parts(s.m)), None),
        "cuda/worker.h: product_parts<kRows, 4>(rows",
    ),
)
WORDS, PAIRS = "for (; count > 4 * (kBlocks - 1)", "normal_pairs(bits_of(V::load(out + i * N))"


def _normals(section: str, count: Count) -> tuple[Part, ...]:
    """Words, and pairs of normals made of them."""
    inside = f"core/sampler-inl.h: lanes.normals(block({section})"
    return (
        Part("core/draws-inl.h", WORDS, _each(lambda s: up(count(s), 4)), None, inside),
        Part("core/draws-inl.h", PAIRS, _each(lambda s: up(count(s), 2)), ("generic", 4), inside),
    )


def _rank(s: CaseShape) -> int:
    return min(s.n, s.m - 1)


def _below(s: CaseShape) -> float:
    """Normals of the factor."""
    return _rank(s) * (s.m - 1) - _rank(s) * (_rank(s) + 1) / 2


CHI = "core/sampler-inl.h: lanes.chi(block(kChi), freedom"
DRAWS = (
    *_normals("kBeta", lambda s: s.m - 1),
    *_normals("kQuery", lambda s: s.m - 1),
    *_normals("kFactor", _below),
    Part("core/draws-inl.h", "for (; i + kBlocks <= slots; i += kBlocks) first_words", _each(_rank), None, CHI),
    Part("core/draws-inl.h", "for (i = 0; i < slots; ++i) {", _each(_rank), None, CHI),
    # The definition, where a lane of the warp is not settled: in about one block of words of twenty.
    Part("core/draws-inl.h", "for (std::uint32_t j = 0; needs_block &&", _each(lambda s: _rank(s) / 20), None, CHI),
    Part(
        *("core/sampler-inl.h", "symmetric_product(m, count, Across<T>{rows, m}"),
        *(_each(lambda s: _rank(s) * _gram_parts(s.m)), ("fma", 16)),
    ),
)
TRIAL = (
    Part(
        *("cuda/trial.h", "product_column(m, m, NumbersAcross<T>{W_of"),
        *(_trials(lambda s: up(s.m, 8) * s.m), ("fma", 8)),
    ),
    Part(
        *("cuda/trial.h", "product_parts<6, 2>(m, 2, m, Across<T>{G"),
        *(_trials(lambda s: up(s.m, 6) * s.m), ("fma", 12)),
    ),
    Part("cuda/trial.h", "L::dot(a_of(head), c, m)", _trials(lambda s: s.m), ("fma", 1)),
    Part("cuda/trial.h", "L::put(c, i, g * L::at(c, i))", _trials(lambda s: s.m), ("fma", 1)),
    Part(
        *("cuda/trial.h", "L::add_outer(q, c, m, dW_of"),
        *(_trials(lambda s: 32 * up(up(s.m, 3) * up(s.m, 2), 32)), ("fma", 6)),
    ),
    Part(
        *("cuda/trial.h", "static_cast<double>(L::sum(sums + i * N, from, to))"),
        *(_trials(lambda s: K * 32 * up(2 * s.m + 1, 32)), ("fma", 1)),
    ),
)
LAYERS = (
    Part(
        *("core/stack-inl.h", "product(m, m, m, Across<T>{Gl, m}, Across<T>{Tl, m}"),
        *(_per_layer(lambda s: 10 * up(s.m, 4) ** 2 * s.m), ("fma", 16)),
    ),
)


def _blocks(s: CaseShape) -> float:
    """Blocks of tiles: as launch.cu cuts a batch up."""
    square = (s.R or 1) * s.m * s.m
    each = (square * (1 + 2 * (s.L - 1 if "stack" in s.op else 0)) + 2 * (s.R or 1) * (1 + 3 * s.m)) * 8
    most = min(max((64 << 20) // each, 32), 1024)
    return up(_tiles(s), up(_tiles(s), most))


def _squares(s: CaseShape) -> float:
    return (s.R or 1) * s.m * s.m * (1 + 2 * (s.L - 1 if "stack" in s.op else 0))


def _shared(s: CaseShape) -> float:
    """Bytes of a tile and of four warps; a stack does not fit and lies in global memory."""
    if "stack" in s.op:
        return 0
    warps = 4 if not s.op.startswith("sampled") or s.R else 1
    of_tile = 4 * 32 * (s.m * s.m + s.m + 6)
    of_trial = 4 * 32 * (4 * s.m + s.m + 2 * s.m + 1)
    forming = 4 * (8 * s.m * 32 + warps * 32 * 33)
    return of_tile + max(of_trial * warps, forming)


MATRICES = Launch(
    "15matrices_kernelIf",
    lambda s: up(_squares(s), 256),
    256,
    lambda s: 0,
    (
        Part(
            *("cuda/kernels.cuh", "sum += call.partial[block * call.matrices + i]"),
            *(lambda s: up(_squares(s), 32) * _blocks(s), ("double", 1)),
        ),
    ),
    lambda s: 8 * _squares(s) * _blocks(s),
)
TASKS = Launch(
    "12tasks_kernelIf",
    lambda s: K * (s.R or 1),
    32,
    lambda s: 8 * s.m,
    (
        Part(
            *("cuda/kernels.cuh", "sum += call.task(first) == k"),
            *(lambda s: (s.R or 1) * _blocks(s) * up(2 * s.m + 1, 32), ("double", 1)),
        ),
    ),
    lambda s: 8 * (s.R or 1) * _blocks(s) * (2 * s.m + 1),
)
LOSS = Launch("11loss_kernelIf", lambda s: 1, 256, lambda s: 0, (), lambda s: 0)


def _attention(instance: str, parts: tuple[Part, ...]) -> Launch:
    def threads(s: CaseShape) -> float:
        return min(_blocks(s), 16 * 132)

    return Launch(
        *(f"16attention_kernelIf{instance}", threads, 128, _shared, parts),
        lambda s: bytes_moved(s) + 8 * _squares(s) * _blocks(s) + (24 * s.B),
    )


@dataclass(frozen=True)
class Case:
    """A call: its shape, its launches, and the number of torch's before them, which sort by task."""

    shape: CaseShape
    launches: tuple[Launch, ...]
    of_torch: int = 8

    @property
    def name(self) -> str:
        """The op and its sizes."""
        s = self.shape
        sizes = [
            f"m = {s.m}",
            *([] if s.op == "gram_loss" else [f"n = {s.n}"]),
            *([f"R = {s.R}"] if s.R else []),
            *([f"L = {s.L}"] if "stack" in s.op else []),
        ]
        return f"`{s.op}`, {', '.join(sizes)}"


def _case(
    op: str, instance: str, parts: tuple[Part, ...], n: int = 50, m: int = 11, R: int | None = None, L: int = 1
) -> Case:
    return Case(CaseShape(op, B=BATCH, n=n, m=m, R=R, L=L), (_attention(instance, parts), MATRICES, TASKS, LOSS))


GIVEN, DRAWN, STACKED = "Lb0ELb0E", "Lb0ELb1E", "Lb1ELb0E"
CASES = (
    *(_case("prompt_loss", GIVEN, TOKENS + TRIAL, n=n) for n in (10, 50, 200)),
    _case("prompt_loss", GIVEN, TOKENS + TRIAL, m=33),
    _case("prompt_loss", GIVEN, TOKENS + TRIAL, R=50),
    _case("sampled_loss", DRAWN, DRAWS + TRIAL),
    _case("sampled_loss", DRAWN, DRAWS + TRIAL, R=50),
    _case("stack_loss", STACKED, TOKENS + LAYERS + TRIAL, L=3),
)


def compile_all(architectures: Sequence[str], folder: Path) -> dict[str, Code]:
    """Loops of the kernels, and their registers, for each architecture."""
    toolkit = nvcc.find()
    if toolkit is None:
        raise FileNotFoundError("no nvcc, neither in CUDA_HOME nor on the PATH")
    found: dict[str, Code] = {name: ({}, {}) for name in architectures}
    for source in sorted((SOURCES / "cuda").glob("*.cu")):
        ptx = folder / f"{source.stem}.ptx"
        subprocess.run(nvcc.ptx_command(toolkit, source, ptx, architectures), check=True)
        for name in architectures:
            cubin = folder / f"{source.stem}-{name}.cubin"
            command = nvcc.cubin_command(toolkit, ptx, cubin, name)
            told = subprocess.run(command, check=True, capture_output=True, text=True)
            found[name][0].update(sass.kernels(cubin))
            found[name][1].update(registers(told.stdout + told.stderr))
    return found


def registers(told: str) -> dict[str, int]:
    """Registers of each kernel, from what ptxas says."""
    pattern = r"Compiling entry function '(\w+)'.*?Used (\d+) registers"
    return {name: int(count) for name, count in re.findall(pattern, told, re.DOTALL)}


def estimates(case: Case, gpu: paper.Gpu, code: Code) -> list[Estimate]:
    """What each launch of a call takes."""
    loops, used = code
    return [paper.estimate(launch, case.shape, gpu, loops, used, SOURCES) for launch in case.launches]


def tables(code: Mapping[str, Code], gpus: Sequence[paper.Gpu] = GPUS) -> str:
    """What a sequence takes by kind of instruction, and what 2^20 of them take on each GPU."""
    counted: list[list[str]] = []
    timed: list[list[str]] = []
    for case in CASES:
        row = [case.name]
        for gpu in gpus:
            found = estimates(case, gpu, code[gpu.architecture])
            call = paper.total(found)
            seconds = call.seconds + case.of_torch * paper.GAP
            if gpu is gpus[-1]:
                # A warp's instruction serves 32 lanes: per sequence, as if each lane had one.
                kinds = [f"{32 * call.counts[kind] / case.shape.B:,.0f}" for kind in sass.KINDS if kind != "local"]
                places = f"{call.registers}, {call.shared >> 10} KB, {call.warps}"
                counted.append(
                    [
                        case.name,
                        *kinds,
                        f"{call.bytes_ / case.shape.B:,.0f}",
                        str(call.launches + case.of_torch),
                        places,
                    ]
                )
            row += [
                in_units(seconds),
                call.bound,
                f"{call.fma_seconds / seconds:.0%}",
                f"{call.dram_seconds / seconds:.0%}",
            ]
        timed.append(row)
    kinds = [kind for kind in sass.KINDS if kind != "local"]
    header = ["call", *kinds, "bytes", "launches", "registers, shared, warps"]
    times = ["call", *(name for gpu in gpus for name in (gpu.name, "bound by", "of FMA", "of bandwidth"))]
    return f"{markdown(header, counted)}\n{markdown(times, timed)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, count, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m dev.roofline", description="Expected times, on paper.")
    parser.parse_args(arguments)
    try:
        sass.disassembler()
        with tempfile.TemporaryDirectory() as folder:
            code = compile_all([gpu.architecture for gpu in GPUS], Path(folder))
    except FileNotFoundError as error:
        sys.stderr.write(f"dev.roofline: {error}\n")
        return 2
    sys.stdout.write(tables(code))
    return 0


if __name__ == "__main__":
    sys.exit(main())
