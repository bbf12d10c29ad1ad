"""Cells of `fastlin reproduce` in this process: another one takes seconds to start."""

from __future__ import annotations

import os

from fastlin.experiments import farm, leases


def fill_here(orders, jobs, patience, settled, ended, tick):
    """In place of `farm.run`."""
    for index, order in enumerate(orders):
        lease = leases.take(order.folder, 0, os.getpid(), 5.0)
        tick()
        ended(index, farm.fill(order, lease))
        lease.release()
