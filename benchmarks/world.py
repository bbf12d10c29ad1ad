"""Throughput of training against the number of processes on this machine: `python -m benchmarks.world`.

Every number of processes trains the same problem, on as many threads in all as the machine has cores, but one for each
process at least. Prints a table and draws world.png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import fastlin as fl
from fastlin._files import replacing
from fastlin.plots.style import new_figure
from fastlin.training.team import joined, team_of

CASES = {
    "1 trial, batch 8192": {"trials": 1, "batch": 8192},
    "50 trials, batch 8192": {"trials": 50, "batch": 8192},
    "1 trial, batch 131072": {"trials": 1, "batch": 1 << 17},
    "50 trials, batch 131072": {"trials": 50, "batch": 1 << 17},
}
_D, _TASKS = 10, 2
# Sequences times the root of the trials that a stretch has: about a second of a core.
_WORK = 3_000_000


def work(rounds: int) -> dict[str, Any]:
    """Of one process: seconds a step of each case, and of the sum over processes alone, in every round.

    And what all processes were busy in a step: on a machine that others use, these seconds tell more.
    """
    means = torch.stack([torch.ones(_D), -torch.ones(_D)])
    mix = fl.TaskMixture(means, torch.eye(_D).expand(_TASKS, _D, _D), [0.5, 0.5], noise_std=0.1)
    found: dict[str, Any] = {}
    for name, sizes in CASES.items():
        steps = max(int(_WORK / (sizes["batch"] * sizes["trials"] ** 0.5)), 20)
        options: dict[str, Any] = {"preset": "paper", "records": 1, "progress": False, **sizes}
        run = fl.train(mix, "joint", 20, steps=2, **options)
        before = time.process_time()
        runs = [fl.train(mix, "joint", 20, steps=steps, **options) for _ in range(rounds)]
        busy = torch.tensor(time.process_time() - before, dtype=torch.float64)
        team_of(torch.device("cpu")).add(busy)
        numbers = sum(raw.numel() for raw in run.model.parameters()) + sizes["trials"] + 2
        found[name] = {
            "seconds": [one.seconds / steps for one in runs],
            "busy": float(busy) / rounds / steps,
            "bytes": 8 * numbers,
            "sum": [_sum(numbers) for _ in range(rounds)],
        }
    return found


def _sum(numbers: int) -> float:
    """Seconds of a sum over the processes."""
    team, values, repeats = team_of(torch.device("cpu")), torch.zeros(numbers, dtype=torch.float64), 100
    start = time.perf_counter()
    for _ in range(repeats):
        team.add(values)
    return (time.perf_counter() - start) / repeats


def measure(size: int, rounds: int) -> dict[str, Any]:
    """What the first of `size` processes has found."""
    threads = max(_cores() // size, 1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    done = subprocess.run(
        [*command, "-m", "benchmarks.world", "--worker", "--rounds", str(rounds)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def draw(table: dict[int, dict[str, Any]], path: Path) -> None:
    """Sequences a second over those of one process, for each case."""
    figure = new_figure(6.0, 3.6)
    axes = figure.add_subplot()
    sizes = list(table)
    for name, marker in zip(CASES, "os^D", strict=True):
        rates = [1.0 / statistics.median(table[size][name]["seconds"]) for size in sizes]
        axes.plot(sizes, [rate / rates[0] for rate in rates], marker=marker, label=name)
    axes.axhline(0.9, color="black", linestyle=":", linewidth=0.8)
    axes.set_xticks(sizes)
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel(f"processes, on {_cores()} cores in all")
    axes.set_ylabel("sequences a second, over one process")
    axes.legend(frameon=False)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=160)


def rows(table: dict[int, dict[str, Any]]) -> list[str]:
    """The table in Markdown."""
    titles = (
        "",
        "processes",
        "M sequences/s",
        "over one process",
        "a core-second, over one process",
        "sum of one buffer",
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, sizes in CASES.items():
        first = table[min(table)][name]
        one = statistics.median(first["seconds"])
        for size, found in table.items():
            step = statistics.median(found[name]["seconds"])
            added = f"{found[name]['bytes']} bytes, {1e6 * statistics.median(found[name]['sum']):.0f} µs"
            rate = f"{sizes['batch'] / step / 1e6:.2f} | {one / step:.2f} | {first['busy'] / found[name]['busy']:.2f}"
            lines.append(f"| {name} | {size} | {rate} | {added if size > 1 else '-'} |")
    return lines


def main() -> int:
    """Measure, print and draw; or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1,2,4", help="numbers of processes; the first is compared with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of world.png")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        with joined("cpu"):
            found, first = work(options.rounds), team_of(torch.device("cpu")).first
        if first:
            print(json.dumps(found))
        return 0
    table = {size: measure(size, options.rounds) for size in map(int, options.sizes.split(","))}
    print(*rows(table), sep="\n")
    options.out.mkdir(parents=True, exist_ok=True)
    draw(table, options.out / "world.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
