"""Throughput of training against the number of processes on this machine.

Every number of processes trains the same problem, on as many threads in all as the machine has cores, but one for each
process at least. All are started at once and take turns, stretch by stretch, so that a slow moment of the machine meets
them all; those whose turn it is not sleep.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from fastlin.bench.machine import available_cores
from fastlin.bench.rows import Row
from fastlin.data.sources import TaskMixture
from fastlin.training.run import train
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
_D = 10
# Sequences times the root of the trials that a stretch has: about a second of a core.
_WORK = 3_000_000


def serve() -> None:
    """Be one process of a group: train a stretch of each case that is asked for, one a line; the first one answers."""
    means = torch.stack([torch.ones(_D), -torch.ones(_D)])
    mix = TaskMixture(means, noise_std=0.1)
    team = team_of(torch.device("cpu"))
    while True:
        name = team.broadcast(lambda: sys.stdin.readline().strip())
        if not name:
            return
        found = _stretch(mix, team, name)
        if team.first:
            print(json.dumps(found), flush=True)


def _stretch(mix: TaskMixture, team: Team, name: str) -> dict[str, float]:
    """Seconds of a step, seconds that all processes were busy with it, bytes of the sum, and seconds of it alone."""
    sizes = CASES[name]
    steps = max(int(_WORK / (sizes["batch"] * sizes["trials"] ** 0.5)), 6)
    options: dict[str, Any] = {"preset": "paper", "records": 1, "progress": False, **sizes}
    # The first steps after the others' turn find cold caches and sleeping threads.
    run = train(mix, "joint", 20, steps=2, **options)
    before = time.process_time()
    run = train(mix, "joint", 20, steps=steps, **options)
    busy = torch.tensor(time.process_time() - before, dtype=torch.float64)
    team.add(busy)
    numbers = sum(raw.numel() for raw in run.model.parameters()) + sizes["trials"] + 2
    values, repeats = torch.zeros(numbers, dtype=torch.float64), 100
    start = time.perf_counter()
    for _ in range(repeats):
        team.add(values)
    added = (time.perf_counter() - start) / repeats
    return {"step": run.seconds / steps, "busy": float(busy) / steps, "bytes": values.nbytes, "sum": added}


class ProcessGroup:
    """Some processes that wait for their turn."""

    def __init__(self, size: int) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        self._process = subprocess.Popen(
            [*command, "-m", "fastlin.bench.processes"],
            env={**os.environ, "OMP_NUM_THREADS": str(max(available_cores() // size, 1))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, name: str) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(name, file=self._process.stdin, flush=True)
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found

    def end(self) -> None:
        self._process.communicate()


def stretches(sizes: Sequence[int], rounds: int) -> Table:
    groups = {size: ProcessGroup(size) for size in sizes}
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


def share(table: Table, name: str, size: int, what: str) -> float:
    """Of what the first number of processes does in that time: the median over rounds."""
    first = next(iter(table[name].values()))
    return statistics.median(one[what] / other[what] for one, other in zip(first, table[name][size], strict=True))


def measure(row: Row, quick: bool) -> dict[str, Any]:
    """Medians by case and number of processes; the values are sequences a second over those of one process."""
    table = stretches((1, 2) if quick else (1, 2, 4), 1 if quick else 9)
    found: dict[str, dict[int, dict[str, float]]] = {}
    lines = [f"{'':24}{'processes':>9}{'M seq/s':>9}{'over one':>9}{'a core-s':>9}{'sum':>18}"]
    for name, by_size in table.items():
        found[name] = {}
        for size, ones in by_size.items():
            medians = {what: statistics.median(one[what] for one in ones) for what in ones[0]}
            medians["over_one"], medians["busy_over_one"] = (share(table, name, size, w) for w in ("step", "busy"))
            rate = CASES[name]["batch"] / medians["step"] / 1e6
            added = f"{medians['bytes']:.0f} B, {1e6 * medians['sum']:.0f} µs" if size > 1 else "-"
            shares = f"{medians['over_one']:>9.2f}{medians['busy_over_one']:>9.2f}"
            lines.append(f"{name:24}{size:>9}{rate:>9.2f}{shares}{added:>18}")
            found[name][size] = medians
    values = {f"{name}, {size} processes": m["over_one"] for name, by in found.items() for size, m in by.items()}
    return {"lines": lines, "values": values, "found": found, "cores": available_cores()}


if __name__ == "__main__":
    with joined("cpu"):
        serve()
        # Leaving the group aborts in half of the runs: gloo's "terminate called without an active exception".
        os._exit(0)
