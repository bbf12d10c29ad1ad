"""Small sweeps in processes that can be killed, and the way their tables are compared.

This file is also a program, which has loaded all that takes time and forks a process for each line that it reads.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from fastlin._tensors import read_json

STEPS, LENGTHS = 60, [2]
KEYS = [f"{regime}-full-n{n}" for regime in ("plain", "fine-tune", "joint") for n in LENGTHS]


def serve():
    """Fork a process for {"start": request}, and say its id; wait for that of {"end": id}, and say how it ended."""
    import torch

    from fastlin import cli, plots  # noqa: F401
    from fastlin.experiments import config, farm, forgetting, prompts, report, reproduce, status  # noqa: F401

    torch.set_num_threads(1)
    farm.train(config.load("2c").mixture, "plain", 2, steps=2, batch=16)
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


def perform(out, said, patience=30.0, shard=None, clock=None, space=None, mute=False, checkpoint=0.02):
    """`fastlin reproduce 2c`, small and without pictures.

    `clock` is the seed of a clock that jumps, `space` the size that no file can grow beyond; who is `mute` gives no
    signs of life.
    """
    from fastlin import cli, plots
    from fastlin.experiments import farm, reproduce
    from fastlin.experiments.reproduce import Effort, Request

    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), stream)
    # This process has no threads yet, and has loaded what a new one would take seconds for.
    fork = farm.multiprocessing.get_context("fork")
    farm.multiprocessing.get_context = lambda method: fork
    plots.panel = lambda folder, name: []
    reproduce.LEAST_PATIENCE = 0.0
    reproduce.SCALES = {"quick": {"layer": Effort(2, STEPS, 32)}}
    reproduce.Request = functools.partial(Request, lengths=tuple(LENGTHS))
    farm.train = functools.partial(farm.train, checkpoint_seconds=checkpoint)
    if mute:
        farm.leases.renewed = lambda lease, gone: nullcontext()
    if clock is not None:
        moments = random.Random(clock)
        time.time = lambda: moments.uniform(0.0, 2e10)
    if space is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (space, resource.RLIM_INFINITY))
    more = [] if shard is None else ["--shard", shard]
    return cli.main(["reproduce", "2c", "--jobs", "1", "--patience", str(patience), "--out", out, *more])


class Server:
    """The program, at work."""

    def __init__(self, folder):
        self._folder, self._count = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _ask(self, **request):
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def start(self, out, **request):
        """A sweep that is under way."""
        self._count += 1
        said = self._folder / f"said-{self._count}"
        return Sweep(self, self._ask(start={"out": str(out), "said": str(said), **request}), Path(out), said)

    def end(self, process):
        return self._ask(end=process)

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(timeout=60) == 0


class Sweep:
    """A process of `fastlin reproduce` and those that it starts."""

    def __init__(self, server, process, out, said):
        self._server, self.process, self.out, self.said = server, process, out, said

    def wait(self):
        """How it ended, and what it said."""
        code = self._server.end(self.process)
        return code, self.said.read_text()

    def over(self):
        """Whether it has ended."""
        return _stat(self.process)[0] == "Z"

    def trainers(self):
        """Its processes that train, by the leases of the folder."""
        from fastlin.experiments import leases

        found = [leases.read(path) or {} for path in held(self.out)]
        return [lease["pid"] for lease in found if _stat(lease.get("pid"))[1] == str(self.process)]

    def await_trainer(self):
        """One that trains, once there is one; None when there is nothing to do."""
        while not (found := self.trainers()) and not self.over():
            time.sleep(0.002)
        return found[0] if found else None


def _stat(process):
    """State and parent of a process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "Z", None


def table(out):
    """All that a sweep is for: the table, and of each cell its records, model and result without times."""
    found = {"csv": (out / "2c.csv").read_bytes()}
    for key in KEYS:
        result = read_json(out / f"cells/2c/{key}/result.json")
        found[key] = {name: value for name, value in result.items() if name != "seconds"}
        for name in ("records.jsonl", "model.safetensors"):
            found[key, name] = (out / f"cells/2c/{key}/{name}").read_bytes()
    return found


def held(out):
    """Files of leases."""
    return [path for key in KEYS for path in out.glob(f"cells/2c/.{key}.lease.*")]


def remains(out):
    """What is hidden in the folder of the cells: leases, folders of workers.

    Halves of files are no harm, nor are copies that were not begun and folders on their way out of a worker that was
    stopped or killed meanwhile.
    """
    hidden = {path.name for path in (out / "cells/2c").iterdir() if path.name.startswith(".")}
    return sorted(name for name in hidden if not re.search(r"\.\d+-[0-9a-f]{8}\.|\.(part|old)\.", name))


if __name__ == "__main__":
    serve()
