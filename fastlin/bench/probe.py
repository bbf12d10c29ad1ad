"""First call and memory of a contender, measured in a separate process.

`Probe` starts a process that imports torch and fastlin and runs nothing. For each request it forks, and the fork, which
has neither threads nor kernels nor anything compiled, makes the inputs, times its first call, and measures the second
one: the highest resident size during the call, over the size before it and the outputs. Linux keeps that mark as VmHWM
in /proc/self/status; writing 5 to /proc/self/clear_refs sets it back. (ru_maxrss cannot be set back, and a child
inherits its parent's.)
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch

from fastlin.bench.cases import CaseShape
from fastlin.bench.contenders import BenchProblem, Call

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Probe:
    """A process that measures contenders, each in its own fork; what they compile is removed with it."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="fastlin-bench-", ignore_cleanup_errors=True)
        # Here too: torch.compile finds what it compiled in the probe, where the compilation was timed.
        self._before = os.environ.get(_CACHE)
        os.environ[_CACHE] = self._folder.name
        # A fixed threshold: glibc would raise it as blocks are freed, and keep later ones resident for reuse.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fastlin.bench.probe"],
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 17)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()
        if self._before is None:
            del os.environ[_CACHE]
        else:
            os.environ[_CACHE] = self._before
        self._folder.cleanup()

    def measure(self, shape: CaseShape, label: str, dtype: str, threads: int) -> dict[str, Any]:
        """Seconds of the `first_call`, and bytes of `memory` beyond inputs and outputs (None where Linux is not).

        A RuntimeError has the last words of a process that failed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"shape": asdict(shape), "label": label, "dtype": dtype, "threads": threads}
        line = ""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
        if "error" in answer:
            raise RuntimeError(f"the measuring process failed: {answer['error']}")
        return answer


def measure(request: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(request["threads"])
    problem = BenchProblem(CaseShape(**request["shape"]), getattr(torch, request["dtype"]))
    call = problem.build(request["label"])
    start = time.perf_counter()
    results = call()
    first = time.perf_counter() - start
    del results
    gc.collect()
    return {"first_call": first, "memory": growth(call)}


def growth(call: Call) -> int | None:
    """Bytes by which this process grows during a call, less its outputs; None where the system does not tell."""
    try:
        _CLEAR.write_text("5")
        before = _status("VmRSS")
    except OSError:
        return None
    outputs = sum(int(x.nbytes) for x in call())
    return max(_status("VmHWM") - before - outputs, 0)


def _status(field: str) -> int:
    found = [line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:")]
    return 1024 * int(found[0].split()[1])


def serve() -> None:
    """Answer requests from stdin, one a line, on stdout, each in a fork."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what a contender prints is not an answer
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                answer = measure(json.loads(line))
            except BaseException as error:
                answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            os.write(answers, (json.dumps(answer) + "\n").encode())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            os.write(answers, (json.dumps({"error": f"exit status {status}"}) + "\n").encode())


if __name__ == "__main__":
    serve()
