"""The emulation itself: kernels without fault, and faults that it or a sanitizer must see, in
csrc/testing/cuda_shim_driver.cpp."""

import re

import pytest
from support import emulation

SOURCES = ("testing/cuda_shim_driver.cpp",)
FLAGS = {
    "plain": ("-O2", *emulation.EMULATED),
    "ucontext": ("-O1", "-DFASTLIN_UCONTEXT", *emulation.EMULATED),  # as on machines other than x86-64
    "addresses": emulation.ADDRESSES,
    "races": emulation.RACES,
}


def shim(build):
    return emulation.linked(f"shim-{build}", SOURCES, FLAGS[build])


@pytest.mark.parametrize("build", FLAGS)
def test_kernels_without_fault(build):
    emulation.assert_ok(shim(build), "correct")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("mask", r"block 0: a lane is not in the mask of its own collective: cuda_shim_driver.cpp:\d+"),
        ("left", r"block 0: deadlock: 3 have returned, 93 at cuda_shim_driver.cpp:\d+"),
        ("divergent", r"block 0: threads wait at different barriers: 3 at cuda_shim.*:\d+, 93 at cuda_shim.*:\d+"),
    ],
)
@pytest.mark.parametrize("build", FLAGS)
def test_launches_that_fail(build, fault, told):
    """The sanitizers have nothing to say about threads that were given up, nor about the launch after it."""
    done = emulation.call(shim(build), fault)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(told + "\n", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("build", "fault", "report"),
    [
        ("addresses", "shared-bound", "AddressSanitizer: heap-buffer-overflow"),
        ("addresses", "global-bound", "AddressSanitizer: heap-buffer-overflow"),
        ("races", "barrier", "ThreadSanitizer: data race"),
        ("races", "syncwarp", "ThreadSanitizer: data race"),
        ("races", "blocks", "ThreadSanitizer: data race"),
    ],
)
def test_faults_that_a_sanitizer_sees(build, fault, report):
    done = emulation.call(shim(build), fault)
    assert done.returncode != 0, done.stdout
    assert report in done.stderr, done.stdout + done.stderr
    assert re.search(r"#0 .*(reversed|added) .*cuda_shim_driver.cpp", done.stderr), "not in the kernel"
