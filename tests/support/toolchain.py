"""Compilers for the tests of the C++ kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "csrc"
STRICT = ("-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")


def native() -> list[str]:
    """The compiler of the machine, without which the extension is not built either."""
    compiler = shutil.which("g++")
    assert compiler is not None, "no g++"
    return [compiler]


def cross(target: str) -> list[str]:
    """Clang for another machine, from the wheel `ziglang` of the dev extra."""
    return [sys.executable, "-m", "ziglang", "c++", "-target", target]


def run(command: Sequence[object]) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def objects(compiler: Sequence[str], folder: Path, flags_of: dict[str, Sequence[str]]) -> list[Path]:
    """Object files of sources, given with their flags; as many at a time as there are cores."""

    def compile_one(item: tuple[str, Sequence[str]]) -> Path:
        name, flags = item
        out = folder / f"{Path(name).stem}.o"
        language = ("-x", "c++") if name.endswith(".cu") else ()
        run([*compiler, *STRICT, *flags, f"-I{SOURCES}", *language, "-c", SOURCES / name, "-o", out])
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, flags_of.items()))
