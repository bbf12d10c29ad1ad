"""Cells trained side by side, each in a process with its share of the threads.

The cells of a figure are many and small: two on one thread each take half the time of one after the other on two. A
worker ends with its parent, however that ends, so that nobody holds a cell's folder when the figure is taken up again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import torch

from fastlin.experiments.cells import summary
from fastlin.experiments.train import train


class Trained(Protocol):
    """What is trained in a cell."""

    @property
    def panel(self) -> str:
        """Name of the panel."""

    @property
    def key(self) -> str:
        """Name among the panel's cells."""

    def call(self) -> dict[str, Any]:
        """Arguments of `train` that the cell decides."""

    def row(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Its line of the table, of the summary of its run."""


@dataclass(frozen=True, eq=False)
class Order:
    """A cell, the folder of its run, the options of `train`, and the folder of the run that it goes on from."""

    cell: Trained
    folder: Path
    options: dict[str, Any]
    after: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of an order: a summary of the run, or the error that ended it; and the warnings."""

    summary: dict[str, Any] | None
    error: str | None
    warnings: tuple[str, ...]


def workers(jobs: int | None, orders: int) -> tuple[int, int]:
    """Processes, and threads of each: one process for each thread of torch's unless told."""
    threads = torch.get_num_threads()
    count = max(min(jobs or threads, orders), 1)
    return count, max(threads // count, 1)


def _side_by_side(orders: Sequence[Order]) -> int:
    """How many orders can be filled at once, those that others wait for first."""
    made = {order.folder for order in orders}
    later = sum(order.after in made for order in orders)
    return max(later, len(orders) - later)


def run(
    orders: Sequence[Order],
    jobs: int | None,
    started: Callable[[int], None],
    ended: Callable[[int, Outcome], None],
    tick: Callable[[], None],
) -> None:
    """Fill every order, one that goes on from another after it; an error of one does not stop the others.

    Parameters
    ----------
    orders : sequence of Order
    jobs : int or None
        Processes; None is one for each thread.
    started, ended : callable
        Called with the index of an order, and with what became of it.
    tick : callable
        Called a few times a second.
    """
    count, threads = workers(jobs, _side_by_side(orders))
    made = {order.folder for order in orders}
    waiting = list(range(len(orders)))[::-1]
    with _started(count, threads) as found:
        busy: dict[Connection, tuple[BaseProcess, int]] = {}
        idle = list(found)
        while waiting or busy:
            while idle:
                ready_now = [index for index in waiting if orders[index].after not in made]
                if not ready_now:
                    break
                process, connection = idle.pop()
                index = ready_now[-1]
                waiting.remove(index)
                connection.send(orders[index])
                busy[connection] = process, index
                started(index)
            for ready in wait(list(busy), timeout=0.25):
                assert isinstance(ready, Connection)
                process, index = busy.pop(ready)
                try:
                    outcome = ready.recv()
                except (EOFError, ConnectionResetError):
                    process.join()
                    outcome = Outcome(None, f"its process ended with status {process.exitcode}", ())
                    idle.append(_start(threads))
                    found.append(idle[-1])
                else:
                    idle.append((process, ready))
                made.discard(orders[index].folder)
                ended(index, outcome)
            tick()


def _start(threads: int) -> tuple[BaseProcess, Connection]:
    # A fork would copy the locks of torch's threads as they are.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, threads), daemon=True)
    process.start()
    there.close()
    return process, here


@contextmanager
def _started(count: int, threads: int) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """Workers, which are asked to leave a checkpoint and end when the block is left."""
    found: list[tuple[BaseProcess, Connection]] = []
    try:
        found += [_start(threads) for _ in range(count)]
        yield found
    finally:
        for process, connection in found:
            connection.close()
            process.terminate()
        for process, _ in found:
            process.join()


def _work(connection: Connection, threads: int) -> None:
    """Fill orders until there are no more."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ctrl-C reaches all processes of a terminal; the parent passes it on as the one signal that ends a worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    try:
        while True:
            connection.send(_fill(connection.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _fill(order: Order) -> Outcome:
    options = {**order.options, **order.cell.call(), "out": order.folder, "after": order.after}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run = train(**options, resume=True, progress=False)
        except Exception as error:
            return Outcome(None, f"{type(error).__name__}: {error}", _texts(caught))
    return Outcome(summary(run), None, _texts(caught))


def _texts(caught: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(warning.message) for warning in caught))
