"""These tests run in Triton's interpreter, which must be chosen before a kernel is imported: in a process of their own.

`tests/triton/test_interpreter.py` starts it. By hand: TRITON_INTERPRET=1 pytest tests/triton/interpreted
"""

import os

import pytest

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if IS_INTERPRETED else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def language_patched_once():
    """A call from kernel to function patches the function's language anew, 2 ms each: the first time is enough."""
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
    from helpers import poisoned

    with poisoned():
        yield
