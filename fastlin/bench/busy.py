"""Two threads against one on two cores of which another process keeps one busy.

Measured in a process that may use two cores only; the mean of many calls, because a call that waits for a thread
without a core is rare and long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from fastlin.bench.rows import Row

BATCHES = (64, 256, 1024, 8192)
_HOG = "import os; os.sched_setaffinity(0, {%d})\nwhile True: pass"
_SECONDS = 2.0


def measure(row: Row, quick: bool) -> dict[str, Any]:
    """Mean times by work, batch and threads; the values are those of two threads over one."""
    cores = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        return {"lines": [], "values": {}, "skipped": {"fastlin": "wants two cores"}}
    hog = subprocess.Popen([sys.executable, "-c", _HOG % cores[0]])
    try:
        request = json.dumps({"cores": cores, "seconds": 0.0 if quick else _SECONDS})
        command = [sys.executable, "-m", "fastlin.bench.busy", request]
        means = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    finally:
        hog.kill()
        hog.wait()
    lines = [f"{'':28}{'1 thread':>12}{'2 threads':>12}{'ratio':>8}"]
    values = {}
    for name, (one, two) in means.items():
        values[name] = two / one
        lines.append(f"{name:28}{1e3 * one:>9.3f} ms{1e3 * two:>9.3f} ms{two / one:>8.2f}")
    return {"lines": lines, "values": values, "means": means}


def _serve(cores: list[int], seconds: float) -> dict[str, list[float]]:
    """Mean seconds on one and on two threads, by work; rounds of the two alternate."""
    os.sched_setaffinity(0, cores)  # before torch starts threads, which inherit it

    import statistics

    import torch

    from fastlin.bench.cases import CaseShape
    from fastlin.bench.contenders import BenchProblem
    from fastlin.bench.end_to_end import training_step
    from fastlin.bench.timing import Contender, interleave

    def on(threads: int, call: Any) -> Any:
        def before() -> None:
            torch.set_num_threads(threads)
            call()

        return Contender(str(threads), call, before, calls=1 if not seconds else 10)

    means = {}
    for op, work in (("prompt_loss", "prompt_loss"), ("sampled_loss", "training step")):
        for B in BATCHES:
            problem = BenchProblem(CaseShape(op, B=B), torch.float32)
            call: Any = problem.build("fastlin")
            if work != op:
                call = training_step(call, problem.leaves)
            rounds = max(2, min(100, int(seconds / (1e-6 * B))))
            found = interleave([on(1, call), on(2, call)], rounds)
            means[f"{work} B={B}"] = [statistics.fmean(found[threads].seconds) for threads in ("1", "2")]
    return means


if __name__ == "__main__":
    print(json.dumps(_serve(**json.loads(sys.argv[1]))))
