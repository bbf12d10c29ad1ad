"""Triton kernels for NVIDIA and AMD GPUs: the same algebra, in Python that a researcher can change.

An adapter: it cuts the batch into tiles (`plan`), launches kernels (`launch`) and turns sums into losses and gradients.
There is one configuration per width and dtype, without tuning at run time: compilation depends on m's padded width,
dtypes and options, never on B, n, t, K, R, H or L. The first call of a kind compiles for 1 to 3 s, 7 s where the kernel
of a stack draws (sm_90, on a shared core). Triton caches the result on disk.

In the interpreter, TRITON_INTERPRET=1 set before the first use, the kernels run on the CPU, slowly, for tests.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastlin.backends.base import Backend, Batch, check_sizes
from fastlin.backends.draw import Draw
from fastlin.backends.problem import Gradients, Problem
from fastlin.backends.triton import plan

PRECISIONS = ("ieee", "tf32")
_precision = "ieee"


@contextmanager
def using(precision: str) -> Iterator[None]:
    """Run the kernels' float32 matrix products at a precision by name, in this process.

    Parameters
    ----------
    precision : str
        "ieee", which is what they have otherwise, or "tf32": factors are rounded to 10 bits, for tensor cores.
    """
    global _precision
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; wants one of {', '.join(map(repr, PRECISIONS))}")
    before, _precision = _precision, precision
    try:
        yield
    finally:
        _precision = before


def precision() -> str:
    """The precision of float32 matrix products."""
    return _precision


@functools.cache
def _launch() -> Any:
    return importlib.import_module("fastlin.backends.triton.launch")


@functools.cache
def why_missing() -> str | None:
    """Why the kernels cannot be loaded, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install 'fastlin[triton]' brings it"
    try:
        _launch()
    except Exception as error:
        return f"triton does not load: {type(error).__name__}: {error}"
    return None


_PIECE = 1 << 22
"""Sequences whose tasks are drawn and sorted in one go, which takes 130 MB. A larger batch is taken in pieces."""


class TritonBackend(Backend):
    """The kernels of `fastlin.backends.triton.kernels`."""

    name = "triton"
    reads_half = True
    draws = True

    def supports(self, op: str, device: torch.device, dtype: torch.dtype, m: int) -> str | None:
        """Why this backend cannot serve a call, or None."""
        missing = why_missing()
        if missing is not None:
            return missing
        if _launch().interprets():
            if device.type != "cpu":
                return f"the data are on {device}; wants the cpu, where Triton's interpreter (TRITON_INTERPRET) runs"
        elif device.type != "cuda":
            return f"the data are on {device}; wants a GPU, device type cuda"
        elif not torch.cuda.is_available():
            return "torch sees no GPU"
        if dtype not in (torch.float32, torch.float64):
            return f"the parameters have dtype {dtype}; wants torch.float32 or torch.float64"
        if m > plan.WIDEST:
            return f"m = {m} is above {plan.WIDEST}"
        return None

    def predict(self, problem: Problem) -> Tensor:
        """Predictions yhat (R, B)."""
        yhat = self._attention(problem, _launch().Asked(yhat=True)).yhat
        assert isinstance(yhat, Tensor)
        return yhat

    def predict_bwd(self, problem: Problem, gy: Tensor, wants: str) -> Gradients:
        """Gradients of the wanted letters, given gy = dloss/dyhat (R, B)."""
        grads: Gradients = self._attention(problem, _launch().Asked(gy=gy, wants=wants)).grads
        return grads

    def loss(self, problem: Problem, y: Tensor, weight: Tensor | None, wants: str) -> tuple[Tensor, Tensor, Gradients]:
        """Loss (R,), per-task losses (R, K), and the gradients of loss for the wanted letters."""
        B, K, config = y.shape[0], problem.tasks, _config(problem, wants)
        tiles = plan.cut_batch(problem.task, B, K, config.BB, y.device)
        asked = _launch().Asked(y=y, coefficients=_coefficients(tiles.counts, B, weight, y), wants=wants)
        sums = self._attention(problem, asked, tiles)
        return *_losses(sums.squares, tiles.counts, B, weight), sums.grads

    def sampled_loss(
        self, problem: Problem, draw: Draw, weight: Tensor | None, wants: str
    ) -> tuple[Tensor, Tensor, Gradients]:
        """`loss` of sequences that are drawn and forgotten, piece by piece; wide ones are drawn beforehand."""
        check_sizes(draw, problem)
        W, K, B, m = problem.W, problem.tasks, draw.batch, draw.m
        is_apart = plan.draws_apart(m, W.dtype)
        config = plan.config(m, W.dtype, draws=not is_apart)
        size = min(_PIECE, plan.DRAWN_BYTES // (m * m * W.element_size())) if is_apart else _PIECE
        pieces = [draw.piece(first, min(size, B - first)) for first in range(0, B, size)] or [draw]
        counts = torch.zeros(K, dtype=torch.int64, device=W.device)
        for piece in pieces:
            counts = counts + _cut(piece, W.device, config)[1].counts
        coefficients = _coefficients(counts, B, weight, W)
        total: Any = None
        for piece in pieces:
            drawn, tiles = _cut(piece, W.device, config)
            given, asked = problem, _launch().Asked(coefficients=coefficients, wants=wants)
            if is_apart:
                G, q, y, _ = _launch().sample(drawn, True, W.dtype, W.device, plan.config(m, W.dtype, draws=True))
                given, asked = problem._replace(x=G, is_gram=True, q=q), asked._replace(y=y)
            sums = self._attention(given, asked, tiles, drawn, is_apart=is_apart)
            if total is None:
                total = sums
            else:
                grads = {letter: grad + sums.grads[letter] for letter, grad in total.grads.items()}
                total = total._replace(squares=total.squares + sums.squares, grads=grads)
        return *_losses(total.squares, counts, B, weight), total.grads

    def sample(self, draw: Draw, is_gram: bool, dtype: torch.dtype, device: torch.device) -> Batch:
        """Drawn sequences, with their Gram matrices or their tokens."""
        drawn, config = _launch().prepare(draw, device), plan.config(draw.m, dtype, draws=True)
        batch: Batch = _launch().sample(drawn, is_gram, dtype, device, config)
        return batch

    def gram(self, z: Tensor) -> Tensor:
        """Gram matrices sum_i z_i z_i' (..., m, m) of tokens z (..., n, m)."""
        *front, n, m = z.shape
        dtype = z.dtype if z.dtype is torch.float64 else torch.float32
        G: Tensor = _launch().gram(z.reshape(math.prod(front), n, m), plan.config(m, dtype), _precision, dtype)
        self.last_kernel = f"{str(dtype).removeprefix('torch.')} gram"
        return G.reshape(*front, m, m)

    def _attention(
        self,
        problem: Problem,
        asked: Any,
        tiles: plan.Tiles | None = None,
        drawn: Any = None,
        *,
        is_apart: bool = False,
    ) -> Any:
        """Results of a problem; `drawn` are its sequences, which the kernel draws unless they were drawn apart."""
        if drawn is not None:
            path, config = "sampled", plan.config(problem.W.shape[-1], problem.W.dtype, draws=not is_apart)
        else:
            is_streamed = _launch().streams(problem, asked.wants)
            path = "streamed" if is_streamed else "gram" if problem.A is None else "stack"
            config = _config(problem, asked.wants)
        if tiles is None:
            _, q = problem.data
            tiles = plan.cut_batch(problem.task, q.shape[0], problem.tasks, config.BB, q.device)
        self.last_kernel = f"{str(problem.W.dtype).removeprefix('torch.')} {path}"
        return _launch().attention(problem, asked, tiles, config, _precision, None if is_apart else drawn)


backend = TritonBackend()


def _cut(draw: Draw, device: torch.device, config: plan.TileConfig) -> tuple[Any, plan.Tiles]:
    drawn = _launch().prepare(draw, device)
    return drawn, plan.cut_batch(drawn.task, draw.batch, draw.recipe.K, config.BB, device)


def _config(problem: Problem, wants: str) -> plan.TileConfig:
    m, dtype, is_streamed = problem.W.shape[-1], problem.W.dtype, _launch().streams(problem, wants)
    return plan.config(m, dtype, streams=is_streamed)


def _coefficients(counts: Tensor, B: int, weight: Tensor | None, like: Tensor) -> Tensor:
    """What a squared error of each task is multiplied by in the loss, (K,)."""
    if weight is None:
        return like.new_full(counts.shape, 1.0 / max(B, 1))
    return weight / counts.clamp(min=1).to(weight.dtype)


def _losses(squares: Tensor, counts: Tensor, B: int, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Loss (R,) and per-task losses (R, K) from sums of squared errors (K, R)."""
    per_task = (squares / counts.clamp(min=1).to(squares.dtype)[:, None]).mT
    value = squares.sum(0) / max(B, 1) if weight is None else (per_task * weight).sum(-1)
    return value, per_task
