"""Throughput of training against the number of processes on this machine: `python -m benchmarks.world`.

Every number of processes trains the same problem, on as many threads in all as the machine has cores, but one for each
process at least. All are started at once and take turns, stretch by stretch, so that a slow moment of the machine meets
them all; those whose turn it is not sleep. Prints a table and draws world.png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fastlin as fl
from fastlin._files import replacing
from fastlin.plots.style import new_figure
from fastlin.training.team import Team, joined, team_of

Table = dict[str, dict[int, list[dict[str, float]]]]
"""Stretches, one a round, by case and number of processes."""

CASES = {
    "1 trial, batch 8192": {"trials": 1, "batch": 8192},
    "50 trials, batch 8192": {"trials": 50, "batch": 8192},
    "1 trial, batch 131072": {"trials": 1, "batch": 1 << 17},
    "50 trials, batch 131072": {"trials": 50, "batch": 1 << 17},
    "1 trial, batch 1048576": {"trials": 1, "batch": 1 << 20},
}
_D, _TASKS = 10, 2
# Sequences times the root of the trials that a stretch has: about a second of a core.
_WORK = 3_000_000


def serve() -> None:
    """Be one process of a group: train a stretch of each case that is asked for, one a line; the first one answers."""
    means = torch.stack([torch.ones(_D), -torch.ones(_D)])
    mix = fl.TaskMixture(means, torch.eye(_D).expand(_TASKS, _D, _D), [0.5, 0.5], noise_std=0.1)
    team = team_of(torch.device("cpu"))
    while True:
        name = team.broadcast(lambda: sys.stdin.readline().strip())
        if not name:
            return
        found = _stretch(mix, team, name)
        if team.first:
            print(json.dumps(found), flush=True)


def _stretch(mix: fl.TaskMixture, team: Team, name: str) -> dict[str, float]:
    """Seconds of a step, seconds that all processes were busy with it, bytes of the sum, and seconds of it alone."""
    sizes = CASES[name]
    steps = max(int(_WORK / (sizes["batch"] * sizes["trials"] ** 0.5)), 6)
    options: dict[str, Any] = {"preset": "paper", "records": 1, "progress": False, **sizes}
    # The first steps after the others' turn find cold caches and sleeping threads.
    run = fl.train(mix, "joint", 20, steps=2, **options)
    before = time.process_time()
    run = fl.train(mix, "joint", 20, steps=steps, **options)
    busy = torch.tensor(time.process_time() - before, dtype=torch.float64)
    team.add(busy)
    numbers = sum(raw.numel() for raw in run.model.parameters()) + sizes["trials"] + 2
    values, repeats = torch.zeros(numbers, dtype=torch.float64), 100
    start = time.perf_counter()
    for _ in range(repeats):
        team.add(values)
    added = (time.perf_counter() - start) / repeats
    return {"step": run.seconds / steps, "busy": float(busy) / steps, "bytes": values.nbytes, "sum": added}


class Group:
    """Some processes that wait for their turn."""

    def __init__(self, size: int) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        self._process = subprocess.Popen(
            [*command, "-m", "benchmarks.world", "--worker"],
            env={**os.environ, "OMP_NUM_THREADS": str(max(_cores() // size, 1))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, name: str) -> dict[str, float]:
        """A stretch of a case."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(name, file=self._process.stdin, flush=True)
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found

    def end(self) -> None:
        """Let them go."""
        self._process.communicate()


def measure(sizes: Sequence[int], rounds: int) -> Table:
    """Stretches of each case by each number of processes, in every round."""
    groups = {size: Group(size) for size in sizes}
    table: Table = {name: {size: [] for size in sizes} for name in CASES}
    try:
        for _ in range(rounds):
            for name in CASES:
                for size, group in groups.items():
                    table[name][size].append(group.ask(name))
    finally:
        for group in groups.values():
            group.end()
    return table


def median(found: Sequence[dict[str, float]], what: str) -> float:
    """Of all rounds."""
    return statistics.median(one[what] for one in found)


def share(table: Table, name: str, size: int, what: str = "step") -> float:
    """Of what the first number of processes does in that time: the median over rounds."""
    first = next(iter(table[name].values()))
    return statistics.median(one[what] / other[what] for one, other in zip(first, table[name][size], strict=True))


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def draw(table: Table, path: Path) -> None:
    """Sequences a second over those of one process, for each case."""
    figure = new_figure(6.0, 3.6)
    axes = figure.add_subplot()
    for (name, by_size), marker in zip(table.items(), "os^Dv", strict=True):
        axes.plot(list(by_size), [share(table, name, size) for size in by_size], marker=marker, label=name)
    axes.axhline(0.9, color="black", linestyle=":", linewidth=0.8)
    axes.set_xticks(list(by_size))
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel(f"processes, on {_cores()} cores in all")
    axes.set_ylabel("sequences a second, over one process")
    axes.legend(frameon=False)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=160)


def rows(table: Table) -> list[str]:
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
    for name, by_size in table.items():
        for size, found in by_size.items():
            rate = CASES[name]["batch"] / median(found, "step") / 1e6
            added = f"{median(found, 'bytes'):.0f} bytes, {1e6 * median(found, 'sum'):.0f} µs" if size > 1 else "-"
            shares = f"{share(table, name, size):.2f} | {share(table, name, size, 'busy'):.2f}"
            lines.append(f"| {name} | {size} | {rate:.2f} | {shares} | {added} |")
    return lines


def main() -> int:
    """Measure, print and draw; or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1,2,4", help="numbers of processes; the first is compared with")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of world.png")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        with joined("cpu"):
            serve()
        return 0
    table = measure([int(size) for size in options.sizes.split(",")], options.rounds)
    print(*rows(table), sep="\n")
    options.out.mkdir(parents=True, exist_ok=True)
    draw(table, options.out / "world.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
