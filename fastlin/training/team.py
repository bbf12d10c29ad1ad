"""The processes that train together: a process group of torch.distributed, or this process alone.

Every process holds all parameters and takes the same steps; the processes share the sequences of a batch. All compute
the same values, or the first process broadcasts them. Only the first process reads and writes files.
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
    """Processes that train together: rank of this one, their number, and the device of exchanged tensors."""

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU

    @property
    def first(self) -> bool:
        """Whether this is the process that reads and writes files and shows progress."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """The part of range(count) that belongs to this process."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def add(self, values: Tensor) -> None:
        """Sum over all processes, in place."""
        if self.size > 1:
            with self._explaining():
                distributed.all_reduce(values)

    def broadcast(self, make: Callable[[], Any]) -> Any:
        """Call `make` in the first process and return its result in all; where it raises, the others raise too."""
        if self.size == 1:
            return make()
        message: list[Any] = [None, None]  # result, error
        try:
            if self.first:
                message[0] = make()
        except BaseException as error:
            message[1] = str(error) or type(error).__name__
            raise
        finally:
            with self._explaining():
                distributed.broadcast_object_list(message, 0, device=self.device)
        if message[1] is not None:
            raise ConnectionAbortedError(f"process 0 of {self.size} has ended: {message[1]}")
        return message[0]

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn an error of the network into one that says what to do."""
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
    """The processes of the initialised process group, or this one alone; `shared` as `RunConfig.distributed`."""
    if shared is not None and not isinstance(shared, bool):
        raise TypeError(f"distributed: got {shared!r}, wants True, False or None")
    if not (distributed.is_available() and distributed.is_initialized()):
        if shared:
            raise ValueError("distributed: got True, wants a process group that torch.distributed has initialised")
        return ALONE
    if shared is False or distributed.get_world_size() == 1:
        return ALONE
    group = str(distributed.get_backend_config()).lower()
    if device.type not in group:
        raise ValueError(f"device: got {device}, which the process group ({group}) does not serve; wants one it does")
    return Team(distributed.get_rank(), distributed.get_world_size(), device)


@contextmanager
def joined(device: str) -> Iterator[str]:
    """Join the processes that torchrun started, if any; yields the device of this one.

    "cuda" without an index becomes the GPU of the process's local rank.
    """
    if not all(name in os.environ for name in _LAUNCHED) or distributed.is_initialized():
        yield device
        return
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    store, rank, size = next(rendezvous("env://"))
    # The store outlives restarts: a prefix keeps restarted processes from reading keys of the dead ones.
    store = PrefixStore(f"fastlin/{os.environ.get(_RESTARTS, '0')}/{size}", store)
    backend = "nccl" if device.startswith("cuda") else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield device
    finally:
        distributed.destroy_process_group()


def leads() -> bool:
    """Whether this is the first process of its process group, or has none."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


@contextmanager
def folder(out: Path) -> Iterator[Path]:
    """Output folder of this process: `out` in the first process, a temporary folder in the others."""
    if leads():
        yield out
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)


def restarted() -> bool:
    """Whether torchrun has restarted this process after a failure."""
    return int(os.environ.get(_RESTARTS, "0")) > 0
