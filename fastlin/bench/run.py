"""Runs cases: contenders are checked, then timed in interleaved rounds; what was found is a record of plain data."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from fastlin.bench import checks, end_to_end, machine, work
from fastlin.bench.contenders import Call, Problem, SkippedError, kind
from fastlin.bench.machine import Limits
from fastlin.bench.probe import Probe
from fastlin.bench.suite import TABLE, Spec
from fastlin.bench.timing import summary, timed

FORMAT = 1


@dataclass(frozen=True)
class Effort:
    """How long things may take.

    Attributes
    ----------
    table, scaling : float
        Seconds that a contender of the table, of a curve, is timed for, about.
    scores : int
        What the reference may do in the check of a case of the table; a twelfth of it for a point of a curve.
    repeats : int
        Of the measurement of the machine's limits.
    training : int or None
        Steps of a stretch of the training loop; None: no training is timed.
    batch : int
        Of the training.
    """

    table: float = 0.15
    scaling: float = 0.06
    scores: int = checks.AFFORDABLE_SCORES // 12
    repeats: int = 3
    training: int | None = 100
    batch: int = end_to_end.BATCH


QUICK = Effort(table=0.0, scaling=0.0, scores=checks.AFFORDABLE_SCORES // 1000, repeats=1, training=2, batch=64)
"""To see that it runs, not to compare."""


def run(
    specs: Sequence[Spec],
    effort: Effort,
    *,
    command: str,
    probing: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure cases.

    Parameters
    ----------
    specs : sequence of Spec
    effort : Effort
    command : str
        That the record says it was made with.
    probing : bool
        Whether first calls and memory of the cases of the table are measured, in processes of their own.
    progress : callable
        Told what is being done.

    Returns
    -------
    dict
        The record: machine, versions, limits, cases with every time, and the training at the paper's scale.
    """
    start, before = time.monotonic(), torch.get_num_threads()
    limits: dict[tuple[str, int], Limits] = {}
    found = []
    try:
        with Probe() if probing else nullcontext() as probe, _compiling_into(probe):
            for i, spec in enumerate(specs):
                progress(f"{i + 1} of {len(specs)}: {spec.name}")
                torch.set_num_threads(spec.threads)
                key = (spec.dtype, spec.threads)
                if key not in limits:
                    limits[key] = machine.measure(spec.threads, effort.repeats, spec.dtype)
                found.append(_case(spec, effort, probe if spec.part == TABLE else None))
            training = None
            if effort.training is not None:
                progress("training at the paper's scale")
                torch.set_num_threads(before)
                training = end_to_end.measure(effort.training, effort.batch, effort.table)
        for limit in limits.values():  # a moment when others were at work must not pass for a slow machine
            torch.set_num_threads(limit.threads)
            limit.again(effort.repeats)
        for limit in limits.values():  # memory is as fast for every dtype
            limit.bandwidth = max(other.bandwidth for other in limits.values() if other.threads == limit.threads)
    finally:
        torch.set_num_threads(before)
    for case in found:
        _rates(case, limits[case["dtype"], case["threads"]])
    return {
        "format": FORMAT,
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - start, 1),
        "machine": machine.describe("auto", before),
        "limits": [asdict(limit) for limit in limits.values()],
        "effort": asdict(effort),
        "cases": found,
        "training": training,
    }


@contextmanager
def _compiling_into(probe: Probe | None) -> Iterator[None]:
    """Let torch.compile find here what it compiled in the probe, where the compilation was timed."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    if probe is not None:
        os.environ[name] = str(probe.cache)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _case(spec: Spec, effort: Effort, probe: Probe | None) -> dict[str, Any]:
    """Check, probe and time one case; a contender that is wrong or cannot run is left out with the reason."""
    table = spec.part == TABLE
    problem = Problem(spec.shape, getattr(torch, spec.dtype), effort.scores if table else effort.scores // 12)
    entries: dict[str, dict[str, Any]] = {}
    calls: dict[str, Call] = {}
    skipped: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for label in spec.labels:
        try:
            call = problem.build(label)
            once = probe.measure(spec.shape, label, spec.dtype, spec.threads) if probe is not None else {}
            errors = problem.check(label, call)
        except SkippedError as error:
            skipped[label] = str(error)
        except checks.WrongResultError as error:
            wrong[label] = str(error)
        except Exception as error:  # whatever keeps a contender from running is what the record says
            skipped[label] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            calls[label] = call
            entries[label] = {"label": label, **once, "error": max(errors.values(), default=None)}
    steps = {label: problem.steps(label) for label in calls}
    for label, timing in timed(calls, effort.table if table else effort.scaling).items():
        entries[label].update(summary(timing, steps[label]))
    return {
        "part": spec.part,
        "name": spec.name,
        "axis": spec.axis,
        "place": spec.place,
        "shape": asdict(spec.shape),
        "dtype": spec.dtype,
        "threads": spec.threads,
        "multiply_adds": work.multiply_adds(spec.shape),
        "bytes": work.bytes_moved(spec.shape, getattr(torch, spec.dtype).itemsize),
        "contenders": list(entries.values()),
        "skipped": skipped,
        "wrong": wrong,
    }


def _rates(case: dict[str, Any], limits: Limits) -> None:
    """Add what follows from the times: ratios, rates, and their share of the machine's limits."""
    ours = next((entry["median"] for entry in case["contenders"] if kind(entry["label"]) == "fastlin"), None)
    flops = 2 * case["multiply_adds"]
    for entry in case["contenders"]:
        seconds = entry["median"]
        entry["times_fastlin"] = None if ours is None else seconds / ours
        entry["gflops"] = flops / seconds / 1e9
        entry["of_peak"] = flops / seconds / limits.flops
        entry["gbs"] = case["bytes"] / seconds / 1e9 if case["bytes"] else None
        entry["of_bandwidth"] = case["bytes"] / seconds / limits.bandwidth if case["bytes"] else None
