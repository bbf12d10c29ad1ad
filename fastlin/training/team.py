"""The processes that train together: a process group of torch.distributed, or this process alone.

Every process holds all parameters and takes the same steps; they share the sequences of a batch. What decides a run is
either computed by all alike or told by the first process, which alone reads and writes files.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fastlin.training.wires import Wires, connect

_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_CPU = torch.device("cpu")
# Processes, and bytes, whose sums the first process of a machine makes: more want every process to add a part.
_FEW, _SMALL = 8, 1 << 18
_WIRES: WeakKeyDictionary[Any, Wires | None] = WeakKeyDictionary()  # of process groups


@dataclass(frozen=True)
class Team:
    """Processes that train together.

    Attributes
    ----------
    rank, size : int
        This process's number, and how many there are.
    device : torch.device
        Where what they tell each other is held.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU

    @property
    def first(self) -> bool:
        """Whether this is the process that reads and writes files and shows progress."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Those of `count` things in a row that are this process's."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def add(self, values: Tensor) -> None:
        """Add up over all processes, in place."""
        if self.size == 1:
            return
        is_small = self.device.type == "cpu" and self.size <= _FEW and values.nbytes <= _SMALL
        wires = self._wires() if is_small else None
        with self._reaching():
            if wires is None:
                distributed.all_reduce(values)
            else:
                wires.add(values)

    def _wires(self) -> Wires | None:
        """Between the processes, where all are on one machine."""
        group = distributed.group.WORLD
        if group is None:
            return None
        if group not in _WIRES:
            with self._reaching():
                found = connect(
                    self.rank, self.size, _timeout(group), lambda text: str(self.told(lambda: (text, {}))[0])
                )
            _WIRES[group] = found
            if found is not None:
                weakref.finalize(group, found.close)
        return _WIRES[group]

    def told(self, make: Callable[[], tuple[Any, dict[str, Tensor]]]) -> tuple[Any, dict[str, Tensor]]:
        """What `make` gives in the first process, given to all: a value that JSON has, and tensors on the CPU by name.

        Raises
        ------
        ConnectionError
            In the others, when it raised in the first.
        """
        if self.size == 1:
            return make()
        if not self.first:
            head = json.loads(bytes(self._broadcast_bytes(None)))
            if "error" in head:
                raise ConnectionAbortedError(f"process 0 of {self.size} has ended: {head['error']}")
            shapes = {name: (getattr(torch, dtype), size) for name, dtype, size in head["tensors"]}
            tensors = {name: torch.empty(size, dtype=dtype) for name, (dtype, size) in shapes.items()}
            return head["value"], {name: self._broadcast(tensor) for name, tensor in tensors.items()}
        try:
            value, tensors = make()
        except Exception as error:
            self._broadcast_bytes({"error": str(error)})
            raise
        kinds = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]
        self._broadcast_bytes({"value": value, "tensors": kinds})
        for tensor in tensors.values():
            self._broadcast(tensor)
        return value, tensors

    def _broadcast_bytes(self, value: dict[str, Any] | None) -> list[int]:
        text = b"" if value is None else json.dumps(value).encode()
        size = self._broadcast(torch.tensor(len(text)))
        held = torch.empty(int(size), dtype=torch.uint8)
        if text:
            held.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        found: list[int] = self._broadcast(held).tolist()
        return found

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """The first process's tensor, on the CPU."""
        held = tensor.detach().to(self.device).contiguous()
        with self._reaching():
            distributed.broadcast(held, 0)
        return held.cpu()

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Say in one line what an error of the network means."""
        try:
            yield
        except ConnectionAbortedError:  # it has been said
            raise
        except (RuntimeError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConnectionAbortedError(
                f"process {self.rank} of {self.size}: another process of the run has ended or cannot be reached; "
                f"resume=True (--resume) goes on from the last checkpoint ({reason})"
            ) from error


def _timeout(group: Any) -> float:
    """Seconds after which processes of a group give up waiting for each other."""
    options = getattr(group._get_backend(_CPU), "options", None)
    timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return timeout.total_seconds()


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
