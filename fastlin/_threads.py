"""Threads of torch: one for small linear algebra, and one after a fork."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Run linear algebra of torch on one thread.

    The matrices are small, and waiting threads cost more than they save on a busy machine: 3.8 s against 0.12 s for the
    closed forms of d = 10 at 20 context lengths, two cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _after_fork() -> None:
    """Set one thread in a forked child."""
    # The threads of libgomp, which torch and the kernels share, exist in the parent only: a child that starts a
    # parallel region waits for them forever. One thread starts none.
    torch.set_num_threads(1)


os.register_at_fork(after_in_child=_after_fork)
