"""The CPU kernels under sanitizers: edge problems against an oracle, in csrc/testing/attention_driver.cpp, random
arrays of edge sizes, in random_driver.cpp, drawn sequences, in sampled_driver.cpp, and calls that are made from random
bytes, in boundary_fuzzer.cpp.

Each sanitizer also gets errors that it must see, from the same executable.
"""

import re
import subprocess

from cpp import toolchain

KERNELS = ("cpu/isa_avx512.cpp", "cpu/isa_avx2.cpp", "cpu/isa_neon.cpp", "cpu/isa_scalar.cpp", "cpu/dispatch.cpp")
CASES = "testing/attention_cases.cpp"
# The oracle's loops are what takes time, and what is not tested.
ORACLE = {"testing/attention_oracle.cpp": ("-O2",)}


def build(folder, kernels, drivers, flags):
    """Drivers, each with one source of its own, on the same objects."""
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


def assert_seen(driver, mode, report):
    done = subprocess.run([driver, mode], capture_output=True, text=True, check=False)
    assert done.returncode != 0, done.stdout
    assert re.search(report, done.stderr), done.stdout + done.stderr
    assert "csrc/cpu/" in done.stderr, "not in the kernels"


def test_no_overrun_and_nothing_undefined(tmp_path, request):
    """Without OpenMP, whose runtime the sanitizers do not know.

    Not optimised: with -O1 the kernels compile for two minutes instead of half of one, and the run takes 8 s
    instead of 16.
    """
    guarded = f"-I{toolchain.SOURCES / 'testing' / 'guarded'}"
    flags = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", guarded)
    drivers = ("attention_driver", "random_driver", "sampled_driver", "boundary_fuzzer")
    driver, random, sampled, fuzzer = build(tmp_path, (*KERNELS, "testing/isa_portable.cpp"), drivers, flags)
    for mode in ("plant-input", "plant-output", "plant-workspace"):
        assert_seen(driver, mode, "AddressSanitizer: (heap-buffer-overflow|use-after-poison|unknown-crash)")
    assert_seen(driver, "plant-undefined", "runtime error: signed integer overflow")
    assert_ok(driver, "edges")
    assert_ok(random, "edges")
    assert_ok(sampled, "edges")
    assert_seen(fuzzer, "plant", "AddressSanitizer: heap-buffer-overflow")
    assert_ok(fuzzer, str(6000 * request.config.getoption("--faults")), "3")


def test_no_race(tmp_path):
    """Four threads, then two calls at once: on std::thread, since libgomp's barriers look like races."""
    flags = ("-O1", "-g1", "-fsanitize=thread", "-DFASTLIN_WITHOUT_PORTABLE")
    drivers = ("attention_driver", "random_driver", "sampled_driver")
    driver, random, sampled = build(tmp_path, KERNELS, drivers, flags)
    assert_seen(driver, "plant-race", "ThreadSanitizer: data race")
    assert_ok(driver, "threads")
    assert_ok(random, "threads")
    assert_ok(sampled, "threads")
