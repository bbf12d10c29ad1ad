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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from fastlin.experiments.cells import summary
from fastlin.experiments.panels import Cell
from fastlin.experiments.train import train


@dataclass(frozen=True, eq=False)
class Order:
    """A cell, the folder of its run, and the options of `train`."""

    cell: Cell
    folder: Path
    options: dict[str, Any]


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


def run(
    orders: Sequence[Order],
    jobs: int | None,
    started: Callable[[int], None],
    ended: Callable[[int, Outcome], None],
    tick: Callable[[], None],
) -> None:
    """Fill every order; an error of one does not stop the others.

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
    count, threads = workers(jobs, len(orders))
    waiting = list(range(len(orders)))[::-1]
    with _started(count, threads) as found:
        busy: dict[Connection, tuple[BaseProcess, int]] = {}
        idle = list(found)
        while waiting or busy:
            while waiting and idle:
                process, connection = idle.pop()
                index = waiting.pop()
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
    cell = order.cell
    sizes = {"layers": cell.layers, "attention_heads": cell.attention_heads}
    options = {"model": cell.model, **sizes, **order.options}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run = train(
                cell.setting.mixture, cell.regime, cell.n, out=order.folder, resume=True, progress=False, **options
            )
        except Exception as error:
            return Outcome(None, f"{type(error).__name__}: {error}", _texts(caught))
    return Outcome(summary(run), None, _texts(caught))


def _texts(caught: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(warning.message) for warning in caught))
