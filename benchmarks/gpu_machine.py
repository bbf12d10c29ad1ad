"""The GPU: what it is, what it can do at most, and how time is taken on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import fastlin as fl
from fastlin.bench.machine import Limits

QUEUE_SECONDS = 2e-3
"""What is in the queue before a timed call, so that its launches, 0.5 ms of eager's, come before the GPU wants them."""


def default_backend() -> str:
    """The one under test where none is named: the kernels of AMD's GPUs are Triton's."""
    return "cuda" if torch.version.hip is None else "triton"


def why_not(backend: str) -> str | None:
    """Why nothing can be measured here, and what to do about it, or None."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch finds no GPU that it can use; nvidia-smi shows devices and driver"
    backends = fl.info()["backends"]
    if backend not in backends:
        return f"no backend {backend!r}; there are {', '.join(backends)}"
    reason = backends[backend]["reason"]
    return None if reason is None else f"backend {backend!r} cannot serve: {reason}"


@dataclass
class GpuLimits(Limits):
    """Limits of a GPU: those that its clocks and widths say, or where torch does not tell them, what was measured.

    Attributes
    ----------
    bandwidth_source : str
        How the bandwidth is known.
    reached_flops, reached_bandwidth : float
        What torch.mm in float32 and z.sum() reached in this run.
    """

    bandwidth_source: str = ""
    reached_flops: float = 0.0
    reached_bandwidth: float = 0.0

    def again(self, repeats: int) -> None:
        """A GPU that nobody else uses is not measured again."""


def describe(backend: str) -> dict[str, Any]:
    """Device, driver, versions, and what was built."""
    info, properties = fl.info(), torch.cuda.get_device_properties()
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "l2": properties.L2_cache_size,
        "devices": torch.cuda.device_count(),
        "driver": info["cuda"]["driver"],
        "architectures": info["cuda"].get("architectures"),
        "cuda_of_fastlin": info["cuda"].get("cuda"),
        "cuda_of_torch": torch.version.cuda,
        "versions": info["versions"],
        "backend": backend,
    }


def measure() -> GpuLimits:
    """The limits of the current device."""
    properties = torch.cuda.get_device_properties()
    a, x = torch.ones(4096, 4096, device="cuda"), torch.ones(1 << 28, device="cuda")
    reached_flops = 2.0 * 4096**3 / _best(lambda: a @ a)
    reached_bandwidth = x.nbytes / _best(x.sum)
    flops, bandwidth = published(properties)
    return GpuLimits(
        threads=1,
        flops=flops or reached_flops,
        flops_source="clock x FMA units" if flops else "torch.mm of 4096 x 4096",
        bandwidth=bandwidth or reached_bandwidth,
        bandwidth_source="memory clock x bus width" if bandwidth else "z.sum() of 1 GB",
        reached_flops=reached_flops,
        reached_bandwidth=reached_bandwidth,
    )


def published(properties: Any) -> tuple[float | None, float | None]:
    """FLOP/s in float32 and bytes a second by the device's clocks; None where torch does not tell one, or not so."""
    if torch.version.hip is not None:
        return None, None
    clock, memory_clock = getattr(properties, "clock_rate", 0), getattr(properties, "memory_clock_rate", 0)  # kHz
    units = 64 if (properties.major, properties.minor) in ((7, 5), (8, 0)) else 128  # FMAs a clock and multiprocessor
    flops = 2e3 * clock * units * properties.multi_processor_count
    bandwidth = 2e3 * memory_clock * getattr(properties, "memory_bus_width", 0) / 8  # two transfers a clock
    return flops or None, bandwidth or None


def event_clock(call: Callable[[], object], calls: int) -> float:
    """The `timing.Stopwatch` of a GPU: between two events on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return 1e-3 * float(start.elapsed_time(end)) / calls


class ColdL2:
    """Leaves nothing of the case in the L2 cache, and the GPU at work for a while: a buffer is overwritten."""

    def __init__(self, l2: int, bandwidth: float) -> None:
        self.buffer = torch.empty(max(2 * l2, 1 << 28), dtype=torch.uint8, device="cuda")
        self.passes = math.ceil(QUEUE_SECONDS * bandwidth / self.buffer.nbytes)

    def __call__(self) -> None:
        """Enqueue the passes over the buffer."""
        for _ in range(self.passes):
            self.buffer.zero_()


def _best(call: Callable[[], object], repeats: int = 10) -> float:
    call()
    return min(event_clock(call, 5) for _ in range(repeats))
