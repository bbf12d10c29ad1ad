"""The table of the CPU: what the ops cost against peers and the machine's limits. `python -m benchmarks.cpu --help`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import fastlin as fl
from benchmarks import report
from benchmarks.rows import Entrant, Race, Ratio, Result, Row, Session, Within, Workspace
from benchmarks.sampled import Normals, SampledRace
from benchmarks.sweep import Sweep
from benchmarks.training import Cell
from fastlin.bench import machine
from fastlin.bench.cases import Shape
from fastlin.bench.progress import one_line
from fastlin.bench.timing import ColdCache

WIDTHS = (
    *(3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 21, 22, 24, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65),
    *(96, 127, 128, 129, 192, 255, 256, 257),
)

MANY_TASKS = (100, 1000, 10_000)

OP, READ, REFERENCE = Entrant("op"), Entrant("read"), Entrant("reference", every=6)
EAGER, EAGER_ONE = Entrant("query row"), Entrant("query row, one product")
COMPILED = Entrant("compiled query row")
# 18 MB of tokens at n = 50: a loop over one batch may find them in a cache, one over batches does not.
FRESH = {
    f"{name}, fresh tokens": replace(entrant, fresh=True)
    for name, entrant in {"op": OP, "read": READ, "compiled query row": COMPILED}.items()
}
EAGER_FORMS = {"query row": EAGER, "query row, one product": EAGER_ONE}


def faster(times: float | None, peer: str, tokens: str = "") -> Ratio:
    """The op must be that many times faster than the peer; None shows by how much it is."""
    of = f"{peer}{tokens}" if times is not None else "the fastest eager form found"
    return Ratio(f"{peer}{tokens}", f"op{tokens}", ">=", times, of)


def near_reading(times: float, tokens: str = "") -> Ratio:
    """The op may take that many times the time of reading z once."""
    return Ratio(f"op{tokens}", f"read{tokens}", "<=", times, f"reading z once{tokens}")


ROWS: tuple[Row, ...] = (
    Race(
        "loss-50",
        "prompt_loss + gradients, n = 50",
        Shape(n=50),
        {"op": OP, "read": READ, **EAGER_FORMS, "compiled query row": COMPILED, "reference": REFERENCE, **FRESH},
        (
            faster(300, "reference"),
            faster(25, "query row"),
            faster(None, "query row, one product"),
            faster(8, "compiled query row"),
            near_reading(3),
            faster(8, "compiled query row", ", fresh tokens"),
            near_reading(3, ", fresh tokens"),
        ),
    ),
    Race(
        "loss-10",
        "prompt_loss + gradients, n = 10",
        Shape(n=10),
        {"op": OP, **EAGER_FORMS},
        (faster(15, "query row"), faster(None, "query row, one product")),
    ),
    Race(
        "loss-200",
        "prompt_loss + gradients, n = 200",
        Shape(n=200),
        {"op": OP, "read": READ, **EAGER_FORMS},
        (faster(25, "query row"), faster(None, "query row, one product"), near_reading(2)),
        rounds=15,
    ),
    Race(
        "loss-800",
        "prompt_loss + gradients, n = 800",
        Shape(n=800),
        {"op": OP, "read": READ},
        (near_reading(2),),
        rounds=15,
    ),
    Race(
        "tasks",
        "prompt_loss + gradients, n = 50, B = 65536, many tasks",
        Shape(n=50),
        {"2 tasks": OP, **{f"{K} tasks": replace(OP, tasks=K) for K in MANY_TASKS}},
        tuple(Ratio(f"{K} tasks", "2 tasks", "<=", None, f"{65536 / K:.3g} sequences each") for K in MANY_TASKS),
        rounds=15,
        batch=65536,
    ),
    Race(
        "stack",
        "stack_loss + gradients, L = 3, n = 50",
        Shape("stack_loss", n=50, L=3),
        {"op": OP, "reference": REFERENCE},
        (faster(100, "reference"),),
    ),
    Race(
        "trials",
        "R = 50 trials on one batch, n = 50",
        Shape(n=50, R=50),
        {"op": OP},
        (Within("op", 4.5e-3, peak=100e9),),
    ),
    Sweep(
        "widths",
        Shape(n=50),
        {
            "op": OP,
            "query row": Entrant("query row", every=3),
            "query row, one product": Entrant("query row, one product", every=3),
        },
        ((65, "query row", 5), (257, "query row", 2), (257, "query row, one product", None)),
    ),
    Race(
        "float64",
        "float64, n = 50",
        Shape(n=50),
        {"op": OP, "op, float64": Entrant("op", dtype=torch.float64)},
        (Ratio("op, float64", "op", "<=", 2.5, "the float32 time"),),
    ),
    Race(
        "threads",
        "1 to 2 threads, R = 50, n = 50",
        Shape(n=50, R=50),
        {"op, 1 thread": Entrant("op", threads=1), "op, 2 threads": Entrant("op", threads=2)},
        (Ratio("op, 1 thread", "op, 2 threads", ">=", 1.7, "one thread"),),
    ),
    Workspace("workspace", Shape(n=20), 32_000_000),
    Race(
        "one",
        "a call with B = 1, n = 50, with gradients",
        Shape(n=50),
        {
            "op": Entrant("call"),
            "op, then torch.autograd.grad": OP,
            "torch.autograd.grad of a sum": Entrant("autograd"),
        },
        (Within("op", 40e-6), Within("op, then torch.autograd.grad"), Within("torch.autograd.grad of a sum")),
        calls=200,
        batch=1,
    ),
    SampledRace(
        "sampled",
        "data + loss + gradients, R = 1, n = 50",
        {"op": Shape("sampled_loss", n=50)},
        {"eager": True, "compiled": True},
        (faster(40, "eager"), faster(20, "compiled")),
    ),
    SampledRace(
        "sampled-trials",
        "data + loss + gradients, R = 50, n = 50",
        {"op": Shape("sampled_loss", n=50, R=50)},
        {"eager": True, "JAX": False},
        (
            Within("op", 6e-3, peak=100e9),
            Ratio("eager", "op", ">=", 400 / 50, "eager of one trial, which is 400x per trial"),
            Ratio("JAX", "op", ">=", 25, "JAX (jit, scan, vmap, Gram form)"),
        ),
    ),
    SampledRace(
        "sampled-n",
        "data + loss + gradients, n = 1000 against n = 20",
        {"op": Shape("sampled_loss", n=20), "op, n = 1000": Shape("sampled_loss", n=1000)},
        {},
        (Ratio("op, n = 1000", "op", "<=", 1.15, "n = 20"),),
        rounds=40,
    ),
    SampledRace(
        "sampled-stack",
        "sampled_stack_loss + gradients, L = 3, n = 50",
        {"op": Shape("sampled_stack_loss", n=50, L=3)},
        {"eager": True, "eager, linear": True},
        (faster(100, "eager"), faster(None, "eager, linear")),
        rounds=9,
    ),
    Normals("normals", 1.2e-9),
    Cell("cell", n=20, trials=50, steps=20_000, seconds=150.0, peak=100e9, overhead=1.1),
    Workspace("sampled-memory", Shape("sampled_loss", n=100), 64_000_000, times=10),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows and print the table; returns 1 when a contender's results were wrong, else 0."""
    options = _options(arguments)
    rows = [row for row in ROWS if row.name in options.rows]
    settings = {
        "rows": [row.name for row in rows],
        "batch": options.batch,
        "memory_batch": options.memory_batch,
        "widths": options.widths,
        "quick": options.quick,
        "cache": options.cache,
    }
    threads_before = torch.get_num_threads()
    start = time.monotonic()
    results: list[Result] = []
    try:
        torch.set_num_threads(options.threads)
        about = machine.describe(options.backend, options.threads)
        limits = machine.measure(options.threads, repeats=1 if options.quick else 7)
        session = Session(
            backend=options.backend,
            threads=options.threads,
            batch=options.batch,
            memory_batch=options.memory_batch,
            widths=options.widths,
            quick=options.quick,
            limits=limits,
            reset=ColdCache() if options.cache == "cold" else None,
            progress=one_line(),
        )
        results.extend(row.run(session) for row in rows)
        session.progress("")
    finally:
        torch.set_num_threads(threads_before)
    settings["seconds"] = time.monotonic() - start
    sys.stdout.write(report.head(about, limits, settings) + "\n" + report.table(results))
    if options.json is not None:
        report.write_json(options.json, about, limits, settings, results)
    return int(any(result.wrong for result in results))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description="The benchmark table of the CPU.")
    parser.add_argument("--backend", default="cpu", metavar="NAME", help="the one under test (default: cpu)")
    parser.add_argument(
        "--rows",
        type=lambda text: tuple(text.split(",")),
        default=tuple(names),
        metavar="NAME,...",
        help=f"of {', '.join(names)} (default: all)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--quick", action="store_true", help="two rounds: to see that it runs, not to compare")
    parser.add_argument("--threads", type=_positive, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--batch", type=_positive, default=8192, metavar="B", help="of the timed rows (default: 8192)")
    parser.add_argument(
        "--memory-batch", type=_positive, default=1_000_000, metavar="B", help="of the workspace row (default: 1000000)"
    )
    parser.add_argument(
        "--widths",
        type=lambda text: tuple(sorted({_positive(part) for part in text.split(",")})),
        default=WIDTHS,
        metavar="M,...",
        help="of the row `widths` (default: 35 from 3 to 257)",
    )
    parser.add_argument(
        "--cache",
        choices=["cold", "warm"],
        default="warm",
        help="warm (default): calls in a row for 10 ms that are not timed, then for 10 ms that are; cold: caches are "
        "flushed before each timed call, the interpreter's too, and threads are at rest",
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.rows if name not in names]
    if unknown:
        parser.error(f"no row {unknown[0]!r}; there are {', '.join(names)}")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"{options.json.parent} is not a folder")  # better now than after minutes of measuring
    backends = fl.info()["backends"]
    if options.backend not in backends:
        parser.error(f"no backend {options.backend!r}; there are {', '.join(backends)}")
    if not backends[options.backend]["available"]:
        parser.error(f"backend {options.backend!r} cannot serve: {backends[options.backend]['reason']}")
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
