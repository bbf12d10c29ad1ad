"""What a training step costs beyond its kernel (Python, the model's forms, the pull-back, the update), and a normal."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from fastlin import _extension, _info
from fastlin.bench.cases import CaseShape
from fastlin.bench.end_to_end import cell_config
from fastlin.bench.rows import Row
from fastlin.bench.timing import wall_clock
from fastlin.ops import call
from fastlin.training.loop import Loop

SIZES = ((1, 8192), (4, 256), (50, 8192))
"""Trials and batch."""
_SECONDS = 1.0


def measure(row: Row, quick: bool) -> dict[str, Any]:
    """Medians over the steps of the loop, in the regime joint with the full model at n = 20."""
    if _extension.why_missing() is not None:
        return {"lines": [], "values": {}, "skipped": {"fastlin": str(_extension.why_missing())}}
    lines = [f"{'':16}{'step':>11}{'kernel':>11}{'beyond':>11}"]
    values: dict[str, float] = {}
    for trials, batch in SIZES:
        steps, kernels = _times(trials, 64 if quick else batch, 0.0 if quick else _SECONDS)
        beyond = [step - kernel for step, kernel in zip(steps, kernels, strict=True)]
        name = f"{trials} x {batch}"
        values |= {f"step of {name}": statistics.median(steps), f"beyond {name}": statistics.median(beyond)}
        numbers = (statistics.median(times) for times in (steps, kernels, beyond))
        lines.append(f"{name:16}" + "".join(f"{1e3 * number:8.3f} ms" for number in numbers))
    return {"lines": lines, "values": values}


def _times(trials: int, batch: int, seconds: float) -> tuple[list[float], list[float]]:
    shape = CaseShape("sampled_loss", B=batch, n=20, R=trials)
    with _kernel_times() as kernels:
        loop = Loop(cell_config(shape, 1 << 20), progress=False)
        _, objective, first, end = next(loop._phases())
        for _ in range(20):
            loop._one_step(objective, first, end)
        kernels.clear()
        steps: list[float] = []
        while len(steps) < 5 or sum(steps) < seconds:
            start = time.perf_counter()
            loop._one_step(objective, first, end)
            steps.append(time.perf_counter() - start)
        return steps, list(kernels)


@contextmanager
def _kernel_times() -> Iterator[list[float]]:
    module, seconds = _extension.loaded(), list[float]()
    attention = module.attention

    def timed(*arguments: Any) -> str:
        start = time.perf_counter()
        kernel: str = attention(*arguments)
        seconds.append(time.perf_counter() - start)
        return kernel

    call.signatures.clear()  # plans of earlier calls hold the function
    try:
        with mock.patch.object(module, "attention", timed):
            yield seconds
    finally:
        call.signatures.clear()


def normals(row: Row, quick: bool) -> dict[str, Any]:
    """Normals on one thread, written to a buffer that stays in the cache: the median of many short stretches."""
    out = torch.empty(512, 64)
    try:
        fill = _extension.loaded().fill_normal
    except ImportError as error:
        return {"lines": [], "values": {}, "skipped": {"fastlin": str(error)}}
    options = {"instruction_set": _info.info()["instruction_set"], "threads": 1}

    def seconds(step: int) -> float:
        return wall_clock(lambda: fill(out.data_ptr(), *out.shape, "float32", 1, step, 0, 0, 0, **options), 1)

    each = statistics.median(seconds(step) for step in range(20 if quick else 2000)) / out.numel()
    deviation = float(out.std())
    if not abs(deviation - 1) < 0.05:
        return {"lines": [], "values": {}, "wrong": {"fastlin": f"normals have standard deviation {deviation:.3g}"}}
    return {"lines": [f"{1e9 * each:.2f} ns a normal (fill_normal, float32)"], "values": {"fastlin": each}}
