"""The GPU: what it is, what it can do at most, and how time is taken on it."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastlin import _info
from fastlin.bench.machine import Device, Limits
from fastlin.bench.timing import Contender, Stopwatch, interleave, summary, warm

QUEUE_SECONDS = 2e-3
"""What is in the queue before a timed call, so that its launches, 0.5 ms of eager's, come before the GPU wants them."""
CALLS_IN_A_ROW = 20
_ROUNDS = 15


def tested_backend() -> str:
    """The backend that a GPU of this build of torch must have: AMD's GPUs have Triton's kernels."""
    return "cuda" if torch.version.hip is None else "triton"


def why_not() -> str | None:
    """Why nothing can be measured here, and what to do about it, or None."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch finds no GPU that it can use; nvidia-smi shows devices and driver"
    backend = tested_backend()
    reason = _info.info()["backends"][backend]["reason"]
    return None if reason is None else f"backend {backend!r} cannot serve: {reason}"


@dataclass
class GpuLimits(Limits):
    """Limits of a GPU: those that its clocks and widths say, or where torch does not tell them, what was measured."""

    bandwidth_source: str = ""
    reached_flops: float = 0.0  # by torch.mm in float32, in this run
    reached_bandwidth: float = 0.0  # by z.sum()

    def again(self, repeats: int) -> None:
        """A GPU that nobody else uses is not measured again."""


class GpuDevice(Device):
    """A GPU. Times are between CUDA events, in two states.

    cold: nothing of the case in L2, and a full queue: the time of the GPU, whatever the launches take.
    warm: calls in a row, as a training loop makes them, their launches included.
    """

    torch = "cuda"
    probes = False

    def __init__(self) -> None:
        self._limits = measure()
        self.stopwatch: Stopwatch = event_clock
        self.make_cold: Callable[[], None] = ColdL2(l2_bytes(), self._limits.bandwidth)

    def describe(self, threads: int) -> dict[str, Any]:
        info, properties = _info.info(), torch.cuda.get_device_properties()
        cuda = info["cuda"]
        return {
            "cpu": f"{properties.name}, compute capability {properties.major}.{properties.minor}",
            "cores": properties.multi_processor_count,
            "instruction_set": f"driver {cuda['driver'] or 'unknown'}, built for {cuda.get('architectures')}",
            "memory": properties.total_memory,
            "l2": l2_bytes(),
            "devices": torch.cuda.device_count(),
            "cuda_of_fastlin": cuda.get("cuda"),
            "cuda_of_torch": torch.version.cuda,
            "threads": threads,
            "load": os.getloadavg()[0],
            "versions": info["versions"],
        }

    def limits(self, threads: int, repeats: int, dtype: str) -> Limits:
        """The device's, whatever the threads; its float32 peak also for float64."""
        return replace(self._limits, threads=threads, dtype=dtype)

    def time(self, contenders: Sequence[Contender], seconds: float) -> dict[str, dict[str, Any]]:
        if not contenders:
            return {}
        rounds = _ROUNDS if seconds else 2
        cold = interleave(contenders, rounds, reset=self.make_cold, stopwatch=self.stopwatch)
        in_a_row = [replace(one, calls=CALLS_IN_A_ROW, before=warm(one, CALLS_IN_A_ROW)) for one in contenders]
        in_rows = interleave(in_a_row, rounds, stopwatch=self.stopwatch)
        torch.cuda.empty_cache()
        return {label: {**summary(timing), "warm": in_rows[label].median} for label, timing in cold.items()}


def l2_bytes() -> int:
    return int(torch.cuda.get_device_properties().L2_cache_size)


def measure() -> GpuLimits:
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
        for _ in range(self.passes):
            self.buffer.zero_()


def _best(call: Callable[[], object], repeats: int = 10) -> float:
    call()
    return min(event_clock(call, 5) for _ in range(repeats))
