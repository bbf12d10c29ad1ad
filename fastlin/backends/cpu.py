"""C++ kernels for the CPU: one pass over the data, on the best instruction set that the machine has.

An adapter over `fastlin._C`, which gets addresses (`compiled`). The threads are those of torch:
`torch.set_num_threads` governs both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastlin import _extension
from fastlin._instruction_sets import instruction_set, instruction_sets, using
from fastlin.backends.compiled import RESULTS, Kernels, empty_losses, is_read_as_it_is, packed, rows
from fastlin.backends.draw import Draw
from fastlin.backends.problem import LETTERS, PLAIN_TYPES, Prepared, Problem

__all__ = [
    "gram",
    "instruction_set",
    "instruction_sets",
    "loss",
    "predict",
    "predict_bwd",
    "sample",
    "sampled_loss",
    "supports",
    "using",
]

name = "cpu"
traceable = False
any_form = True
shares_heads = True
checks_tasks = True

last_kernel: str | None = None
"""Instruction set, dtype and path of the last call, for tests and for the curious: "avx2 float32 streamed"."""
last_sampler: str | None = None
"""The same of the last batch that was drawn to be kept: "avx2 float32 sampled tokens"."""


def supports(op: str, device: torch.device, dtype: torch.dtype, m: int) -> str | None:
    """Why this backend cannot serve a call, or None."""
    if device.type != "cpu":
        return f"the data are on {device}; wants the cpu"
    if dtype not in (torch.float32, torch.float64):
        return f"the data have dtype {dtype}; wants torch.float32 or torch.float64"
    return _extension.why_missing()


class _CpuKernels(Kernels):
    piece = 1 << 18  # tasks and order of so many sequences take 4 MB

    def attention(
        self,
        problem: Problem,
        results: dict[str, Tensor],
        y: Tensor | None = None,
        weight: Tensor | None = None,
        gy: Tensor | None = None,
        draw: Draw | None = None,
        counts: Tensor | None = None,
        total: int = 0,
    ) -> None:
        global last_kernel
        source = None if draw is None else draw.packed(draw.arrays)
        arguments, _kept = packed(problem, results, y, weight, gy, draw, counts, total, source)
        last_kernel = _extension.loaded().attention(
            instruction_set(), problem.W.dtype is torch.float64, torch.get_num_threads(), *arguments
        )

    def count(self, draw: Draw, like: Tensor) -> Tensor:
        task = torch.empty(draw.batch, dtype=torch.int64, device=like.device)
        _extension.loaded().sample_tasks(
            instruction_set(), torch.get_num_threads(), draw.packed(draw.arrays), draw.batch, task.data_ptr()
        )
        return torch.bincount(task, minlength=draw.recipe.K)


kernels = _CpuKernels()


def prepare(problem: Problem, y: Tensor, weight: Tensor | None, wants: str) -> Prepared:
    """A loss for tensors like these: what their shapes decide is found once, 25 us of a call on one sequence."""
    value, per_task = empty_losses(problem)
    arguments, _ = packed(problem, {}, y, weight, None, None, None, 0, None)
    sizes, _, factors, flags, *_ = arguments
    _, n, m, *_ = sizes
    constants = (sizes, (n * m, m, m), factors, flags)
    letters = [LETTERS.index(letter) for letter in wants]
    places = [RESULTS.index(letter) for letter in wants]
    is_double = problem.W.dtype is torch.float64
    attention = _extension.loaded().attention

    def loss(tensors: Sequence[Tensor | None], extra: Sequence[Any]) -> list[Tensor] | None:
        global last_kernel
        given = (*tensors, extra[0], extra[1])
        inputs = []
        for tensor in given:
            if tensor is None:
                inputs.append(0)
            elif type(tensor) in PLAIN_TYPES and tensor.is_contiguous() and is_read_as_it_is(tensor):
                inputs.append(tensor.data_ptr())
            else:
                return None
        inputs += (0, 0)
        results = [torch.empty_like(value), torch.empty_like(per_task)]
        outputs = [0, results[0].data_ptr(), results[1].data_ptr(), 0, 0, 0, 0, 0, 0, 0, 0]
        for letter, place in zip(letters, places, strict=True):
            gradient = torch.empty_like(given[letter])
            results.append(gradient)
            outputs[place] = gradient.data_ptr()
        try:
            last_kernel = attention(
                instruction_set(), is_double, torch.get_num_threads(), *constants, inputs, outputs, None
            )
        except IndexError:
            return None  # where the task indices are looked at, the message is
        return results

    return loss


predict, predict_bwd, loss = kernels.predict, kernels.predict_bwd, kernels.loss
sampled_loss = kernels.sampled_loss


def sample(
    draw: Draw, is_gram: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gram matrices (B, m, m) or tokens (B, n, m), queries (B, m), targets (B,), tasks (B,) of drawn sequences.

    They are on the CPU, whatever the device is that they are for.
    """
    global last_sampler
    B, m = draw.batch, draw.m
    name = "float64" if dtype is torch.float64 else "float32"
    # Buffers of numpy's: inside torch.func a tensor of torch's own may be a wrapper without memory.
    shapes = ((B, m if is_gram else draw.n, m), (B, m), (B,))
    arrays = [*(np.empty(shape, name) for shape in shapes), np.empty(B, np.int64)]
    last_sampler = _extension.loaded().sample(
        instruction_set(),
        dtype is torch.float64,
        torch.get_num_threads(),
        draw.packed(draw.arrays),
        B,
        is_gram,
        [array.ctypes.data for array in arrays],
    )
    x, q, y, task = (torch.from_numpy(array).to(device) for array in arrays)
    return x, q, y, task


def gram(z: Tensor) -> Tensor:
    """Gram matrices sum_i z_i z_i' (..., m, m) of tokens z (..., n, m)."""
    global last_kernel
    *front, n, m = z.shape
    B = math.prod(front)
    tokens = rows(z.reshape(B, n, m))
    G = z.new_empty(*front, m, m)
    last_kernel = _extension.loaded().gram(
        instruction_set(),
        z.dtype is torch.float64,
        torch.get_num_threads(),
        (B, n, m, tokens.stride(0), tokens.stride(1)),
        (tokens.data_ptr(), G.data_ptr()),
    )
    return G
