"""The fuzzer of the C++ boundary, csrc/testing/boundary_fuzzer.cpp, under the address and undefined sanitizers.

    python tests/fuzz/boundary.py --executions 1000000 --seed 0                # random bytes, with g++
    python tests/fuzz/boundary.py --libfuzzer -runs=1000000 -len_control=0     # guided by coverage, where clang is

Building takes minutes; build/boundary caches the objects. tests/cpp/test_sanitizers.py runs the same driver for a few
seconds, not optimised.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support import toolchain

KERNELS = tuple(
    f"cpu/{name}.cpp" for name in ("isa_avx512", "isa_avx2", "isa_neon", "isa_scalar", "dispatch", "parallel")
)
FUZZER = tuple(f"testing/{name}.cpp" for name in ("boundary_fuzzer", "attention_cases", "attention_oracle"))
FLAGS = (
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-DFASTLIN_WITHOUT_PORTABLE",  # g++ would take over 7 minutes; the tests include them
    f"-I{toolchain.SOURCES / 'testing' / 'guarded'}",
)
FOLDER = toolchain.SOURCES.parent / "build" / "boundary"


def build(libfuzzer: bool) -> Path:
    """Build the fuzzer: with g++, or with clang and libFuzzer."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    compiler, flags = toolchain.native(), ("-O1", *FLAGS)
    if libfuzzer:
        clang = shutil.which("clang++")
        if clang is None:
            raise SystemExit("--libfuzzer wants clang++ with compiler-rt: Debian's clang and libclang-rt-dev")
        # Not optimised: with three instrumentations clang already takes minutes for a file.
        compiler, flags = [clang], ("-O0", *FLAGS, "-fsanitize=fuzzer", "-DFASTLIN_LIBFUZZER")
    objects = _objects(compiler, flags, KERNELS, ("core/*", "cpu/**/*", "kernels.h"))
    objects += _objects(compiler, flags, FUZZER, ("core/*", "*.h", "testing/*"))
    fuzzer = objects[-1].with_name("fuzzer")
    toolchain.run([*compiler, *flags, *objects, "-pthread", "-o", fuzzer])
    return fuzzer


def _objects(
    compiler: list[str], flags: Sequence[str], sources: Sequence[str], dependencies: Sequence[str]
) -> list[Path]:
    """Compile sources, unless objects of the same flags and dependencies are cached: the kernels take minutes."""
    digest = hashlib.sha256(repr((compiler, flags, toolchain.STRICT)).encode())
    for path in sorted(
        {path for pattern in dependencies for path in toolchain.SOURCES.glob(pattern) if path.is_file()}
    ):
        digest.update(str(path).encode() + path.read_bytes())
    folder = FOLDER / digest.hexdigest()[:16]
    made = [folder / f"{Path(name).stem}.o" for name in sources]
    if not all(path.exists() for path in made):
        with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
            toolchain.objects(compiler, Path(temporary), dict.fromkeys(sources, flags))
            shutil.copytree(temporary, folder, dirs_exist_ok=True)
    return made


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--libfuzzer", action="store_true", help="use libFuzzer; further options go to it")
    options, rest = parser.parse_known_args()
    if rest and not options.libfuzzer:
        parser.error(f"{rest[0]} is an option of libFuzzer; wants --libfuzzer")
    arguments = rest if options.libfuzzer else [str(options.executions), str(options.seed)]
    raise SystemExit(subprocess.run([build(options.libfuzzer), *arguments], check=False).returncode)


if __name__ == "__main__":
    main()
