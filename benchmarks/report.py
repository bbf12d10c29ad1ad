"""The run as markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.rows import Result
from fastlin._files import replacing
from fastlin.bench.machine import Limits
from fastlin.bench.timing import in_units


def head(machine: dict[str, Any], limits: Limits, settings: dict[str, Any]) -> str:
    """Machine, versions, limits and method, as a list."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    policy = machine["omp_wait_policy"]
    state = {
        "cold": "caches flushed and threads at rest before each call",
        "warm": "calls for 10 ms in a row, or one longer one, after as many untimed ones",
    }[settings["cache"]]
    items = [
        f"machine: {machine['machine']}, {machine['cpu']}, {machine['cores']} cores, load {machine['load']:.2f}",
        f"threads: {machine['threads']}" + (f", OMP_WAIT_POLICY={policy}" if policy else ""),
        f"versions: {versions}",
        f"backend: {machine['backend']}; instruction set: {machine['instruction_set']}",
        f"FMA peak: {limits.flops_per_core / 1e9:.1f} GFLOP/s a core ({limits.flops_source})",
        f"read bandwidth: {limits.bandwidth / 1e9:.1f} GB/s (z.sum() of 256 MB)",
        f"float32, m = 11, K = 2, t = 1, B = {settings['batch']} where a line does not say otherwise",
        f"medians of interleaved rounds, ± interquartile range over median; {state}",
        "timed after loss and gradients agreed with fl.reference in float64: "
        "error <= 2 (eager's own + eps (sqrt((n + t) m) + sqrt(B))), of the largest entry",
    ]
    return "".join(f"- {item}\n" for item in items)


def table(results: Iterable[Result]) -> str:
    """The lines of all rows, and the details of those that have some."""
    results = list(results)
    lines = [line for result in results for line in result.lines]
    cells = [[line.work, line.measured, line.bar, "" if line.verdict == "no bar" else line.verdict] for line in lines]
    text = markdown(["work", "measured", "bar", "verdict"], cells)
    for result in results:
        if result.details:
            text += f"\n{result.name}:\n\n{_details(result.details)}"
    return text


def _details(details: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for detail in details for name in detail))
    return markdown(names, [[_cell(name, detail.get(name)) for name in names] for detail in details])


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int):
        return str(value)
    return f"{value:.3g}" if name in ("ns per token-element", "over trend") else in_units(value)


def markdown(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table."""
    rows = [header, ["---"] * len(header), *([text.replace("|", "\\|") for text in row] for row in cells)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write_json(
    path: Path, machine: dict[str, Any], limits: Limits, settings: dict[str, Any], results: Iterable[Result]
) -> None:
    """Everything that was measured."""
    record = {
        "machine": machine,
        "limits": {**asdict(limits), "flops_per_core": limits.flops_per_core},
        "settings": settings,
        "rows": [as_dict(result) for result in results],
    }
    write(path, record)


def write(path: Path, record: dict[str, Any]) -> None:
    """A record as JSON; the file is whole or not there."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


def as_dict(result: Result) -> dict[str, Any]:
    """Everything that a row found."""
    timings = {
        name: {"median": t.median, "quartiles": t.quartiles, "spread": t.spread, "seconds": t.seconds}
        for name, t in result.timings.items()
    }
    return {**asdict(result), "timings": timings}
