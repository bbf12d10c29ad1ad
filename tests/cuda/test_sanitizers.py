"""The CUDA kernels in emulation, under sanitizers: edge problems against an oracle with the same bits on every device
and in every order of threads, and drawn sequences against the CPU's, in csrc/testing/cuda_driver.cpp; optimiser updates
in every order, in csrc/testing/cuda_update_driver.cpp."""

from support import emulation


def test_no_overrun_and_nothing_undefined():
    driver = emulation.driver("addresses", emulation.ADDRESSES)
    emulation.assert_ok(driver, "edges", 200)
    emulation.assert_ok(driver, "drawn")
    emulation.assert_ok(emulation.update_driver("update-addresses", emulation.ADDRESSES))


def test_no_race():
    """Each CUDA thread is a thread to the sanitizer, which only barriers order."""
    driver = emulation.driver("races", emulation.RACES)
    emulation.assert_ok(driver, "edges", 24)
    emulation.assert_ok(driver, "drawn")
    emulation.assert_ok(emulation.update_driver("update-races", emulation.RACES))
