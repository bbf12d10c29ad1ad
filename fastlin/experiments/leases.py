"""Leases on cells: who is at work on what, through files in a folder that all workers see, and nothing else.

    .KEY.lease.G     the G-th lease on the cell KEY: who holds it, and a count that goes up every few seconds

A lease is taken by making its file, which the system grants to one process alone, on file systems of many machines too
(O_EXCL); nothing relies on locks. It is over when its holder removes it, when the holder is known to be dead, which a
process of the same machine can tell, or when the file has stayed as it is for long: then the next one is taken. How
long is measured on the clock of whoever waits, in pieces that are no longer than its looks are apart, so that neither
clocks that differ or jump nor a waiter that was stopped itself make a lease look old.

A holder that was taken for dead and is not does no harm: it works in a folder of its own (`workplaces`), and leaves the
cell as soon as it sees that the lease is not its own any more.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlin._files import replacing

_MARK = ".lease."


@dataclass(frozen=True)
class Lease:
    """The right to work on a cell.

    Attributes
    ----------
    cell : Path
        Folder of the cell's run.
    generation : int
    token : str
        Of this lease alone.
    pid : int
        Of the process that works.
    every : float
        Seconds between signs of life.
    """

    cell: Path
    generation: int
    token: str
    pid: int
    every: float

    @property
    def path(self) -> Path:
        """The lease's file."""
        return _path(self.cell, self.generation)

    def lost(self) -> bool:
        """Whether somebody else has taken the cell over."""
        newest = last(self.cell)
        if newest is None or newest > self.generation:
            return True
        held = read(self.path)
        return held is None or held.get("token", self.token) != self.token

    def renew(self, beat: int, seconds: float) -> None:
        """Give a sign of life."""
        about = {"token": self.token, **_process(self.pid), "every": self.every, "beat": beat, "seconds": seconds}
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps(about), encoding="utf-8")

    def release(self) -> None:
        """Let others have the cell, with leases that were taken over; nothing if this one was."""
        if self.lost():
            return
        for generation in generations(self.cell):
            _path(self.cell, generation).unlink(missing_ok=True)


def _path(cell: Path, generation: int) -> Path:
    return cell.with_name(f".{cell.name}{_MARK}{generation}")


def generations(cell: Path) -> list[int]:
    """Of the leases on a cell that are there, from the oldest."""
    start = f".{cell.name}{_MARK}"
    try:
        ends = [name.removeprefix(start) for name in os.listdir(cell.parent) if name.startswith(start)]
    except FileNotFoundError:
        return []
    return sorted(int(end) for end in ends if end.isdecimal())


def last(cell: Path) -> int | None:
    """Generation of the newest lease on a cell, None when there is none."""
    return max(generations(cell), default=None)


def read(path: Path) -> dict[str, Any] | None:
    """What a lease says; {} when that cannot be read, as in the moment when it is made; None when it is gone."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def newest(cell: Path) -> dict[str, Any] | None:
    """What the newest lease on a cell says, None when there is none."""
    generation = last(cell)
    return None if generation is None else read(_path(cell, generation))


def take(cell: Path, generation: int, pid: int, every: float) -> Lease | None:
    """Take the lease of a generation, None when somebody was faster."""
    cell.parent.mkdir(parents=True, exist_ok=True)
    lease = Lease(cell, generation, secrets.token_hex(8), pid, every)
    try:
        os.close(os.open(lease.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return None
    try:
        lease.renew(0, 0.0)
    except OSError:
        lease.path.unlink(missing_ok=True)
        raise
    return lease


def clear(cells: Iterable[Path]) -> None:
    """Remove the leases on cells of a folder that have ended: of a call that died after it had said so.

    Who is at work on such a cell all the same, having been taken for dead, leaves it.
    """
    by_folder: dict[Path, set[str]] = {}
    for cell in cells:
        by_folder.setdefault(cell.parent, set()).add(cell.name)
    for folder, names in by_folder.items():
        for name in os.listdir(folder) if folder.is_dir() else ():
            key, _, generation = name.rpartition(_MARK)
            if key.startswith(".") and key[1:] in names and generation.isdecimal():
                (folder / name).unlink(missing_ok=True)


@contextmanager
def renewed(lease: Lease, gone: Callable[[], None]) -> Iterator[None]:
    """Give signs of life while the block runs; `gone` is called from another thread when the lease is lost."""
    stop, started = threading.Event(), time.monotonic()

    def beat() -> None:
        count = 0
        while not stop.wait(lease.every):
            count += 1
            # A disk that is full for now is not the end of the work; who waits in vain for a sign takes the cell over.
            with suppress(OSError):
                if lease.lost():
                    gone()
                    return
                lease.renew(count, time.monotonic() - started)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Watch:
    """Leases as one worker sees them.

    Parameters
    ----------
    patience : float
        Seconds without a sign of life after which a lease is over.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        # What a lease said, when it was looked at last, and for how long it had said so.
        self._seen: dict[Path, tuple[dict[str, Any], float, float]] = {}

    def free(self, cell: Path) -> int | None:
        """The generation to take a cell with, None while somebody is at work on it."""
        newest = last(cell)
        if newest is None:
            return 0
        path = _path(cell, newest)
        held = read(path)
        if held is None:
            return None  # it has just ended: what has become of the cell is known at the next look
        if alive(held) is False or self._silent(path, held) >= self._patience:
            return newest + 1
        return None

    def _silent(self, path: Path, held: dict[str, Any]) -> float:
        """For how long this worker has watched a lease stay as it is."""
        now = time.monotonic()
        before, looked, silent = self._seen.get(path, (None, now, 0.0))
        # A look that comes late, after a stop or a jump of the clock, has not seen what was between.
        silent = silent + min(max(now - looked, 0.0), self._patience / 4) if before == held else 0.0
        self._seen[path] = held, now, silent
        return silent


def alive(held: dict[str, Any]) -> bool | None:
    """Whether the holder of a lease is alive; None when it is on another machine, or this one cannot tell."""
    machine, pid = held.get("machine"), held.get("pid")
    if machine is None or machine != _machine() or not isinstance(pid, int):
        return None
    born = _born(pid)
    return born is not None and born == held.get("born")


def _process(pid: int) -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": pid, "machine": _machine(), "born": _born(pid)}


def _machine() -> str | None:
    """The machine since it started, and its numbering of processes: containers have their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _born(pid: int) -> int | None:
    """When a process of this machine started, in ticks of it; None when it does not run, a zombie included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
