"""What the CUDA kernels should take on a GPU, on paper. `python -m dev.roofline`, where nvcc and nvdisasm are.

`dev.paper` is the model, `CASES` the calls that it is asked about: their launches, and how often each loop runs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from csrc.cuda import nvcc
from dev import paper, sass
from dev.drawn_and_stacks import COUNT_DRAWN, DRAWN, FORM_DRAWN, STACK
from dev.many_trials import MANY_TRIALS
from dev.one_layer import COUNT, finish_launches, form_launch, tokens_launch
from dev.paper import GPUS, Estimate, Launch
from fastlin._tables import markdown
from fastlin.bench.cases import CaseShape
from fastlin.bench.timing import in_units

SOURCES = Path(nvcc.__file__).parents[1]
BATCH = 1 << 20
Code = tuple[dict[str, list[sass.Loop]], dict[str, int]]
"""Loops, and registers, of the kernels of an architecture."""


@dataclass(frozen=True)
class Case:
    """A call: its shape, and its launches."""

    shape: CaseShape
    launches: tuple[Launch, ...]

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


def _of_tokens(n: int, m: int = 11) -> Case:
    shape = CaseShape(B=BATCH, n=n, m=m)
    return Case(shape, (COUNT, tokens_launch(shape.m), *finish_launches()))


CASES = (
    *(_of_tokens(n) for n in (10, 50, 200)),
    _of_tokens(50, m=33),
    Case(CaseShape(B=BATCH, R=50), (form_launch(11), MANY_TRIALS, *finish_launches())),
    Case(CaseShape("gram_loss", B=BATCH, R=50), (COUNT, MANY_TRIALS, *finish_launches())),
    Case(CaseShape("sampled_loss", B=BATCH), (COUNT_DRAWN, DRAWN, *finish_launches())),
    Case(CaseShape("sampled_loss", B=BATCH, R=50), (FORM_DRAWN, MANY_TRIALS, *finish_launches())),
    Case(CaseShape("stack_loss", B=BATCH, L=3), (form_launch(11), STACK, *finish_launches())),
    Case(CaseShape("sampled_stack_loss", B=BATCH, L=3), (FORM_DRAWN, STACK, *finish_launches())),
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
            if gpu is gpus[-1]:
                # A warp's instruction serves 32 lanes: per sequence, as if each lane had one.
                kinds = [f"{32 * call.counts[kind] / case.shape.B:,.0f}" for kind in sass.KINDS if kind != "local"]
                places = f"{call.registers}, {call.shared >> 10} KB, {call.warps}"
                counted.append(
                    [
                        case.name,
                        *kinds,
                        f"{call.bytes_ / case.shape.B:,.0f}",
                        str(call.launches),
                        places,
                    ]
                )
            row += [
                in_units(call.seconds),
                call.bound,
                f"{call.fma_seconds / call.seconds:.0%}",
                f"{call.dram_seconds / call.seconds:.0%}",
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
