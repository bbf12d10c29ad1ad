"""Triton's kernels run in its interpreter, or on a GPU: op_cases.TRITON_DEVICE says which."""

import contextlib

import pytest
from support.op_cases import HAS_TRITON, TRITON_DEVICE, poisoned

IS_INTERPRETED = TRITON_DEVICE.type == "cpu"


@pytest.fixture(autouse=True, scope="session")
def language_patched_once():
    """A call from kernel to function patches the function's language anew, 2 ms each: the first time is enough."""
    if not (HAS_TRITON and IS_INTERPRETED):
        return
    from triton.runtime.interpreter import InterpretedFunction

    slow, seen = InterpretedFunction.__call__, set()

    def call(self, *args, **kwargs):
        if self.fn in seen:
            return self.rewrite()(*args, **kwargs)
        seen.add(self.fn)
        return slow(self, *args, **kwargs)

    InterpretedFunction.__call__ = call


@pytest.fixture(autouse=True)
def poisoned_memory():
    with poisoned() if IS_INTERPRETED else contextlib.nullcontext():
        yield
