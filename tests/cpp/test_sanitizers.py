"""The CPU kernels under sanitizers, in the drivers of csrc/testing: edge problems against an oracle
(attention_driver.cpp), random arrays (random_driver.cpp), drawn sequences (sampled_driver.cpp), the optimiser's update
(update_driver.cpp), calls made from random bytes (boundary_fuzzer.cpp), and blocks on threads (threads_driver.cpp).

The same executables also make errors that each sanitizer must report.
"""

import re
import subprocess

from support import toolchain

THREADS = "cpu/parallel.cpp"
INSTRUCTION_SETS = ("avx512", "avx2", "neon", "scalar")
KERNELS = (*(f"cpu/isa_{name}.cpp" for name in INSTRUCTION_SETS), "cpu/dispatch.cpp", "cpu/update.cpp", THREADS)
CASES = "testing/attention_cases.cpp"
# Optimised: the oracle takes most of the time, and is not under test.
ORACLE = {"testing/attention_oracle.cpp": ("-O2",)}


def build(folder, kernels, drivers, flags):
    """Executables, each from its own source and the same objects."""
    compiler = toolchain.native()
    own = [f"testing/{name}.cpp" for name in drivers]
    made = toolchain.objects(compiler, folder, dict.fromkeys((*own, *kernels, CASES), flags) | ORACLE)
    for name, driver in zip(drivers, made, strict=False):
        toolchain.run([*compiler, *flags, driver, *made[len(drivers) :], "-pthread", "-o", folder / name])
    return [folder / name for name in drivers]


def assert_ok(driver, *mode):
    done = subprocess.run([driver, *mode], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"ok \d+\n", done.stdout), done.stdout


def assert_reported(driver, mode, report):
    done = subprocess.run([driver, mode], capture_output=True, text=True, check=False)
    assert done.returncode != 0, done.stdout
    assert re.search(report, done.stderr), done.stdout + done.stderr
    assert "csrc/cpu/" in done.stderr, "the report is not about the kernels"


def test_no_overrun_and_nothing_undefined(tmp_path, request):
    """Built without OpenMP, whose runtime the sanitizers do not know.

    Not optimised: -O1 takes two minutes to compile instead of half a minute, and saves 8 s of 16 s at run time.
    """
    guarded = f"-I{toolchain.SOURCES / 'testing' / 'guarded'}"
    flags = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", guarded)
    drivers = ("attention_driver", "random_driver", "sampled_driver", "update_driver", "boundary_fuzzer")
    driver, random, sampled, update, fuzzer = build(tmp_path, (*KERNELS, "testing/isa_portable.cpp"), drivers, flags)
    for mode in ("plant-input", "plant-output", "plant-workspace"):
        assert_reported(driver, mode, "AddressSanitizer: (heap-buffer-overflow|use-after-poison|unknown-crash)")
    assert_reported(driver, "plant-undefined", "runtime error: signed integer overflow")
    assert_ok(driver, "edges")
    assert_ok(random, "edges")
    assert_ok(sampled, "edges")
    assert_ok(update)
    assert_reported(fuzzer, "plant", "AddressSanitizer: heap-buffer-overflow")
    assert_ok(fuzzer, str(6000 * request.config.getoption("--faults")), "3")


def test_no_race(tmp_path):
    """Four threads, then two calls at once. On std::thread: ThreadSanitizer reports libgomp's barriers as races."""
    # GCC 12 stops with an internal error in its scalar replacement of aggregates, in log1p of one vector as Parts.
    flags = ("-O1", "-fno-tree-sra", "-g1", "-fsanitize=thread", "-DFASTLIN_WITHOUT_PORTABLE")
    drivers = ("attention_driver", "random_driver", "sampled_driver", "update_driver")
    driver, random, sampled, update = build(tmp_path, KERNELS, drivers, flags)
    assert_reported(driver, "plant-race", "ThreadSanitizer: data race")
    assert_ok(driver, "threads")
    assert_ok(random, "threads")
    assert_ok(sampled, "threads")
    assert_ok(update)
    made = toolchain.objects(
        toolchain.native(), tmp_path, dict.fromkeys(("testing/threads_driver.cpp", THREADS), flags)
    )
    toolchain.run([*toolchain.native(), *flags, *made, "-pthread", "-o", tmp_path / "threads_driver"])
    assert_ok(tmp_path / "threads_driver", "blocks")
