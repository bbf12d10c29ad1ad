"""The machine code of a kernel: its loops, what is in them, and the source lines that they come from."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);(?:\s*/\* 0x[0-9a-f]+ \*/)?\s*$"
)
_CONTROL = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/\s*$")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_FUNCTION = re.compile(r"^\$(\S+):", re.MULTILINE)
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_LINE = re.compile(r'"([^"]+)", line (\d+)')

KINDS = ("fma", "imad", "alu", "double", "special", "shared", "generic", "global", "local", "other")
"""What an instruction occupies; exchanges between lanes are `shared`."""

_KIND_OF = {
    "fma": "FFMA FMUL FADD",
    "imad": "IMAD",
    "alu": "IADD3 LEA LOP3 SHF ISETP SEL IMNMX VIMNMX IABS PRMT FSEL FSETP FMNMX FCHK VABSDIFF LOP SHL SHR BMSK SGXT",
    "double": "DFMA DMUL DADD DSETP",
    "special": "MUFU I2F F2I F2F I2I FRND POPC FLO BREV I2FP",
    "shared": "LDS STS SHFL LDSM ATOMS",
    "generic": "LD ST",
    "global": "LDG STG LDGSTS RED ATOM ATOMG UBLKCP",
    "local": "LDL STL",
}
_KINDS = {name: kind for kind, names in _KIND_OF.items() for name in names.split()}

LATENCY = {
    **{"shared": 30, "generic": 40, "global": 500, "local": 200},
    **{"special": 24, "double": 40, "imad": 6, "fma": 6, "alu": 6, "other": 24},
}
"""Clocks until a result that the code waits for by a scoreboard is there: published micro-benchmarks, rounded.

Generic accesses are to shared memory.
"""

Place = tuple[str, int]
"""A source file's name and a line of it."""


class Control(NamedTuple):
    """What the compiler tells the scheduler: clocks to the next instruction, and barriers of the scoreboard."""

    stall: int
    writes: int | None  # the barrier that is set until the result is there
    reads: int | None  # the barrier that is set until the operands are read
    waits: int  # bits of the barriers that the instruction waits for

    @classmethod
    def of(cls, word: int) -> Control:
        """From the upper 64 bits of an instruction, sm_70 to sm_120."""
        write, read = (word >> 46) & 7, (word >> 49) & 7
        return cls((word >> 41) & 15, None if write == 7 else write, None if read == 7 else read, (word >> 52) & 63)


NO_CONTROL = Control(1, None, None, 0)


@dataclass(frozen=True)
class Instruction:
    """One instruction: its address, what it does, the label that it jumps to, its line and those that inlined it."""

    address: int
    opcode: str
    target: str | None
    places: tuple[Place, ...]  # innermost first
    control: Control = NO_CONTROL

    @property
    def kind(self) -> str:
        """Which of KINDS it occupies."""
        name = self.opcode.split(".")[0]
        return _KINDS.get(name, "imad" if name == "IMAD" else "other")

    @property
    def shared_clocks(self) -> int:
        """Clocks of the shared memory's port: 128 bytes each, half as many where a wide load is a broadcast."""
        if self.kind != "shared":
            return 0
        return 2 if ".128" in self.opcode else 1


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

    @property
    def line(self) -> Place | None:
        """The source line of the jump back: that of the loop's `for` or `while`."""
        jump = next((x for x in reversed(self.own) if x.address == self.last), None)
        return jump.places[0] if jump is not None and jump.places else None

    def has(self, place: Place) -> bool:
        """Whether an own instruction comes from a line."""
        return any(place in instruction.places for instruction in self.own)

    def walk(self) -> Iterable[Loop]:
        """The loop and those inside it."""
        yield self
        for loop in self.inside:
            yield from loop.walk()


def clocks(instructions: Sequence[Instruction]) -> float:
    """Clocks that one warp alone takes for one more round of these instructions, in their order.

    The warp issues in order: an instruction waits for the barriers that the compiler named, and the next one comes
    after its stall count. Rounds before it are simulated too, so that what is loaded ahead counts as such.
    """
    ready = [0.0] * 8
    now, starts = 0.0, []
    for _ in range(3):
        starts.append(now)
        for x in instructions:
            control = x.control
            for barrier in range(6):
                if control.waits >> barrier & 1:
                    now = max(now, ready[barrier])
            if control.writes is not None:
                ready[control.writes] = max(ready[control.writes], now + LATENCY[x.kind])
            if control.reads is not None:
                ready[control.reads] = max(ready[control.reads], now + 12)
            now += max(control.stall, 1)
    return now - starts[-1]


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
    """Outermost loops of each kernel of a cubin, by its mangled name; the first has what is in no loop.

    A function that a kernel calls is an entry of its own, with a name that starts with the kernel's.
    """
    command = [disassembler(), "-c", "-gi", "-hex", str(cubin)]
    return read(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def read(text: str) -> dict[str, list[Loop]]:
    """The same from nvdisasm's output."""
    found = {}
    for part in re.split(r"^//-+ \.text\.", text, flags=re.MULTILINE)[1:]:
        pieces = _FUNCTION.split(part)
        for name, piece in zip([part.split()[0], *pieces[1::2]], pieces[::2], strict=True):
            found[name] = nest(*_instructions(piece))
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
            own = tuple(dict.fromkeys(places))
            instructions.append(Instruction(address, found[2], target[1] if target else None, own))
        elif (word := _CONTROL.match(line)) and instructions:
            last = instructions[-1]
            control = Control.of(int(word[1], 16))
            instructions[-1] = Instruction(last.address, last.opcode, last.target, last.places, control)
    return instructions, labels


def nest(instructions: list[Instruction], labels: Mapping[str, int]) -> list[Loop]:
    """Loops by their jumps back. Jumps to one label are one loop; NOP and the endless jump of the end are not code.

    Code behind the last exit is for warps whose lanes have parted; it jumps back, and makes no loop.
    """
    exits = [x.address for x in instructions if x.opcode.split(".")[0] in ("EXIT", "RET")]
    end_of_code = max(exits, default=1 << 60)
    ends: dict[int, int] = {}
    for instruction in instructions:
        start = labels.get(instruction.target or "")
        if start is not None and start < instruction.address <= end_of_code:
            ends[start] = max(ends.get(start, 0), instruction.address)
    # The code of a loop may be cut up, and its last piece lie far behind: what is around is the smallest that contains.
    loops = sorted((Loop(start, end) for start, end in ends.items()), key=lambda loop: loop.last - loop.first)
    outermost = [Loop(-1, -1)]
    for i, loop in enumerate(loops):
        around = next((x for x in loops[i + 1 :] if x.first <= loop.first and loop.last <= x.last), None)
        (outermost if around is None else around.inside).append(loop)
    for instruction in instructions:
        if instruction.opcode != "NOP" and instruction.address <= end_of_code:
            at = (x for x in loops if x.first <= instruction.address <= x.last)
            next(at, outermost[0]).own.append(instruction)
    return outermost
