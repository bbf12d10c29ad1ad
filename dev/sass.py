"""The machine code of a kernel: its loops, what is in them, and the source lines that they come from."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_LINE = re.compile(r'"([^"]+)", line (\d+)')

KINDS = ("fma", "double", "memory", "integer", "other")
"""What an instruction occupies."""

Place = tuple[str, int]
"""A source file's name and a line of it."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: its address, what it does, the label that it jumps to, its line and those that inlined it."""

    address: int
    opcode: str
    target: str | None
    places: frozenset[Place]

    @property
    def kind(self) -> str:
        """Which of KINDS it occupies."""
        name = self.opcode.split(".")[0]
        if name in ("FFMA", "FMUL", "FADD"):
            return "fma"
        if name in ("DFMA", "DMUL", "DADD", "DSETP"):
            return "double"
        if name in ("LD", "ST", "LDS", "STS", "LDG", "STG", "LDL", "STL"):
            return "memory"
        if name in ("IADD3", "IMAD", "LEA", "LOP3", "SHF", "ISETP", "SEL", "IMNMX", "IABS", "PRMT"):
            return "integer"
        return "other"


@dataclass
class Loop:
    """Instructions from a label to a jump back to it; `own` are those that are in no loop inside it."""

    first: int
    last: int
    own: list[Instruction] = field(default_factory=list)
    inside: list[Loop] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        """Own instructions by kind."""
        return Counter(instruction.kind for instruction in self.own)

    def counts_at(self, place: Place) -> Counter[str]:
        """Own instructions that come from a line, by kind."""
        return Counter(instruction.kind for instruction in self.own if place in instruction.places)

    def walk(self) -> Iterable[Loop]:
        """The loop and those inside it."""
        yield self
        for loop in self.inside:
            yield from loop.walk()


def disassembler() -> str:
    """nvdisasm: that of PATH, or of the wheel `triton`.

    Raises
    ------
    FileNotFoundError
        When there is none.
    """
    found = shutil.which("nvdisasm")
    if found is not None:
        return found
    triton = find_spec("triton")
    if triton is not None and triton.submodule_search_locations:
        path = Path(triton.submodule_search_locations[0], "backends", "nvidia", "bin", "nvdisasm")
        if path.exists():
            return str(path)
    raise FileNotFoundError("no nvdisasm, neither on the PATH nor in the wheel triton; `pip install triton` has one")


def kernels(cubin: Path) -> dict[str, list[Loop]]:
    """Outermost loops of each kernel of a cubin, by its mangled name; the first has what is in no loop."""
    command = [disassembler(), "-c", "-gi", str(cubin)]
    return read(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def read(text: str) -> dict[str, list[Loop]]:
    """The same from nvdisasm's output."""
    found = {}
    for part in re.split(r"^//-+ \.text\.", text, flags=re.MULTILINE)[1:]:
        name = part.split()[0]
        instructions, labels = _instructions(part)
        found[name] = nest(instructions, labels)
    return found


def _instructions(text: str) -> tuple[list[Instruction], dict[str, int]]:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    places: list[Place] = []
    is_new = True
    for line in text.splitlines():
        if "//##" in line:
            if is_new:
                places, is_new = [], False
            places += [(Path(file).name, int(number)) for file, number in _LINE.findall(line)]
        elif label := _LABEL.match(line):
            waiting.append(label[1])
        elif found := _INSTRUCTION.match(line):
            address = int(found[1], 16)
            labels.update(dict.fromkeys(waiting, address))
            waiting, is_new = [], True
            target = _TARGET.search(found[3]) if found[2].startswith("BRA") else None
            instructions.append(Instruction(address, found[2], target[1] if target else None, frozenset(places)))
    return instructions, labels


def nest(instructions: list[Instruction], labels: dict[str, int]) -> list[Loop]:
    """Loops by their jumps back. Jumps to one label are one loop; NOP and the endless jump of the end are not code."""
    ends: dict[int, int] = {}
    for instruction in instructions:
        start = labels.get(instruction.target or "")
        if start is not None and start < instruction.address:
            ends[start] = max(ends.get(start, 0), instruction.address)
    # The code of a loop may be cut up, and its last piece lie far behind: what is around is the smallest that contains.
    loops = sorted((Loop(start, end) for start, end in ends.items()), key=lambda loop: loop.last - loop.first)
    outermost = [Loop(-1, -1)]
    for i, loop in enumerate(loops):
        around = next((x for x in loops[i + 1 :] if x.first <= loop.first and loop.last <= x.last), None)
        (outermost if around is None else around.inside).append(loop)
    for instruction in instructions:
        if instruction.opcode != "NOP":
            at = (x for x in loops if x.first <= instruction.address <= x.last)
            next(at, outermost[0]).own.append(instruction)
    return outermost
