"""What each kernel takes of each architecture, as ptxas says: a table for the log, and a budget."""

from __future__ import annotations

import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from csrc.cuda import nvcc

SOURCES = sorted(Path(nvcc.__file__).parent.glob("*.cu"))
TOOLKIT = nvcc.find()

MOST_SPILLED = 16
"""Bytes of stores and of loads, each."""
MOST_STACK = 16
"""Bytes: an array that is not in registers would lie there, in memory."""
REGISTERS = 65536
"""Of a multiprocessor, on every architecture from Turing on."""
THREADS = {"trials_kernel": 256, "attention_kernel": 256}
"""Of a block, or of two blocks of 128, that a multiprocessor's registers have room for; 128 in other kernels."""


class Use(NamedTuple):
    registers: int
    stack: int
    stores: int
    loads: int
    shared: int


def read(log: str) -> dict[str, Use]:
    """Use by mangled name, from what `ptxas -v` prints."""
    found = {}
    for part in re.split(r"Compiling entry function ", log)[1:]:
        name = re.match(r"'(\w+)'", part)[1]
        stack, stores, loads = map(
            int, re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part).groups()
        )
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        shared = re.search(r"(\d+) bytes smem", part)
        found[name] = Use(registers, stack, stores, loads, int(shared[1]) if shared else 0)
    return found


def short_names(mangled) -> dict[str, str]:
    """`attention_kernel<float, true, false>`, as in the source."""
    names = sorted(mangled)
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    plain = re.sub(r"fastlin::cuda::|\(anonymous namespace\)::|^void ", "", done.stdout, flags=re.MULTILINE)
    plain = re.sub(r"\(\w+\)(?=\w)", "", plain)  # types of template arguments
    return dict(zip(names, (line.split("(")[0] for line in plain.splitlines()), strict=True))


def table(used: dict[str, dict[str, Use]]) -> str:
    """Kernels down, architectures across."""
    kernels = sorted({kernel for by_kernel in used.values() for kernel in by_kernel})
    wide = max(map(len, kernels))
    lines = ["registers/stack/spill stores/spill loads/static shared memory, in bytes but the first"]
    lines.append(" " * wide + "".join(f"{name:>16}" for name in used))
    for kernel in kernels:
        cells = ("/".join(map(str, by_kernel[kernel])) for by_kernel in used.values())
        lines.append(f"{kernel:{wide}}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def over_budget(used: dict[str, dict[str, Use]]) -> list[str]:
    return [
        f"{kernel} on {name}: {use}"
        for name, by_kernel in used.items()
        for kernel, use in by_kernel.items()
        if max(use.stores, use.loads) > MOST_SPILLED
        or use.stack > MOST_STACK
        or use.registers * THREADS.get(kernel.split("<")[0], 128) > REGISTERS
    ]


@pytest.fixture(scope="module")
def used():
    """Use of every kernel by architecture; all of the list that nvcc knows, two at a time."""
    if TOOLKIT is None:
        pytest.skip("no nvcc, neither in CUDA_HOME nor on the PATH")
    names = nvcc.architectures("all", TOOLKIT)
    with tempfile.TemporaryDirectory() as folder:

        def compiled(command):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
            return done.stderr

        def machine_code(job):
            name, ptx = job
            return name, read(compiled(nvcc.cubin_command(TOOLKIT, ptx, ptx.with_suffix(f".{name}"), name)))

        ptx_of = {source: Path(folder, f"{source.stem}.ptx") for source in SOURCES}
        found = {name: {} for name in names}
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(compiled, [nvcc.ptx_command(TOOLKIT, *item, names) for item in ptx_of.items()]))
            for name, by_kernel in pool.map(machine_code, [(name, ptx) for ptx in ptx_of.values() for name in names]):
                found[name].update(by_kernel)
    short = short_names({kernel for by_kernel in found.values() for kernel in by_kernel})
    return {name: {short[kernel]: use for kernel, use in by_kernel.items()} for name, by_kernel in found.items()}


def test_every_kernel_is_within_the_budget_on_every_architecture(used, record_property):
    record_property("table", table(used))
    assert len(used) >= 6
    assert all(by_kernel for by_kernel in used.values())
    assert len({frozenset(by_kernel) for by_kernel in used.values()}) == 1
    assert over_budget(used) == []
