"""The CPU kernels under sanitizers: edge problems against an oracle, in csrc/testing/attention_driver.cpp, random
arrays of edge sizes, in random_driver.cpp, and drawn sequences, in sampled_driver.cpp.

Each sanitizer also gets errors that it must see, from the same executable.
"""

import re
import subprocess

from cpp import toolchain

KERNELS = ("cpu/isa_avx512.cpp", "cpu/isa_avx2.cpp", "cpu/isa_neon.cpp", "cpu/isa_scalar.cpp", "cpu/dispatch.cpp")
DRIVER = ("testing/attention_driver.cpp", "testing/attention_cases.cpp")
# The oracle's loops are what takes time, and what is not tested.
ORACLE = {"testing/attention_oracle.cpp": ("-O2",)}
OTHER_DRIVERS = ("testing/random_driver.cpp", "testing/sampled_driver.cpp")


def build(folder, kernels, flags):
    """The drivers of attention, of random arrays and of drawn sequences, on the same objects."""
    compiler = toolchain.native()
    sources = dict.fromkeys((*kernels, *OTHER_DRIVERS, *DRIVER), flags) | ORACLE
    made = toolchain.objects(compiler, folder, sources)
    shared, rest = made[: len(kernels)], made[len(kernels) :]
    parts = {"random": rest[:1], "sampled": rest[1:2], "driver": rest[2:]}
    for name, objects in parts.items():
        toolchain.run([*compiler, *flags, *shared, *objects, "-pthread", "-o", folder / name])
    return folder / "driver", folder / "random", folder / "sampled"


def assert_ok(driver, mode):
    done = subprocess.run([driver, mode], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"ok \d+\n", done.stdout), done.stdout


def assert_seen(driver, mode, report):
    done = subprocess.run([driver, mode], capture_output=True, text=True, check=False)
    assert done.returncode != 0, done.stdout
    assert re.search(report, done.stderr), done.stdout + done.stderr
    assert "csrc/cpu/" in done.stderr, "not in the kernels"


def test_no_overrun_and_nothing_undefined(tmp_path):
    """Without OpenMP, whose runtime the sanitizers do not know.

    Not optimised: with -O1 the kernels compile for two minutes instead of half of one, and the run takes 8 s
    instead of 16.
    """
    guarded = f"-I{toolchain.SOURCES / 'testing' / 'guarded'}"
    flags = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", guarded)
    driver, random, sampled = build(tmp_path, (*KERNELS, "testing/isa_portable.cpp"), flags)
    for mode in ("plant-input", "plant-output", "plant-workspace"):
        assert_seen(driver, mode, "AddressSanitizer: (heap-buffer-overflow|use-after-poison|unknown-crash)")
    assert_seen(driver, "plant-undefined", "runtime error: signed integer overflow")
    assert_ok(driver, "edges")
    assert_ok(random, "edges")
    assert_ok(sampled, "edges")


def test_no_race(tmp_path):
    """Four threads, then two calls at once: on std::thread, since libgomp's barriers look like races."""
    flags = ("-O1", "-g1", "-fsanitize=thread", "-DFASTLIN_WITHOUT_PORTABLE")
    driver, random, sampled = build(tmp_path, KERNELS, flags)
    assert_seen(driver, "plant-race", "ThreadSanitizer: data race")
    assert_ok(driver, "threads")
    assert_ok(random, "threads")
    assert_ok(sampled, "threads")
