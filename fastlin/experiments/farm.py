"""Cells trained side by side, each in a process with its share of the threads, and among as many calls as there are.

The cells of a figure are many and small: two on one thread each take half the time of one after the other on two. Other
calls, of this machine or others, may work on the same cells: each cell is trained under a lease (`leases`) and in a
folder of its own (`workplaces`). A process ends with its parent, however that ends, with a checkpoint if it can.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import torch

from fastlin.experiments import leases, workplaces
from fastlin.experiments.cells import summary
from fastlin.experiments.leases import Lease
from fastlin.experiments.train import train
from fastlin.training.signals import ending_on_sigterm, interruptible

SIGN_SECONDS = 5.0
"""Between signs of life of a worker, at most."""

_LAST_SECONDS = 60.0  # for a worker to end that is to


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
    """What became of an order: a summary of the run, or the error that ended it; and the warnings.

    Neither when another worker had taken the cell over.
    """

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
    patience: float,
    settled: Callable[[int], bool],
    ended: Callable[[int, Outcome], None],
    tick: Callable[[], None],
) -> None:
    """Have every order filled, by this call or another, one that goes on from another after it.

    An error of one does not stop the others; a process that dies is replaced, and its order filled anew once.

    Parameters
    ----------
    orders : sequence of Order
    jobs : int or None
        Processes; None is one for each thread.
    patience : float
        Seconds without a sign of life after which an order of another call is taken over.
    settled : callable
        Says whether another call has filled an order, or failed to.
    ended : callable
        Called with the index of an order of this call, and with what became of it.
    tick : callable
        Called a few times a second.
    """
    count, threads = workers(jobs, _side_by_side(orders))
    made = {order.folder for order in orders}
    waiting, deaths = list(range(len(orders))), dict.fromkeys(range(len(orders)), 0)
    watch, every = leases.Watch(patience), min(patience / 8, SIGN_SECONDS)
    next_look = time.monotonic()
    # Signals are heard between two looks, where nothing is half done: no lease is left that nobody holds.
    with _crew(count, threads) as crew, interruptible(True) as caught:
        while waiting or crew.busy:
            caught.raise_if_caught()
            if waiting and time.monotonic() >= next_look:
                for index in [index for index in waiting if settled(index)]:
                    waiting.remove(index)
                    made.discard(orders[index].folder)
                for index in waiting.copy():
                    if crew.idle and orders[index].after not in made and crew.give(index, orders[index], watch, every):
                        waiting.remove(index)
                # Others may be many, and the file system slow.
                next_look = time.monotonic() + every / 2
            for index, lease, outcome in crew.returned(0.25):
                next_look = time.monotonic()
                deaths[index] += outcome is None
                if outcome is None and deaths[index] == 2:
                    outcome = Outcome(None, "its process died, twice", ())
                if outcome is None or (outcome.summary is None and outcome.error is None):
                    waiting.insert(0, index)
                else:
                    made.discard(orders[index].folder)
                    ended(index, outcome)
                lease.release()
            tick()


class _Crew:
    """Processes: those that wait for an order, and those that have one, under a lease.

    Parameters
    ----------
    count, threads : int
        Processes, and threads of each.
    """

    def __init__(self, count: int, threads: int) -> None:
        self._threads = threads
        self.idle = [_start(threads) for _ in range(count)]
        self.busy: dict[Connection, tuple[BaseProcess, int, Lease]] = {}

    def give(self, index: int, order: Order, watch: leases.Watch, every: float) -> bool:
        """Have an order filled, unless somebody else is at it."""
        generation = watch.free(order.folder)
        if generation is None:
            return False
        process, connection = self.idle[-1]
        assert process.pid is not None
        lease = leases.take(order.folder, generation, process.pid, every)
        if lease is None:
            return False
        self.idle.pop()
        self.busy[connection] = process, index, lease
        # One that has died meanwhile is found out when its answer is due.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.send((order, lease))
        return True

    def returned(self, seconds: float) -> Iterator[tuple[int, Lease, Outcome | None]]:
        """Orders that come back within some time, with what became of them; None: the process has died."""
        for ready in wait(list(self.busy), timeout=seconds):
            assert isinstance(ready, Connection)
            process, index, lease = self.busy.pop(ready)
            outcome = None
            try:
                outcome = ready.recv()
            except (EOFError, ConnectionResetError):
                process.join()
                self.idle.append(_start(self._threads))
            else:
                self.idle.append((process, ready))
            yield index, lease, outcome

    def end(self) -> None:
        """Ask all to leave a checkpoint and end, and wait for them."""
        found = [*self.idle, *((process, connection) for connection, (process, _, _) in self.busy.items())]
        for process, connection in found:
            connection.close()
            process.terminate()
        for process, _ in found:
            process.join(_LAST_SECONDS)
            process.kill()
            process.join()
        for _, _, lease in self.busy.values():
            lease.release()


@contextmanager
def _crew(count: int, threads: int) -> Iterator[_Crew]:
    """Processes that end when the block is left, with a checkpoint."""
    crew = _Crew(count, threads)
    try:
        yield crew
    finally:
        crew.end()


def _start(threads: int) -> tuple[BaseProcess, Connection]:
    # A fork would copy the locks of torch's threads as they are.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, threads), daemon=True)
    process.start()
    there.close()
    return process, here


def _work(connection: Connection, threads: int) -> None:
    """Fill orders until there are no more."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ctrl-C reaches all processes of a terminal; the parent passes it on as the one signal that ends a worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    with ending_on_sigterm():
        try:
            while True:
                connection.send(fill(*connection.recv()))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    # Between two steps a run leaves a checkpoint. A step takes seconds at most.
    _terminate()
    time.sleep(_LAST_SECONDS)
    os._exit(1)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fill(order: Order, lease: Lease) -> Outcome:
    """Train a cell under a lease, in a folder of this worker, and give that the cell's name."""
    options = {**order.options, **order.cell.call(), "after": order.after}
    with warnings.catch_warnings(record=True) as caught, leases.renewed(lease, _terminate):
        warnings.simplefilter("always")
        try:
            place = workplaces.begin(order.folder, lease.token)
            run = train(**options, out=place, resume=True, progress=False)
            workplaces.publish(place, order.folder)
        except (Exception, SystemExit) as error:
            if lease.lost():
                workplaces.leave(order.folder, lease.token)
                return Outcome(None, None, ())
            if isinstance(error, SystemExit):
                lease.release()
                raise
            return Outcome(None, f"{type(error).__name__}: {error}", _texts(caught))
    return Outcome(summary(run), None, _texts(caught))


def _texts(caught: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(warning.message) for warning in caught))
