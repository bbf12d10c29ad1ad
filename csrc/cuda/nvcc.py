"""How the CUDA kernels are compiled: setup.py, the tests and dev/roofline.py ask here, and nowhere else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
"""FASTLIN_CUDA_ARCHS=all: every GPU of data centres and desktops from Turing on that CUDA 13 serves."""

DEFAULT = ("sm_80",)
"""A plain installation. The machine code runs on every GPU of generation 8 (A100, A10, L4, RTX 30 and 40); newer ones
compile the PTX when they first load it, which takes them as long as nvcc; only Turing (T4) is left out."""


class Toolkit(NamedTuple):
    """An nvcc, its version as in 13.0, the architectures that it knows, and where its libcudart_static.a is."""

    nvcc: str
    version: str
    architectures: tuple[str, ...]
    libraries: tuple[str, ...]


def find(environment: Mapping[str, str] = os.environ) -> Toolkit | None:
    """The nvcc of CUDA_HOME, else that of PATH, or None."""
    home = environment.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None
    nvcc = nvcc or shutil.which("nvcc", path=environment.get("PATH", ""))
    if nvcc is None:
        return None
    version = re.search(r"release (\d+\.\d+)", _output(nvcc, "--version"))
    # nvcc may be a link or a script that lies elsewhere than its toolkit: it says itself where its libraries are.
    libraries = re.search(r"^#\$ LIBRARIES=(.*)$", _output(nvcc, "--dryrun", "-x", "cu", os.devnull), re.MULTILINE)
    if version is None or libraries is None:
        raise RuntimeError(f"{nvcc} does not answer as nvcc does")
    folders = re.findall(r'-L"?([^"\s]+)', libraries[1])
    return Toolkit(nvcc, version[1], tuple(_output(nvcc, "--list-gpu-code").split()), tuple(folders))


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} fails:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def architectures(wanted: str | None, toolkit: Toolkit) -> tuple[str, ...]:
    """Architectures by the value of FASTLIN_CUDA_ARCHS: None, "all", "native", or a list like "80,90".

    Raises
    ------
    ValueError
        When nvcc does not know one, or "native" finds no GPU.
    """
    if not wanted:
        return DEFAULT
    if wanted == "all":
        return tuple(name for name in ARCHITECTURES if name in toolkit.architectures)
    parts = _of_this_machine() if wanted == "native" else wanted.split(",")
    names = tuple(dict.fromkeys(f"sm_{part.strip().removeprefix('sm_')}" for part in parts))
    unknown = [name for name in names if name not in toolkit.architectures]
    if unknown:
        raise ValueError(
            f"FASTLIN_CUDA_ARCHS={wanted}: nvcc {toolkit.version} does not know {unknown[0]}; "
            f'wants "all", "native" or a list of {", ".join(toolkit.architectures)}'
        )
    return names


def _of_this_machine() -> list[str]:
    """Architectures of the GPUs here, as nvidia-smi names them, without the dot."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        found = []
    else:
        found = re.findall(r"^(\d+)\.(\d+)\s*$", done.stdout, re.MULTILINE)
    if not found:
        raise ValueError(
            f'FASTLIN_CUDA_ARCHS=native: got no GPU from "{" ".join(command)}", wants a machine with one, '
            'or "all", or a list like "80,90"'
        )
    return [major + minor for major, minor in found]


def describe(names: Sequence[str]) -> str:
    """What a build for these architectures holds: their machine code, and PTX for the GPUs to come."""
    return f"{', '.join(names)}, PTX of {virtual(names)}"


def virtual(names: Sequence[str]) -> str:
    """The architecture of the PTX that all of these are made from: the oldest.

    The kernels use nothing that a later one has, and to make the PTX takes longer than to make machine code of it.
    """
    return f"compute_{min(int(name.removeprefix('sm_')) for name in names)}"


def command(toolkit: Toolkit, source: Path, out: Path, names: Sequence[str], *, werror: bool) -> list[str]:
    """The command that makes an object file with code for these architectures, and their PTX."""
    of_all = virtual(names)
    host = ["-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", *(["-Werror"] if werror else [])]
    return [
        *(toolkit.nvcc, *_flags(werror), f"-gencode=arch={of_all},code=[{','.join((*names, of_all))}]"),
        *(f"--threads={os.cpu_count() or 1}", f"-Xcompiler={','.join(host)}", "-c", str(source), "-o", str(out)),
    ]


def ptx_command(toolkit: Toolkit, source: Path, out: Path, names: Sequence[str]) -> list[str]:
    """The command that makes the PTX of these architectures alone, with the lines that it comes from."""
    return [toolkit.nvcc, *_flags(True), f"-arch={virtual(names)}", "-lineinfo", "-ptx", str(source), "-o", str(out)]


def cubin_command(toolkit: Toolkit, ptx: Path, out: Path, name: str) -> list[str]:
    """The command that makes one architecture's code of PTX, and prints what each kernel takes of the GPU."""
    of_ptx = re.search(r"^\.target sm_(\d+)", ptx.read_text(), re.MULTILINE)
    assert of_ptx is not None
    code = f"-gencode=arch=compute_{of_ptx[1]},code={name}"
    return [toolkit.nvcc, "-O3", code, "-Xptxas=-v", "-lineinfo", "-cubin", str(ptx), "-o", str(out)]


def _flags(werror: bool) -> list[str]:
    """No multiply-add but where a kernel asks for one, as on the CPU: chi variates have the same bits everywhere.

    The headers that the CPU has too call std::min and std::max, which a kernel may with relaxed constexpr alone:
    without it nvcc warns, and compiles what follows the call to nothing.
    """
    flags = ["-O3", "-std=c++17", "--fmad=false", "--expt-relaxed-constexpr", f"-I{Path(__file__).parents[1]}"]
    return [*flags, "-Werror=all-warnings"] if werror else flags
