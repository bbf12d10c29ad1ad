"""CUDA C++ kernels: an adapter over `fastlin._cuda`, which takes addresses (`compiled`), a device and a stream.

Kernels run on torch's current stream of the tensors' device, and nothing here waits for them. All memory comes from
torch's allocator, so a CUDA graph can capture a call. A call that draws must run once before it is captured: the first
run copies the arrays of its source to the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fastlin import _extension, backends
from fastlin.backends.base import Batch
from fastlin.backends.compiled import CompiledBackend, Inputs, packed, packed_update, rows
from fastlin.backends.draw import Draw
from fastlin.backends.problem import Problem
from fastlin.backends.update import PreparedUpdate, UpdateRule, UpdateState

_emulated: ModuleType | None = None


@contextmanager
def emulated(module: ModuleType) -> Iterator[None]:
    """For tests: serve tensors of the CPU by a module that runs the kernels there, in this process."""
    global _emulated
    before, _emulated = _emulated, module
    backends.resolve.cache_clear()
    try:
        yield
    finally:
        _emulated = before
        backends.resolve.cache_clear()


class CudaBackend(CompiledBackend):
    name = "cuda"
    updates = True
    schedules = True
    piece = 1 << 22  # tasks, their order and what sorting them takes: 150 MB

    def supports(self, op: str, device: torch.device, dtype: torch.dtype, m: int) -> str | None:
        if device.type != ("cuda" if _emulated is None else "cpu"):
            return f"the data are on {device}; wants a cuda device"
        if dtype not in (torch.float32, torch.float64):
            return f"the data have dtype {dtype}; wants torch.float32 or torch.float64"
        if _emulated is not None:
            return None
        return _extension.why_missing(_extension.CUDA) or _module().why_not() or None

    def attention(self, problem: Problem, results: dict[str, Tensor], inputs: Inputs) -> None:
        W, draw = problem.W, inputs.draw
        device = W.device
        source = None if draw is None else _source(draw, device)
        arguments, _kept = packed(problem, results, inputs, source)
        float64, module, (index, stream) = W.dtype is torch.float64, _module(), _place(device)
        size, path = module.plan(float64, index, *arguments)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        module.attention(float64, index, stream, workspace.data_ptr(), *arguments)
        self.last_kernel = f"{_label(W.dtype)} {'' if draw is None else 'sampled '}{path}"

    def count(self, draw: Draw, like: Tensor) -> Tensor:
        K = draw.recipe.K
        if K == 1:
            return torch.full((1,), draw.batch, dtype=torch.int64, device=like.device)
        task = _drawn_tasks(draw, like.device)
        return torch.zeros(K, dtype=torch.int64, device=like.device).scatter_add_(0, task, torch.ones_like(task))

    def sample(self, draw: Draw, is_gram: bool, dtype: torch.dtype, device: torch.device) -> Batch:
        B, m = draw.batch, draw.m
        x = torch.empty(B, m if is_gram else draw.n, m, dtype=dtype, device=device)
        q, y = torch.empty(B, m, dtype=dtype, device=device), torch.empty(B, dtype=dtype, device=device)
        task = torch.empty(B, dtype=torch.int64, device=device)
        float64, module, (index, stream) = dtype is torch.float64, _module(), _place(x.device)
        source = _source(draw, x.device)
        size = module.sample_workspace(float64, index, source, B, is_gram)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        addresses = [t.data_ptr() for t in (x, q, y, task)]
        module.sample(float64, index, stream, workspace.data_ptr(), source, B, is_gram, addresses)
        self.last_sampler = f"{_label(dtype)} sampled {'gram' if is_gram else 'tokens'}"
        return x, q, y, task

    def gram(self, z: Tensor) -> Tensor:
        *front, n, m = z.shape
        B = math.prod(front)
        tokens = rows(z.reshape(B, n, m))
        G = z.new_empty(*front, m, m)
        float64, module, (index, stream) = z.dtype is torch.float64, _module(), _place(z.device)
        sizes = (B, n, m, tokens.stride(0), tokens.stride(1))
        workspace = torch.empty(module.gram_workspace(float64, index, sizes), dtype=torch.uint8, device=z.device)
        module.gram(float64, index, stream, workspace.data_ptr(), sizes, (tokens.data_ptr(), G.data_ptr()))
        self.last_kernel = f"{_label(z.dtype)} gram"
        return G

    def prepare_update(self, rule: UpdateRule, state: UpdateState) -> PreparedUpdate:
        """A function that updates all parameters of all trials in place; the state's tensors stay where they are."""
        value, schedule, packed_call = state.values[0], state.schedule, packed_update(rule, state)
        float64, module, R = value.dtype is torch.float64, _module(), len(state.total)
        size = module.update_workspace(R, sum(each[0].numel() for each in state.values))
        workspace = torch.empty(size, dtype=torch.uint8, device=value.device)

        def prepared(loss: Tensor, gradients: list[Tensor], average_weight: float | None) -> None:
            index, stream = _place(value.device)
            arguments, _kept = packed_call(loss, gradients, average_weight or 0.0)
            words = (0, 0, 0, False)
            if schedule is not None:
                words = (schedule.words.data_ptr(), schedule.rows, schedule.width, average_weight is None)
            module.update(float64, index, stream, workspace.data_ptr(), words, *arguments)

        return prepared


backend = CudaBackend()


def _label(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _module() -> ModuleType:
    return _extension.loaded(_extension.CUDA) if _emulated is None else _emulated


def _place(device: torch.device) -> tuple[int, int]:
    """Index of a device and the address of torch's current stream there."""
    if device.type == "cpu":
        return 0, 0
    assert device.index is not None
    return device.index, torch.cuda.current_stream(device).cuda_stream


def _drawn_tasks(draw: Draw, device: torch.device) -> Tensor:
    task = torch.empty(draw.batch, dtype=torch.int64, device=device)
    index, stream = _place(device)
    _module().sample_tasks(index, stream, _source(draw, device), draw.batch, task.data_ptr())
    return task


_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Copies of the arrays of sources, by device: the copy, the version of the array, and the stream that copied it."""


def _source(draw: Draw, device: torch.device) -> tuple[Any, ...]:
    """A draw as kernels take it. Copies live as long as the arrays of the source, so a CUDA graph can be replayed."""
    if device.type == "cpu":
        return draw.packed(draw.arrays)
    return draw.packed([None if array is None else _copy(array, device) for array in draw.arrays])


def _copy(array: Tensor, device: torch.device) -> Tensor:
    if array not in _copies:
        _copies[array] = {}
    by_device: dict[torch.device, tuple[Tensor, int | None, torch.cuda.Stream]] = _copies[array]
    stream = torch.cuda.current_stream(device)
    version = None if array.is_inference() else array._version
    with torch.inference_mode():  # a copy that was made there cannot be written elsewhere
        if device not in by_device:
            by_device[device] = (array.to(device, copy=True), version, stream)
        copy, copied, made_on = by_device[device]
        if version is None or version != copied:
            by_device[device] = (copy.copy_(array), version, made_on)
    if stream != made_on and not torch.cuda.is_current_stream_capturing():
        copy.record_stream(stream)
    return copy
