"""A step on a device, in emulation: what it must not do is refused, and what it did is recorded and repeated.

A CUDA graph repeats launches with the arguments that they had. Here these are the launches of the emulated kernels, and
the operations of torch between them; all tensors that they made are kept, at the same addresses.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import emulation
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "allclose")
"""Operations whose results the host reads; torch waits for the device in each."""
_COPIES = ("lift_fresh", "lift_fresh_copy", "pin_memory")
"""Operations that bring numbers from the host."""
_FREE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view")
"""Operations that launch nothing."""
_OF_TENSORS = ("item", "tolist", "numpy", "cpu", "cuda", "__bool__", "__float__", "__int__", "__index__")
_MAKERS = ("tensor", "as_tensor", "from_numpy", "asarray", "frombuffer")


class DeviceStep(TorchDispatchMode):
    """Refuses read-backs and host copies, and records launches and operations.

    Attributes
    ----------
    operations : list of str
        Names of the operations of torch that a GPU would launch kernels for.
    launches : int
        Of the emulated kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self._actions: list[Any] = []
        self.operations: list[str] = []
        self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        assert name not in _READS, f"the host reads what {func} gives"
        assert name not in _COPIES, f"{func} copies from the host"
        if name in ("index", "index_put", "index_put_"):
            masks = [t for t in tree_iter(args[1]) if isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"the host reads how many there are: {func} with a mask"
        self._note_launches()
        results = func(*args, **kwargs)
        self._actions.append((func, args, kwargs, results))
        if not _is_view(func) and name not in _FREE:
            self.operations.append(name)
        return results

    def _note_launches(self) -> None:
        count = emulation.record(True)
        self._actions += range(self.launches, count)
        self.launches = count

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        emulation.record(True)
        try:
            with self, _refused(), torch.no_grad():
                yield
            self._note_launches()
        finally:
            emulation.record(False)

    def repeat(self) -> None:
        """Do again all that was recorded, on the memory that it was done on."""
        with torch.no_grad():
            for action in self._actions:
                if isinstance(action, int):
                    emulation.repeat(action)
                else:
                    _repeat(*action)


def _is_view(func: Any) -> bool:
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


def _repeat(func: Any, args: Any, kwargs: Any, results: Any) -> None:
    """An operation again: in place it finds its own results, and others are written over the results that it gave."""
    name = func._schema.name.removeprefix("aten::")
    if _is_view(func) or name in _FREE:
        return
    again = func(*args, **kwargs)
    for kept, new in zip(tree_iter(results), tree_iter(again), strict=True):
        if isinstance(kept, Tensor) and kept.data_ptr() != new.data_ptr():
            kept.copy_(new)


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """What does not pass through the dispatcher, or passes before a mode sees it."""

    def refuse(name: str) -> Callable[..., Any]:
        def refused(*_: Any, **__: Any) -> Any:
            raise AssertionError(f"{name} in a step of a device")

        return refused

    with pytest.MonkeyPatch.context() as patch:
        for name in _OF_TENSORS:
            patch.setattr(Tensor, name, refuse(name))
        patch.setattr(Tensor, "new_tensor", refuse("new_tensor"))
        patch.setattr(Tensor, "to", _to_dtype)
        for name in _MAKERS:
            patch.setattr(torch, name, refuse(name))
        yield


_to = Tensor.to


def _to_dtype(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to` another dtype; to a device, even to the one where it is, may be a copy from the host."""
    assert len(args) == 1, f"to{args} in a step of a device"
    assert isinstance(args[0], torch.dtype), f"to({args[0]}) in a step of a device"
    assert not kwargs, f"to({kwargs}) in a step of a device"
    return _to(self, *args)


class FakeGraphs:
    """Stands for CUDA graphs: `captured` takes the first step as it is, records the second, and repeats it then."""

    def __init__(self) -> None:
        self.steps: list[DeviceStep] = []
        self.repeats = 0

    def captured(self, step: Callable[[], object], device: torch.device) -> Callable[[], object]:
        step()
        return functools.partial(self._later, step, [])

    def _later(self, step: Callable[[], object], recorded: list[DeviceStep]) -> None:
        if recorded:
            self.repeats += 1
            recorded[0].repeat()
            return
        recorded.append(DeviceStep())
        self.steps += recorded
        with recorded[0].recording():
            step()


@contextlib.contextmanager
def fake_graphs() -> Iterator[FakeGraphs]:
    """Within it, the CPU has graphs."""
    from fastlin.training import graph

    graphs = FakeGraphs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "_has_graphs", lambda device: True)
        patch.setattr(graph, "captured", graphs.captured)
        yield graphs
