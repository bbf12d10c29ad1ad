"""The extension `fastlin._C`; everything else is in pyproject.toml.

FASTLIN_NO_EXTENSION=1 leaves the extension out on purpose; FASTLIN_WERROR=1 turns warnings into errors.
"""

import os
import runpy
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

VERSION = runpy.run_path("fastlin/_version.py")["__version__"]


class BuildExtension(build_ext):
    """Stops the installation when the kernels do not compile, and says what to do."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
            raise CompileError(
                f"{error}\nfastlin._C needs a C++17 compiler; FASTLIN_NO_EXTENSION=1 installs without it"
            ) from error


def compiled_kernels() -> Extension:
    """Describe `fastlin._C`, which knows neither torch nor numpy when it is built."""
    from pybind11.setup_helpers import ParallelCompile, Pybind11Extension

    ParallelCompile(default=0).install()  # as many sources at once as there are cores

    # No multiply-add but where a kernel asks for one: chi variates have the same bits on every instruction set.
    flags = ["-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"]
    if os.environ.get("FASTLIN_WERROR") == "1":
        flags.append("-Werror")
    return Pybind11Extension(
        "fastlin._C",
        sorted(glob("csrc/*.cpp") + glob("csrc/cpu/*.cpp")),
        depends=sorted(glob("csrc/**/*.h", recursive=True)),
        include_dirs=["csrc"],
        define_macros=[("FASTLIN_VERSION", f'"{VERSION}"'), ("FASTLIN_FLAGS", f'"{" ".join(flags)}"')],
        # The threads are torch's: its libgomp has the plain name, so that the loader takes the copy that is there.
        extra_compile_args=[*flags, "-fopenmp"],
        extra_link_args=["-fopenmp"],
        cxx_std=17,
    )


without_extension = os.environ.get("FASTLIN_NO_EXTENSION") == "1"
setup(
    ext_modules=[] if without_extension else [compiled_kernels()],
    cmdclass={"build_ext": BuildExtension},
)
