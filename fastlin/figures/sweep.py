"""Cells of figures, trained here one after the other or as tasks of dask.distributed.

A cell is a function of its request: it trains in its own folder, resumes from its checkpoint, writes what became of it
by rename and returns its key. Dask runs a task again when its worker dies: the cell's checkpoint or result is then
on disk. The lock of the run's folder keeps two trainers apart: the second waits, then reads the result.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from msgspec import to_builtins

from fastlin._files import write_json
from fastlin.figures.panel_files import Outcome, outcome_of, outcome_path
from fastlin.training.record import FolderInUseError
from fastlin.training.run import train
from fastlin.training.signals import interrupt, interruptible
from fastlin.training.table import summary

if TYPE_CHECKING:
    from distributed import Client, Future

_WAIT = 0.5  # seconds between two looks, at a lock that is held and at tasks that are running
_LAST_SECONDS = 60.0  # for cells to write a checkpoint when the command is stopped
_SETTINGS = {
    # A cell whose third worker dies has failed; dask counts how many deaths are forgiven.
    "distributed.scheduler.allowed-failures": 2,
    # Its sampling profiler takes the interpreter's lock every 10 ms.
    "distributed.worker.profile.enabled": False,
    # Without dask's MALLOC_TRIM_THRESHOLD_ of 64 KiB: in a thread, 1500 steps that take 1.25 s took 1.55 s with it.
    "distributed.nanny.pre-spawn-environ": {"OMP_NUM_THREADS": "1"},
}
_UNGUARDED = (
    "reproduce: its worker processes could not start; a script that calls it needs `if __name__ == '__main__':` "
    "around the call, since they import the script, or jobs=1"
)


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
        """Its line of the table, from the summary of its run."""


@dataclass(frozen=True, eq=False)
class CellRequest:
    """A cell, the folder of its run, the options of `train`, and the folder of the run that it continues."""

    cell: Trained
    folder: Path
    options: dict[str, Any]
    after: Path | None = None


def train_cell(request: CellRequest, progress: bool | None = False) -> None:
    """Train a cell, unless its outcome is on disk, and write what became of it."""
    found = outcome_of(request.folder)
    if found is not None and found.row is not None:
        return
    options = {**request.options, **request.cell.call(), "after": request.after, "progress": progress}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        row, seconds, failure = None, None, None
        try:
            told = summary(_trained(request.folder, options))
            row, seconds = request.cell.row(told), told["seconds"]
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    said = list(dict.fromkeys(str(warning.message) for warning in caught))
    write_outcome(request, Outcome(row, seconds, failure, said))


def _trained(folder: Path, options: dict[str, Any]) -> Any:
    """The run of a cell; waits while another process trains it."""
    while True:
        try:
            return train(**options, out=folder, resume=True)
        except FolderInUseError:
            time.sleep(_WAIT)


def write_outcome(request: CellRequest, outcome: Outcome) -> None:
    """Write what became of a cell."""
    write_json(outcome_path(request.folder), to_builtins(outcome))


def _task(request: CellRequest, *_: str) -> str:
    """A cell as a task of dask, after the tasks of the cells that it continues."""
    # The command that asked for the cell was stopped, and has had the cell leave a checkpoint.
    with suppress(SystemExit):
        train_cell(request)
    return request.cell.key


def workers(jobs: int | None, requests: Sequence[CellRequest]) -> int:
    """Processes for some cells: as many as asked for, or one for each thread of torch's, but not more than are of use.

    Cells that continue another of them train after it.
    """
    folders = {request.folder for request in requests}
    later = sum(request.after in folders for request in requests)
    return max(min(jobs or torch.get_num_threads(), max(later, len(requests) - later)), 1)


def run(
    requests: Sequence[CellRequest],
    out: Path,
    *,
    jobs: int | None,
    client: Client | None,
    done: Callable[[CellRequest], None],
    tick: Callable[[], object],
) -> None:
    """Train cells; an error of one does not stop the others.

    Parameters
    ----------
    requests : sequence of CellRequest
        One that continues another comes after it.
    out : Path
        The folder that all are in.
    jobs : int or None
        Processes; None is one for each thread of torch's, 1 is this process, with all its threads.
    client : distributed.Client or None
        Of a cluster that is there, in place of `jobs` processes.
    done : callable
        Called with each request that has ended.
    tick : callable
        Called between looks at the cluster.
    """
    if client is not None:
        _on_cluster(client, requests, out, done, tick)
        return
    count = workers(jobs, requests)
    if count == 1:
        for request in requests:
            train_cell(request, progress=None)
            done(request)
        return
    with local_cluster(count) as found:
        _on_cluster(found, requests, out, done, tick)


def refuse_unguarded() -> None:
    """End a worker process that imports a script which calls `reproduce` without a guard: its parent says so."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(1)


@contextmanager
def local_cluster(count: int) -> Iterator[Client]:
    """A cluster of single-threaded processes of this machine, which listens on loopback only and ends with the block.

    Its workers end when this process does, however it ends: each holds a pipe to it.
    """
    try:
        import dask
        from distributed import Client, LocalCluster
    except ModuleNotFoundError as error:
        message = f"several processes need dask.distributed ({error}): pip install 'fastlin[cluster]', or --jobs 1"
        raise ModuleNotFoundError(message) from None
    with dask.config.set(_SETTINGS):
        try:
            cluster = LocalCluster(
                n_workers=count,
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",
                memory_limit=None,
                silence_logs=logging.CRITICAL,
            )
        except RuntimeError as error:
            raise RuntimeError(f"{_UNGUARDED} ({error})") from None
        with cluster, Client(cluster) as client:
            # Ctrl-C reaches all processes of a terminal: this one passes it on.
            client.register_plugin(_ignore_ctrl_c())
            yield client


def _ignore_ctrl_c() -> Any:
    from distributed import WorkerPlugin

    class IgnoreCtrlC(WorkerPlugin):  # type: ignore[misc]
        def setup(self, worker: Any) -> None:
            import signal

            signal.signal(signal.SIGINT, signal.SIG_IGN)

    return IgnoreCtrlC()


@contextmanager
def cluster_at(place: str) -> Iterator[Client]:
    """A cluster that is there, by the address of its scheduler or by its scheduler file."""
    try:
        from distributed import Client
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"--dask needs dask.distributed ({error}): pip install 'fastlin[cluster]'") from None
    # A connection that is lost is told below, in one line.
    for name in ("distributed.client", "distributed.utils", "distributed.core"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    where = {"scheduler_file": place} if Path(place).exists() else {"address": place}
    with Client(**where) as client:
        yield client


def _on_cluster(
    client: Client,
    requests: Sequence[CellRequest],
    out: Path,
    done: Callable[[CellRequest], None],
    tick: Callable[[], object],
) -> None:
    from distributed import wait

    print(f"dask dashboard: {client.dashboard_link}", file=sys.stderr, flush=True)
    address = client.scheduler.address
    token = secrets.token_hex(4)
    waiting, submitted = list(requests), dict[Path, "Future"]()
    running: dict[Future, CellRequest] = {}
    with interruptible(True) as caught:
        try:
            while waiting or running:
                caught.raise_if_caught()
                # No more tasks than workers: dask blames a worker's death on every task that it was sent.
                free = max(sum(client.nthreads().values()) - len(running), 0)
                for request in waiting[:free]:
                    before = [submitted[request.after]] if request.after in submitted else []
                    key = f"{request.cell.panel}-{request.cell.key}-{token}"
                    future = client.submit(_task, request, *before, key=key, pure=False)
                    submitted[request.folder] = future
                    running[future] = request
                del waiting[:free]
                ended: set[Future] = set()
                if running:
                    with suppress(TimeoutError):
                        ended = wait(list(running), timeout=_WAIT, return_when="FIRST_COMPLETED").done
                else:
                    time.sleep(_WAIT)  # no workers yet
                for future in ended:
                    request = running.pop(future)
                    _settle(request, future)
                    done(request)
                tick()
        except CancelledError:
            raise ConnectionError(
                f"lost the connection to dask's scheduler at {address}; cells that are done or have a "
                "checkpoint are kept: rerun the same command to resume"
            ) from None
        except BaseException:
            _stop(client, running, out)
            raise


def _settle(request: CellRequest, future: Future) -> None:
    """Note the failure of a cell that could not do it itself, and raise what concerns more than one cell."""
    from distributed import KilledWorker

    error = future.exception()
    if isinstance(error, KilledWorker):
        message = f"{error.allowed_failures + 1} workers died while training it"
        write_outcome(request, Outcome(None, None, message, []))
    elif error is not None:
        raise error


def _stop(client: Client, running: Mapping[Future, CellRequest], out: Path) -> None:
    """Have the cells that are being trained below a folder leave a checkpoint."""
    with suppress(Exception):  # the cluster may be gone, which is no news to whoever stops it
        client.cancel(list(running), force=True)
        client.run(_leave_checkpoints, out, on_error="ignore")


async def _leave_checkpoints(out: Path) -> None:
    """Runs in a worker's event loop, beside the thread that trains."""
    end = time.monotonic() + _LAST_SECONDS
    while interrupt(out) and time.monotonic() < end:
        await asyncio.sleep(0.02)
