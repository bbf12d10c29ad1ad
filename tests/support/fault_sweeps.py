"""Small sweeps in processes that can be killed, and their results for comparison.

As a program, this file loads everything that takes time, then forks a process for each line that it reads.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from fastlin._files import read_json

STEPS, LENGTHS = 60, [2]
KEYS = [f"{regime}-full-n{n}" for regime in ("plain", "fine-tune", "joint") for n in LENGTHS]


def serve():
    """{"start": request} forks a process and prints its id; {"end": id} waits for it and prints its exit code."""
    import torch

    from fastlin import cli, plots, settings  # noqa: F401
    from fastlin.figures import forgetting, prompts, report, reproduce, status, sweep  # noqa: F401

    torch.set_num_threads(1)
    sweep.train(settings.load("2c").mixture, "plain", 2, steps=2, batch=16)
    for line in sys.stdin:
        request = json.loads(line)
        if "end" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["end"], 0)[1]), flush=True)
            continue
        child = os.fork()
        if child == 0:
            os.setsid()
            sys.exit(perform(**request["start"]))
        print(child, flush=True)


def perform(out, said, space=None, checkpoint=0.02):
    """`fastlin reproduce 2c --jobs 1`, small and without pictures; no file can be larger than `space` bytes."""
    from fastlin import cli, plots
    from fastlin.figures import reproduce, sweep
    from fastlin.figures.reproduce import Effort

    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), stream)
    plots.panel = lambda folder, name, **look: []
    reproduce.SCALES = {"quick": {"layer": Effort(2, STEPS, 32)}}
    sweep.train = functools.partial(sweep.train, checkpoint_seconds=checkpoint)
    if space is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (space, resource.RLIM_INFINITY))
    lengths = ",".join(map(str, LENGTHS))
    return cli.main(["reproduce", "2c", "-n", lengths, "--jobs", "1", "--out", out])


class Server:
    """This file as a running program."""

    def __init__(self, folder):
        self._folder, self._count = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _ask(self, **request):
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def start(self, out, **request):
        """Start a sweep."""
        self._count += 1
        said = self._folder / f"said-{self._count}"
        before = _records(Path(out))
        return Sweep(self, self._ask(start={"out": str(out), "said": str(said), **request}), Path(out), said, before)

    def end(self, process):
        return self._ask(end=process)

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(timeout=60) == 0


class Sweep:
    """A process of `fastlin reproduce`."""

    def __init__(self, server, process, out, said, before):
        self._server, self.process, self.out, self.said, self._before = server, process, out, said, before

    def wait(self):
        """Exit code and output, after the end."""
        code = self._server.end(self.process)
        return code, self.said.read_text()

    def over(self):
        """Whether it has ended."""
        return _state(self.process) == "Z"

    def await_record(self):
        """Wait until it has written a record of a cell, or has ended."""
        while not self.over() and _records(self.out) == self._before:
            time.sleep(0.002)


def _records(out):
    """Sizes of the records of all cells."""
    return {path: path.stat().st_size for path in out.glob("cells/2c/*/records.jsonl")}


def _state(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def table(out, panel="2c", keys=tuple(KEYS)):
    """Results of a sweep without times: the table, and the records, model and result of each cell."""
    found = {"csv": (out / f"{panel}.csv").read_bytes()}
    for key in keys:
        cell = out / "cells" / panel / key
        found[key] = {name: value for name, value in read_json(cell / "result.json", dict).items() if name != "seconds"}
        for name in ("records.jsonl", "model.safetensors"):
            found[key, name] = (cell / name).read_bytes()
    return found


if __name__ == "__main__":
    serve()
