"""The machine: what it is, and what it can do at most, measured in the same run."""

import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fastlin import _extension, _info
from fastlin.bench.timing import Contender, summary, timed

_LONG_ENOUGH = 0.05


@dataclass
class Limits:
    """What the machine can do at most: the best that was seen so far."""

    threads: int
    flops: float  # operations a second of all threads; a multiply-add is two
    flops_source: str
    bandwidth: float  # bytes a second that z.sum() reads
    dtype: str = "float32"

    @property
    def flops_per_core(self) -> float:
        """Floating-point operations a second of one thread when all are busy."""
        return self.flops / self.threads

    def again(self, repeats: int) -> None:
        """Measure once more: a moment when others were at work must not pass for a slow machine."""
        now = measure(self.threads, repeats, self.dtype)
        self.flops, self.bandwidth = max(self.flops, now.flops), max(self.bandwidth, now.bandwidth)


def measure(threads: int, repeats: int, dtype: str = "float32") -> Limits:
    """Measure the limits, best of several; torch must already run on `threads` threads."""
    compiled = _extension.extension()
    chains: Callable[..., float] | None = getattr(compiled, "fma_chains", None)
    if chains is None:
        flops, source = _product(repeats, dtype), "torch.mm of 1024 x 1024, as fastlin._C has no fma_chains"
    else:
        flops, source = _fma_chains(partial(chains, dtype=dtype), threads, repeats), "independent FMA chains"
    x = torch.ones(1 << 26)
    bandwidth = x.nbytes / min(_seconds(x.sum) for _ in range(repeats + 1))
    return Limits(threads, flops, source, bandwidth, dtype)


def _fma_chains(chains: Callable[[int], float], threads: int, repeats: int) -> float:
    iterations = 1000
    while _seconds(partial(chains, iterations)) < _LONG_ENOUGH:
        iterations *= 2
    return max(_together(partial(chains, iterations), threads) for _ in range(repeats))


def _together(work: Callable[[], float], threads: int) -> float:
    """Sum of what `work` returns on each thread, over the time from the first start to the last end."""
    barrier = threading.Barrier(threads)

    def run(_: int) -> tuple[float, float, float]:
        barrier.wait()
        start = time.perf_counter()
        done = work()
        return start, time.perf_counter(), done

    with ThreadPoolExecutor(threads) as pool:
        starts, ends, done = zip(*pool.map(run, range(threads)), strict=True)
    return float(sum(done) / (max(ends) - min(starts)))


def _product(repeats: int, dtype: str) -> float:
    a, b = torch.ones(2, 1024, 1024, dtype=getattr(torch, dtype))
    return 2.0 * 1024**3 / min(_seconds(lambda: a @ b) for _ in range(3 * repeats))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Device:
    """What contenders run on, here the CPU: what it is, its limits, and how time is taken."""

    torch = "cpu"
    probes = True  # whether first calls and memory are measured, in processes of their own

    def describe(self, threads: int) -> dict[str, Any]:
        info = _info.info()
        return {
            "machine": f"{platform.system()} {platform.machine()}",
            "cpu": _cpu_name(),
            "cores": available_cores(),
            "load": os.getloadavg()[0],
            "threads": threads,
            "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
            "versions": {**info["versions"], **({"jax": version("jax")} if find_spec("jax") else {})},
            "instruction_set": info["instruction_set"],
            "extension": info["extension"],
        }

    def limits(self, threads: int, repeats: int, dtype: str) -> Limits:
        return measure(threads, repeats, dtype)

    def time(self, contenders: Sequence[Contender], seconds: float) -> dict[str, dict[str, Any]]:
        return {label: summary(timing) for label, timing in timed(contenders, seconds).items()}


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
