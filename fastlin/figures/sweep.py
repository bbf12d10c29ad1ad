"""Trains the cells of figures, one after another in this process or as tasks of dask.distributed.

A task trains a cell in its own folder, resumes from its checkpoint, writes the outcome by rename and returns the cell's
key. When a worker dies, dask runs its task again, which finds the cell's checkpoint or result on disk. The lock of the
run's folder keeps two processes from training one cell: the second waits, then reads the result.
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
from typing import TYPE_CHECKING, Any

import torch
from msgspec import to_builtins

from fastlin._files import write_json
from fastlin.figures.figure import FigureCell
from fastlin.figures.panel_files import Outcome, outcome_of, outcome_path
from fastlin.training.record import FolderInUseError
from fastlin.training.run import train
from fastlin.training.signals import interrupt, interruptible
from fastlin.training.table import summary

if TYPE_CHECKING:
    from distributed import Client, Future

_WAIT = 0.5  # seconds between two checks of a lock, or of running tasks
_CHECKPOINT_SECONDS = 60.0  # for cells to write a checkpoint when the command is stopped
_SETTINGS = {
    # A cell fails when its third worker dies.
    "distributed.scheduler.allowed-failures": 2,
    # The sampling profiler takes the interpreter's lock every 10 ms.
    "distributed.worker.profile.enabled": False,
    # Leaves out dask's MALLOC_TRIM_THRESHOLD_ of 64 KiB: 1500 steps in a thread take 1.25 s without it, 1.55 s with it.
    "distributed.nanny.pre-spawn-environ": {"OMP_NUM_THREADS": "1"},
}
_UNGUARDED = (
    "reproduce: its worker processes could not start; a script that calls it needs `if __name__ == '__main__':` "
    "around the call, since they import the script, or jobs=1"
)


@dataclass(frozen=True, eq=False)
class CellRequest:
    """A cell, the folder of its run, options of `train`, and the folder of the run that it continues."""

    cell: FigureCell
    folder: Path
    options: dict[str, Any]
    after: Path | None = None


Done = Callable[[CellRequest], None]
Tick = Callable[[], object]


def train_cell(request: CellRequest, progress: bool | None = False) -> None:
    """Train a cell, unless it is done, and write its outcome."""
    outcome = outcome_of(request.folder)
    if outcome is not None and outcome.row is not None:
        return
    options = {**request.options, **request.cell.call(), "after": request.after, "progress": progress}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        row, seconds, failure = None, None, None
        try:
            result = summary(_train(request.folder, options))
            row, seconds = request.cell.row(result), result["seconds"]
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    messages = list(dict.fromkeys(str(warning.message) for warning in caught))
    _write_outcome(request, Outcome(row, seconds, failure, messages))


def _train(folder: Path, options: dict[str, Any]) -> Any:
    """Train or resume the run of a cell; waits while another process trains it."""
    while True:
        try:
            return train(**options, out=folder, resume=True)
        except FolderInUseError:
            time.sleep(_WAIT)


def _write_outcome(request: CellRequest, outcome: Outcome) -> None:
    write_json(outcome_path(request.folder), to_builtins(outcome))


def _task(request: CellRequest, *_: str) -> str:
    """A cell as a task of dask; further arguments are results of the tasks that must end before it."""
    # SystemExit: the command was stopped, and the cell has written a checkpoint.
    with suppress(SystemExit):
        train_cell(request)
    return request.cell.key


def workers(jobs: int | None, requests: Sequence[CellRequest]) -> int:
    """Number of processes: `jobs`, or torch's number of threads, but not more than cells that can train at once."""
    # Cells that continue another train after it.
    folders = {request.folder for request in requests}
    later = sum(request.after in folders for request in requests)
    return max(min(jobs or torch.get_num_threads(), max(later, len(requests) - later)), 1)


def run(
    requests: Sequence[CellRequest], out: Path, *, jobs: int | None, client: Client | None, done: Done, tick: Tick
) -> None:
    """Train cells of a folder; an error in one does not stop the others.

    A cell that continues another comes after it. `jobs` is the number of processes: None is torch's number of threads,
    1 is this process with all its threads. `client` is that of a running cluster, in place of `jobs` processes.
    Calls `done` with each request that has ended, and `tick` between two checks of the cluster.
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
    with local_cluster(count) as local:
        _on_cluster(local, requests, out, done, tick)


def refuse_unguarded() -> None:
    """End a worker process that imports a script without a `__main__` guard; the parent reports the error."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(1)


@contextmanager
def local_cluster(count: int) -> Iterator[Client]:
    """A cluster of single-threaded processes on this machine, on loopback only, which ends with the block."""
    # Each worker holds a pipe to this process and ends when this process ends, also when it is killed.
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
            # Ctrl-C reaches all processes of a terminal; only this one handles it.
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
def cluster_at(scheduler: str) -> Iterator[Client]:
    """A running cluster, given by its scheduler's address or by its scheduler file."""
    try:
        from distributed import Client
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"--dask needs dask.distributed ({error}): pip install 'fastlin[cluster]'") from None
    # _on_cluster reports a lost connection in one line.
    for name in ("distributed.client", "distributed.utils", "distributed.core"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    option = "scheduler_file" if Path(scheduler).exists() else "address"
    with Client(**{option: scheduler}) as client:
        yield client


def _on_cluster(client: Client, requests: Sequence[CellRequest], out: Path, done: Done, tick: Tick) -> None:
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
                with _connected(address):
                    # No more tasks than workers: dask counts a worker's death against every task that it was sent.
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
                    errors = {future: future.exception() for future in ended}
                for future, error in errors.items():
                    request = running.pop(future)
                    _settle(request, error)
                    done(request)
                tick()
        except ConnectionError:
            raise
        except BaseException:
            _stop(client, running, out)
            raise


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Turn each error that dask raises after its scheduler died into one ConnectionError."""
    from distributed.client import ClosedClientError

    try:
        yield
    except (CancelledError, ClosedClientError, OSError):
        raise ConnectionError(
            f"lost the connection to dask's scheduler at {address}; cells that are done or have a "
            "checkpoint are kept: rerun the same command to resume"
        ) from None


def _settle(request: CellRequest, error: BaseException | None) -> None:
    """Write the outcome of a cell whose workers died, and raise any other error of its task."""
    from distributed import KilledWorker

    if isinstance(error, KilledWorker):
        message = f"{error.allowed_failures + 1} workers died while training it"
        _write_outcome(request, Outcome(None, None, message, []))
    elif error is not None:
        raise error


def _stop(client: Client, running: Mapping[Future, CellRequest], out: Path) -> None:
    """Make the running cells of a folder write a checkpoint and stop."""
    with suppress(Exception):  # the cluster may have ended already
        client.cancel(list(running), force=True)
        client.run(_leave_checkpoints, out, on_error="ignore")


async def _leave_checkpoints(out: Path) -> None:
    """Runs in a worker's event loop, beside the thread that trains."""
    end = time.monotonic() + _CHECKPOINT_SECONDS
    while interrupt(out) and time.monotonic() < end:
        await asyncio.sleep(0.02)
