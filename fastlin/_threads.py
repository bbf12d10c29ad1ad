"""Threads of torch: for small linear algebra, and after a fork."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Linear algebra on one thread.

    Matrices are small, and threads that wait for each other on a busy machine cost more than they bring: 3.8 s against
    0.12 s for the closed forms of d = 10 at 20 context lengths, two cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _after_fork() -> None:
    """Go on with one thread in a forked child.

    libgomp's team, which torch and the kernels share, stays with the parent, and a child that asks it for work waits
    for ever. One thread does not ask.
    """
    torch.set_num_threads(1)


os.register_at_fork(after_in_child=_after_fork)
