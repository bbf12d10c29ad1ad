"""The CUDA backend on the CPU: its very sources, built with g++ over csrc/testing/cuda_shim.h."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import ModuleType

import pybind11
from cpp import toolchain
from filelock import FileLock

NAME = "_cuda_emulated"
FOLDER = toolchain.SOURCES.parent / "build" / "emulated"
SOURCES = ("cuda/launch.cu", "cuda/bindings.cpp")
FLAGS = ("-O2", "-fPIC", "-fvisibility=hidden", "-DFASTLIN_EMULATED", f"-DFASTLIN_MODULE={NAME}")
# What fastlin_emulate takes, as a device is in the beginning.
DEVICE = {"devices": 1, "multiprocessors": 4, "shared_bytes": 99 * 1024, "order": 0}


def digest() -> str:
    """Changes with every source, flag and header of Python that the module is made of."""
    found = hashlib.sha256(repr((FLAGS, sys.version, pybind11.__version__)).encode())
    for path in sorted(toolchain.SOURCES.rglob("*")):
        if path.suffix in {".h", ".cuh", ".cu", ".cpp"}:
            found.update(str(path.relative_to(toolchain.SOURCES)).encode() + path.read_bytes())
    return found.hexdigest()[:16]


@functools.cache
def module() -> ModuleType:
    """The module that is `fastlin._cuda` on a GPU; built once for all processes and as long as no source changes."""
    made = FOLDER / f"{NAME}-{digest()}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / "lock"):
        if not made.exists():
            for old in FOLDER.glob(f"{NAME}-*.so"):
                old.unlink()
            build(made)
    spec = importlib.util.spec_from_file_location(NAME, made)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def build(made) -> None:
    compiler = toolchain.native()
    headers = (f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}")
    objects = toolchain.objects(compiler, FOLDER, dict.fromkeys(SOURCES, (*FLAGS, *headers)))
    unfinished = made.with_suffix(f".{os.getpid()}")
    toolchain.run([*compiler, "-shared", *objects, "-o", unfinished])
    unfinished.rename(made)


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
