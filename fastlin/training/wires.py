"""Sums over the processes of one machine, by sockets between the first of them and the others.

gloo's all_reduce hands each of its many messages from thread to thread; here the system itself wakes a process that
waits. On 2 cores, by turns, 62 kB took two processes 0.12 ms for 1.9, and four 0.20 for 6.3.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, distributed


class Wires:
    """Sockets to the other processes in their order, in the first process; in the others one, to the first.

    Parameters
    ----------
    rank : int
        Of this process.
    sockets : list of socket.socket
    seconds : float
        After which who waits gives up.
    """

    def __init__(self, rank: int, sockets: list[socket.socket], seconds: float) -> None:
        self._first, self._sockets = rank == 0, sockets
        self._part = torch.empty(0)
        for one in sockets:
            one.settimeout(seconds)

    def add(self, values: Tensor) -> None:
        """Add up over all processes, in place; in the first process, in the order of the processes.

        Parameters
        ----------
        values : Tensor
            Contiguous, on the CPU, of one size and dtype in all.
        """
        try:
            self._add(values)
        except BaseException:
            # What is left in a socket would be taken for a part of the next sum, and others would wait for the rest.
            self.close()
            raise

    def _add(self, values: Tensor) -> None:
        held = _bytes_of(values)
        if not self._first:
            self._sockets[0].sendall(held)
            _fill(self._sockets[0], held)
            return
        if self._part.shape != values.shape or self._part.dtype != values.dtype:
            self._part = torch.empty_like(values)
        for one in self._sockets:
            _fill(one, _bytes_of(self._part))
            values += self._part
        for one in self._sockets:
            one.sendall(held)

    def close(self) -> None:
        """End the connections."""
        for one in self._sockets:
            one.close()


def _bytes_of(values: Tensor) -> memoryview:
    return values.numpy().data.cast("B")


def _fill(wire: socket.socket, held: memoryview) -> None:
    while held:
        count = wire.recv_into(held)
        if count == 0:
            raise ConnectionResetError("its connection was closed")
        held = held[count:]


def connect(rank: int, size: int, seconds: float, tell: Callable[[str], str]) -> Wires | None:
    """Sockets between all processes of a group; None where one cannot reach the first, as from another machine.

    Parameters
    ----------
    rank, size : int
        This process's number, and how many there are.
    seconds : float
        After which who waits gives up.
    tell : callable
        What it is given in the first process, in all.
    """
    if rank > 0:
        wire, is_wired = _called(tell(""), rank), False
        try:
            is_wired = _all(wire is not None, size)
        finally:
            if wire is not None and not is_wired:
                wire.close()
        return Wires(rank, [wire], seconds) if wire is not None and is_wired else None
    with ExitStack() as stack:
        door, place = _opened(size, stack)
        tell(place)
        if not _all(door is not None, size) or door is None:
            return None
        door.settimeout(seconds)
        callers = [door.accept()[0] for _ in range(size - 1)]
    by_rank = {caller.recv(1)[0]: caller for caller in callers}
    return Wires(rank, [by_rank[other] for other in range(1, size)], seconds)


def _opened(size: int, stack: ExitStack) -> tuple[socket.socket | None, str]:
    """Where the others can come to, while the stack is there; None and "" where that cannot be had."""
    try:
        # Only this user may enter the folder.
        place = str(Path(stack.enter_context(tempfile.TemporaryDirectory()), "door"))
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(place)
        door.listen(size)
    except OSError:  # no room for a folder or a socket, or a path that is too long
        return None, ""
    return door, place


def _called(place: str, rank: int) -> socket.socket | None:
    """A socket to the first process, which has been told whose it is."""
    try:
        wire = socket.socket(socket.AF_UNIX)
    except OSError:
        return None
    try:
        wire.connect(place)
        wire.sendall(bytes([rank]))
    except OSError:
        wire.close()
        return None
    return wire


def _all(has_reached: bool, size: int) -> bool:
    reached = torch.tensor(int(has_reached))
    distributed.all_reduce(reached)
    return int(reached) == size
