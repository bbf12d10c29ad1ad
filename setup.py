"""The extensions `fastlin._C` and, where nvcc is found, `fastlin._cuda`; everything else is in pyproject.toml.

FASTLIN_NO_EXTENSION=1  leaves both out on purpose
FASTLIN_NO_CUDA=1       leaves fastlin._cuda out
FASTLIN_CUDA_ARCHS      "all", "native" for the GPUs of this machine, or architectures like 80,90; csrc/cuda/nvcc.py has
                        the default and the whole list
FASTLIN_WERROR=1        turns warnings into errors
CUDA_HOME               the CUDA toolkit, where it is not the one of PATH
"""

import os
import runpy
import subprocess
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from types import SimpleNamespace

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

VERSION = runpy.run_path("fastlin/_version.py")["__version__"]
WERROR = os.environ.get("FASTLIN_WERROR") == "1"
nvcc = SimpleNamespace(**runpy.run_path("csrc/cuda/nvcc.py"))


class BuildExtension(build_ext):
    """Builds both extensions at once; stops the installation when one does not compile, and says what to do."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.parallel = True  # nvcc keeps one core busy: 85 s on two cores, against 119 s one after the other

    def build_extension(self, ext: Extension) -> None:
        is_cuda = ext.name == "fastlin._cuda"
        needs = (
            "a CUDA toolkit that works; FASTLIN_NO_CUDA=1 installs without it"
            if is_cuda
            else "a C++17 compiler; FASTLIN_NO_EXTENSION=1 installs without it"
        )
        try:
            if is_cuda:
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    ext.extra_objects = list(pool.map(self._device_code, sorted(glob("csrc/cuda/*.cu"))))
            super().build_extension(ext)
        except (BaseError, CCompilerError, subprocess.CalledProcessError, OSError) as error:
            raise CompileError(f"{error}\n{ext.name} needs {needs}") from error

    def _device_code(self, source: str) -> str:
        out = Path(self.build_temp, source).with_suffix(".o")
        out.parent.mkdir(parents=True, exist_ok=True)
        command = nvcc.command(TOOLKIT, Path(source), out, ARCHITECTURES, werror=WERROR)
        self.announce(" ".join(command), level=2)
        subprocess.run(command, check=True)
        return str(out)


def extension(name: str, sources: list[str], flags: list[str], **more) -> Extension:
    """An extension that knows neither torch nor numpy when it is built."""
    from pybind11.setup_helpers import ParallelCompile, Pybind11Extension

    ParallelCompile(default=0).install()  # as many sources at once as there are cores

    # No multiply-add but where a kernel asks for one: chi variates have the same bits on every instruction set.
    # A square root that sets errno is not vectorised: an update of 50 trials would take 18 us in place of 5.
    common = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra"]
    common += ["-Werror"] if WERROR else []
    macros = [("FASTLIN_VERSION", f'"{VERSION}"'), ("FASTLIN_FLAGS", f'"{" ".join(common)}"')]
    return Pybind11Extension(
        name,
        sorted(sources),
        include_dirs=["csrc"],
        define_macros=[*macros, *more.pop("define_macros", ())],
        extra_compile_args=[*common, *flags],
        cxx_std=17,
        **more,
    )


def cpu_kernels() -> Extension:
    """`fastlin._C`. Its threads are torch's: its libgomp has the plain name, so the loader takes the copy there is."""
    return extension(
        "fastlin._C",
        glob("csrc/*.cpp") + glob("csrc/cpu/*.cpp"),
        ["-fopenmp"],
        depends=sorted(glob("csrc/**/*.h", recursive=True)),
        extra_link_args=["-fopenmp"],
    )


def cuda_kernels() -> Extension:
    """`fastlin._cuda`, with the CUDA runtime inside: it loads where there is no driver, and says so."""
    return extension(
        "fastlin._cuda",
        glob("csrc/cuda/*.cpp"),
        [],
        depends=[path for ending in ("h", "cuh", "cu") for path in sorted(glob(f"csrc/**/*.{ending}", recursive=True))],
        define_macros=[
            ("FASTLIN_ARCHITECTURES", f'"{nvcc.describe(ARCHITECTURES)}"'),
            ("FASTLIN_CUDA_VERSION", f'"{TOOLKIT.version}"'),
        ],
        library_dirs=list(TOOLKIT.libraries),
        libraries=["cudart_static", "dl", "rt", "pthread"],
        extra_link_args=["-Wl,--exclude-libs,ALL"],  # torch has a CUDA runtime of its own in the same process
    )


extensions = []
if os.environ.get("FASTLIN_NO_EXTENSION") != "1":
    extensions.append(cpu_kernels())
    TOOLKIT = None if os.environ.get("FASTLIN_NO_CUDA") == "1" else nvcc.find()
    if TOOLKIT is not None:
        ARCHITECTURES = nvcc.architectures(os.environ.get("FASTLIN_CUDA_ARCHS"), TOOLKIT)
        extensions.append(cuda_kernels())
setup(ext_modules=extensions, cmdclass={"build_ext": BuildExtension})
