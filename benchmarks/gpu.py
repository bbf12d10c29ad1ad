"""The table of the GPU: what the ops cost against peers and the device's limits. `python -m benchmarks.gpu --help`.

Correctness first, as in the table of the CPU. Times are between CUDA events, medians of interleaved rounds, in two
states:

    cold    nothing of the case in L2, and a full queue: the time of the GPU, whatever the launches take
    warm    calls in a row, as a training loop makes them, their launches included
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import fastlin as fl
from benchmarks import gpu_machine, report
from benchmarks.gpu_machine import GpuLimits
from benchmarks.rows import Entrant, Race, Result, Session
from benchmarks.sampled import SampledRace
from fastlin.bench import work
from fastlin.bench.cases import Shape
from fastlin.bench.progress import one_line
from fastlin.bench.timing import in_units

STATES = ("cold", "warm")
CALLS_IN_A_ROW = 20

OPS = {
    "op": Entrant("op"),
    "op, CUDA graph": Entrant("graph"),
    "triton": Entrant("op", backend="triton"),
    "fastlin's eager": Entrant("op", backend="eager", every=3),
}
QUERY_ROWS = {
    "query row": Entrant("query row", every=3),
    "query row, one product": Entrant("query row, one product", every=3),
    "compiled query row": Entrant("compiled query row"),
    "graphed query row": Entrant("graphed query row"),
}
LINEAR_STACKS = {
    "linear stack": Entrant("linear stack", every=3),
    "compiled linear stack": Entrant("compiled linear stack"),
    "graphed linear stack": Entrant("graphed linear stack"),
}
READ = {"read": Entrant("read")}
SAMPLED_PEERS = {"eager": True, "compiled": True, "graphed": True}
STACK_PEERS = {**SAMPLED_PEERS, "eager, linear": True}
LARGE, HUGE = 1 << 16, 1 << 18


@dataclass(frozen=True)
class Sized:
    """A row with its number of sequences."""

    row: Race | SampledRace
    batch: int

    @property
    def shape(self) -> Shape:
        """Of the op."""
        row = self.row
        return replace(row.shape if isinstance(row, Race) else row.shapes["op"], B=self.batch)


def _race(name: str, work: str, batch: int, peers: dict[str, Entrant], **sizes: Any) -> Sized:
    return Sized(Race(name, work, Shape(**sizes), {**OPS, **READ, **peers}, ()), batch)


def _sampled(name: str, work: str, batch: int, peers: dict[str, bool], **sizes: Any) -> Sized:
    shapes = dict.fromkeys(("op", "triton"), Shape(**sizes))
    return Sized(SampledRace(name, work, shapes, peers, (), backends={"triton": "triton"}), batch)


ROWS: tuple[Sized, ...] = (
    _race("loss-50-8192", "prompt_loss, n = 50", 8192, QUERY_ROWS, n=50),
    _race("loss-10", "prompt_loss, n = 10", HUGE, QUERY_ROWS, n=10),
    _race("loss-50", "prompt_loss, n = 50", HUGE, QUERY_ROWS, n=50),
    _race("loss-200", "prompt_loss, n = 200", HUGE, QUERY_ROWS, n=200),
    _race("width-33", "prompt_loss, m = 33, n = 50", LARGE, QUERY_ROWS, n=50, m=33),
    _race("trials", "prompt_loss, R = 50, n = 50", LARGE, {}, n=50, R=50),
    _race("stack", "stack_loss, L = 3, n = 50", LARGE, LINEAR_STACKS, op="stack_loss", n=50, L=3),
    _sampled("sampled-8192", "sampled_loss, n = 50", 8192, SAMPLED_PEERS, op="sampled_loss", n=50),
    _sampled("sampled", "sampled_loss, n = 50", HUGE, SAMPLED_PEERS, op="sampled_loss", n=50),
    _sampled("sampled-trials", "sampled_loss, R = 50, n = 50", LARGE, SAMPLED_PEERS, op="sampled_loss", n=50, R=50),
    _sampled("sampled-stack", "sampled_stack_loss, L = 3, n = 50", LARGE, STACK_PEERS, op="sampled_stack_loss", n=50),
)


@dataclass(frozen=True)
class Measured:
    """A row in both states: what each found."""

    name: str
    work: str
    shape: Shape
    states: dict[str, Result]

    @property
    def wrong(self) -> bool:
        """Whether a contender was not timed for its results."""
        return any(result.wrong for result in self.states.values())


def run(rows: Iterable[Sized], session: Session, cold: gpu_machine.ColdL2) -> list[Measured]:
    """Check and time rows in both states."""
    found = []
    for sized in rows:
        row, states = sized.row, {}
        for state in STATES:
            here = replace(session, batch=sized.batch, reset=cold if state == "cold" else None)
            states[state] = replace(row, calls=1 if state == "cold" else CALLS_IN_A_ROW).run(here)
            torch.cuda.empty_cache()
        found.append(Measured(row.name, row.work, sized.shape, states))
    return found


def lines(measured: Measured, limits: GpuLimits) -> list[dict[str, Any]]:
    """What the table says about each contender; None where something was not measured."""
    cold, warm = (measured.states[state] for state in STATES)
    shape = measured.shape
    read, flops = work.bytes_moved(shape), 2 * work.multiply_adds(shape)
    labels = dict.fromkeys((*cold.timings, *warm.timings, *cold.failures))
    of_op = cold.timings.get("op")
    table = []
    for label in labels:
        seconds = cold.timings[label].median if label in cold.timings else None
        errors = cold.errors.get(label, {})
        does_all = label != "read" and (shape.R is None or label not in SAMPLED_PEERS)  # these run one trial
        table.append(
            {
                "contender": label,
                "cold": seconds,
                "warm": warm.timings[label].median if label in warm.timings else None,
                "spread": cold.timings[label].spread if label in cold.timings else None,
                "GB/s": read / seconds / 1e9 if read and seconds else None,
                "of bandwidth": read / seconds / limits.bandwidth if read and seconds else None,
                "of FMA peak": flops / seconds / limits.flops if seconds and does_all else None,
                "over op": seconds / of_op.median if seconds and of_op else None,
                "error": max(errors.values(), default=None),
                "failure": cold.failures.get(label) or warm.failures.get(label),
            }
        )
    return table


def head(machine: dict[str, Any], limits: GpuLimits) -> str:
    """Device, driver, versions, limits and method, as a list."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    items = [
        f"device: {machine['device']}, compute capability {machine['capability']}, "
        f"{machine['multiprocessors']} multiprocessors, {machine['memory'] / 2**30:.1f} GiB, "
        f"L2 {machine['l2'] / 2**20:.0f} MiB; {machine['devices']} such devices or others",
        f"driver: {machine['driver'] or 'unknown'}; CUDA of fastlin {machine['cuda_of_fastlin']}, "
        f"of torch {machine['cuda_of_torch']}; built for {machine['architectures']}",
        f"versions: {versions}",
        f"backend: {machine['backend']}",
        f"peak: {limits.flops / 1e12:.1f} TFLOP/s in float32 ({limits.flops_source}; torch.mm reached "
        f"{limits.reached_flops / 1e12:.1f}), {limits.bandwidth / 1e9:.0f} GB/s ({limits.bandwidth_source}; z.sum() "
        f"reached {limits.reached_bandwidth / 1e9:.0f})",
        "float32, m = 11, K = 2, t = 1, loss and gradients of all parameters, where a row does not say otherwise",
        "CUDA events, medians of interleaved rounds; cold: L2 overwritten and the queue full before each call; "
        f"warm: {CALLS_IN_A_ROW} calls in a row, launches included",
        "timed after loss and gradients agreed with fl.reference in float64; error: the largest, of the largest entry",
        "GB/s: z, q, y and task once; FMA: the least that is known to do, per trial or by Gram matrices",
    ]
    return "".join(f"- {item}\n" for item in items)


def tables(found: Iterable[Measured], limits: GpuLimits) -> str:
    """A table for each row."""
    text = ""
    for measured in found:
        cells = [_cells(line) for line in lines(measured, limits)]
        header = ["contender", "cold", "warm", "GB/s", "of bandwidth", "of FMA peak", "over op", "error"]
        text += f"### {measured.work}, B = {measured.shape.B:,}\n\n{report.markdown(header, cells)}\n"
    return text


def _cells(line: dict[str, Any]) -> list[str]:
    if line["cold"] is None:
        return [line["contender"], line["failure"] or "not timed", *[""] * 6]

    def shown(name: str, template: str) -> str:
        return "" if line[name] is None else template.format(line[name])

    return [
        line["contender"],
        f"{in_units(line['cold'])} (±{100 * line['spread']:.0f} %)",
        "" if line["warm"] is None else in_units(line["warm"]),
        shown("GB/s", "{:.0f}"),
        shown("of bandwidth", "{:.0%}"),
        shown("of FMA peak", "{:.1%}"),
        shown("over op", "{:.2f}"),
        shown("error", "{:.1e}"),
    ]


def as_dict(measured: Measured, limits: GpuLimits) -> dict[str, Any]:
    """Everything that was measured about a row."""
    return {
        "name": measured.name,
        "work": measured.work,
        "shape": asdict(measured.shape),
        "lines": lines(measured, limits),
        "states": {state: report.as_dict(result) for state, result in measured.states.items()},
    }


def measure(backend: str, names: Sequence[str], *, quick: bool) -> tuple[dict[str, Any], GpuLimits, list[Measured]]:
    """The device, its limits, and the rows of these names."""
    machine, limits = gpu_machine.describe(backend), gpu_machine.measure()
    session = Session(
        backend=backend,
        threads=torch.get_num_threads(),
        batch=0,
        memory_batch=0,
        widths=(),
        quick=quick,
        limits=limits,
        reset=None,
        progress=one_line(),
        device="cuda",
        stopwatch=gpu_machine.event_clock,
    )
    cold = gpu_machine.ColdL2(machine["l2"], limits.bandwidth)
    there = fl.info()["backends"]
    rows = [without_missing(sized, there) for sized in ROWS if sized.row.name in names]
    found = run(rows, session, cold)
    session.progress("")
    return machine, limits, found


def without_missing(sized: Sized, backends: dict[str, Any]) -> Sized:
    """A row without the contenders of backends that this installation does not have."""
    if isinstance(sized.row, SampledRace):
        named = sized.row.backends
        shapes = {
            label: shape
            for label, shape in sized.row.shapes.items()
            if label not in named or backends[named[label]]["available"]
        }
        return replace(sized, row=replace(sized.row, shapes=shapes))
    entrants = {
        label: entrant
        for label, entrant in sized.row.entrants.items()
        if entrant.backend is None or backends[entrant.backend]["available"]
    }
    return replace(sized, row=replace(sized.row, entrants=entrants))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows and print the tables; 1 when a contender's results were wrong, 2 without a GPU, else 0."""
    names = [sized.row.name for sized in ROWS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="The benchmark table of the GPU.")
    parser.add_argument(
        "--backend",
        default=gpu_machine.default_backend(),
        metavar="NAME",
        help="the one under test (default: cuda; triton on AMD)",
    )
    parser.add_argument("--rows", default=",".join(names), metavar="NAME,...", help=f"of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="two rounds: to see that it runs, not to compare")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    options = parser.parse_args(arguments)
    chosen = options.rows.split(",")
    unknown = [name for name in chosen if name not in names]
    if unknown:
        parser.error(f"no row {unknown[0]!r}; there are {', '.join(names)}")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"{options.json.parent} is not a folder")
    reason = gpu_machine.why_not(options.backend)
    if reason is not None:
        sys.stderr.write(f"benchmarks.gpu: nothing to measure: {reason}\n")
        return 2
    start = time.monotonic()
    machine, limits, found = measure(options.backend, chosen, quick=options.quick)
    sys.stdout.write(head(machine, limits) + "\n" + tables(found, limits))
    if options.json is not None:
        rows = [as_dict(row, limits) for row in found]
        seconds = time.monotonic() - start
        report.write(options.json, {"machine": machine, "limits": asdict(limits), "seconds": seconds, "rows": rows})
    return int(any(row.wrong for row in found))


if __name__ == "__main__":
    sys.exit(main())
