"""Threads on cores that others use: another process on one of two cores, and torch's own operations between calls.

Measured in a process that may use two cores only; the mean of many calls, because a call that waits for a thread
without a core is rare and long.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from fastlin.bench.rows import Row

BATCHES = (64, 256, 1024, 8192)
_SIZES = (*((B, None) for B in BATCHES), (512, 4), (8192, 50))  # batch and trials
_HOG = "import os; os.sched_setaffinity(0, {%d})\nwhile True: pass"
_SECONDS = 2.0  # of one and of two threads each
_ROUNDS = 10
_NUMBERS = 1_000_000  # of an operation of torch's


def measure(row: Row, quick: bool) -> dict[str, Any]:
    """Mean times by work; the values are two threads over one, and calls in turn with torch's over both alone."""
    cores = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        return {"lines": [], "values": {}, "skipped": {"fastlin": "wants two cores"}}
    beside = _ask("_beside_torch", cores, quick)
    hog = subprocess.Popen([sys.executable, "-c", _HOG % cores[0]])
    try:
        busy = _ask("_on_busy_core", cores, quick)
    finally:
        hog.kill()
        hog.wait()
    lines = [f"{'one core busy':28}{'1 thread':>12}{'2 threads':>12}{'ratio':>8}"]
    lines += [_line(name, *times) for name, times in busy.items()]
    lines += [f"{'in turn with torch':28}{'sum of both':>12}{'in turn':>12}{'ratio':>8}"]
    lines += [_line(name, *times) for name, times in beside.items()]
    means = {**busy, **{f"{name}, in turn with torch": times for name, times in beside.items()}}
    return {"lines": lines, "values": {name: after / before for name, (before, after) in means.items()}, "means": means}


def _line(name: str, before: float, after: float) -> str:
    return f"{name:28}{1e3 * before:>9.3f} ms{1e3 * after:>9.3f} ms{after / before:>8.2f}"


def _ask(function: str, cores: list[int], quick: bool) -> dict[str, list[float]]:
    request = json.dumps([function, cores, 0.0 if quick else _SECONDS])
    command = [sys.executable, "-m", "fastlin.bench.busy", request]
    answer: dict[str, list[float]] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return answer


def _ops() -> dict[str, tuple[Any, int]]:
    """Ops with their gradients by name, and the steps of a call: one."""
    import torch

    from fastlin.bench.cases import CaseShape
    from fastlin.bench.contenders import BenchProblem

    shapes = [CaseShape("prompt_loss", B=B) for B in BATCHES]
    shapes += [CaseShape("sampled_loss", B=B, R=R) for B, R in _SIZES]
    return {_name(shape.op, shape): (BenchProblem(shape, torch.float32).build("fastlin"), 1) for shape in shapes}


def _name(work: str, shape: Any) -> str:
    return f"{work} B={shape.B}" + (f" R={shape.R}" if shape.R else "")


def _training(steps: int) -> dict[str, tuple[Any, int]]:
    from fastlin.bench.cases import CaseShape
    from fastlin.bench.end_to_end import cell_config, loop

    shapes = [CaseShape("sampled_loss", B=B, R=R) for B, R in _SIZES]
    return {_name("training", shape): (functools.partial(loop, cell_config(shape, steps)), steps) for shape in shapes}


def _on_busy_core(seconds: float) -> dict[str, list[float]]:
    import torch

    one, two = (functools.partial(torch.set_num_threads, threads) for threads in (1, 2))
    steps = 100 if seconds else 2
    return {
        name: _means([(one, call), (two, call)], seconds, made)
        for name, (call, made) in {**_ops(), **_training(steps)}.items()
    }


def _beside_torch(seconds: float) -> dict[str, list[float]]:
    """Mean seconds on two threads of a call and of an operation of torch's, added, and of both in turn, by work."""
    import torch

    torch.set_num_threads(2)
    numbers = torch.randn(_NUMBERS)
    operation = functools.partial(torch.exp, numbers, out=torch.empty_like(numbers))
    found = {}
    for name, (call, _) in _ops().items():
        in_turn = functools.partial(lambda call: (call(), operation()), call)
        alone, torchs, both = _means([(None, call), (None, operation), (None, in_turn)], seconds, 1)
        found[name] = [alone + torchs, both]
    return found


def _means(sections: list[tuple[Any, Any]], seconds: float, steps: int) -> list[float]:
    """Mean seconds of a step of each call, which runs after its own preparation; they take turns, `seconds` each."""
    from fastlin.bench.timing import Contender, interleave, wall_clock

    contenders = []
    for index, (prepare, call) in enumerate(sections):

        def before(prepare: Any = prepare, call: Any = call) -> None:
            if prepare is not None:
                prepare()
            call()

        before()
        calls = max(1, round(seconds / _ROUNDS / wall_clock(call, 1)))
        contenders.append(Contender(str(index), call, before, calls=calls, steps=steps))
    found = interleave(contenders, _ROUNDS if seconds else 1)
    return [statistics.fmean(timing.seconds) for timing in found.values()]


if __name__ == "__main__":
    name, cores, seconds = json.loads(sys.argv[1])
    os.sched_setaffinity(0, cores)  # before torch starts threads, which inherit it
    print(json.dumps(globals()[name](seconds)))
