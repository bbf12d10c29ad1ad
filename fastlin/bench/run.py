"""Runs rows: contenders are checked, then timed in interleaved rounds; the record is plain data."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch

from fastlin.bench import checks
from fastlin.bench.cases import bytes_moved, multiply_adds
from fastlin.bench.contenders import BenchProblem, SkippedError, noting_failure
from fastlin.bench.labels import parse
from fastlin.bench.machine import Device, Limits
from fastlin.bench.probe import Probe
from fastlin.bench.rows import Row
from fastlin.bench.timing import Contender

FORMAT = 2


@dataclass(frozen=True)
class BenchEffort:
    """How long things may take, with less at the points of a curve: two fifths of `seconds`, a twelfth of `scores`."""

    seconds: float = 0.15  # for which a contender is timed
    scores: int = checks.AFFORDABLE_SCORES // 12  # that the reference may form in a check
    repeats: int = 3  # of the machine's limits
    quick: bool = False  # as little as shows that it runs


QUICK = BenchEffort(seconds=0.0, scores=checks.AFFORDABLE_SCORES // 1000, repeats=1, quick=True)
"""To see that it runs, not to compare."""


def run(
    rows: Sequence[Row],
    effort: BenchEffort,
    *,
    command: str,
    device: Device | None = None,
    probing: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure rows on a device, None for the CPU; `progress` is told what is being done.

    With `probing`, first calls and memory are measured in processes of their own, except at the points of curves. The
    record has machine, versions, limits, cases with every time, and what functions measured, by row; and the `command`
    that it was made with.
    """
    device = device or Device()
    start, before = time.monotonic(), torch.get_num_threads()
    limits: dict[tuple[str, int], Limits] = {}
    cases: list[tuple[Row, dict[str, Any]]] = []
    others: dict[str, tuple[Row, dict[str, Any]]] = {}
    try:
        with Probe() if probing and device.probes else nullcontext() as probe:
            for i, row in enumerate(rows):
                threads = row.threads or before
                progress(f"{i + 1} of {len(rows)}: {row.name}: {row.title(threads)}")
                torch.set_num_threads(threads)
                if (row.dtype, threads) not in limits:
                    limits[row.dtype, threads] = device.limits(threads, effort.repeats, row.dtype)
                if row.function is None:
                    cases.append((row, _case(row, threads, effort, device, probe)))
                else:
                    others[row.name] = row, _call(row, effort)
        for limit in limits.values():  # a moment when others were at work must not pass for a slow machine
            torch.set_num_threads(limit.threads)
            limit.again(effort.repeats)
        for limit in limits.values():  # memory is as fast for any dtype
            limit.bandwidth = max(other.bandwidth for other in limits.values() if other.threads == limit.threads)
    finally:
        torch.set_num_threads(before)
    for row, case in cases:
        limit = limits[case["dtype"], case["threads"]]
        _rates(case, limit)
        case["bars"] = _bars(row, _values(case), case, limit)
    for row, other in others.values():
        other["bars"] = _bars(row, other["values"], other, limits["float32", before])
    return {
        "format": FORMAT,
        "command": command,
        "device": device.torch,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - start, 1),
        "machine": device.describe(before),
        "limits": [asdict(limit) for limit in limits.values()],
        "effort": asdict(effort),
        "cases": [case for _, case in cases],
        "others": {name: other for name, (_, other) in others.items()},
    }


def wrong(record: dict[str, Any]) -> bool:
    """Whether a contender was not timed because its results were wrong."""
    return any(part["wrong"] for part in (*record["cases"], *record["others"].values()))


def _case(row: Row, threads: int, effort: BenchEffort, device: Device, probe: Probe | None) -> dict[str, Any]:
    assert row.shape is not None
    case: dict[str, Any] = {
        "row": row.name,
        "name": row.title(threads),
        "axis": row.axis,
        "place": row.position(threads),
        "shape": asdict(row.shape),
        "dtype": row.dtype,
        "threads": threads,
        "multiply_adds": multiply_adds(row.shape),
        "bytes": bytes_moved(row.shape, getattr(torch, row.dtype).itemsize),
        "skipped": {},
        "wrong": {},
    }
    if row.memory_only:
        case["contenders"] = _memory(row, threads, probe, case["skipped"])
        return case
    share = (1.0, 1) if row.axis is None else (0.4, 12)
    problem = BenchProblem(row.shape, getattr(torch, row.dtype), effort.scores // share[1], device.torch)
    entries: dict[str, dict[str, Any]] = {}
    ready = []
    several = any(parse(label).threads for label in row.labels)
    for text in row.labels:
        label = parse(text)
        on = label.threads or threads
        torch.set_num_threads(on)
        with noting_failure(text, case["skipped"], case["wrong"]):
            call = problem.build(text)
            probed = probe is not None and row.axis is None and label.plain and label.has_results
            once = probe.measure(row.shape, text, row.dtype, threads) if probe is not None and probed else {}
            errors = problem.check(text, call)
            before = partial(torch.set_num_threads, on) if several else None
            ready.append(Contender(text, call, before, steps=problem.steps(text)))
            entries[text] = {"label": text, **once, "error": max(errors.values(), default=None)}
    for text, times in device.time(ready, effort.seconds * share[0]).items():
        entries[text].update(times)
    case["contenders"] = list(entries.values())
    return case


def _memory(row: Row, threads: int, probe: Probe | None, skipped: dict[str, str]) -> list[dict[str, Any]]:
    assert row.shape is not None
    entries = []
    for label in row.labels:
        with noting_failure(label, skipped, {}):
            if probe is None:
                raise SkippedError("no process to measure in")
            once = probe.measure(row.shape, label, row.dtype, threads)
            entries.append({"label": label, **once, "error": None, "median": None})
    return entries


def _call(row: Row, effort: BenchEffort) -> dict[str, Any]:
    assert row.function is not None
    found = resolve_name(f"fastlin.bench.{row.function}")(row, effort.quick)
    return {"about": row.about, "wrong": {}, "skipped": {}, **found}


def _values(case: dict[str, Any]) -> dict[str, float]:
    times = {entry["label"]: entry["median"] for entry in case["contenders"]}
    memory = {f"memory of {entry['label']}": entry.get("memory") for entry in case["contenders"]}
    return {name: value for name, value in {**times, **memory}.items() if value is not None}


def _bars(row: Row, values: dict[str, float], part: dict[str, Any], limits: Limits) -> list[dict[str, Any]]:
    failed = {**part["skipped"], **part["wrong"]}
    judged = [bar.judge(values, failed, limits.flops_per_core) for bar in row.bars]
    return [{**found, "text": bar.line(found)} for bar, found in zip(row.bars, judged, strict=True)]


def _rates(case: dict[str, Any], limits: Limits) -> None:
    medians = {entry["label"]: entry["median"] for entry in case["contenders"]}
    ours = medians.get("fastlin", next((t for label, t in medians.items() if parse(label).kind == "fastlin"), None))
    flops, moved = 2 * case["multiply_adds"], case["bytes"]
    for entry in case["contenders"]:
        seconds, label = entry["median"], parse(entry["label"])
        does_all = seconds is not None and label.same_work
        reads = seconds is not None and moved and (label.same_work or label.kind == "read")
        entry["times_fastlin"] = seconds / ours if seconds and ours else None
        entry["gflops"] = flops / seconds / 1e9 if does_all else None
        entry["of_peak"] = flops / seconds / limits.flops if does_all else None
        entry["gbs"] = moved / seconds / 1e9 if reads else None
        entry["of_bandwidth"] = moved / seconds / limits.bandwidth if reads else None
