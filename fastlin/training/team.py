"""The processes that train together: a process group of torch.distributed, or this process alone.

Every process holds all parameters and takes the same steps; they share the sequences of a batch. What decides a run is
either computed by all alike or broadcast by the first process, which alone reads and writes files.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Team:
    """Processes that train together.

    Attributes
    ----------
    rank, size : int
        This process's number, and how many there are.
    device : torch.device
        Of the tensors that they exchange.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU

    @property
    def first(self) -> bool:
        """Whether this is the process that reads and writes files and shows progress."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Those of `count` consecutive things that belong to this process."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def add(self, values: Tensor) -> None:
        """Add up over all processes, in place."""
        if self.size > 1:
            with self._reaching():
                distributed.all_reduce(values)

    def broadcast(self, make: Callable[[], Any]) -> Any:
        """The object that `make` returns in the first process, in all of them.

        Raises
        ------
        ConnectionError
            In the others, when it raised in the first.
        """
        if self.size == 1:
            return make()
        held: list[Any] = [None, None]
        try:
            if self.first:
                held[0] = make()
        except BaseException as error:
            held[1] = str(error) or type(error).__name__
            raise
        finally:
            with self._reaching():
                distributed.broadcast_object_list(held, 0, device=self.device)
        if held[1] is not None:
            raise ConnectionAbortedError(f"process 0 of {self.size} has ended: {held[1]}")
        return held[0]

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Say in one line what an error of the network means."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConnectionAbortedError(
                f"process {self.rank} of {self.size}: another process of the run has ended or cannot be reached; "
                f"resume=True (--resume) resumes from the last checkpoint ({reason})"
            ) from error


ALONE = Team()


def team_of(device: torch.device, shared: bool | None = None) -> Team:
    """The processes of the initialised process group, or this one alone.

    Parameters
    ----------
    device : torch.device
        Of the parameters.
    shared : bool, optional
        None: whenever there is a process group; False never; True insists.
    """
    if shared is not None and not isinstance(shared, bool):
        raise TypeError(f"distributed: got {shared!r}, wants True, False or None")
    if not (distributed.is_available() and distributed.is_initialized()):
        if shared:
            raise ValueError("distributed: got True, wants a process group that torch.distributed has initialised")
        return ALONE
    if shared is False or distributed.get_world_size() == 1:
        return ALONE
    served = str(distributed.get_backend_config()).lower()
    if device.type not in served:
        raise ValueError(f"device: got {device}, which the process group ({served}) does not serve; wants one it does")
    return Team(distributed.get_rank(), distributed.get_world_size(), device)


@contextmanager
def joined(device: str) -> Iterator[str]:
    """Join the other processes that torchrun has started, if it has; the device of this one.

    GPUs of a machine are taken in the order of the processes on it, where `device` has no index.
    """
    if not all(name in os.environ for name in _LAUNCHED) or distributed.is_initialized():
        yield device
        return
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    store, rank, size = next(rendezvous("env://"))
    # The store outlives processes that are started anew, and what these read must not be what the dead had written.
    store = PrefixStore(f"fastlin/{os.environ.get(_RESTARTS, '0')}/{size}", store)
    backend = "nccl" if device.startswith("cuda") else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield device
    finally:
        distributed.destroy_process_group()


@contextmanager
def folder(out: Path) -> Iterator[Path]:
    """Where this process keeps what it makes of a run: `out` in the first, elsewhere a folder that is thrown away."""
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        yield out
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)


def restarted() -> bool:
    """Whether torchrun has started this process anew, after another one had died."""
    return int(os.environ.get(_RESTARTS, "0")) > 0
