"""C++ kernels for the CPU: one pass over the data, on the best instruction set that the machine has.

An adapter over `fastlin._C`, which takes addresses (`compiled`). The threads are torch's: `torch.set_num_threads`
sets them for both.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastlin import _extension, _instruction_sets
from fastlin._instruction_sets import instruction_set, instruction_sets, using
from fastlin.backends.base import Batch, BoundLoss, LossAndGradients, PreparedLoss
from fastlin.backends.compiled import (
    RESULTS,
    CompiledBackend,
    Inputs,
    constants,
    empty_losses,
    packed,
    packed_update,
    rows,
)
from fastlin.backends.draw import Draw
from fastlin.backends.problem import LETTERS, Problem
from fastlin.backends.update import PreparedUpdate, UpdateRule, UpdateState

__all__ = ["CpuBackend", "backend", "instruction_set", "instruction_sets", "using"]


class CpuBackend(CompiledBackend):
    name = "cpu"
    shares_heads = True
    checks_tasks = True
    updates = True
    piece = 1 << 18  # tasks and order of so many sequences take 4 MB

    def supports(self, op: str, device: torch.device, dtype: torch.dtype, m: int) -> str | None:
        if device.type != "cpu":
            return f"the data are on {device}; wants the cpu"
        if dtype not in (torch.float32, torch.float64):
            return f"the data have dtype {dtype}; wants torch.float32 or torch.float64"
        return _extension.why_missing()

    def attention(self, problem: Problem, results: dict[str, Tensor], inputs: Inputs) -> None:
        draw = inputs.draw
        source = None if draw is None else draw.packed()
        arguments, _kept = packed(problem, results, inputs, source)
        self.last_kernel = _extension.loaded().attention(*_target(problem.W.dtype), *arguments)

    def prepare(self, problem: Problem, wants: str, draws: bool) -> PreparedLoss:
        """A loss for problems like this one: what their shapes decide is packed once, 25 us of a call."""
        return _PreparedLoss(self, problem, wants, draws)

    def count(self, draw: Draw, like: Tensor) -> Tensor:
        task = torch.empty(draw.batch, dtype=torch.int64, device=like.device)
        source, threads = draw.packed(), torch.get_num_threads()
        _extension.loaded().sample_tasks(_instruction_sets.selected, threads, source, draw.batch, task.data_ptr())
        return torch.bincount(task, minlength=draw.recipe.K)

    def sample(self, draw: Draw, is_gram: bool, dtype: torch.dtype, device: torch.device) -> Batch:
        """Drawn sequences, with their Gram matrices or their tokens; drawn on the CPU, then moved to the device."""
        B, m = draw.batch, draw.m
        name = "float64" if dtype is torch.float64 else "float32"
        # Buffers of numpy's: inside torch.func a tensor of torch's may be a wrapper without memory.
        shapes = ((B, m if is_gram else draw.n, m), (B, m), (B,))
        arrays = [*(np.empty(shape, name) for shape in shapes), np.empty(B, np.int64)]
        addresses = [array.ctypes.data for array in arrays]
        self.last_sampler = _extension.loaded().sample(*_target(dtype), draw.packed(), B, is_gram, addresses)
        x, q, y, task = (torch.from_numpy(array).to(device) for array in arrays)
        return x, q, y, task

    def gram(self, z: Tensor) -> Tensor:
        *front, n, m = z.shape
        B = math.prod(front)
        tokens = rows(z.reshape(B, n, m))
        G = z.new_empty(*front, m, m)
        sizes = (B, n, m, tokens.stride(0), tokens.stride(1))
        self.last_kernel = _extension.loaded().gram(*_target(z.dtype), sizes, (tokens.data_ptr(), G.data_ptr()))
        return G

    def prepare_update(self, rule: UpdateRule, state: UpdateState) -> PreparedUpdate:
        """A function that updates all parameters of all trials in place; the state's tensors stay where they are."""
        packed_call, is_double = packed_update(rule, state), state.values[0].dtype is torch.float64
        update = _extension.loaded().update

        def prepared(loss: Tensor, gradients: list[Tensor], average_weight: float | None) -> None:
            assert average_weight is not None, "a CPU has no schedule"
            arguments, _kept = packed_call(loss, gradients, average_weight)
            update(is_double, torch.get_num_threads(), *arguments)

        return prepared


def _target(dtype: torch.dtype) -> tuple[str, bool, int]:
    return _instruction_sets.selected, dtype is torch.float64, torch.get_num_threads()


class _PreparedLoss:
    """A loss of problems of one form: sizes, factors and flags are packed once, addresses in every call."""

    def __init__(self, backend: CpuBackend, problem: Problem, wants: str, draws: bool) -> None:
        self.backend = backend
        self.value, self.per_task = empty_losses(problem)
        self.sizes, self.factors, self.flags = constants(problem)
        self.batch, self.n, self.strides = 0, 0, (0, 0, 0)
        if not draws:
            x, q = problem.data
            m = q.shape[-1]
            self.batch, self.n, self.strides = q.shape[0], x.shape[1], (x.shape[1] * m, m, m)
        self.gradients = [(LETTERS.index(letter), RESULTS.index(letter)) for letter in wants]
        self.is_double = problem.W.dtype is torch.float64
        self.attention = _extension.loaded().attention

    def bind(self, problem: Problem, y: Tensor | None, weight: Tensor | None) -> BoundLoss | None:
        x, _, q, task, p, A, C, W, v, h, *_ = problem
        inputs: list[Any] = [x, q, task, p, A, C, W, v, h, y, weight]
        addresses: list[int] = []
        for place, tensor in enumerate(inputs):
            if tensor is None:
                addresses.append(0)
                continue
            if not tensor.is_contiguous():
                if place < 2:
                    return None  # x and q are large, and `attention` reads them in place
                inputs[place] = tensor = tensor.contiguous()
            address = tensor.data_ptr()
            # As in `compiled.contiguous`; zeros without memory have the address 0, as tensors without numbers do.
            if tensor.is_neg() or (address == 0 and tensor._is_zerotensor()):
                return None
            addresses.append(address)
        addresses += (0, 0)  # a loss has neither gy nor counts
        value, per_task = torch.empty_like(self.value), torch.empty_like(self.per_task)
        outputs = [0] * len(RESULTS)
        outputs[1:3] = value.data_ptr(), per_task.data_ptr()
        gradients = []
        for index, result in self.gradients:
            gradient = torch.empty_like(inputs[index])
            gradients.append(gradient)
            outputs[result] = gradient.data_ptr()

        def bound(draw: Draw | None, _kept: list[Any] = inputs) -> LossAndGradients | None:
            source, B, n = None, self.batch, self.n
            if draw is not None:
                recipe = draw.recipe
                if draw.batch > self.backend.piece or (recipe.d + 1 + recipe.bias, recipe.K) != self.sizes[:2]:
                    return None
                source, B, n = draw.packed(), draw.batch, draw.n
            target = (_instruction_sets.selected, self.is_double, torch.get_num_threads())
            fixed = (self.strides, self.factors, self.flags, addresses, outputs)
            try:
                self.backend.last_kernel = self.attention(*target, (B, n, *self.sizes, 0), *fixed, source)
            except IndexError:
                return None  # the caller checks the task indices, and says which is wrong
            return value, per_task, gradients

        return bound


backend = CpuBackend()
