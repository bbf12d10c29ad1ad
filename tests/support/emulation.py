"""The CUDA backend on the CPU: its very sources, built with g++ over csrc/testing/cuda_shim.h."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pybind11
from filelock import FileLock
from support import toolchain

NAME = "_cuda_emulated"
FOLDER = toolchain.SOURCES.parent / "build" / "emulated"
# Loops that nvcc is asked to unroll are no business of g++.
EMULATED = ("-DFASTLIN_EMULATED", "-Wno-unknown-pragmas")
KERNELS = tuple(sorted(str(path.relative_to(toolchain.SOURCES)) for path in toolchain.SOURCES.glob("cuda/*.cu")))
SOURCES = (*KERNELS, "cuda/bindings.cpp")
# What fastlin_emulate takes, as a device is in the beginning.
DEVICE = {"devices": 1, "multiprocessors": 4, "shared_bytes": 99 * 1024, "order": 0}


def built(name: str, recipe: object, build: Callable[[Path, Path], None]) -> Path:
    """A file, built once for all processes and as long as neither a source of csrc nor `recipe` changes.

    `build` is given an empty folder and where the file goes.
    """
    digest = hashlib.sha256(repr((recipe, toolchain.STRICT)).encode())
    for path in sorted(toolchain.SOURCES.rglob("*")):
        if path.suffix in {".h", ".cuh", ".cu", ".cpp"}:
            digest.update(str(path.relative_to(toolchain.SOURCES)).encode() + path.read_bytes())
    made = FOLDER / f"{name}-{digest.hexdigest()[:16]}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / f"{name}.lock"):
        if not made.exists():
            for old in FOLDER.glob(f"{name}-{'?' * 16}"):
                old.unlink()
            with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
                build(Path(folder), Path(folder) / made.name)
                (Path(folder) / made.name).rename(made)
    return made


@functools.cache
def module() -> ModuleType:
    """The module that is `fastlin._cuda` on a GPU."""
    headers = (f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}")
    flags = ("-O2", "-fPIC", "-fvisibility=hidden", *EMULATED, f"-DFASTLIN_MODULE={NAME}", *headers)

    def build(folder: Path, made: Path) -> None:
        objects = toolchain.objects(toolchain.native(), folder, dict.fromkeys(SOURCES, flags))
        toolchain.run([*toolchain.native(), "-shared", *objects, "-o", made])

    made = built(NAME, (flags, sys.version, pybind11.__version__), build)
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(made))
    spec = importlib.util.spec_from_file_location(NAME, made, loader=loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    return loaded


@contextlib.contextmanager
def device(**changes: int) -> Iterator[None]:
    """Within it the device is another one: see `DEVICE`.

    `order` is that of threads and blocks: 0 forward, 1 backward, else the seed of any.
    """
    library = ctypes.CDLL(module().__file__)

    def emulate(settings: dict[str, int]) -> None:
        library.fastlin_emulate(*(settings[name] for name in DEVICE))

    assert changes.keys() <= DEVICE.keys()
    emulate(DEVICE | changes)
    try:
        yield
    finally:
        emulate(DEVICE)


def launches() -> int:
    """How many kernels have been launched."""
    count = ctypes.CDLL(module().__file__).fastlin_emulated_launches
    count.restype = ctypes.c_longlong
    return count()


def record(records: bool) -> int:
    """Start or end to keep launches; starting forgets those kept before. How many are kept."""
    function = ctypes.CDLL(module().__file__).fastlin_emulated_record
    function.restype = ctypes.c_longlong
    return function(int(records))


def repeat(number: int) -> None:
    """Repeat a launch that was kept, with the arguments that it had."""
    ctypes.CDLL(module().__file__).fastlin_emulated_repeat(ctypes.c_longlong(number))


ADDRESSES = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *EMULATED)
RACES = ("-O1", "-g1", "-fsanitize=thread", *EMULATED)


def linked(name: str, sources: tuple[str, ...], flags: tuple[str, ...]) -> Path:
    """An executable."""

    def build(folder: Path, made: Path) -> None:
        objects = toolchain.objects(toolchain.native(), folder, dict.fromkeys(sources, flags))
        toolchain.run([*toolchain.native(), *flags, *objects, "-pthread", "-o", made])

    return built(name, (sources, flags), build)


def reference() -> Path:
    """What the kernels are judged by, as one object file: it takes longest to compile, and is not tested here."""
    flags_of = {
        "testing/attention_oracle.cpp": ("-O2",),
        "testing/attention_cases.cpp": ("-O1",),
        "cpu/isa_scalar.cpp": ("-O0",),
        "cpu/parallel.cpp": ("-O0",),
    }

    def build(folder: Path, made: Path) -> None:
        objects = toolchain.objects(toolchain.native(), folder, flags_of)
        toolchain.run([*toolchain.native(), "-nostdlib", "-r", *objects, "-o", made])

    return built("reference", flags_of, build)


def update_driver(name: str, flags: tuple[str, ...]) -> Path:
    """csrc/testing/cuda_update_driver.cpp with the kernels of the optimiser update."""
    return linked(name, ("cuda/update.cu", "testing/cuda_update_driver.cpp"), flags)


def driver(name: str, flags: tuple[str, ...]) -> Path:
    """csrc/testing/cuda_driver.cpp with the kernels."""
    judge = reference()

    def build(folder: Path, made: Path) -> None:
        parts = dict.fromkeys((*KERNELS, "testing/cuda_driver.cpp"), flags)
        objects = toolchain.objects(toolchain.native(), folder, parts)
        toolchain.run([*toolchain.native(), *flags, *objects, judge, "-pthread", "-o", made])

    return built(name, flags, build)


def call(executable: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """What an executable says; a sanitizer stops it at the first error."""
    environment = {"TSAN_OPTIONS": "halt_on_error=1"}
    command = [str(executable), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def assert_ok(executable: Path, *arguments: object) -> None:
    done = call(executable, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok "), done.stdout
